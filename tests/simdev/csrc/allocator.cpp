#include "allocator.h"

#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "streams.h"
#include "torch_version.h"

#if SIMDEV_TORCH_AT_LEAST(2, 9)
#include <c10/core/CachingDeviceAllocator.h>
#endif

namespace simdev {

namespace {

constexpr size_t kTotalWithoutCap = size_t(64) << 30;

void return_held_back_memory(DeviceState& device) {
  auto& held = device.held_back;
  while (!held.empty() && held.begin()->first <= model().host.now) {
    device.memory.active -= held.begin()->second;
    held.erase(held.begin());
  }
}

// As a real allocator does before it gives up: wait for memory that is only held back by recorded streams.
void wait_for_held_back_memory(DeviceState& device, size_t size) {
  auto& memory = device.memory;
  while (memory.active + size > memory.cap && !device.held_back.empty()) {
    ++memory.stalls;
    model().host.now = std::max(model().host.now, device.held_back.begin()->first);
    return_held_back_memory(device);
  }
}

void charge(int index, size_t size) {
  auto& device = model().devices[index];
  auto& memory = device.memory;
  return_held_back_memory(device);
  wait_for_held_back_memory(device, size);
  if (memory.active + size > memory.cap) {
    ++memory.ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "SIM out of memory. Tried to allocate ", size, " bytes. sim:", index,
                     " has a total capacity of ", memory.cap, " bytes of which ",
                     memory.cap - std::min(memory.cap, memory.active), " bytes is free. ", memory.allocated,
                     " bytes are allocated and ", memory.active - memory.allocated,
                     " bytes are held back by record_stream.");
  }
  memory.allocated += size;
  memory.active += size;
  memory.peak = std::max(memory.peak, memory.allocated);
  memory.active_peak = std::max(memory.active_peak, memory.active);
  if (size > 0) {
    ++memory.allocs;
    ++model().counters.allocs;
  }
}

// Another lane was still using memory when its owner freed it, and the owner's lane may now be handed it again.
void inherit_uses_before_free(Block& block) {
  auto& uses = model().lanes[block.home].freed_uses;
  auto is_over = [&](const FreedUse& use) { return is_ordered(block.home, use.access.lane, use.access.seq); };
  uses.erase(std::remove_if(uses.begin(), uses.end(), is_over), uses.end());
  for (const auto& use : uses) {
    if (model().settings.reuse_any_size || block.size <= use.block_size) {
      Access access = use.access;
      access.begin = 0;
      access.end = static_cast<int64_t>(block.size);
      block.accesses.push_back(access);
    }
  }
}

// A lane may reuse at once what it freed itself, as its own work is in order. But another lane that is given the new
// block has to wait for the kernels that this lane had queued on the memory's previous owner.
void inherit_own_queued_uses(Block& block) {
  const auto& home = model().lanes[block.home];
  Access access = home.last_freed_use;
  bool is_over = model().host.known.covers(access.lane, access.seq);
  bool fits = model().settings.reuse_any_size || block.size <= home.largest_freed;
  if (access.seq == 0 || is_over || !fits) {
    return;
  }
  access.begin = 0;
  access.end = static_cast<int64_t>(block.size);
  // Only a write by another lane is a hazard of its own: a read of memory nobody has filled yet is no use to anyone.
  access.writes = false;
  access.origin = Origin::kPreviousOwner;
  block.accesses.push_back(access);
}

std::unique_ptr<Block> new_block(int device, size_t size, c10::DataPtr memory) {
  charge(device, size);
  auto block = std::make_unique<Block>();
  block->id = ++model().last_block_id;
  block->size = size;
  block->device = device;
  block->home = current_lane(device);
  block->memory = std::move(memory);
  inherit_uses_before_free(*block);
  inherit_own_queued_uses(*block);
  return block;
}

// One entry for each lane and kind of use is enough: a lane's later use is over only when its earlier ones are.
void remember_freed_use(Lane& home, const Access& access, size_t block_size) {
  for (auto& known : home.freed_uses) {
    bool same_size = model().settings.reuse_any_size || known.block_size == block_size;
    if (same_size && known.access.lane == access.lane && known.access.writes == access.writes) {
      if (known.access.seq < access.seq) {
        known.access = access;
      }
      known.block_size = std::max(known.block_size, block_size);
      return;
    }
  }
  home.freed_uses.push_back({access, block_size});
}

void remember_own_queued_use(Lane& home, const Access& access, size_t block_size) {
  if (model().host.known.covers(access.lane, access.seq)) {
    return;
  }
  home.largest_freed = std::max(home.largest_freed, block_size);
  if (access.seq > home.last_freed_use.seq) {
    home.last_freed_use = access;
  }
}

void remember_unfinished_uses(const Block& block) {
  auto& home = model().lanes[block.home];
  for (Access access : block.accesses) {
    if (access.lane == block.home) {
      remember_own_queued_use(home, access, block.size);
      continue;
    }
    bool recorded = std::find(block.recorded.begin(), block.recorded.end(), access.lane) != block.recorded.end();
    if (!recorded && !is_ordered(block.home, access.lane, access.seq)) {
      if (access.origin == Origin::kOwn) {
        access.origin = Origin::kBeforeFree;
      }
      remember_freed_use(home, access, block.size);
    }
  }
}

void free_block(Block* raw) {
  ModelLock lock;
  std::unique_ptr<Block> block(raw);
  auto& device = model().devices[block->device];
  device.memory.allocated -= block->size;
  if (block->size > 0) {
    ++device.memory.frees;
    ++model().counters.frees;
  }
  remember_unfinished_uses(*block);
  double usable_at = 0;
  for (LaneId lane : block->recorded) {
    if (lane != block->home) {
      usable_at = std::max(usable_at, model().lanes[lane].busy_until);
    }
  }
  if (usable_at > model().host.now) {
    device.held_back.emplace(usable_at, block->size);
  } else {
    device.memory.active -= block->size;
  }
}

void delete_block(void* context) {
  free_block(static_cast<Block*>(context));
}

c10::DataPtr as_device_pointer(std::unique_ptr<Block> block) {
  c10::Device device(kSim, static_cast<c10::DeviceIndex>(block->device));
  void* data = block->memory.get();
  return c10::DataPtr(data, block.release(), &delete_block, device);
}

}  // namespace

