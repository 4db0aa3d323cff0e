#include "aliases.h"

#include <ATen/ops/empty_strided.h>

#include <cstring>

#include "allocator.h"

namespace simdev {

namespace {

void take_shape(const at::Tensor& target, const at::Tensor& like) {
  target.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
}

bool same_shape(const at::Tensor& left, const at::Tensor& right) {
  return left.sizes() == right.sizes() && left.strides() == right.strides() &&
      left.storage_offset() == right.storage_offset();
}

at::Tensor over_storage(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  take_shape(tensor, like);
  return tensor;
}

// A view has its base's keys, not those of the mode it is made in: under inference_mode, a view of a normal tensor is
// a normal tensor too.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                       base.key_set(), like.dtype());
  take_shape(view, like);
  return view;
}

// A kernel has given an argument's alias other memory, so the argument gets that memory.
void replace_memory(const at::Tensor& sim, c10::Storage cpu, int device) {
  size_t size = cpu.nbytes();
  c10::Storage adopted = adopt_cpu_storage(std::move(cpu), device);
  auto* target = sim.storage().unsafeGetStorageImpl();
  target->set_data_ptr_noswap(adopted.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr()));
  target->set_nbytes(size);
}

}  // namespace

bool is_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

Range range_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return {0, 0};
  }
  int64_t first = tensor.storage_offset();
  int64_t last = first;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  auto item = static_cast<int64_t>(tensor.itemsize());
  return {first * item, (last + 1) * item};
}

bool check_tensor(const at::Tensor& tensor, LaneId lane, bool writes, const char* op) {
  if (model().settings.mode == Mode::kOff || tensor.numel() == 0) {
    return true;
  }
  return check_access(block_of(tensor.storage()), range_of(tensor), lane, writes, op);
}

void note_tensor(const at::Tensor& tensor, LaneId lane, Seq seq, bool writes, const char* op) {
  if (model().settings.mode == Mode::kOff || tensor.numel() == 0) {
    return;
  }
  note_access(block_of(tensor.storage()), range_of(tensor), lane, seq, writes, op);
}

at::Tensor poisoned_like(const at::Tensor& tensor) {
  auto poisoned = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
  auto storage = poisoned.storage();
  // Any other byte than 0 or 1 in a bool is undefined behaviour for the kernels.
  int byte = tensor.scalar_type() == at::kBool ? 1 : 0xFF;
  std::memset(storage.mutable_data(), byte, storage.nbytes());
  return poisoned;
}

c10::Storage Aliases::cpu_storage(const c10::Storage& sim) {
  for (const auto& pair : storages_) {
    if (pair.sim == sim.unsafeGetStorageImpl()) {
      return pair.cpu;
    }
  }
  c10::DataPtr borrowed(sim.mutable_data(), c10::Device(c10::kCPU));
  c10::Storage cpu(c10::Storage::use_byte_size_t(), sim.nbytes(), std::move(borrowed), c10::GetAllocator(c10::kCPU),
                   true);
  storages_.push_back({cpu, sim.unsafeGetStorageImpl()});
  return cpu;
}

at::Tensor Aliases::to_cpu(const at::Tensor& sim) {
  for (const auto& pair : tensors_) {
    if (pair.sim.is_same(sim)) {
      return pair.cpu;
    }
  }
  at::Tensor cpu = over_storage(cpu_storage(sim.storage()), c10::DispatchKey::CPU, sim);
  tensors_.push_back({cpu, sim});
  return cpu;
}

const at::Tensor* Aliases::base_of(const at::Tensor& cpu) const {
  for (const auto& pair : tensors_) {
    if (pair.cpu.storage().unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl()) {
      return &pair.sim;
    }
  }
  return nullptr;
}

at::Tensor Aliases::to_sim(const at::Tensor& cpu, int device, bool& is_new) {
  is_new = false;
  if (!cpu.defined()) {
    return cpu;
  }
  for (const auto& pair : tensors_) {
    if (pair.cpu.is_same(cpu)) {
      return pair.sim;
    }
  }
  if (const at::Tensor* base = base_of(cpu)) {
    return view_of(*base, cpu);
  }
  is_new = true;
  return over_storage(adopt_cpu_storage(cpu.storage(), device), c10::DispatchKey::PrivateUse1, cpu);
}

void Aliases::copy_back_metadata(int device) {
  for (const auto& [cpu, sim] : tensors_) {
    const auto& now = cpu.storage();
    const auto& before = sim.storage();
    if (now.data() != before.data() || now.nbytes() != before.nbytes()) {
      replace_memory(sim, now, device);
    }
    if (!same_shape(cpu, sim)) {
      take_shape(sim, cpu);
    }
  }
}

}  // namespace simdev
