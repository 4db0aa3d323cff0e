// Blocks of device memory and the happens-before check on every access to them.
#pragma once

#include <c10/core/Allocator.h>

#include <vector>

#include "model.h"

namespace simdev {

struct Block {
  uint64_t id = 0;
  size_t size = 0;
  int device = 0;
  LaneId home = 0;  // the stream it was allocated on, which alone may be handed its memory after it is freed
  std::vector<Access> accesses;
  std::vector<LaneId> recorded;  // lanes named in record_stream
  c10::DataPtr memory;
};

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
};

// Reports the first recorded access that conflicts with this one and may still be running. False when there is one.
bool check_access(const Block& block, Range range, LaneId lane, bool writes, const char* op);

// Records an access that has been checked and submitted.
void note_access(Block& block, Range range, LaneId lane, Seq seq, bool writes, const char* op);

}  // namespace simdev
