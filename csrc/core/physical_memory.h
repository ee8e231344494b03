// Handles: who owns which piece of memory, and whose budget it is taken from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/budget.h"
#include "core/dialect.h"
#include "core/pool.h"
#include "core/status.h"

namespace vmm {

using Handle = std::uint64_t;

// What a handle was made for, in the driver's numbers. The model itself asks only whether it can be exported as a
// file; front ends keep the rest here.
struct Traits {
    static constexpr int kPosixFile = 1;

    int handle_types = 0;
    bool rdma = false;
};

struct Allocation {
    int device;
    std::uint64_t size;
    Traits traits;
    int fd = -1;                 // the file that it lies in: the pool's, or its own where it can be exported
    std::uint64_t offset = 0;    // in that file
    bool charged = true;         // false: another process made it and is charged for it
    std::uint64_t own = 1;       // references to the handle that it was made with: made, retained, less released
    std::uint64_t imports = 0;   // other handles to it
    std::uint64_t mapped = 0;    // number of mappings
    std::uint64_t home = 0;      // serial number of the reservation that it was mapped in last; 0: none that is left

    bool held() const { return own > 0 || imports > 0 || mapped > 0; }
};

class PhysicalMemory {
public:
    PhysicalMemory(const std::vector<std::uint64_t> &budgets, const Switches &switches)
        : budgets_(budgets.begin(), budgets.end()), switches_(switches) {}
    ~PhysicalMemory();

    int devices() const { return static_cast<int>(budgets_.size()); }
    bool has_device(int device) const { return device >= 0 && device < devices(); }
    Budget &budget(int device) { return budgets_[static_cast<std::size_t>(device)]; }

    // Takes memory of a device: its bytes are zero, or 0xff where fresh memory is poisoned.
    Answer create(int device, std::uint64_t size, Traits traits);
    Status release(Handle handle);

    // One more reference to the handle that an allocation was made with, which every reference has to be released of.
    void retain(Handle made_with);

    // A descriptor of the file that an exportable allocation lies in, for the caller to close.
    Answer export_file(Handle handle) const;

    // A handle to what another handle, of this process or another, was exported from. Not charged again. `device` is
    // where memory of another process is taken to lie.
    Answer import_file(int fd, int device);
    Answer import(Handle exported);

    // The allocation behind a handle that was not released, or null; and the handle that it was made with.
    const Allocation *find(Handle handle) const;
    Handle made_with(Handle handle) const;

    // A mapping holds its memory, whatever becomes of the handles. Both take the handle that it was made with.
    void hold(Handle made_with, std::uint64_t reservation);
    void drop(Handle made_with);
    const Allocation &at(Handle made_with) const { return allocations_.at(made_with); }

    // The addresses are gone: memory that could not return without them does now.
    void addresses_gone(std::uint64_t reservation);

    // References that somebody has to release.
    std::uint64_t live_handles() const { return live_handles_; }

private:
    using Allocations = std::unordered_map<Handle, Allocation>;

    bool place(Allocation &allocation);
    Answer adopt(Handle made_with);
    Allocations::iterator give_back_if_unused(Allocations::iterator it);

    std::vector<Budget> budgets_;
    const Switches &switches_;
    Pool pool_;
    Allocations allocations_;                     // by the handle that it was made with
    std::unordered_map<Handle, Handle> imports_;  // handle -> the one that it was made with
    std::uint64_t live_handles_ = 0;
};

}  // namespace vmm
