// CPU tensors over the bytes of sim tensors, for the CPU kernels to work on, and the way back.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "race.h"

namespace simdev {

bool is_sim(const at::Tensor& tensor);

// The bytes of its block that a tensor may touch.
Range range_of(const at::Tensor& tensor);

// check_access and note_access for a whole tensor; both do nothing in Mode::kOff.
bool check_tensor(const at::Tensor& tensor, LaneId lane, bool writes, const char* op);
void note_tensor(const at::Tensor& tensor, LaneId lane, Seq seq, bool writes, const char* op);

// A CPU tensor of the same shape full of 0xFF bytes, which read as NaN in every floating type. It stands in for what
// a racing read would see.
at::Tensor poisoned_like(const at::Tensor& tensor);

// The aliases of one kernel call.
class Aliases {
 public:
  struct Pair {
    at::Tensor cpu;
    at::Tensor sim;
  };

  // Sim tensors that share memory get CPU tensors that share memory, so that an operator sees the same overlaps.
  at::Tensor to_cpu(const at::Tensor& sim);

  // The sim tensor for what a kernel returned: the argument itself, a view of one, or a tensor over new memory. The
  // last sets `is_new`.
  at::Tensor to_sim(const at::Tensor& cpu, int device, bool& is_new);

  // Passes on what a kernel did to its arguments' shapes and storages (a resized out=, say).
  void copy_back_metadata(int device);

 private:
  struct StoragePair {
    c10::Storage cpu;
    const c10::StorageImpl* sim;
  };

  c10::Storage cpu_storage(const c10::Storage& sim);
  const at::Tensor* base_of(const at::Tensor& cpu) const;

  std::vector<Pair> tensors_;
  std::vector<StoragePair> storages_;
};

}  // namespace simdev
