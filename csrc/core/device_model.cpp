#include "core/device_model.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <stdexcept>
#include <string>

#include <unistd.h>

namespace vmm {
namespace {

bool is_power_of_two(std::uint64_t n) { return n != 0 && (n & (n - 1)) == 0; }

std::uint64_t page_size() { return static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)); }

std::uint64_t checked_granule(std::uint64_t granule) {
    if (!is_power_of_two(granule) || granule % page_size() != 0)
        throw std::invalid_argument("granule is " + std::to_string(granule) + "; it must be a power of two and a " +
                                    "multiple of the page, which is " + std::to_string(page_size()));
    return granule;
}

const std::vector<std::uint64_t> &checked_budgets(const std::vector<std::uint64_t> &budgets) {
    if (budgets.empty() || budgets.size() > Access::kMaxDevices)
        throw std::invalid_argument("there are " + std::to_string(budgets.size()) + " budgets; 1 to " +
                                    std::to_string(Access::kMaxDevices) + " devices are possible");
    return budgets;
}

}  // namespace

DeviceModel::DeviceModel(const std::vector<std::uint64_t> &budgets, std::uint64_t granule)
    : granule_(checked_granule(granule)), memory_(checked_budgets(budgets)) {}

// The pool's file and the ballast go with their owners; the pages that are mapped from the pool go here.
DeviceModel::~DeviceModel() {
    for (auto [base, size] : reservations_) addresses_.free(base, size);
}

// What all primitives have in common: the lock, the door with its counters and faults, and an honest answer where the
// books themselves find no memory. Bodies do what can throw before they change anything.
template <class Body>
Status DeviceModel::primitive(Call call, Body body) {
    std::lock_guard lock(mutex_);
    if (Status fault = faults_.enter(call)) return fault;
    try {
        return body();
    } catch (const std::bad_alloc &) {
        return kOutOfMemory;
    }
}

Answer DeviceModel::reserve(std::uint64_t size, std::uint64_t alignment, std::uint64_t hint, std::uint64_t flags) {
    std::uint64_t base = 0;
    Status status = primitive(Call::reserve, [&] {
        if (size == 0 || size % granule_ != 0 || flags != 0) return kInvalidValue;
        if (alignment != 0 && !is_power_of_two(alignment)) return kInvalidValue;
        if (hint % page_size() != 0) return kInvalidValue;

        std::uint64_t reserved = addresses_.reserve(size, std::max(alignment, granule_), hint);
        if (reserved == AddressSpace::kNone) return kOutOfMemory;
        try {
            reservations_.emplace(reserved, size);
        } catch (const std::bad_alloc &) {
            addresses_.free(reserved, size);
            throw;
        }
        base = reserved;
        return kSuccess;
    });
    return {status, base};
}

Status DeviceModel::free_address(std::uint64_t base, std::uint64_t size) {
    return primitive(Call::free_address, [&] {
        auto it = reservations_.find(base);
        if (it == reservations_.end() || it->second != size) return kInvalidValue;
        if (mappings_.any_in(base, size)) return kInvalidValue;
        if (!addresses_.free(base, size)) return kOutOfMemory;
        reservations_.erase(it);
        return kSuccess;
    });
}

Answer DeviceModel::create(int device, std::uint64_t size, std::uint64_t flags) {
    Handle handle = 0;
    Status status = primitive(Call::create, [&] {
        if (!memory_.has_device(device)) return kInvalidDevice;
        if (size == 0 || size % granule_ != 0 || flags != 0) return kInvalidValue;
        auto [answer, created] = memory_.create(device, size, poison_);
        handle = created;
        return answer;
    });
    return {status, handle};
}

Status DeviceModel::release(Handle handle) {
    return primitive(Call::release, [&] { return memory_.release(handle); });
}

bool DeviceModel::in_one_reservation(std::uint64_t address, std::uint64_t size) const {
    auto after = reservations_.upper_bound(address);
    if (after == reservations_.begin()) return false;
    auto [base, reserved] = *std::prev(after);
    return address - base < reserved && size <= reserved - (address - base);
}

