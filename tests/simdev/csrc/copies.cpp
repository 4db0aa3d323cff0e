// Allocation, copies between host and devices and between devices, and the few operators on storages.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "aliases.h"
#include "allocator.h"
#include "host_memory.h"
#include "pending_copies.h"
#include "streams.h"

namespace simdev {

namespace {

constexpr const char* kUploadName = "copy_h2d";
constexpr const char* kDownloadName = "copy_d2h";
constexpr const char* kDeviceCopyName = "copy_d2d";
constexpr const char* kPeerCopyName = "copy_p2p";

int64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.nbytes());
}

// From its first byte to its last one, with what lies between in a tensor that has gaps.
size_t extent_of(const at::Tensor& tensor) {
  Range range = range_of(tensor);
  return static_cast<size_t>(range.end - range.begin);
}

int device_index_of(const at::Tensor& tensor) {
  return tensor.device().index();
}

LaneId current_lane_of(const at::Tensor& tensor) {
  return current_lane(device_index_of(tensor));
}

// What a copy on `lane` finds in its source: the bytes, or poison when they may not be there yet.
at::Tensor read_source(Aliases& aliases, const at::Tensor& source, LaneId lane, const char* op) {
  return check_tensor(source, lane, false, op) ? aliases.to_cpu(source) : poisoned_like(source);
}

void copy_within_device(const at::Tensor& source, const at::Tensor& target) {
  Aliases aliases;
  LaneId lane = current_lane_of(target);
  int64_t bytes = bytes_of(target);
  check_tensor(target, lane, true, kDeviceCopyName);
  at::Tensor from = read_source(aliases, source, lane, kDeviceCopyName);
  aliases.to_cpu(target).copy_(from);
  const auto& settings = model().settings;
  double seconds = settings.kernel_min + 2.0 * static_cast<double>(bytes) / settings.hbm;
  Seq seq = submit(lane, kCompute, seconds, kDeviceCopyName, "d2d", bytes);
  note_tensor(source, lane, seq, false, kDeviceCopyName);
  note_tensor(target, lane, seq, true, kDeviceCopyName);
  ++model().counters.kernels;
  ++model().counters.d2d_copies;
  model().counters.d2d_bytes += bytes;
}

// As on CUDA, the copy runs on the source device's current stream, between two waits: it starts after what the target
// device's current stream has queued (which may still use the target), and that stream then goes on after the copy.
// So the two current streams need no help, and any other stream does.
void copy_between_devices(const at::Tensor& source, const at::Tensor& target) {
  Aliases source_alias;
  Aliases target_alias;
  LaneId lane = current_lane_of(source);
  LaneId target_lane = current_lane_of(target);
  int64_t bytes = bytes_of(target);
  wait_for_lane(lane, target_lane);
  check_tensor(target, lane, true, kPeerCopyName);
  at::Tensor from = read_source(source_alias, source, lane, kPeerCopyName);
  target_alias.to_cpu(target).copy_(from);
  const auto& settings = model().settings;
  double seconds = settings.copy_lat + static_cast<double>(bytes) / settings.p2p;
  Seq seq = submit(lane, kPeer, seconds, kPeerCopyName, "p2p", bytes);
  note_tensor(source, lane, seq, false, kPeerCopyName);
  note_tensor(target, lane, seq, true, kPeerCopyName);
  wait_for_lane(target_lane, lane);
  ++model().counters.d2d_copies;
  model().counters.d2d_bytes += bytes;
  model().counters.p2p_bytes += bytes;
}

bool same_strides(const at::Tensor& left, const at::Tensor& right) {
  if (left.is_contiguous() && right.is_contiguous()) {
    return true;
  }
  return left.strides() == right.strides() && left.is_non_overlapping_and_dense();
}

// A copy that is one run of bytes. Any other one goes through temporaries in pageable memory, so it blocks.
bool is_direct(const at::Tensor& source, const at::Tensor& target) {
  return source.scalar_type() == target.scalar_type() && source.sizes() == target.sizes() &&
      same_strides(source, target);
}

// A copy between the host and a device, and what is known of it before it runs.
struct HostTransfer {
  int64_t bytes = 0;
  LaneId lane = 0;
  bool pageable = false;
  bool asynchronous = false;
  double seconds = 0;
};

HostTransfer plan_transfer(const at::Tensor& host, const at::Tensor& device, bool direct, bool non_blocking,
                           double rate) {
  const auto& settings = model().settings;
  HostTransfer plan;
  plan.bytes = bytes_of(device);  // types are changed on the host, so it is the device's that cross
  plan.lane = current_lane_of(device);
  plan.pageable = host.numel() > 0 && host_kind(host.data_ptr()) == HostKind::kPageable;
  plan.asynchronous = non_blocking && direct && !plan.pageable;
  bool at_full_rate = direct && !plan.pageable;
  plan.seconds = settings.copy_lat + static_cast<double>(plan.bytes) / (at_full_rate ? rate : settings.pageable);
  return plan;
}

