// The control functions, by which a test rules an emulated library. vmm_kv/testing/emulation.py calls them.
//
// They answer a negative number (or the largest) where a name or a device is unknown. They are no driver calls: never
// counted, never made to fail.
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

#include "emulation/state.h"

using namespace vmm::emulation;

namespace {

constexpr std::uint64_t kNoDevice = UINT64_MAX;

bool starts_with(const std::string &text, const std::string &prefix, std::string &rest) {
    if (text.compare(0, prefix.size(), prefix) != 0) return false;
    rest = text.substr(prefix.size());
    return true;
}

std::int64_t look_up(const std::map<std::string, std::uint64_t> &counts, const std::string &name) {
    auto found = counts.find(name);
    return found == counts.end() ? -1 : static_cast<std::int64_t>(found->second);
}

template <class Read>
std::uint64_t reading(int device, Read read) {
    auto model = vmm::emulation::model();
    return device >= 0 && device < model->devices() ? read(*model) : kNoDevice;
}

}  // namespace

// A fresh model in place of the old one. What was reserved and mapped stays in the process, so that tensors which are
// still alive do no harm, but the new model knows nothing of it. 0; 1 for an argument that cannot be; 2 out of memory.
VMM_EXPORT int vmm_emu_reset(int devices, const std::uint64_t *budgets, std::uint64_t minimum,
                             std::uint64_t recommended) try {
    kFrontEnd.forget_thread();
    state().reset({budgets, budgets + (devices > 0 ? devices : 0)}, minimum, recommended);
    state().ready = true;
    return 0;
} catch (const std::invalid_argument &) {
    return 1;
} catch (const std::bad_alloc &) {
    return 2;
}

VMM_EXPORT int vmm_emu_set(const char *name, std::int64_t value) { return state().set(name, value) ? 0 : -1; }

VMM_EXPORT std::int64_t vmm_emu_get(const char *name) {
    auto *found = state().find(name);
    return found ? found->load() : INT64_MIN;
}

VMM_EXPORT int vmm_emu_fail(const char *call, std::int64_t nth, int status) try {
    {
        std::lock_guard lock(state().mutex);
        if (state().sides.knows(call)) {
            state().sides.arm(call, nth, status);
            return 0;
        }
    }
    model()->fail(call, nth, status);
    return 0;
} catch (const std::invalid_argument &) {
    return -1;
}

VMM_EXPORT void vmm_emu_clear_faults() {
    model()->clear_faults();
    std::lock_guard lock(state().mutex);
    state().sides.clear();
}

VMM_EXPORT void vmm_emu_seal() { model()->seal(); }

VMM_EXPORT std::int64_t vmm_emu_count(const char *what) {
    std::string rest;
    if (starts_with(what, "live.", rest)) return look_up(model()->live(), rest);
    if (starts_with(what, "calls_on.", rest)) {
        const std::size_t device = rest.size() < 3 ? std::strtoul(rest.c_str(), nullptr, 10) : vmm::Access::kMaxDevices;
        return device < state().calls_on.size() ? static_cast<std::int64_t>(state().calls_on[device]) : -1;
    }
    if (!starts_with(what, "calls.", rest)) return -1;
    std::int64_t count = look_up(model()->calls(), rest);
    if (count >= 0) return count;
    std::lock_guard lock(state().mutex);
    return look_up(state().sides.counts(), rest);
}

// (address, size) of the live mappings in order of address, as many as there is room for. How many there are.
VMM_EXPORT std::size_t vmm_emu_mapped(std::uint64_t *pairs, std::size_t capacity) {
    auto spans = model()->mapped();
    for (std::size_t i = 0; i < spans.size() && i < capacity; ++i) {
        pairs[2 * i] = spans[i].first;
        pairs[2 * i + 1] = spans[i].second;
    }
    return spans.size();
}

VMM_EXPORT int vmm_emu_charge(int device, std::uint64_t size) { return model()->charge(device, size); }
VMM_EXPORT int vmm_emu_credit(int device, std::uint64_t size) { return model()->credit(device, size); }

VMM_EXPORT std::uint64_t vmm_emu_used(int device) {
    return reading(device, [=](vmm::DeviceModel &model) { return model.used(device); });
}
VMM_EXPORT std::uint64_t vmm_emu_budget(int device) {
    return reading(device, [=](vmm::DeviceModel &model) { return model.budget(device); });
}
VMM_EXPORT std::uint64_t vmm_emu_peak_used(int device) {
    return reading(device, [=](vmm::DeviceModel &model) { return model.peak_used(device); });
}
VMM_EXPORT void vmm_emu_reset_peak(int device) {
    reading(device, [=](vmm::DeviceModel &model) {
        model.reset_peak(device);
        return kNoDevice;
    });
}
