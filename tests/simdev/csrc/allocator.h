// Device memory: accounting against a cap, and which old uses a new block's memory may still be under.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "race.h"

namespace simdev {

// The allocator of tensors on `sim`.
c10::Allocator* device_allocator();

// Allocates on `device`'s current stream.
c10::DataPtr allocate_on(int device, size_t size);

// Makes a storage that a CPU kernel has allocated into device memory of the same bytes, without copying it.
c10::Storage adopt_cpu_storage(c10::Storage cpu, int device);

// The block behind some memory; an error when that is not this allocator's.
Block& block_of(const c10::Storage& storage);
Block& block_of(const c10::DataPtr& pointer);

// record_stream: freed memory stays out of reach until what `stream` has queued at that time is over.
void record_stream_use(const c10::DataPtr& pointer, const c10::Stream& stream);

// Gives back the memory whose recorded streams are done by the host's time.
void return_held_back_memory();

// Bytes free and bytes in total, as a driver would tell them.
std::pair<size_t, size_t> free_and_total(int device);

}  // namespace simdev
