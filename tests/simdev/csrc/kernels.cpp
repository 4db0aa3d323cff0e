// Every operator with a CPU kernel runs on sim as one kernel: the CPU's, on the same bytes.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <set>

#include "aliases.h"
#include "generator.h"
#include "kernels.h"
#include "op_info.h"
#include "streams.h"

namespace simdev {

namespace {

// One call of one operator, in the order its methods are listed.
class KernelCall {
 public:
  KernelCall(OpInfo& info, torch::jit::Stack& stack)
      : info_(info), stack_(stack), first_argument_(stack.size() - info.writes.size()) {}

  void collect_arguments();
  void check_order();
  void put_aliases_on_stack();
  void put_results_on_stack();
  void account();

 private:
  struct Input {
    at::Tensor tensor;
    bool writes;
  };

  void collect_tensor(const at::Tensor& tensor, bool writes);
  void collect_index(const at::Tensor& tensor);
  void collect_value(const c10::IValue& value, bool writes);
  void fail_on_devices(const at::Tensor& other) const;
  at::Tensor alias(const at::Tensor& tensor);
  c10::IValue alias_value(const c10::IValue& value);
  at::Tensor result(const at::Tensor& cpu);
  double seconds(double flops, double bytes) const;

  OpInfo& info_;
  torch::jit::Stack& stack_;
  size_t first_argument_;
  int device_ = -1;
  LaneId lane_ = 0;
  std::vector<Input> inputs_;
  at::Tensor cpu_input_;  // a CPU tensor that could not be mixed with sim tensors
  std::vector<at::Tensor> racing_reads_;
  std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> new_outputs_;
  bool host_needs_result_ = false;
  Aliases aliases_;
};

void KernelCall::fail_on_devices(const at::Tensor& other) const {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, sim:", device_,
              " and ", other.device(), "! (when checking arguments of ", info_.name, ")");
}

void KernelCall::collect_tensor(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined()) {
    return;
  }
  if (!is_sim(tensor)) {
    // Zero-dimensional CPU tensors are passed to kernels as numbers, everywhere.
    if (tensor.dim() > 0 || writes) {
      cpu_input_ = tensor;
    }
    return;
  }
  if (device_ >= 0 && device_ != tensor.device().index()) {
    fail_on_devices(tensor);
  }
  device_ = tensor.device().index();
  inputs_.push_back({tensor, writes});
}

// A mask has to be counted and an index on the CPU has to be copied over: the host waits for both.
void KernelCall::collect_index(const at::Tensor& tensor) {
  bool is_mask = tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
  host_needs_result_ = host_needs_result_ || is_mask || !is_sim(tensor);
  if (is_sim(tensor)) {
    collect_tensor(tensor, false);
  }
}

void KernelCall::collect_value(const c10::IValue& value, bool writes) {
  if (value.isTensor()) {
    collect_tensor(value.toTensor(), writes);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      collect_tensor(tensor, writes);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (!tensor.has_value() || !tensor->defined()) {
        continue;
      }
      info_.takes_indices ? collect_index(*tensor) : collect_tensor(*tensor, writes);
    }
  } else if (value.isDevice() && value.toDevice().type() == kSim && device_ < 0) {
    device_ = resolve_device(value.toDevice().index());
  }
}

void KernelCall::collect_arguments() {
  for (size_t index = 0; index < info_.writes.size(); ++index) {
    collect_value(stack_[first_argument_ + index], info_.writes[index]);
  }
  device_ = resolve_device(device_);
  lane_ = current_lane(device_);
  if (cpu_input_.defined() && !inputs_.empty()) {
    fail_on_devices(cpu_input_);
  }
}

void KernelCall::check_order() {
  if (info_.only_views) {
    return;
  }
  for (const auto& input : inputs_) {
    bool ordered = check_tensor(input.tensor, lane_, input.writes, info_.name);
    if (!ordered && !input.writes) {
      racing_reads_.push_back(input.tensor);
    }
  }
}

at::Tensor KernelCall::alias(const at::Tensor& tensor) {
  if (!is_sim(tensor)) {
    return tensor;
  }
  auto is_it = [&](const at::Tensor& racing) { return racing.is_same(tensor); };
  bool races = std::any_of(racing_reads_.begin(), racing_reads_.end(), is_it);
  return races ? poisoned_like(tensor) : aliases_.to_cpu(tensor);
}

