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

DeviceModel::DeviceModel(const std::vector<std::uint64_t> &budgets, std::uint64_t granule, const Dialect &dialect)
    : granule_(checked_granule(granule)),
      dialect_(dialect),
      memory_(checked_budgets(budgets), switches),
      faults_(kPrimitives) {}

// Files and ballast go with their owners; the pages that are mapped from the files go here.
DeviceModel::~DeviceModel() {
    for (auto &[base, reservation] : reservations_) addresses_.free(base, reservation.size);
}

// What all primitives have in common: the lock, the door with its counters and faults, and an honest answer where the
// books themselves find no memory. Bodies do what can throw before they change anything.
template <class Body>
Status DeviceModel::primitive(Call call, Body body) {
    std::lock_guard lock(mutex_);
    if (Status fault = faults_.enter(static_cast<std::size_t>(call))) return fault;
    if (switches.capturing && call <= Call::set_access) return kCaptureUnsupported;
    try {
        return body();
    } catch (const std::bad_alloc &) {
        return kOutOfMemory;
    }
}

std::uint64_t DeviceModel::find_addresses(std::uint64_t size, std::uint64_t alignment, std::uint64_t hint) {
    if (hint != 0 && switches.ignore_hint) return addresses_.reserve_elsewhere(size, alignment, hint);
    if (switches.ignore_alignment && granule_ > page_size()) return addresses_.reserve_askew(size, alignment, hint);
    return addresses_.reserve(size, alignment, hint);
}