c10::DataPtr allocate_on(int device, size_t size) {
  ModelLock lock;
  void* data = size > 0 ? c10::alloc_cpu(size) : nullptr;
  c10::DataPtr memory(data, data, &c10::free_cpu, c10::Device(c10::kCPU));
  if (data != nullptr && model().settings.fill) {
    std::memset(data, 0xFF, size);
  }
  return as_device_pointer(new_block(resolve_device(device), size, std::move(memory)));
}

c10::Storage adopt_cpu_storage(c10::Storage cpu, int device) {
  size_t size = cpu.nbytes();
  void* data = cpu.mutable_data();
  auto* keep = new c10::Storage(std::move(cpu));
  auto drop = [](void* context) { delete static_cast<c10::Storage*>(context); };
  c10::DataPtr memory(data, keep, drop, c10::Device(c10::kCPU));
  c10::DataPtr pointer = as_device_pointer(new_block(device, size, std::move(memory)));
  return c10::Storage(c10::Storage::use_byte_size_t(), size, std::move(pointer), device_allocator(), true);
}

Block& block_of(const c10::Storage& storage) {
  return block_of(storage.data_ptr());
}

Block& block_of(const c10::DataPtr& pointer) {
  TORCH_CHECK(pointer.get_deleter() == &delete_block, "sim: this tensor's memory is not from the sim allocator");
  return *static_cast<Block*>(pointer.get_context());
}

void record_stream_use(const c10::DataPtr& pointer, const c10::Stream& stream) {
  ModelLock lock;
  if (pointer.get_deleter() != &delete_block) {
    return;
  }
  auto& recorded = static_cast<Block*>(pointer.get_context())->recorded;
  LaneId lane = lane_of(stream);
  if (std::find(recorded.begin(), recorded.end(), lane) == recorded.end()) {
    recorded.push_back(lane);
  }
}

void return_held_back_memory() {
  for (auto& device : model().devices) {
    return_held_back_memory(device);
  }
}

std::pair<size_t, size_t> free_and_total(int device) {
  const auto& memory = model().devices[device].memory;
  size_t total = memory.cap == SIZE_MAX ? kTotalWithoutCap : memory.cap;
  return {total - std::min(total, memory.active), total};
}

namespace {

#if SIMDEV_TORCH_AT_LEAST(2, 9)
using AllocatorBase = c10::DeviceAllocator;
#else
using AllocatorBase = c10::Allocator;
#endif

struct SimAllocator final : AllocatorBase {
  c10::DataPtr allocate(size_t size) override {
    return allocate_on(current_device(), size);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }

#if SIMDEV_TORCH_AT_LEAST(2, 9)
  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {
    ModelLock lock;
    ++model().counters.empty_cache;
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_stream_use(pointer, stream);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    ModelLock lock;
    const auto& memory = model().devices[resolve_device(index)].memory;
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = memory.allocated;
    stats.allocated_bytes[0].peak = memory.peak;
    for (auto* bytes : {&stats.active_bytes[0], &stats.reserved_bytes[0]}) {
      bytes->current = memory.active;
      bytes->peak = memory.active_peak;
    }
    stats.num_ooms = memory.ooms;
    stats.num_alloc_retries = memory.stalls;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}

  void resetPeakStats(c10::DeviceIndex index) override {
    ModelLock lock;
    auto& memory = model().devices[resolve_device(index)].memory;
    memory.peak = memory.allocated;
    memory.active_peak = memory.active;
  }

  // No "override": some versions served lack it.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) {
    ModelLock lock;
    return free_and_total(resolve_device(index));
  }
#endif
};

SimAllocator sim_allocator;
REGISTER_ALLOCATOR(kSim, &sim_allocator);

}  // namespace

c10::Allocator* device_allocator() {
  return &sim_allocator;
}

}  // namespace simdev
