// The Python bindings of the control side: settings, figures, lists of what happened.
#include <torch/csrc/utils/pybind.h>
#include <pybind11/stl.h>

#include "allocator.h"
#include "hooks.h"
#include "host_memory.h"
#include "kernels.h"
#include "model.h"
#include "op_info.h"
#include "pending_copies.h"
#include "streams.h"

namespace py = pybind11;

namespace simdev {

namespace {

void set_cap(int device, size_t bytes) {
  ModelLock lock;
  model().devices.at(device).memory.cap = bytes > 0 ? bytes : SIZE_MAX;
}

void reset() {
  ModelLock lock;
  reset_model();
  reset_calls();
}

void restore_settings() {
  ModelLock lock;
  model().settings = Settings();
  for (auto& device : model().devices) {
    device.memory.cap = SIZE_MAX;
  }
}

std::map<std::string, size_t> memory_figures(int device) {
  ModelLock lock;
  const auto& memory = model().devices.at(resolve_device(device)).memory;
  HostMemoryStats host = host_memory_stats();
  return {
      {"allocated", memory.allocated},
      {"peak", memory.peak},
      {"active", memory.active},
      {"active_peak", memory.active_peak},
      {"allocs", memory.allocs},
      {"frees", memory.frees},
      {"stalls", memory.stalls},
      {"ooms", memory.ooms},
      {"pinned", host.pinned},
      {"pinned_peak", host.pinned_peak},
      {"registered", host.registered},
      {"registered_peak", host.registered_peak},
  };
}

void reset_memory_peaks(int device) {
  ModelLock lock;
  auto& memory = model().devices.at(resolve_device(device)).memory;
  memory.peak = memory.allocated;
  memory.active_peak = memory.active;
}

double busy_time(Engine engine) {
  double busy = 0;
  for (const auto& device : model().devices) {
    busy += device.engines[engine].busy;
  }
  return busy;
}

std::map<std::string, double> times() {
  ModelLock lock;
  double total = model().host.now;
  for (const auto& lane : model().lanes) {
    total = std::max(total, lane.busy_until);
  }
  return {
      {"total", total},
      {"host", model().host.now},
      {"compute_busy", busy_time(kCompute)},
      {"h2d_busy", busy_time(kUpload)},
      {"d2h_busy", busy_time(kDownload)},
      {"p2p_busy", busy_time(kPeer)},
  };
}

py::list spans() {
  ModelLock lock;
  py::list result;
  for (const auto& span : model().spans) {
    result.append(py::make_tuple(span.name, span.kind, lane_name(span.lane), span.start, span.end, span.bytes));
  }
  return result;
}

py::tuple check_pending() {
  ModelLock lock;
  check_pending_uploads();
  check_registrations();
  size_t freed_uses = 0;
  for (const auto& lane : model().lanes) {
    freed_uses += lane.freed_uses.size();
  }
  size_t held_back = 0;
  for (const auto& device : model().devices) {
    held_back += device.held_back.size();
  }
  return py::make_tuple(pending_uploads(), pending_downloads(), freed_uses, held_back);
}

void register_tensor(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().is_cpu(), "sim: only host memory can be registered");
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "sim: only a dense tensor can be registered");
  ModelLock lock;
  register_host(tensor.data_ptr(), tensor.nbytes(), &tensor.storage());
}

void unregister_tensor(const at::Tensor& tensor) {
  ModelLock lock;
  unregister_host(tensor.data_ptr());
}

void register_address(uintptr_t address, size_t size) {
  ModelLock lock;
  register_host(reinterpret_cast<const void*>(address), size, nullptr);
}

void unregister_address(uintptr_t address) {
  ModelLock lock;
  unregister_host(reinterpret_cast<const void*>(address));
}

void bind_controls(py::module_& module) {
  module.def("set", [](const std::string& name, double value) {
    ModelLock lock;
    change_setting(name, value);
  });
  module.def("set_cap", &set_cap);
  module.def("restore_settings", &restore_settings);
  module.def("reset", &reset);
  module.def("reset_peaks", &reset_memory_peaks);
  module.def("check_pending", &check_pending);
  module.def("advance_host", [](double seconds) {
    ModelLock lock;
    model().host.now += seconds;
  });
  module.def("register_tensor", &register_tensor);
  module.def("unregister_tensor", &unregister_tensor);
  module.def("register_host", &register_address);
  module.def("unregister_host", &unregister_address);
}

void bind_figures(py::module_& module) {
  module.def("races", [] {
    ModelLock lock;
    return model().races;
  });
  module.def("counters", [] {
    ModelLock lock;
    return counters_by_name(model().counters);
  });
  module.def("ops", [] {
    ModelLock lock;
    return calls_by_name();
  });
  module.def("spans", &spans);
  module.def("times", &times);
  module.def("mem", &memory_figures);
  module.def("mem_get_info", [](int device) {
    ModelLock lock;
    return free_and_total(resolve_device(device));
  });
}

void bind_device(py::module_& module) {
  module.def("take_cpu_ops", &take_cpu_operators);
  module.def("device_count", [] { return model().settings.device_count; });
  module.def("current_device", &current_device);
  module.def("set_device", &set_current_device);
  module.def("synchronize", [](int device) {
    ModelLock lock;
    host_wait_for_device(resolve_device(device));
  });
  module.def("empty_cache", [] {
    ModelLock lock;
    ++model().counters.empty_cache;
  });
}

}  // namespace

}  // namespace simdev

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  simdev::register_hooks();
  simdev::bind_device(module);
  simdev::bind_controls(module);
  simdev::bind_figures(module);
}
