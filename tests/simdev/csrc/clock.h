// Vector clocks: who knows that what has finished.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace simdev {

// A lane is one in-order queue of work: a stream of some device. Lane ids are never reused.
using LaneId = int;

// The n-th piece of work submitted to a lane has sequence number n; 0 means "none".
using Seq = uint64_t;

// What one observer (a stream, an event or the host) knows to be over: for every lane, the sequence number up to
// which all work has finished by the time the observer's next step runs.
class VectorClock {
 public:
  bool covers(LaneId lane, Seq seq) const {
    return seq <= at(lane);
  }

  Seq at(LaneId lane) const {
    return static_cast<size_t>(lane) < finished_.size() ? finished_[lane] : 0;
  }

  void merge(const VectorClock& other) {
    if (finished_.size() < other.finished_.size()) {
      finished_.resize(other.finished_.size());
    }
    for (size_t lane = 0; lane < other.finished_.size(); ++lane) {
      finished_[lane] = std::max(finished_[lane], other.finished_[lane]);
    }
  }

  // A lane runs in order, so whatever it does next comes after the work counted here.
  Seq tick(LaneId lane) {
    if (finished_.size() <= static_cast<size_t>(lane)) {
      finished_.resize(lane + 1);
    }
    return ++finished_[lane];
  }

 private:
  std::vector<Seq> finished_;
};

}  // namespace simdev
