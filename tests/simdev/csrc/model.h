// The state of the simulated machine that every other file works on: settings, lanes, devices, the host.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "clock.h"

namespace simdev {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;

enum class Mode {
  kOff,     // nothing is checked
  kPoison,  // races are listed, and a racing read sees NaN
  kRaise,   // a race is an error at the operation that commits it
};

// Each device runs one piece of work at a time on each of these.
enum Engine : int { kCompute, kUpload, kDownload, kPeer, kEngineCount };

// Rates are per second, latencies are in seconds.
struct Settings {
  Mode mode = Mode::kRaise;
  int device_count = 1;
  bool trace = false;
  bool fill = true;            // fresh device memory holds 0xFF bytes instead of whatever was there
  bool reuse_any_size = true;  // a freed block's memory may come back in a block of any size
  double flops = 50e12;
  double hbm = 1e12;
  double h2d = 25e9;
  double d2h = 25e9;
  double p2p = 50e9;
  double pageable = 6e9;
  double launch = 5e-6;
  double kernel_min = 3e-6;
  double copy_lat = 8e-6;
  double query = 1e-6;
};

struct Counters {
  int64_t kernels = 0;
  int64_t flops = 0;
  int64_t h2d_bytes = 0;
  int64_t h2d_copies = 0;
  int64_t h2d_pageable_bytes = 0;
  int64_t h2d_nonblocking_but_sync = 0;
  int64_t d2h_bytes = 0;
  int64_t d2h_copies = 0;
  int64_t d2h_pageable_bytes = 0;
  int64_t d2h_nonblocking_but_sync = 0;
  int64_t d2d_bytes = 0;
  int64_t d2d_copies = 0;
  int64_t p2p_bytes = 0;
  int64_t allocs = 0;
  int64_t frees = 0;
  int64_t host_syncs = 0;
  int64_t pin_allocs = 0;
  int64_t host_registers = 0;
  int64_t empty_cache = 0;
  int64_t races = 0;
};

enum class Origin {
  kOwn,            // an access to this very block
  kBeforeFree,     // another lane's access to the block this memory belonged to before, unfinished when that was freed
  kPreviousOwner,  // the home lane's own queued access to memory it has freed since
};

struct Access {
  int64_t begin = 0;  // bytes [begin, end) of the block
  int64_t end = 0;
  LaneId lane = 0;
  Seq seq = 0;
  bool writes = false;
  const char* op = "";  // a string that is never freed
  uint64_t block = 0;   // the block it touched, which for a hazard taken over is not the block that lists it
  Origin origin = Origin::kOwn;
};

// An access that was still running, on another lane than the block's home, when its block was freed.
struct FreedUse {
  Access access;
  size_t block_size = 0;
};

struct Lane {
  int device = 0;
  VectorClock known;
  double busy_until = 0;
  std::vector<FreedUse> freed_uses;
  Access last_freed_use;  // the latest access by this lane itself to memory it has freed
  size_t largest_freed = 0;
};

struct Host {
  VectorClock known;
  double now = 0;
};

struct EngineState {
  double free_at = 0;
  double busy = 0;
};

struct MemoryStats {
  size_t cap = SIZE_MAX;
  size_t allocated = 0;
  size_t peak = 0;
  size_t active = 0;  // allocated, or freed but held back by record_stream
  size_t active_peak = 0;
  size_t allocs = 0;
  size_t frees = 0;
  size_t stalls = 0;
  size_t ooms = 0;
};

struct DeviceState {
  MemoryStats memory;
  std::array<EngineState, kEngineCount> engines;
  std::multimap<double, size_t> held_back;  // when a freed block's recorded streams are done -> its bytes
};

struct Span {
  std::string name;
  const char* kind;
  LaneId lane;
  double start;
  double end;
  int64_t bytes;
};

struct Model {
  std::recursive_mutex mutex;
  Settings settings;
  Counters counters;
  Host host;
  std::deque<Lane> lanes;  // lane 0 is unused; 1 + d is the default stream of device d
  std::array<DeviceState, kMaxDevices> devices;
  std::vector<std::string> races;
  std::vector<Span> spans;
  uint64_t last_block_id = 0;

  Model();
};

Model& model();

// Holds the model's mutex. While it waits for it, it lets go of Python's lock: the thread that has the mutex may
// need Python's to drop a tensor, and the two threads would wait for each other for ever.
class ModelLock {
 public:
  ModelLock();
  ~ModelLock();
  ModelLock(const ModelLock&) = delete;
  ModelLock& operator=(const ModelLock&) = delete;
};

// Sets one number of Settings by its Python name.
void change_setting(const std::string& name, double value);

// Every counter with its Python name.
std::map<std::string, int64_t> counters_by_name(const Counters& counters);

// Lists the message, and throws it in Mode::kRaise.
void report_race(const std::string& message);

// Whether `observer`'s next work is certain to start after the given work has finished.
bool is_ordered(LaneId observer, LaneId lane, Seq seq);

// Forgets races, counters, spans and everything in flight, and sets the clock to zero. Memory stays as it is.
void reset_model();

}  // namespace simdev
