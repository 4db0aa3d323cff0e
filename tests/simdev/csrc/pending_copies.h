// Asynchronous copies that the host has not waited for yet, and what may not happen to its memory until it has.
#pragma once

#include <c10/core/Storage.h>

#include "model.h"

namespace simdev {

// One copy, told from the host's end.
struct HostCopy {
  c10::Storage storage;  // kept alive, so that the simulation itself never touches freed memory
  char* data = nullptr;
  size_t size = 0;
  LaneId lane = 0;
  Seq seq = 0;
  uint64_t device_block = 0;
};

// An upload reads its source at some moment before the host knows that it is over. Until then the source must stay as
// it is, so its bytes are fingerprinted now and compared later.
void begin_upload(const HostCopy& copy);

// A download writes its target at some moment before the host knows that it is over. Until then the target holds
// poison, and the real bytes wait here.
void begin_download(const HostCopy& copy, const void* bytes, char poison);

// For a copy on `lane` that is about to read or write the host's memory [data, data + size), where other copies may be
// pending: those that the lane comes after are concluded now, any other one is a race.
void conclude_copies_before_read(LaneId lane, const void* data, size_t size, const char* op);
void conclude_copies_before_write(LaneId lane, const void* data, size_t size, const char* op);

// Concludes the copies that the host knows are over: checks upload sources, fills in download targets.
void settle_finished_copies();

// Reports a pending copy from or to memory that is being given up.
void check_no_copy_uses(const void* data, size_t size);

// Reports sources that have been overwritten already, without waiting for anything.
void check_pending_uploads();

size_t pending_uploads();
size_t pending_downloads();

// Fills in all download targets, forgets all uploads and complains about nothing.
void finish_pending_copies_unchecked();

}  // namespace simdev
