// The process's addresses: the only place that reserves, maps and protects pages.
//
// False (or kNone) always means that the kernel refused and that nothing was changed.
#pragma once

#include <cstdint>

#include "core/ballast.h"

namespace vmm {

class AddressSpace {
public:
    static constexpr std::uint64_t kNone = 0;

    // Addresses without memory, `alignment` a power of two and a multiple of the page. `hint` is a wish; 0 is none.
    std::uint64_t reserve(std::uint64_t size, std::uint64_t alignment, std::uint64_t hint);

    // Anywhere but at `base`.
    std::uint64_t reserve_elsewhere(std::uint64_t size, std::uint64_t alignment, std::uint64_t base);

    // At the hint or anywhere, but in the latter case one page off the alignment, which is larger than a page.
    std::uint64_t reserve_askew(std::uint64_t size, std::uint64_t alignment, std::uint64_t hint);
    bool free(std::uint64_t base, std::uint64_t size);

    // Puts an extent of a file at reserved addresses, not accessible yet.
    bool map(std::uint64_t address, std::uint64_t size, int fd, std::uint64_t offset);

    // Back to addresses without memory.
    bool unmap(std::uint64_t address, std::uint64_t size);

    // PROT_NONE, PROT_READ or PROT_READ | PROT_WRITE. The kernel goes from area to area: where it refuses, the range
    // may be changed in part. `undoing` lets a call that puts things back use the ballast.
    bool protect(std::uint64_t address, std::uint64_t size, int protection, bool undoing = false);

private:
    template <class Operation>
    bool undo(Operation operation);

    Ballast ballast_;
};

}  // namespace vmm
