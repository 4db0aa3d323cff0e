#include "pending_copies.h"

#include <c10/core/StorageImpl.h>
#include <c10/util/StringUtil.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "host_memory.h"
#include "streams.h"

namespace simdev {

namespace {

struct PendingCopy {
  HostCopy copy;
  HostPlace place;
  const char* op = "";
  const char* direction = "";
};

struct PendingUpload : PendingCopy {
  uint64_t fingerprint = 0;
};

struct PendingDownload : PendingCopy {
  std::vector<char> bytes;
  char poison = 0;
};

struct PendingCopies {
  std::vector<PendingUpload> uploads;
  std::vector<PendingDownload> downloads;
};

PendingCopies& pending_copies() {
  static auto* instance = new PendingCopies();
  return *instance;
}

// Not for security: it only has to notice that somebody has written other values. Four sums side by side, because one
// would spend its time waiting for its own multiplications.
uint64_t fingerprint(const char* data, size_t size) {
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15ull;
  constexpr size_t kSums = 4;
  std::array<uint64_t, kSums> sums{size, 1, 2, 3};
  auto mix = [](uint64_t& sum, uint64_t word) {
    sum = (sum ^ word) * kFactor;
    sum ^= sum >> 32;
  };
  std::array<uint64_t, kSums> words;
  size_t done = 0;
  for (; done + sizeof(words) <= size; done += sizeof(words)) {
    std::memcpy(words.data(), data + done, sizeof(words));
    for (size_t index = 0; index < kSums; ++index) {
      mix(sums[index], words[index]);
    }
  }
  for (; done < size; ++done) {
    mix(sums[0], static_cast<unsigned char>(data[done]));
  }
  for (size_t index = 1; index < kSums; ++index) {
    mix(sums[0], sums[index]);
  }
  return sums[0];
}

// Its first byte is the right one, and each byte equals the next.
bool is_filled_with(const char* data, size_t size, char byte) {
  return size == 0 || (data[0] == byte && std::memcmp(data, data + 1, size - 1) == 0);
}

bool overlaps(const HostCopy& copy, const void* data, size_t size) {
  const auto* begin = static_cast<const char*>(data);
  return copy.data < begin + size && begin < copy.data + copy.size;
}

bool is_over_for_host(const HostCopy& copy) {
  return model().host.known.covers(copy.lane, copy.seq);
}

// "copy_h2d on stream9(sim:0) into block #12"
std::string name_of(const PendingCopy& pending) {
  return c10::str(pending.op, " on ", lane_name(pending.copy.lane), pending.direction, pending.copy.device_block);
}

std::string missing_host_wait(const PendingCopy& pending, const char* before) {
  return c10::str(". Missing: the host has to synchronize ", lane_name(pending.copy.lane),
                  ", or an event recorded after ", pending.op, ", before ", before);
}

bool is_source_intact(const PendingUpload& upload) {
  return fingerprint(upload.copy.data, upload.copy.size) == upload.fingerprint;
}

std::string describe_overwritten_source(const PendingUpload& upload) {
  return c10::str("host write during upload: the source of ", name_of(upload), ", ", upload.place.name,
                  ", was overwritten by the host while the copy was pending",
                  missing_host_wait(upload, "it writes to that memory"));
}

std::string describe_touched_target(const PendingDownload& download) {
  return c10::str("host write during download: the target of ", name_of(download), ", ", download.place.name,
                  ", was overwritten by the host while the copy was pending",
                  missing_host_wait(download, "it touches that memory"));
}

std::string describe_early_free(const PendingCopy& pending, const char* what, const char* before) {
  return c10::str("early free: ", pending.place.name, " was ", what, " while ", name_of(pending), " was pending",
                  missing_host_wait(pending, before));
}

// Pinned memory is not handed out again before the copies that use it are over. Memory that was merely registered is
// its owner's to free at any moment. Of several copies that hold a freed storage here, the last one tells.
bool was_freed_early(const PendingCopy& pending) {
  const auto& owner = pending.place.owner;
  if (pending.place.kind != HostKind::kRegistered) {
    return false;
  }
  if (!owner.has_value()) {
    return pending.copy.storage.use_count() == 1;
  }
  if (owner->expired()) {
    return true;
  }
  bool owner_is_held_here = owner->_unsafe_get_target() == pending.copy.storage.unsafeGetStorageImpl();
  return owner_is_held_here && pending.copy.storage.use_count() == 1;
}

std::string early_free_of(const PendingCopy& pending) {
  return was_freed_early(pending) ? describe_early_free(pending, "freed", "it is freed") : "";
}

// Both return what was wrong, or nothing.
std::string conclude(const PendingUpload& upload) {
  return is_source_intact(upload) ? early_free_of(upload) : describe_overwritten_source(upload);
}

std::string conclude(const PendingDownload& download) {
  const auto& copy = download.copy;
  bool untouched = is_filled_with(copy.data, copy.size, download.poison);
  std::memcpy(copy.data, download.bytes.data(), copy.size);
  return untouched ? early_free_of(download) : describe_touched_target(download);
}

// Concludes the copies for which `is_over` holds, in the order they were queued, and takes them off the list. The
// first complaint is returned and not thrown, so that the list is in order before anybody hears of it.
template <typename Pending, typename Predicate>
std::string conclude_where(std::vector<Pending>& list, Predicate is_over) {
  std::string first_problem;
  std::vector<Pending> remaining;
  for (auto& pending : list) {
    if (!is_over(pending.copy)) {
      remaining.push_back(std::move(pending));
      continue;
    }
    std::string problem = conclude(pending);
    if (first_problem.empty()) {
      first_problem = problem;
    }
    pending.copy.storage = c10::Storage();
  }
  list = std::move(remaining);
  return first_problem;
}

void report_if_any(const std::string& problem) {
  if (!problem.empty()) {
    report_race(problem);
  }
}

template <typename Pending>
void conclude_before(std::vector<Pending>& list, LaneId lane, const void* data, size_t size, const char* op) {
  auto concerns = [&](const HostCopy& copy) { return overlaps(copy, data, size); };
  auto is_earlier = [&](const HostCopy& copy) { return concerns(copy) && is_ordered(lane, copy.lane, copy.seq); };
  report_if_any(conclude_where(list, is_earlier));
  for (const auto& pending : list) {
    if (concerns(pending.copy)) {
      report_race(c10::str("host memory race: ", op, " on ", lane_name(lane), " uses ", pending.place.name, ", which ",
                           name_of(pending), " may still be using. Missing: ", lane_name(lane), " has to wait for ",
                           lane_name(pending.copy.lane), " before ", op));
      return;
    }
  }
}

template <typename Pending>
std::string unregistered_early(const std::vector<Pending>& list, const void* data, size_t size) {
  for (const auto& pending : list) {
    if (overlaps(pending.copy, data, size)) {
      return describe_early_free(pending, "unregistered", "host_unregister");
    }
  }
  return "";
}

}  // namespace

void begin_upload(const HostCopy& copy) {
  PendingUpload upload;
  upload.copy = copy;
  upload.place = place_of(copy.data, copy.size);
  upload.op = "copy_h2d";
  upload.direction = " into block #";
  upload.fingerprint = fingerprint(copy.data, copy.size);
  pending_copies().uploads.push_back(std::move(upload));
}

void begin_download(const HostCopy& copy, const void* bytes, char poison) {
  const auto* first = static_cast<const char*>(bytes);
  PendingDownload download;
  download.copy = copy;
  download.place = place_of(copy.data, copy.size);
  download.op = "copy_d2h";
  download.direction = " from block #";
  download.bytes.assign(first, first + copy.size);
  download.poison = poison;
  std::memset(copy.data, poison, copy.size);
  pending_copies().downloads.push_back(std::move(download));
}

void conclude_copies_before_read(LaneId lane, const void* data, size_t size, const char* op) {
  conclude_before(pending_copies().downloads, lane, data, size, op);
}

void conclude_copies_before_write(LaneId lane, const void* data, size_t size, const char* op) {
  conclude_before(pending_copies().uploads, lane, data, size, op);
  conclude_before(pending_copies().downloads, lane, data, size, op);
}

void settle_finished_copies() {
  std::string problem = conclude_where(pending_copies().uploads, is_over_for_host);
  std::string download_problem = conclude_where(pending_copies().downloads, is_over_for_host);
  report_if_any(problem.empty() ? download_problem : problem);
}

void check_no_copy_uses(const void* data, size_t size) {
  std::string problem = unregistered_early(pending_copies().uploads, data, size);
  report_if_any(problem.empty() ? unregistered_early(pending_copies().downloads, data, size) : problem);
}

void check_pending_uploads() {
  for (const auto& upload : pending_copies().uploads) {
    if (!is_source_intact(upload)) {
      report_race(describe_overwritten_source(upload));
    }
  }
}

size_t pending_uploads() {
  return pending_copies().uploads.size();
}

size_t pending_downloads() {
  return pending_copies().downloads.size();
}

void finish_pending_copies_unchecked() {
  auto all = [](const HostCopy&) { return true; };
  conclude_where(pending_copies().uploads, all);
  conclude_where(pending_copies().downloads, all);
}

}  // namespace simdev
