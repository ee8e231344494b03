// The Python module vmm_kv._native. Its interface is written down in vmm_kv/_native.pyi.
#include <atomic>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "core/device_model.h"
#include "lease.h"

namespace nb = nanobind;
using namespace nb::literals;
using vmm::DeviceModel;
using vmm::Lease;

namespace {

// For all of the model, also for what looks short: each call may have to wait for the model's lock.
using without_gil = nb::call_guard<nb::gil_scoped_release>;

// What the library does chunk by chunk from Python, without Python: a benchmark's yardstick.
std::pair<vmm::Status, std::vector<vmm::Handle>> map_chunks(DeviceModel &model, std::uint64_t base,
                                                            std::uint64_t chunk, std::uint64_t count, int device) {
    std::vector<vmm::Handle> handles;
    for (std::uint64_t i = 0; i < count; ++i) {
        auto [status, handle] = model.create(device, chunk, 0);
        if (status != vmm::kSuccess) return {status, handles};
        handles.push_back(handle);
        status = model.map(base + i * chunk, chunk, 0, handle, 0);
        if (status != vmm::kSuccess) return {status, handles};
    }
    return {model.set_access(base, chunk * count, {{device, vmm::kAccessReadWrite}}), handles};
}

template <std::atomic<bool> vmm::Switches::*flag>
void bind_switch(nb::class_<DeviceModel> &model, const char *name) {
    model.def_prop_rw(
        name, [](const DeviceModel &self) { return (self.switches.*flag).load(); },
        [](DeviceModel &self, bool on) { self.switches.*flag = on; });
}

void bind_device_model(nb::module_ &m) {
    nb::class_<DeviceModel> model(m, "DeviceModel");
    model.def(nb::init<const std::vector<std::uint64_t> &, std::uint64_t>(), "budgets"_a, "granule"_a = 2097152)
        .def_prop_ro("granule", &DeviceModel::granule)
        .def_prop_ro("devices", &DeviceModel::devices)

        .def("reserve", &DeviceModel::reserve, "size"_a, "alignment"_a, "hint"_a, "flags"_a = 0, without_gil())
        .def("free_address", &DeviceModel::free_address, "base"_a, "size"_a, without_gil())
        .def("create",
             [](DeviceModel &model, int device, std::uint64_t size, std::uint64_t flags) {
                 return model.create(device, size, flags);
             },
             "device"_a, "size"_a, "flags"_a = 0, without_gil())
        .def("release", &DeviceModel::release, "handle"_a, without_gil())
        .def("map", &DeviceModel::map, "address"_a, "size"_a, "offset"_a, "handle"_a, "flags"_a = 0, without_gil())
        .def("unmap", &DeviceModel::unmap, "address"_a, "size"_a, without_gil())
        .def("set_access",
             [](DeviceModel &model, std::uint64_t address, std::uint64_t size, int device, int access) {
                 return model.set_access(address, size, {{device, access}});
             },
             "address"_a, "size"_a, "device"_a, "access"_a, without_gil())
        .def("get_access", &DeviceModel::get_access, "address"_a, "device"_a, without_gil())
        .def("mem_info",
             [](DeviceModel &model, int device) {
                 auto info = model.mem_info(device);
                 return std::make_tuple(info.status, info.free, info.total);
             },
             "device"_a, without_gil())
        .def("zero",
             [](DeviceModel &model, std::uint64_t address, std::uint64_t size, int device) {
                 return model.zero(address, size, device);
             },
             "address"_a, "size"_a, "device"_a, without_gil())

        .def("charge", &DeviceModel::charge, "device"_a, "size"_a, without_gil())
        .def("credit", &DeviceModel::credit, "device"_a, "size"_a, without_gil())

        .def("used", &DeviceModel::used, "device"_a, without_gil())
        .def("budget", &DeviceModel::budget, "device"_a, without_gil())
        .def("peak_used", &DeviceModel::peak_used, "device"_a, without_gil())
        .def("reset_peak", &DeviceModel::reset_peak, "device"_a, without_gil())
        .def("live", &DeviceModel::live, without_gil())
        .def("calls", &DeviceModel::calls, without_gil())
        .def("mapped", &DeviceModel::mapped, without_gil())

        .def("fail", &DeviceModel::fail, "call"_a, "nth"_a, "status"_a, without_gil())
        .def("clear_faults", &DeviceModel::clear_faults, without_gil())
        .def("seal", &DeviceModel::seal, without_gil())
        .def("map_chunks", &map_chunks, "base"_a, "chunk"_a, "count"_a, "device"_a, without_gil());

    bind_switch<&vmm::Switches::poison>(model, "poison");
    bind_switch<&vmm::Switches::access_from_first>(model, "quirk_access_from_first");
    bind_switch<&vmm::Switches::joint_unmap_busy>(model, "quirk_joint_unmap_busy");
    bind_switch<&vmm::Switches::memory_with_addresses>(model, "quirk_memory_with_addresses");
    bind_switch<&vmm::Switches::single_memset>(model, "quirk_single_memset");
}

}  // namespace

NB_MODULE(_native, m) {
    // A cache that lives until the interpreter ends is no mistake of its user's, so it is no reason for a warning.
    nb::set_leak_warnings(false);

    bind_device_model(m);
    nb::class_<Lease>(m, "Lease")
        .def(nb::init<>())
        .def_prop_ro("count", &Lease::count)
        .def("capsule", &Lease::capsule, "address"_a, "nbytes"_a, "device_type"_a, "device_id"_a);
}
