// The process-wide state behind emulation.h, for emulation.cpp and control.cpp only.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/faults.h"
#include "emulation/emulation.h"

namespace vmm::emulation {

constexpr std::size_t kSwitches = static_cast<std::size_t>(Switch::ignore_alignment) + 1;
constexpr std::uint64_t kDefaultBudget = std::uint64_t{2} << 30, kDefaultGranule = 2 << 20;

struct State {
    State();

    // A fresh model, switches as they are after loading. Throws what DeviceModel's constructor throws.
    void reset(const std::vector<std::uint64_t> &budgets, std::uint64_t minimum, std::uint64_t recommended);
    bool set(const std::string &name, std::int64_t value);
    const std::atomic<std::int64_t> *find(const std::string &name) const;
    void pass_on_switches();

    std::mutex mutex;  // of `model` and `sides`
    std::shared_ptr<DeviceModel> model;
    Faults sides;
    std::array<std::atomic<std::int64_t>, kSwitches> switches{};
    std::array<std::atomic<std::uint64_t>, Access::kMaxDevices> calls_on{};
    std::atomic<bool> ready{false};   // a test has asked for devices
    std::atomic<bool> forked{false};  // since then
};

// Never destroyed: threads and finalizers may call when the process ends.
State &state();

}  // namespace vmm::emulation