HostCopy host_end(const at::Tensor& host, const at::Tensor& device, const HostTransfer& plan, Seq seq) {
  HostCopy copy;
  copy.storage = host.storage();
  copy.data = static_cast<char*>(host.data_ptr());
  copy.size = static_cast<size_t>(plan.bytes);
  copy.lane = plan.lane;
  copy.seq = seq;
  copy.device_block = block_of(device.storage()).id;
  return copy;
}

void count_upload(const HostTransfer& plan, bool non_blocking) {
  auto& counters = model().counters;
  counters.h2d_bytes += plan.bytes;
  ++counters.h2d_copies;
  counters.h2d_pageable_bytes += plan.pageable ? plan.bytes : 0;
  counters.h2d_nonblocking_but_sync += non_blocking && !plan.asynchronous;
}

void count_download(const HostTransfer& plan, bool non_blocking) {
  auto& counters = model().counters;
  counters.d2h_bytes += plan.bytes;
  ++counters.d2h_copies;
  counters.d2h_pageable_bytes += plan.pageable ? plan.bytes : 0;
  counters.d2h_nonblocking_but_sync += non_blocking && !plan.asynchronous;
}

void upload(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Aliases aliases;
  HostTransfer plan = plan_transfer(source, target, is_direct(source, target), non_blocking, model().settings.h2d);
  check_tensor(target, plan.lane, true, kUploadName);
  conclude_copies_before_read(plan.lane, source.data_ptr(), extent_of(source), kUploadName);
  count_upload(plan, non_blocking);
  aliases.to_cpu(target).copy_(source);
  // A "non_blocking" copy from pageable memory waits for the stream, takes the source into a staging buffer and comes
  // back before the device has it all. The source is free again, but other streams still have to wait for the target.
  bool staged = non_blocking && !plan.asynchronous;
  if (staged) {
    host_wait_for_lane(plan.lane);
  }
  Seq seq = submit(plan.lane, kUpload, plan.seconds, kUploadName, "h2d", plan.bytes);
  note_tensor(target, plan.lane, seq, true, kUploadName);
  if (staged) {
    model().host.now = std::max(model().host.now, model().lanes[plan.lane].busy_until);
  } else if (!plan.asynchronous) {
    host_wait_for_lane(plan.lane);
  } else if (plan.bytes > 0 && model().settings.mode != Mode::kOff) {
    begin_upload(host_end(source, target, plan, seq));
  }
}

void download(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Aliases aliases;
  HostTransfer plan = plan_transfer(target, source, is_direct(source, target), non_blocking, model().settings.d2h);
  at::Tensor from = read_source(aliases, source, plan.lane, kDownloadName);
  conclude_copies_before_write(plan.lane, target.data_ptr(), extent_of(target), kDownloadName);
  count_download(plan, non_blocking);
  Seq seq = submit(plan.lane, kDownload, plan.seconds, kDownloadName, "d2h", plan.bytes);
  note_tensor(source, plan.lane, seq, false, kDownloadName);
  if (!plan.asynchronous) {
    target.copy_(from);
    host_wait_for_lane(plan.lane);
  } else if (plan.bytes > 0 && model().settings.mode != Mode::kOff) {
    char poison = source.scalar_type() == at::kBool ? 1 : static_cast<char>(0xFF);
    begin_download(host_end(target, source, plan, seq), from.data_ptr(), poison);
  } else {
    target.copy_(from);
  }
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  ModelLock lock;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::NoGradGuard no_grad;
  if (!is_sim(target)) {
    download(source, target, non_blocking);
  } else if (!is_sim(source)) {
    upload(source, target, non_blocking);
  } else if (device_index_of(source) == device_index_of(target)) {
    copy_within_device(source, target);
  } else {
    copy_between_devices(source, target);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes());
  return copy_from(source, target, false);
}

c10::Device sim_device(std::optional<c10::Device> device) {
  int index = resolve_device(device.has_value() ? device->index() : -1);
  return c10::Device(kSim, static_cast<c10::DeviceIndex>(index));
}

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                               std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>,
                               std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(sim_device(device));
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(sim_device(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  record_stream_use(tensor.storage().data_ptr(), stream);
}

// Lets "parameter.data = tensor" go from any device to any other.
bool has_compatible_type(const at::Tensor&, const at::Tensor&) {
  return true;
}

const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(tensor, size, format);
}

at::Tensor& set_storage(at::Tensor& tensor, c10::Storage storage) {
  return at::native::set_(tensor, storage);
}

at::Tensor& set_storage_view(at::Tensor& tensor, c10::Storage storage, int64_t offset, c10::IntArrayRef size,
                             c10::IntArrayRef stride) {
  return at::cpu::set_(tensor, storage, offset, size, stride);
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return at::native::set_tensor_(tensor, source);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("record_stream", record_stream);
  library.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_view);
  library.impl("set_.source_Tensor", set_tensor);
}

}  // namespace

}  // namespace simdev
