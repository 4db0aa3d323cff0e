#include "race.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

#include "streams.h"

namespace simdev {

namespace {

std::string bytes_of(uint64_t block, int64_t begin, int64_t end) {
  return c10::str("block #", block, " [", begin, ",", end, ")");
}

const char* conflict_name(bool writes, bool earlier_writes) {
  if (!writes) {
    return "read-after-write";
  }
  return earlier_writes ? "write-after-write" : "write-after-read";
}

std::string describe_earlier(const Access& earlier) {
  const char* verb = earlier.writes ? "writes" : "reads";
  std::string who = c10::str(earlier.op, " on ", lane_name(earlier.lane), ", which ", verb);
  switch (earlier.origin) {
    case Origin::kBeforeFree:
      return c10::str(who, " this memory and was queued [before free of block #", earlier.block, "]");
    case Origin::kPreviousOwner:
      return c10::str(earlier.op, " on ", lane_name(earlier.lane), " [use of the memory's previous owner, block #",
                      earlier.block, "]");
    case Origin::kOwn:
      break;
  }
  return c10::str(who, " [", earlier.begin, ",", earlier.end, ")");
}

std::string describe_missing_wait(const Block& block, const Access& earlier, LaneId lane, const char* op) {
  std::string waiter = lane_name(lane);
  std::string awaited = lane_name(earlier.lane);
  if (earlier.origin == Origin::kBeforeFree) {
    return c10::str("block #", earlier.block, " needed record_stream(", awaited, "), or ", lane_name(block.home),
                    " a wait for ", awaited, " before it allocated block #", block.id);
  }
  return c10::str(waiter, " has to wait for ", awaited, " (wait_stream, wait_event on an event recorded after ",
                  earlier.op, ", or a host synchronize) before ", op);
}

std::string describe(const Block& block, Range range, LaneId lane, bool writes, const char* op, const Access& earlier) {
  return c10::str(conflict_name(writes, earlier.writes), ": ", op, " on ", lane_name(lane),
                  writes ? " writes " : " reads ", bytes_of(block.id, range.begin, range.end),
                  " not ordered after ", describe_earlier(earlier),
                  ". Missing: ", describe_missing_wait(block, earlier, lane, op));
}

bool overlaps(const Access& earlier, Range range) {
  return earlier.begin < range.end && range.begin < earlier.end;
}

}  // namespace

bool check_access(const Block& block, Range range, LaneId lane, bool writes, const char* op) {
  for (const auto& earlier : block.accesses) {
    bool conflicts = writes || earlier.writes;
    if (!conflicts || earlier.lane == lane || !overlaps(earlier, range)) {
      continue;
    }
    if (!is_ordered(lane, earlier.lane, earlier.seq)) {
      report_race(describe(block, range, lane, writes, op, earlier));
      return false;
    }
  }
  return true;
}

void note_access(Block& block, Range range, LaneId lane, Seq seq, bool writes, const char* op) {
  const auto& host = model().host.known;
  // An old access can go when nothing later can tell the difference: the host knows it is over; or this access
  // covers its bytes and anything that has to wait for the old one has to wait for this one, which is itself after it.
  auto is_obsolete = [&](const Access& old) {
    if (host.covers(old.lane, old.seq)) {
      return true;
    }
    bool covered = range.begin <= old.begin && old.end <= range.end;
    return covered && (writes || (old.lane == lane && !old.writes));
  };
  auto& accesses = block.accesses;
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), is_obsolete), accesses.end());
  accesses.push_back({range.begin, range.end, lane, seq, writes, op, block.id, Origin::kOwn});
}

}  // namespace simdev
