// Page-locked host memory: what pin_memory() allocates, and what is registered where it lies.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <optional>
#include <string>

#include "model.h"

namespace simdev {

enum class HostKind { kPageable, kPinned, kRegistered };

// The storage that was registered, where it is known. Not kept alive by it.
using HostOwner = std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>>;

// Where some bytes of host memory lie, in words that stay right when the memory is gone.
struct HostPlace {
  std::string name;
  HostKind kind = HostKind::kPageable;
  HostOwner owner;
};

struct HostMemoryStats {
  size_t pinned = 0;
  size_t pinned_peak = 0;
  size_t registered = 0;
  size_t registered_peak = 0;
};

// The allocator behind pin_memory().
c10::Allocator* pinned_allocator();

HostKind host_kind(const void* pointer);
HostPlace place_of(const void* pointer, size_t size);

// Page-locks memory that somebody else has allocated. `owner` is its storage where there is one.
void register_host(const void* pointer, size_t size, const c10::Storage* owner);
void unregister_host(const void* pointer);

// Reports registered memory whose owner has freed it.
void check_registrations();
void forget_lost_registrations();

HostMemoryStats host_memory_stats();
void reset_host_memory_peaks();

}  // namespace simdev
