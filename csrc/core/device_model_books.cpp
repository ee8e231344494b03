// The readings of the device model, and what is for tests: all that is not a primitive.
#include <stdexcept>

#include "core/device_model.h"

namespace vmm {

Status DeviceModel::charge(int device, std::uint64_t size) {
    std::lock_guard lock(mutex_);
    if (!memory_.has_device(device)) return kInvalidDevice;
    return memory_.budget(device).charge(size) ? kSuccess : kOutOfMemory;
}

Status DeviceModel::credit(int device, std::uint64_t size) {
    std::lock_guard lock(mutex_);
    if (!memory_.has_device(device)) return kInvalidDevice;
    return memory_.budget(device).credit(size) ? kSuccess : kInvalidValue;
}

template <class Body>
auto DeviceModel::reading(int device, Body body) {
    std::lock_guard lock(mutex_);
    if (!memory_.has_device(device))
        throw std::invalid_argument("there is no device " + std::to_string(device) + "; the model has " +
                                    std::to_string(devices()));
    return body(memory_.budget(device));
}

std::uint64_t DeviceModel::used(int device) {
    return reading(device, [](const Budget &budget) { return budget.used(); });
}

std::uint64_t DeviceModel::budget(int device) {
    return reading(device, [](const Budget &budget) { return budget.total(); });
}

std::uint64_t DeviceModel::peak_used(int device) {
    return reading(device, [](const Budget &budget) { return budget.peak(); });
}

void DeviceModel::reset_peak(int device) {
    reading(device, [](Budget &budget) { budget.reset_peak(); });
}

std::map<std::string, std::uint64_t> DeviceModel::live() {
    std::lock_guard lock(mutex_);
    return {{"handles", memory_.live_handles()},
            {"mappings", mappings_.all().size()},
            {"reservations", reservations_.size()}};
}

std::map<std::string, std::uint64_t> DeviceModel::calls() {
    std::lock_guard lock(mutex_);
    return faults_.counts();
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> DeviceModel::mapped() {
    std::lock_guard lock(mutex_);
    std::vector<std::pair<std::uint64_t, std::uint64_t>> spans;
    for (auto &[address, mapping] : mappings_.all()) spans.emplace_back(address, mapping.size);
    return spans;
}

std::optional<DeviceModel::Span> DeviceModel::reservation_at(std::uint64_t address) {
    std::lock_guard lock(mutex_);
    auto it = reservation_of(address, 1);
    if (it == reservations_.end()) return std::nullopt;
    return Span{it->first, it->second.size};
}

std::optional<DeviceModel::Placed> DeviceModel::mapping_at(std::uint64_t address) {
    std::lock_guard lock(mutex_);
    auto it = mappings_.find(address);
    if (it == mappings_.all().end()) return std::nullopt;
    auto &[start, mapping] = *it;
    return Placed{{start, mapping.size}, memory_.at(mapping.made_with), mapping.access};
}

std::optional<Allocation> DeviceModel::allocation(Handle handle) {
    std::lock_guard lock(mutex_);
    const Allocation *found = memory_.find(handle);
    if (!found) return std::nullopt;
    return *found;
}

void DeviceModel::leave_addresses() {
    std::lock_guard lock(mutex_);
    reservations_.clear();
}

void DeviceModel::fail(const std::string &call, std::int64_t nth, Status status) {
    std::lock_guard lock(mutex_);
    faults_.arm(call, nth, status);
}

void DeviceModel::clear_faults() {
    std::lock_guard lock(mutex_);
    faults_.clear();
}

void DeviceModel::seal() {
    std::lock_guard lock(mutex_);
    faults_.seal();
}

}  // namespace vmm
