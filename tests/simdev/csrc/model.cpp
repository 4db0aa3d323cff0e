#include "model.h"

#include <Python.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "host_memory.h"
#include "pending_copies.h"
#include "streams.h"

namespace simdev {

namespace {

constexpr size_t kMaxListedRaces = 1000;

double* find_cost(Settings& settings, const std::string& name) {
  static const std::map<std::string, double Settings::*> costs{
      {"flops", &Settings::flops},
      {"hbm", &Settings::hbm},
      {"h2d", &Settings::h2d},
      {"d2h", &Settings::d2h},
      {"p2p", &Settings::p2p},
      {"pageable", &Settings::pageable},
      {"launch", &Settings::launch},
      {"kernel_min", &Settings::kernel_min},
      {"copy_lat", &Settings::copy_lat},
      {"query", &Settings::query},
  };
  auto found = costs.find(name);
  return found == costs.end() ? nullptr : &(settings.*(found->second));
}

void reset_memory_stats(MemoryStats& memory) {
  memory.peak = memory.allocated;
  memory.active_peak = memory.active;
  memory.allocs = 0;
  memory.frees = 0;
  memory.stalls = 0;
  memory.ooms = 0;
}

void reset_device(DeviceState& device) {
  for (const auto& [time, bytes] : device.held_back) {
    device.memory.active -= bytes;
  }
  device.held_back.clear();
  device.engines = {};
  reset_memory_stats(device.memory);
}

}  // namespace

Model::Model() {
  lanes.resize(1 + kMaxDevices);
  for (int device = 0; device < kMaxDevices; ++device) {
    lanes[1 + device].device = device;
  }
}

// Never destroyed: tensors that outlive the interpreter's shutdown still report their memory as freed.
Model& model() {
  static auto* instance = new Model();
  return *instance;
}

ModelLock::ModelLock() {
  auto& mutex = model().mutex;
  if (mutex.try_lock()) {
    return;
  }
  if (Py_IsInitialized() && PyGILState_Check()) {
    PyThreadState* state = PyEval_SaveThread();
    mutex.lock();
    PyEval_RestoreThread(state);
  } else {
    mutex.lock();
  }
}

ModelLock::~ModelLock() {
  model().mutex.unlock();
}

void change_setting(const std::string& name, double value) {
  auto& settings = model().settings;
  if (name == "mode") {
    settings.mode = static_cast<Mode>(static_cast<int>(value));
  } else if (name == "trace") {
    settings.trace = value != 0;
  } else if (name == "fill") {
    settings.fill = value != 0;
  } else if (name == "reuse_any_size") {
    settings.reuse_any_size = value != 0;
  } else if (name == "ndev") {
    TORCH_CHECK(value >= 1 && value <= kMaxDevices, "sim: ndev has to be from 1 to ", kMaxDevices);
    settings.device_count = static_cast<int>(value);
  } else {
    double* cost = find_cost(settings, name);
    TORCH_CHECK(cost != nullptr, "sim: unknown setting ", name);
    *cost = value;
  }
}

std::map<std::string, int64_t> counters_by_name(const Counters& counters) {
  return {
      {"kernels", counters.kernels},
      {"flops", counters.flops},
      {"h2d_bytes", counters.h2d_bytes},
      {"h2d_copies", counters.h2d_copies},
      {"h2d_pageable_bytes", counters.h2d_pageable_bytes},
      {"h2d_nonblocking_but_sync", counters.h2d_nonblocking_but_sync},
      {"d2h_bytes", counters.d2h_bytes},
      {"d2h_copies", counters.d2h_copies},
      {"d2h_pageable_bytes", counters.d2h_pageable_bytes},
      {"d2h_nonblocking_but_sync", counters.d2h_nonblocking_but_sync},
      {"d2d_bytes", counters.d2d_bytes},
      {"d2d_copies", counters.d2d_copies},
      {"p2p_bytes", counters.p2p_bytes},
      {"allocs", counters.allocs},
      {"frees", counters.frees},
      {"host_syncs", counters.host_syncs},
      {"pin_allocs", counters.pin_allocs},
      {"host_registers", counters.host_registers},
      {"empty_cache", counters.empty_cache},
      {"races", counters.races},
  };
}

void report_race(const std::string& message) {
  auto& state = model();
  if (state.settings.mode == Mode::kOff) {
    return;
  }
  ++state.counters.races;
  if (state.races.size() < kMaxListedRaces) {
    state.races.push_back(message);
  }
  TORCH_CHECK(state.settings.mode != Mode::kRaise, "SimRaceError: ", message);
}

bool is_ordered(LaneId observer, LaneId lane, Seq seq) {
  auto& state = model();
  // The host submits all work, so whatever it has waited for is over before any lane's next work. Lanes and events
  // need not be told.
  return state.lanes[observer].known.covers(lane, seq) || state.host.known.covers(lane, seq);
}

void reset_model() {
  auto& state = model();
  for (const auto& lane : state.lanes) {
    state.host.known.merge(lane.known);
  }
  finish_pending_copies_unchecked();
  for (auto& device : state.devices) {
    reset_device(device);
  }
  for (auto& lane : state.lanes) {
    lane.busy_until = 0;
    lane.freed_uses.clear();
    lane.last_freed_use = {};
    lane.largest_freed = 0;
  }
  forget_lost_registrations();
  reset_host_memory_peaks();
  state.host.now = 0;
  state.counters = {};
  state.races.clear();
  state.spans.clear();
}

}  // namespace simdev
