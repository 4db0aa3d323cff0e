// What the simulation needs to know about an operator, worked out once for each.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <string>
#include <vector>

namespace simdev {

struct OpInfo {
  const char* name = "";
  std::vector<bool> writes;  // for each argument, whether it is written in place
  size_t returns = 0;
  bool writes_any = false;
  bool only_views = false;       // touches no data, so it is no kernel
  bool takes_indices = false;    // its optional tensor lists are indices, which may be on the CPU or be masks
  bool waits_for_device = false; // its result's size is not known before it has run, so the host has to wait
  int64_t calls = 0;
};

OpInfo& op_info(const c10::OperatorHandle& op);

// A name that can be kept for ever.
const char* intern(const std::string& name);

std::map<std::string, int64_t> calls_by_name();
void reset_calls();

// Floating-point operations of one call, 0 where not worth counting.
double flops_of(const OpInfo& op, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs);

}  // namespace simdev
