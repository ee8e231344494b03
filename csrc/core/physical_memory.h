// Handles: who owns which extent of the pool, and whose budget it is taken from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/budget.h"
#include "core/pool.h"
#include "core/status.h"

namespace vmm {

using Handle = std::uint64_t;

struct Allocation {
    int device;
    std::uint64_t offset;  // in the pool
    std::uint64_t size;
    bool released = false;    // the handle is gone; the memory stays while it is mapped
    std::uint64_t mapped = 0;  // number of mappings
};

class PhysicalMemory {
public:
    explicit PhysicalMemory(const std::vector<std::uint64_t> &budgets) : budgets_(budgets.begin(), budgets.end()) {}

    int devices() const { return static_cast<int>(budgets_.size()); }
    bool has_device(int device) const { return device >= 0 && device < devices(); }
    Budget &budget(int device) { return budgets_[static_cast<std::size_t>(device)]; }
    int pool_fd() const { return pool_.fd(); }

    // Takes memory of a device: its bytes are zero, or 0xff with `poison`.
    Answer create(int device, std::uint64_t size, bool poison);
    Status release(Handle handle);

    // The allocation behind a handle that was not released, or null.
    const Allocation *find(Handle handle) const;

    // A mapping holds its memory, whatever becomes of the handle.
    void hold(Handle handle) { ++allocations_.at(handle).mapped; }
    void drop(Handle handle);

    std::uint64_t live_handles() const { return live_handles_; }

private:
    using Allocations = std::unordered_map<Handle, Allocation>;

    void give_back_if_unused(Allocations::iterator it);

    std::vector<Budget> budgets_;
    Pool pool_;
    Allocations allocations_;
    std::uint64_t live_handles_ = 0;
    // Opaque on purpose, and never used twice: a stale handle must be an error and not somebody else's memory.
    Handle next_handle_ = 0x766d6d01;
};

}  // namespace vmm
