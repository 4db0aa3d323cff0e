#include "streams.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

#include "allocator.h"
#include "pending_copies.h"

namespace simdev {

namespace {

// What an event knows: all that its stream had been given when it was recorded, and when that is done.
struct Event {
  VectorClock known;
  double time = 0;
};

thread_local int this_thread_device = 0;

struct CurrentLanes {
  std::array<LaneId, kMaxDevices> lane;

  CurrentLanes() {
    for (int device = 0; device < kMaxDevices; ++device) {
      lane[device] = 1 + device;
    }
  }
};

thread_local CurrentLanes this_thread_lanes;

bool is_default(LaneId lane) {
  return lane == 1 + model().lanes[lane].device;
}

// Asking whether work is done takes the host a moment, so a loop that polls does get to the end. A yes tells the
// host the same as waiting would have.
bool host_query(const VectorClock& known, double time) {
  auto& host = model().host;
  host.now += model().settings.query;
  if (host.now < time) {
    return false;
  }
  host_wait(known, time);
  return true;
}

}  // namespace

int current_device() {
  return this_thread_device;
}

void set_current_device(int device) {
  if (device < 0) {
    return;
  }
  TORCH_CHECK(device < model().settings.device_count, "sim: invalid device ordinal ", device);
  this_thread_device = device;
}

int resolve_device(int device) {
  return device < 0 ? this_thread_device : device;
}

LaneId current_lane(int device) {
  return this_thread_lanes.lane[device];
}

LaneId lane_of(const c10::Stream& stream) {
  return stream.id() == 0 ? 1 + stream.device_index() : static_cast<LaneId>(stream.id());
}

c10::Stream stream_of(LaneId lane) {
  auto device = static_cast<c10::DeviceIndex>(model().lanes[lane].device);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), is_default(lane) ? 0 : lane);
}

std::string lane_name(LaneId lane) {
  int device = model().lanes[lane].device;
  return is_default(lane) ? c10::str("default(sim:", device, ")") : c10::str("stream", lane, "(sim:", device, ")");
}

Seq submit(LaneId lane_id, Engine engine, double seconds, const char* op, const char* kind, int64_t bytes) {
  auto& state = model();
  auto& lane = state.lanes[lane_id];
  auto& unit = state.devices[lane.device].engines[engine];
  state.host.now += state.settings.launch;
  double start = std::max({lane.busy_until, state.host.now, unit.free_at});
  double end = start + seconds;
  lane.busy_until = end;
  unit.free_at = end;
  unit.busy += seconds;
  if (state.settings.trace) {
    state.spans.push_back({op, kind, lane_id, start, end, bytes});
  }
  return lane.known.tick(lane_id);
}

void wait_for_lane(LaneId waiter_id, LaneId awaited_id) {
  auto& waiter = model().lanes[waiter_id];
  const auto& awaited = model().lanes[awaited_id];
  waiter.known.merge(awaited.known);
  waiter.busy_until = std::max(waiter.busy_until, awaited.busy_until);
}

void host_wait(const VectorClock& known, double time) {
  auto& host = model().host;
  host.known.merge(known);
  host.now = std::max(host.now, time);
  return_held_back_memory();
  settle_finished_copies();
}

void host_wait_for_lane(LaneId lane) {
  ++model().counters.host_syncs;
  const auto& awaited = model().lanes[lane];
  host_wait(awaited.known, awaited.busy_until);
}

void host_wait_for_device(int device) {
  ++model().counters.host_syncs;
  VectorClock known;
  double time = 0;
  for (const auto& lane : model().lanes) {
    if (lane.device == device) {
      known.merge(lane.known);
      time = std::max(time, lane.busy_until);
    }
  }
  host_wait(known, time);
}

namespace {

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSim;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device previous = getDevice();
    set_current_device(device.index());
    return previous;
  }

  c10::Device getDevice() const override {
    return {kSim, static_cast<c10::DeviceIndex>(current_device())};
  }

  void setDevice(c10::Device device) const override {
    set_current_device(device.index());
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      this_thread_device = device.index();
    }
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(model().settings.device_count);
  }

  c10::Stream getStream(c10::Device device) const override {
    ModelLock lock;
    return stream_of(current_lane(resolve_device(device.index())));
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    ModelLock lock;
    return stream_of(1 + resolve_device(device.index()));
  }

  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    ModelLock lock;
    Lane lane;
    lane.device = resolve_device(device.index());
    model().lanes.push_back(lane);
    return stream_of(static_cast<LaneId>(model().lanes.size()) - 1);
  }

  // CUDA hands out one of 32 streams, which now and then orders two "new" streams by luck. Here each one is new.
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return getNewStream(device, 0);
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    ModelLock lock;
    int device = stream.device_index();
    c10::Stream previous = stream_of(current_lane(device));
    this_thread_lanes.lane[device] = lane_of(stream);
    return previous;
  }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void record(void** handle, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    ModelLock lock;
    if (*handle == nullptr) {
      *handle = new Event();
    }
    auto* event = static_cast<Event*>(*handle);
    const auto& lane = model().lanes[lane_of(stream)];
    event->known = lane.known;
    event->time = std::max(lane.busy_until, model().host.now);
  }

  // Waiting on an event that was never recorded is allowed and waits for nothing.
  void block(void* handle, const c10::Stream& stream) const override {
    ModelLock lock;
    if (handle == nullptr) {
      return;
    }
    auto* event = static_cast<Event*>(handle);
    auto& lane = model().lanes[lane_of(stream)];
    lane.known.merge(event->known);
    lane.busy_until = std::max(lane.busy_until, event->time);
  }

  bool queryEvent(void* handle) const override {
    ModelLock lock;
    if (handle == nullptr) {
      return true;
    }
    auto* event = static_cast<Event*>(handle);
    return host_query(event->known, event->time);
  }

  void synchronizeEvent(void* handle) const override {
    ModelLock lock;
    if (handle == nullptr) {
      return;
    }
    ++model().counters.host_syncs;
    auto* event = static_cast<Event*>(handle);
    host_wait(event->known, event->time);
  }

  bool queryStream(const c10::Stream& stream) const override {
    ModelLock lock;
    const auto& lane = model().lanes[lane_of(stream)];
    return host_query(lane.known, lane.busy_until);
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    ModelLock lock;
    host_wait_for_lane(lane_of(stream));
  }

  // No "override" on these two: some of the PyTorch versions served declare only one of them, or neither.
  void synchronizeDevice(const c10::DeviceIndex device) const {
    ModelLock lock;
    host_wait_for_device(resolve_device(device));
  }

  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const {
    ModelLock lock;
    return 1e3 * (static_cast<Event*>(end)->time - static_cast<Event*>(start)->time);
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream_use(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);

}  // namespace

}  // namespace simdev
