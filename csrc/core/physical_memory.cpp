#include "core/physical_memory.h"

#include <new>

namespace vmm {

Answer PhysicalMemory::create(int device, std::uint64_t size, bool poison) {
    // The entry comes first: after it nothing here can throw, so there is nothing to undo but what failed.
    auto it = allocations_.emplace(next_handle_, Allocation{device, Pool::kNone, size}).first;
    auto refuse = [&] {
        allocations_.erase(it);
        return Answer{kOutOfMemory, 0};
    };
    if (!budget(device).take(size)) return refuse();

    Allocation &allocation = it->second;
    bool made = false;
    try {
        allocation.offset = pool_.take(size);
        made = allocation.offset != Pool::kNone && (!poison || pool_.fill(allocation.offset, size, 0xff));
    } catch (const std::bad_alloc &) {
    }
    if (made) {
        ++live_handles_;
        return {kSuccess, next_handle_++};
    }
    if (allocation.offset != Pool::kNone) pool_.give_back(allocation.offset, size);
    budget(device).give_back(size);
    return refuse();
}

const Allocation *PhysicalMemory::find(Handle handle) const {
    auto it = allocations_.find(handle);
    return it == allocations_.end() || it->second.released ? nullptr : &it->second;
}

Status PhysicalMemory::release(Handle handle) {
    auto it = allocations_.find(handle);
    if (it == allocations_.end() || it->second.released) return kInvalidValue;
    it->second.released = true;
    --live_handles_;
    give_back_if_unused(it);
    return kSuccess;
}

void PhysicalMemory::drop(Handle handle) {
    auto it = allocations_.find(handle);
    --it->second.mapped;
    give_back_if_unused(it);
}

void PhysicalMemory::give_back_if_unused(Allocations::iterator it) {
    const Allocation &allocation = it->second;
    if (!allocation.released || allocation.mapped > 0) return;
    pool_.give_back(allocation.offset, allocation.size);
    budget(allocation.device).give_back(allocation.size);
    allocations_.erase(it);
}

}  // namespace vmm
