#include "core/physical_memory.h"

#include <atomic>
#include <iterator>
#include <new>

#include <fcntl.h>
#include <unistd.h>

#include "core/memory_file.h"

namespace vmm {
namespace {

// Opaque on purpose, and never used twice in the process, whatever models come and go: a stale handle must be an error
// and not somebody else's memory.
Handle new_handle() {
    static std::atomic<Handle> next{0x766d6d01};
    return next++;
}

}  // namespace

PhysicalMemory::~PhysicalMemory() {
    for (auto &[_, allocation] : allocations_)
        if (allocation.fd != pool_.fd()) close(allocation.fd);
}

// Finds a file for the memory. False, and nothing taken, where the machine refuses.
bool PhysicalMemory::place(Allocation &allocation) {
    const bool exportable = (allocation.traits.handle_types & Traits::kPosixFile) != 0;
    if (exportable) {
        allocation.fd = make_sealed_file(allocation.size);
        if (allocation.fd < 0) return false;
    } else {
        allocation.offset = pool_.take(allocation.size);
        if (allocation.offset == Pool::kNone) return false;
        allocation.fd = pool_.fd();
    }
    bool filled = false;
    try {
        filled = !switches_.poison || fill_file(allocation.fd, allocation.offset, allocation.size, 0xff);
    } catch (const std::bad_alloc &) {
    }
    if (filled) return true;
    if (exportable)
        close(allocation.fd);
    else
        pool_.give_back(allocation.offset, allocation.size);
    return false;
}

Answer PhysicalMemory::create(int device, std::uint64_t size, Traits traits) {
    // The entry comes first: after it nothing here can throw but the placing, so there is little to undo.
    auto it = allocations_.emplace(new_handle(), Allocation{device, size, traits}).first;
    if (budget(device).take(size)) {
        bool placed = false;
        try {
            placed = place(it->second);
        } catch (const std::bad_alloc &) {
        }
        if (placed) {
            ++live_handles_;
            return {kSuccess, it->first};
        }
        budget(device).give_back(size);
    }
    allocations_.erase(it);
    return {kOutOfMemory, 0};
}

Handle PhysicalMemory::made_with(Handle handle) const {
    auto import = imports_.find(handle);
    return import == imports_.end() ? handle : import->second;
}

const Allocation *PhysicalMemory::find(Handle handle) const {
    if (auto import = imports_.find(handle); import != imports_.end()) return &allocations_.at(import->second);
    auto it = allocations_.find(handle);
    return it == allocations_.end() || it->second.own == 0 ? nullptr : &it->second;
}

Status PhysicalMemory::release(Handle handle) {
    if (!find(handle)) return kInvalidValue;
    auto it = allocations_.find(made_with(handle));
    if (it->first == handle) {
        --it->second.own;
    } else {
        imports_.erase(handle);
        --it->second.imports;
    }
    --live_handles_;
    give_back_if_unused(it);
    return kSuccess;
}

void PhysicalMemory::retain(Handle made_with) {
    ++allocations_.at(made_with).own;
    ++live_handles_;
}

Answer PhysicalMemory::export_file(Handle handle) const {
    const Allocation *allocation = find(handle);
    if (!allocation || (allocation->traits.handle_types & Traits::kPosixFile) == 0) return {kInvalidValue, 0};
    int fd = fcntl(allocation->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return {kOperatingSystem, 0};
    return {kSuccess, static_cast<std::uint64_t>(fd)};
}

Answer PhysicalMemory::adopt(Handle made_with) {
    const Handle handle = imports_.emplace(new_handle(), made_with).first->first;
    ++allocations_.at(made_with).imports;
    ++live_handles_;
    return {kSuccess, handle};
}

Answer PhysicalMemory::import(Handle exported) {
    return find(exported) ? adopt(made_with(exported)) : Answer{kInvalidValue, 0};
}

Answer PhysicalMemory::import_file(int fd, int device) {
    const std::uint64_t size = size_of_sealed_file(fd);
    if (size == 0) return {kInvalidValue, 0};
    for (auto &[made_with, allocation] : allocations_)
        if (allocation.fd != pool_.fd() && same_file(allocation.fd, fd)) return adopt(made_with);

    auto it = allocations_.emplace(new_handle(), Allocation{device, size, {Traits::kPosixFile, false}}).first;
    it->second.charged = false;
    it->second.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (it->second.fd < 0) {
        allocations_.erase(it);
        return {kOperatingSystem, 0};
    }
    ++live_handles_;
    return {kSuccess, it->first};
}

void PhysicalMemory::hold(Handle made_with, std::uint64_t reservation) {
    Allocation &allocation = allocations_.at(made_with);
    ++allocation.mapped;
    allocation.home = reservation;
}

void PhysicalMemory::drop(Handle made_with) {
    auto it = allocations_.find(made_with);
    --it->second.mapped;
    give_back_if_unused(it);
}

void PhysicalMemory::addresses_gone(std::uint64_t reservation) {
    for (auto it = allocations_.begin(); it != allocations_.end();) {
        if (it->second.home != reservation) {
            ++it;
            continue;
        }
        it->second.home = 0;
        it = give_back_if_unused(it);
    }
}

PhysicalMemory::Allocations::iterator PhysicalMemory::give_back_if_unused(Allocations::iterator it) {
    const Allocation &allocation = it->second;
    if (allocation.held() || (allocation.home != 0 && switches_.memory_with_addresses)) return std::next(it);
    if (allocation.fd == pool_.fd())
        pool_.give_back(allocation.offset, allocation.size);
    else
        close(allocation.fd);
    if (allocation.charged) budget(allocation.device).give_back(allocation.size);
    return allocations_.erase(it);
}

}  // namespace vmm