Answer DeviceModel::reserve(std::uint64_t size, std::uint64_t alignment, std::uint64_t hint, std::uint64_t flags) {
    std::uint64_t base = 0;
    Status status = primitive(Call::reserve, [&] {
        if (size == 0 || size % granule_ != 0 || flags != 0) return kInvalidValue;
        if (alignment != 0 && !is_power_of_two(alignment)) return kInvalidValue;
        if (hint % page_size() != 0) return kInvalidValue;

        const std::uint64_t reserved = find_addresses(size, std::max(alignment, granule_), hint);
        if (reserved == AddressSpace::kNone) return kOutOfMemory;
        try {
            reservations_.emplace(reserved, Reservation{size, next_serial_++});
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
        if (it == reservations_.end() || size == 0) return kInvalidValue;
        const Reservation reservation = it->second;
        if (size != reservation.size && !dialect_.frees_with_any_size) return kInvalidValue;
        if (reservation.busy || mappings_.any_in(base, reservation.size)) return dialect_.busy;
        if (!addresses_.free(base, reservation.size)) return kOutOfMemory;
        reservations_.erase(it);
        memory_.addresses_gone(reservation.serial);
        return kSuccess;
    });
}

Answer DeviceModel::create(int device, std::uint64_t size, std::uint64_t flags, Traits traits) {
    Handle handle = 0;
    Status status = primitive(Call::create, [&] {
        if (!memory_.has_device(device)) return kInvalidDevice;
        if (size == 0 || size % granule_ != 0 || flags != 0) return kInvalidValue;
        auto [answer, created] = memory_.create(device, size, traits);
        handle = created;
        return answer;
    });
    return {status, handle};
}

Status DeviceModel::release(Handle handle) {
    return primitive(Call::release, [&] { return memory_.release(handle); });
}

// The reservation that a whole range lies in, or end.
DeviceModel::Reservations::iterator DeviceModel::reservation_of(std::uint64_t address, std::uint64_t size) {
    auto after = reservations_.upper_bound(address);
    if (after == reservations_.begin()) return reservations_.end();
    auto it = std::prev(after);
    const std::uint64_t offset = address - it->first, reserved = it->second.size;
    return offset < reserved && size <= reserved - offset ? it : reservations_.end();
}

Status DeviceModel::map(std::uint64_t address, std::uint64_t size, std::uint64_t offset, Handle handle,
                        std::uint64_t flags) {
    return primitive(Call::map, [&] {
        if (size == 0 || size % granule_ != 0 || address % granule_ != 0) return kInvalidValue;
        if (offset != 0 || flags != 0) return kInvalidValue;
        const Allocation *allocation = memory_.find(handle);
        if (!allocation || size != allocation->size) return kInvalidValue;  // whole handles only
        auto reservation = reservation_of(address, size);
        if (reservation == reservations_.end() || mappings_.any_in(address, size)) return kInvalidValue;

        auto mapping = mappings_.add(address, {size, memory_.made_with(handle), Access{}});
        if (!addresses_.map(address, size, allocation->fd, allocation->offset)) {
            mappings_.remove(mapping);
            return kOutOfMemory;
        }
        memory_.hold(mapping->second.made_with, reservation->second.serial);
        return kSuccess;
    });
}

Status DeviceModel::unmap(std::uint64_t address, std::uint64_t size) {
    return primitive(Call::unmap, [&] {
        auto run = mappings_.filling(address, size);
        if (run.empty()) return kInvalidValue;
        if (!addresses_.unmap(address, size)) return kOutOfMemory;
        if (switches.joint_unmap_busy && std::next(run.first) != run.last)
            if (auto it = reservation_of(address, size); it != reservations_.end()) it->second.busy = true;
        for (auto &[_, mapping] : run) memory_.drop(mapping.made_with);
        mappings_.remove(run);
        return kSuccess;
    });
}

// B1: true where the sizes of the reservation's mappings, from the first on, come to `size`: all that some releases of
// ROCm look at, wherever the range lies.
bool DeviceModel::summed_from_first(std::uint64_t address, std::uint64_t size) {
    auto reservation = reservation_of(address, size);
    if (reservation == reservations_.end()) return false;
    std::uint64_t sum = 0;
    for (auto it = mappings_.all().lower_bound(reservation->first); it != mappings_.all().end() && sum < size; ++it)
        sum += it->second.size;
    return sum == size;
}

Status DeviceModel::set_access(std::uint64_t address, std::uint64_t size, const std::vector<Grant> &grants) {
    return primitive(Call::set_access, [&] {
        if (grants.empty()) return kInvalidValue;
        for (auto [device, access] : grants) {
            if (access != kAccessNone && access != kAccessRead && access != kAccessReadWrite) return kInvalidValue;
            if (!memory_.has_device(device)) return dialect_.no_such_grantee;
        }
        auto run = mappings_.filling(address, size);
        if (run.empty()) return kInvalidValue;
        if (switches.access_from_first && !summed_from_first(address, size)) return kInvalidValue;
        return change_access(run, grants) ? kSuccess : kOutOfMemory;
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
bool DeviceModel::change_access(MappingTable::Run run, const std::vector<Grant> &grants) {
    auto after = [&](Access changed) {
        for (auto [device, access] : grants) changed = changed.with(device, access);
        return changed;
    };
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
Status DeviceModel::zero(std::uint64_t address, std::uint64_t size, int device, int byte) {
    Status status = primitive(Call::zero, [&] {
        if (!memory_.has_device(device)) return kInvalidDevice;
        if (size != 0 && !dialect_.writes_across_reservations && reservation_of(address, size) == reservations_.end())
            return kInvalidValue;
        if (!mappings_.writable(address, size, device)) return kInvalidValue;
        const bool joint = switches.single_memset && size != 0 && !mappings_.in_one(address, size);
        return joint ? kInvalidValue : kSuccess;
    });
    if (status == kSuccess && size != 0) std::memset(reinterpret_cast<void *>(address), byte, size);
    return status;
}

Status DeviceModel::refuse(Call call, Status status) {
    return primitive(call, [=] { return status; });
}

Answer DeviceModel::retain(std::uint64_t address) {
    std::lock_guard lock(mutex_);
    const Mapping *mapping = mappings_.at(address);
    if (!mapping) return {kInvalidValue, 0};
    memory_.retain(mapping->made_with);
    return {kSuccess, mapping->made_with};
}

Answer DeviceModel::export_file(Handle handle) {
    std::lock_guard lock(mutex_);
    return memory_.export_file(handle);
}

Answer DeviceModel::import_file(int fd, int device) {
    std::lock_guard lock(mutex_);
    return memory_.import_file(fd, device);
}

Answer DeviceModel::import(Handle exported) {
    std::lock_guard lock(mutex_);
    return memory_.import(exported);
}

}  // namespace vmm
