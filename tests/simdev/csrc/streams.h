// Streams as lanes of ordered work, what makes one wait for another, and the virtual clock they run on.
#pragma once

#include <c10/core/Stream.h>

#include <string>

#include "model.h"

namespace simdev {

int current_device();
void set_current_device(int device);

// Turns the "current device" index -1 into a real one.
int resolve_device(int device);

LaneId current_lane(int device);
LaneId lane_of(const c10::Stream& stream);
c10::Stream stream_of(LaneId lane);
std::string lane_name(LaneId lane);

// Puts one piece of work at the end of a lane and on the clock; the returned number stands for it from then on.
Seq submit(LaneId lane, Engine engine, double seconds, const char* op, const char* kind, int64_t bytes);

// Makes `waiter`'s next work start after everything queued on `awaited` so far.
void wait_for_lane(LaneId waiter, LaneId awaited);

// The host waits until everything in `known` is over, which is at `time`.
void host_wait(const VectorClock& known, double time);
void host_wait_for_lane(LaneId lane);
void host_wait_for_device(int device);

}  // namespace simdev
