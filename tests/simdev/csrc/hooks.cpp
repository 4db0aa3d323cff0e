// What PyTorch asks of a device outside of operators: random numbers, pinned memory, resizing a storage.
#include "hooks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>
#include <map>

#include "allocator.h"
#include "generator.h"
#include "host_memory.h"
#include "streams.h"

namespace simdev {

namespace {

c10::DeviceIndex device_index(int device) {
  return static_cast<c10::DeviceIndex>(device);
}

struct SimGenerator final : c10::GeneratorImpl {
  at::Generator cpu;

  SimGenerator(int device, at::Generator cpu_generator)
      : GeneratorImpl(c10::Device(kSim, device_index(device)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(cpu_generator)) {}

  void set_current_seed(uint64_t seed) override {
    cpu.set_current_seed(seed);
  }

  void set_offset(uint64_t offset) override {
    cpu.set_offset(offset);
  }

  uint64_t get_offset() const override {
    return cpu.get_offset();
  }

  uint64_t current_seed() const override {
    return cpu.current_seed();
  }

  uint64_t seed() override {
    return cpu.seed();
  }

  void set_state(const c10::TensorImpl& state) override {
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }

  SimGenerator* clone_impl() const override {
    return new SimGenerator(device_.index(), cpu.clone());
  }
};

struct SimHooks final : at::PrivateUse1HooksInterface {
  // No "override" on those that the oldest versions served do not declare.
  bool isBuilt() const {
    return true;
  }

  bool isAvailable() const {
    return true;
  }

  at::Generator getNewGenerator(c10::DeviceIndex device) const {
    return new_generator(resolve_device(device));
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(resolve_device(device));
  }

  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }

  c10::DeviceIndex deviceCount() const override {
    return device_index(model().settings.device_count);
  }

  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return device_index(current_device());
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    int previous = current_device();
    set_current_device(device);
    return device_index(previous);
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    bool exists = device >= 0 && device < deviceCount();
    return exists ? exchangeDevice(device) : getCurrentDevice();
  }

  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }

  bool isPinnedPtr(const void* pointer) const override {
    ModelLock lock;
    return host_kind(pointer) != HostKind::kPageable;
  }

  c10::Device getDeviceFromPtr(void*) const override {
    return c10::Device(kSim, device_index(current_device()));
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override;
};

// Copies what fits into new memory, as one kernel on the current stream.
void SimHooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const {
  constexpr const char* kName = "storage_resize";
  ModelLock lock;
  int device = storage.device().index();
  LaneId lane = current_lane(device);
  size_t kept = std::min(size, storage.nbytes());
  c10::DataPtr memory = allocate_on(device, size);
  if (kept > 0) {
    auto& old_block = block_of(storage);
    auto& new_block = block_of(memory);
    Range range{0, static_cast<int64_t>(kept)};
    bool checks = model().settings.mode != Mode::kOff;
    bool ordered = !checks || check_access(old_block, range, lane, false, kName);
    if (ordered) {
      std::memcpy(memory.get(), storage.data(), kept);
    }
    const auto& settings = model().settings;
    double seconds = settings.kernel_min + 2.0 * static_cast<double>(kept) / settings.hbm;
    Seq seq = submit(lane, kCompute, seconds, kName, "d2d", range.end);
    if (checks) {
      note_access(old_block, range, lane, seq, false, kName);
      note_access(new_block, range, lane, seq, true, kName);
    }
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

}  // namespace

const at::Generator& default_generator(int device) {
  static auto* generators = new std::map<int, at::Generator>();
  ModelLock lock;
  auto found = generators->find(device);
  if (found == generators->end()) {
    auto generator = at::make_generator<SimGenerator>(device, at::detail::getDefaultCPUGenerator());
    found = generators->emplace(device, std::move(generator)).first;
  }
  return found->second;
}

at::Generator new_generator(int device) {
  return at::make_generator<SimGenerator>(device, at::detail::createCPUGenerator());
}

at::Generator cpu_generator_of(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kSim, "Expected a 'sim' device type for generator but found '",
              generator.device(), "'");
  return static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new SimHooks());
}

}  // namespace simdev