c10::IValue KernelCall::alias_value(const c10::IValue& value) {
  if (value.isTensor()) {
    return alias(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(alias(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor.has_value() ? std::optional<at::Tensor>(alias(*tensor)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kSim) {
    return c10::Device(c10::kCPU);
  }
  if (value.isGenerator()) {
    return cpu_generator_of(value.toGenerator());
  }
  return value;
}

void KernelCall::put_aliases_on_stack() {
  for (size_t index = 0; index < info_.writes.size(); ++index) {
    auto& value = stack_[first_argument_ + index];
    value = alias_value(value);
  }
}

at::Tensor KernelCall::result(const at::Tensor& cpu) {
  bool is_new = false;
  at::Tensor sim = aliases_.to_sim(cpu, device_, is_new);
  if (is_new) {
    new_outputs_.push_back(sim);
  }
  outputs_.push_back(sim);
  return sim;
}

void KernelCall::put_results_on_stack() {
  if (info_.writes_any) {
    aliases_.copy_back_metadata(device_);
  }
  for (size_t index = stack_.size() - info_.returns; index < stack_.size(); ++index) {
    auto& value = stack_[index];
    if (value.isTensor()) {
      value = result(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(result(tensor));
      }
      value = list;
    } else if (!value.isNone()) {
      // A number on the host: it cannot be there before the kernel is done.
      host_needs_result_ = true;
    }
  }
}

double KernelCall::seconds(double flops, double bytes) const {
  const auto& settings = model().settings;
  return settings.kernel_min + std::max(flops / settings.flops, bytes / settings.hbm);
}

void KernelCall::account() {
  if (info_.only_views && new_outputs_.empty()) {
    return;
  }
  std::vector<at::Tensor> tensors;
  double bytes = 0;
  for (const auto& input : inputs_) {
    tensors.push_back(input.tensor);
    bytes += static_cast<double>(input.tensor.nbytes());
  }
  for (const auto& output : new_outputs_) {
    bytes += static_cast<double>(output.nbytes());
  }
  double flops = flops_of(info_, tensors, outputs_);
  ++info_.calls;
  ++model().counters.kernels;
  model().counters.flops += static_cast<int64_t>(flops);
  Seq seq = submit(lane_, kCompute, seconds(flops, bytes), info_.name, "kernel", static_cast<int64_t>(bytes));
  // Reads first: a kernel's own write takes the place of its own read of the same bytes.
  for (bool writes : {false, true}) {
    for (const auto& input : inputs_) {
      if (input.writes == writes) {
        note_tensor(input.tensor, lane_, seq, writes, info_.name);
      }
    }
  }
  for (const auto& output : new_outputs_) {
    note_tensor(output, lane_, seq, true, info_.name);
  }
  if (host_needs_result_ || info_.waits_for_device) {
    host_wait_for_lane(lane_);
  }
}

void run_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ModelLock lock;
  KernelCall call(op_info(op), *stack);
  call.collect_arguments();
  call.check_order();
  call.put_aliases_on_stack();
  {
    // The sim tensors have been through autograd already. Their aliases must not be.
    at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(stack);
  }
  call.put_results_on_stack();
  call.account();
}

bool wants_grad(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

// Attention is one kernel in inference. With gradients it takes the path made of differentiable parts.
at::Tensor attention_autograd(c10::DispatchKeySet, const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const std::optional<at::Tensor>& mask, double dropout,
                              bool causal, std::optional<double> scale, bool grouped) {
  bool mask_wants_grad = mask.has_value() && wants_grad(*mask);
  bool any_wants_grad = wants_grad(query) || wants_grad(key) || wants_grad(value) || mask_wants_grad;
  if (at::GradMode::is_enabled() && any_wants_grad) {
    return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, std::nullopt,
                                                              scale, grouped));
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return at::scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale, grouped);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("scaled_dot_product_attention", attention_autograd);
}

bool is_taken(const c10::OperatorName& name, const c10::OperatorHandle& op) {
  // Composites that are one kernel on an accelerator.
  static const std::set<std::string> also{"aten::scaled_dot_product_attention", "aten::convolution",
                                          "aten::convolution_backward"};
  // These end up in this device's own operators (copies.cpp), or ask about the device itself.
  static const std::set<std::string> never{"aten::copy_",     "aten::_to_copy",      "aten::clone",
                                           "aten::set_",      "aten::resize_",       "aten::record_stream",
                                           "aten::is_pinned", "aten::_pin_memory",   "aten::_fused_sdp_choice"};
  if (name.name.rfind("aten::", 0) != 0 || never.count(name.name) > 0) {
    return false;
  }
  if (!op.hasSchema() || op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
    return false;
  }
  return also.count(name.name) > 0 || op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

}  // namespace

int take_cpu_operators() {
  static auto* registrations = new std::vector<c10::RegistrationHandleRAII>();
  auto& dispatcher = c10::Dispatcher::singleton();
  int taken = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op.has_value() || !is_taken(name, *op)) {
      continue;
    }
    registrations->push_back(dispatcher.registerImpl(name, c10::DispatchKey::PrivateUse1,
                                                     c10::KernelFunction::makeFromBoxedFunction<&run_kernel>(),
                                                     std::nullopt, nullptr, "simdev"));
    ++taken;
  }
  return taken;
}

}  // namespace simdev
