#include "emulation/emulation.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>

#include <pthread.h>

#include "emulation/state.h"

namespace vmm::emulation {
namespace {

// In the order of Switch.
constexpr const char *kNames[kSwitches] = {"poison",
                                           "capturing",
                                           "vmm_supported",
                                           "rdma",
                                           "fabric",
                                           "ignore_hint",
                                           "integrated",
                                           "driver_version",
                                           "runtime_version",
                                           "minimum_granularity",
                                           "recommended_granularity",
                                           "deinitialized",
                                           "quirk_access_from_first",
                                           "quirk_joint_unmap_busy",
                                           "quirk_memory_with_addresses",
                                           "quirk_4k_granularity",
                                           "quirk_single_memset",
                                           "ignore_alignment"};

std::size_t index(Switch which) { return static_cast<std::size_t>(which); }

}  // namespace

// In the order of Side.
State::State() : sides({"init", "device", "context", "stream", "capture_mode"}) {
    reset({kDefaultBudget}, kDefaultGranule, kDefaultGranule);
    pthread_atfork(nullptr, nullptr, [] { state().forked = state().ready.load(); });
}

State &state() {
    static State &only = *new State;
    return only;
}

void State::reset(const std::vector<std::uint64_t> &budgets, std::uint64_t minimum, std::uint64_t recommended) {
    auto fresh = std::make_shared<DeviceModel>(budgets, minimum, kFrontEnd.dialect);
    std::lock_guard lock(mutex);
    if (model) model->leave_addresses();
    model = std::move(fresh);
    sides = Faults({"init", "device", "context", "stream", "capture_mode"});
    for (auto &flag : switches) flag = 0;
    switches[index(Switch::vmm_supported)] = 1;
    switches[index(Switch::driver_version)] = kFrontEnd.driver_version;
    switches[index(Switch::runtime_version)] = kFrontEnd.runtime_version;
    switches[index(Switch::minimum_granularity)] = static_cast<std::int64_t>(minimum);
    switches[index(Switch::recommended_granularity)] = static_cast<std::int64_t>(recommended);
    for (auto &count : calls_on) count = 0;
}

const std::atomic<std::int64_t> *State::find(const std::string &name) const {
    auto found = std::find(std::begin(kNames), std::end(kNames), name);
    return found == std::end(kNames) ? nullptr : &switches[static_cast<std::size_t>(found - std::begin(kNames))];
}

bool State::set(const std::string &name, std::int64_t value) {
    std::lock_guard lock(mutex);
    auto *found = const_cast<std::atomic<std::int64_t> *>(find(name));
    if (!found) return false;
    *found = value;
    pass_on_switches();
    return true;
}

void State::pass_on_switches() {
    auto flag = [&](Switch which) { return switches[index(which)] != 0; };
    Switches &passed = model->switches;
    passed.poison = flag(Switch::poison);
    passed.ignore_hint = flag(Switch::ignore_hint);
    passed.ignore_alignment = flag(Switch::ignore_alignment);
    passed.capturing = flag(Switch::capturing) && kFrontEnd.capture_refuses_mapping;
    passed.access_from_first = flag(Switch::access_from_first);
    passed.joint_unmap_busy = flag(Switch::joint_unmap_busy);
    passed.memory_with_addresses = flag(Switch::memory_with_addresses);
    passed.single_memset = flag(Switch::single_memset);
}

std::int64_t value(Switch which) { return state().switches[index(which)]; }

std::shared_ptr<DeviceModel> model() {
    std::lock_guard lock(state().mutex);
    return state().model;
}

Status enter() {
    if (state().forked) return kNotInitialized;
    if (!state().ready) return kNoDevices;
    return on(Switch::deinitialized) ? kDeinitialized : kSuccess;
}

Status enter(Side side) {
    if (Status refused = enter()) return refused;
    std::lock_guard lock(state().mutex);
    return state().sides.enter(static_cast<std::size_t>(side));
}

void count_on(int device) {
    if (device >= 0 && device < Access::kMaxDevices) ++state().calls_on[static_cast<std::size_t>(device)];
}

std::uint64_t granularity(bool recommended) {
    if (on(Switch::granularity_4k)) return 4096;
    return static_cast<std::uint64_t>(
        value(recommended ? Switch::recommended_granularity : Switch::minimum_granularity));
}

void uuid_of(int device, char (&bytes)[16]) {
    std::memcpy(bytes, "vmm_kv emulation", sizeof bytes);
    bytes[15] = static_cast<char>('0' + device);
}

int pci_bus_id(int device, char *text, int room) {
    return std::snprintf(text, static_cast<std::size_t>(room), "%04x:%02x:%02x.0", kPciDomain, pci_bus(device),
                         kPciDevice);
}

int device_at_pci(const char *text) {
    for (int device = 0; device < model()->devices(); ++device) {
        char known[16];
        pci_bus_id(device, known, sizeof known);
        if (std::strcmp(text, known) == 0) return device;
    }
    return -1;
}

}  // namespace vmm::emulation