Status DeviceModel::map(std::uint64_t address, std::uint64_t size, std::uint64_t offset, Handle handle,
                        std::uint64_t flags) {
    return primitive(Call::map, [&] {
        if (size == 0 || size % granule_ != 0 || address % granule_ != 0) return kInvalidValue;
        if (offset != 0 || flags != 0) return kInvalidValue;
        const Allocation *allocation = memory_.find(handle);
        if (!allocation || size != allocation->size) return kInvalidValue;  // whole handles only
        if (!in_one_reservation(address, size) || mappings_.any_in(address, size)) return kInvalidValue;

        auto mapping = mappings_.add(address, {size, handle, Access{}});
        if (!addresses_.map(address, size, memory_.pool_fd(), allocation->offset)) {
            mappings_.remove(mapping);
            return kOutOfMemory;
        }
        memory_.hold(handle);
        return kSuccess;
    });
}

Status DeviceModel::unmap(std::uint64_t address, std::uint64_t size) {
    return primitive(Call::unmap, [&] {
        auto run = mappings_.filling(address, size);
        if (run.empty()) return kInvalidValue;
        if (!addresses_.unmap(address, size)) return kOutOfMemory;
        for (auto &[_, mapping] : run) memory_.drop(mapping.handle);
        mappings_.remove(run);
        return kSuccess;
    });
}

Status DeviceModel::set_access(std::uint64_t address, std::uint64_t size, int device, int access) {
    return primitive(Call::set_access, [&] {
        if (access != kAccessNone && access != kAccessRead && access != kAccessReadWrite) return kInvalidValue;
        if (!memory_.has_device(device)) return kInvalidDevice;
        auto run = mappings_.filling(address, size);
        if (run.empty()) return kInvalidValue;
        return change_access(run, device, access) ? kSuccess : kOutOfMemory;
    });
}

namespace {

// Calls protect(address, size, protection) for the longest stretches whose mappings want the same protection: one call
// for a uniform range, however many mappings it has.
template <class Wanted, class Protect>
bool for_each_stretch(MappingTable::Run run, Wanted wanted, Protect protect) {
    for (auto it = run.first; it != run.last;) {
        const std::uint64_t start = it->first;
        const int protection = wanted(it->second.access).protection();
        std::uint64_t end = start;
        for (; it != run.last && wanted(it->second.access).protection() == protection; ++it)
            end = it->first + it->second.size;
        if (!protect(start, end - start, protection)) return false;
    }
    return true;
}

}  // namespace

// The kernel refuses where a change would split more map areas than it allows, perhaps after a part was done.
bool DeviceModel::change_access(MappingTable::Run run, int device, int access) {
    auto after = [&](Access before) { return before.with(device, access); };
    auto unchanged = [](Access before) { return before; };
    auto change = [&](auto... stretch) { return addresses_.protect(stretch...); };
    auto restore = [&](auto... stretch) { return addresses_.protect(stretch..., /*undoing=*/true); };

    if (!for_each_stretch(run, after, change)) {
        for_each_stretch(run, unchanged, restore);
        return false;
    }
    for (auto &[_, mapping] : run) mapping.access = after(mapping.access);
    return true;
}

Answer DeviceModel::get_access(std::uint64_t address, int device) {
    std::uint64_t access = 0;
    Status status = primitive(Call::get_access, [&] {
        if (!memory_.has_device(device)) return kInvalidDevice;
        const Mapping *mapping = mappings_.at(address);
        if (!mapping) return kInvalidValue;
        access = static_cast<std::uint64_t>(mapping->access.of(device));
        return kSuccess;
    });
    return {status, access};
}

DeviceModel::MemInfo DeviceModel::mem_info(int device) {
    MemInfo info{kSuccess, 0, 0};
    info.status = primitive(Call::mem_info, [&] {
        if (!memory_.has_device(device)) return kInvalidDevice;
        info.free = memory_.budget(device).free();
        info.total = memory_.budget(device).total();
        return kSuccess;
    });
    return info;
}

// The write itself is done without the lock, as a device would: others go on, and who unmaps meanwhile has not
// synchronised and faults.
Status DeviceModel::zero(std::uint64_t address, std::uint64_t size, int device) {
    Status status = primitive(Call::zero, [&] {
        if (!memory_.has_device(device)) return kInvalidDevice;
        return mappings_.writable(address, size, device) ? kSuccess : kInvalidValue;
    });
    if (status == kSuccess && size != 0) std::memset(reinterpret_cast<void *>(address), 0, size);
    return status;
}

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
