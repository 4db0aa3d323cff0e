#include "host_memory.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>

#include "pending_copies.h"

namespace simdev {

namespace {

// A stretch of page-locked memory.
struct HostBlock {
  uint64_t id = 0;
  size_t size = 0;
  HostKind kind = HostKind::kPinned;
  HostOwner owner;

  // Empty tensors have addresses too.
  size_t extent() const {
    return std::max<size_t>(size, 1);
  }

  bool is_lost() const {
    return owner.has_value() && owner->expired();
  }
};

using HostBlocks = std::map<const char*, HostBlock>;  // by start

struct HostMemory {
  HostBlocks blocks;
  HostMemoryStats stats;
  uint64_t last_block_id = 0;
};

// Never destroyed, as pinned tensors may outlive everything else.
HostMemory& host_memory() {
  static auto* instance = new HostMemory();
  return *instance;
}

HostBlocks::iterator block_at(const void* pointer) {
  auto& blocks = host_memory().blocks;
  const auto* address = static_cast<const char*>(pointer);
  auto next = blocks.upper_bound(address);
  if (next == blocks.begin()) {
    return blocks.end();
  }
  auto candidate = std::prev(next);
  return address < candidate->first + candidate->second.extent() ? candidate : blocks.end();
}

void add_block(const void* start, size_t size, HostKind kind, HostOwner owner) {
  auto& state = host_memory();
  HostBlock block;
  block.id = ++state.last_block_id;
  block.size = size;
  block.kind = kind;
  block.owner = std::move(owner);
  state.blocks.emplace(static_cast<const char*>(start), std::move(block));
  auto& stats = state.stats;
  (kind == HostKind::kPinned ? stats.pinned : stats.registered) += size;
  stats.pinned_peak = std::max(stats.pinned_peak, stats.pinned);
  stats.registered_peak = std::max(stats.registered_peak, stats.registered);
}

void remove_block(HostBlocks::iterator block) {
  auto& stats = host_memory().stats;
  (block->second.kind == HostKind::kPinned ? stats.pinned : stats.registered) -= block->second.size;
  host_memory().blocks.erase(block);
}

// The driver would go on believing in this registration, and whoever gets the addresses next would suffer for it.
void report_lost_block(HostBlocks::iterator block) {
  uint64_t id = block->second.id;
  remove_block(block);
  report_race(c10::str("early free: registered host block #", id,
                       " was freed before host_unregister. Missing: host_unregister before its tensor is dropped"));
}

bool is_locked_anywhere(const char* start, size_t size) {
  const auto& blocks = host_memory().blocks;
  auto next = blocks.lower_bound(start);
  bool hits_next = next != blocks.end() && next->first < start + std::max<size_t>(size, 1);
  return hits_next || host_kind(start) != HostKind::kPageable;
}

void free_pinned(void* pointer) {
  ModelLock lock;
  auto block = host_memory().blocks.find(static_cast<const char*>(pointer));
  if (block != host_memory().blocks.end()) {
    remove_block(block);
  }
  c10::free_cpu(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    ModelLock lock;
    void* data = c10::alloc_cpu(std::max<size_t>(size, 1));
    add_block(data, size, HostKind::kPinned, std::nullopt);
    ++model().counters.pin_allocs;
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }

  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

HostKind host_kind(const void* pointer) {
  auto block = block_at(pointer);
  if (block == host_memory().blocks.end()) {
    return HostKind::kPageable;
  }
  if (block->second.is_lost()) {
    report_lost_block(block);
    return HostKind::kPageable;
  }
  return block->second.kind;
}

HostPlace place_of(const void* pointer, size_t size) {
  auto block = block_at(pointer);
  if (block == host_memory().blocks.end()) {
    return {"pageable host memory", HostKind::kPageable, std::nullopt};
  }
  const auto& found = block->second;
  const char* kind = found.kind == HostKind::kRegistered ? "registered" : "pinned";
  auto begin = static_cast<const char*>(pointer) - block->first;
  return {c10::str(kind, " host block #", found.id, " [", begin, ",", begin + size, ")"), found.kind, found.owner};
}

void register_host(const void* pointer, size_t size, const c10::Storage* owner) {
  TORCH_CHECK(!is_locked_anywhere(static_cast<const char*>(pointer), size),
              "sim: part or all of this host memory is page-locked already");
  HostOwner weak_owner;
  if (owner != nullptr) {
    weak_owner.emplace(owner->getWeakStorageImpl());
  }
  add_block(pointer, size, HostKind::kRegistered, std::move(weak_owner));
  ++model().counters.host_registers;
}

void unregister_host(const void* pointer) {
  auto block = host_memory().blocks.find(static_cast<const char*>(pointer));
  bool is_registered = block != host_memory().blocks.end() && block->second.kind == HostKind::kRegistered;
  TORCH_CHECK(is_registered, "sim: this host memory is not registered");
  size_t size = block->second.size;
  remove_block(block);
  check_no_copy_uses(pointer, size);
}

void check_registrations() {
  auto& blocks = host_memory().blocks;
  auto is_lost = [](const auto& entry) { return entry.second.is_lost(); };
  auto lost = std::find_if(blocks.begin(), blocks.end(), is_lost);
  if (lost != blocks.end()) {
    report_lost_block(lost);
  }
}

void forget_lost_registrations() {
  auto& blocks = host_memory().blocks;
  auto block = blocks.begin();
  while (block != blocks.end()) {
    auto next = std::next(block);
    if (block->second.is_lost()) {
      remove_block(block);
    }
    block = next;
  }
}

HostMemoryStats host_memory_stats() {
  return host_memory().stats;
}

void reset_host_memory_peaks() {
  auto& stats = host_memory().stats;
  stats.pinned_peak = stats.pinned;
  stats.registered_peak = stats.registered;
}

}  // namespace simdev
