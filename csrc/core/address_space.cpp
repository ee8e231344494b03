#include "core/address_space.h"

#include <cerrno>

#include <sys/mman.h>
#include <unistd.h>

#include "core/status.h"

#ifndef MAP_FIXED_NOREPLACE  // Linux 4.17, glibc 2.27; an older kernel takes it for a plain hint, hence the comparison
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace vmm {
namespace {

constexpr int kAddressesOnly = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

void *pointer(std::uint64_t address) { return reinterpret_cast<void *>(address); }

std::uint64_t map_addresses(std::uint64_t where, std::uint64_t size, int extra_flags) {
    void *base = mmap(pointer(where), size, PROT_NONE, kAddressesOnly | extra_flags, -1, 0);
    return base == MAP_FAILED ? AddressSpace::kNone : reinterpret_cast<std::uint64_t>(base);
}

std::uint64_t reserve_exactly_at(std::uint64_t base, std::uint64_t size) {
    std::uint64_t got = map_addresses(base, size, MAP_FIXED_NOREPLACE);
    if (got == base) return base;
    if (got != AddressSpace::kNone) munmap(pointer(got), size);
    return AddressSpace::kNone;
}

// The kernel aligns to pages only: take more than needed and cut off both ends.
std::uint64_t reserve_aligned(std::uint64_t size, std::uint64_t alignment) {
    if (wraps(size, alignment)) return AddressSpace::kNone;
    std::uint64_t got = map_addresses(0, size + alignment, 0);
    if (got == AddressSpace::kNone) return AddressSpace::kNone;

    std::uint64_t base = (got + alignment - 1) & ~(alignment - 1);
    std::uint64_t head = base - got, tail = alignment - head;
    bool trimmed = (head == 0 || munmap(pointer(got), head) == 0) &&
                   (tail == 0 || munmap(pointer(base + size), tail) == 0);
    if (trimmed) return base;
    munmap(pointer(got), size + alignment);
    return AddressSpace::kNone;
}

}  // namespace

std::uint64_t AddressSpace::reserve(std::uint64_t size, std::uint64_t alignment, std::uint64_t hint) {
    if (hint != 0 && hint % alignment == 0 && !wraps(hint, size)) {
        if (std::uint64_t base = reserve_exactly_at(hint, size)) return base;
    }
    return reserve_aligned(size, alignment);
}

std::uint64_t AddressSpace::reserve_elsewhere(std::uint64_t size, std::uint64_t alignment, std::uint64_t base) {
    std::uint64_t first = reserve_aligned(size, alignment);
    if (first != base || first == kNone) return first;
    std::uint64_t second = reserve_aligned(size, alignment);  // while the first still lies at `base`
    free(first, size);
    return second;
}

std::uint64_t AddressSpace::reserve_askew(std::uint64_t size, std::uint64_t alignment, std::uint64_t hint) {
    if (hint != 0 && !wraps(hint, size)) {
        if (std::uint64_t base = reserve_exactly_at(hint, size)) return base;
    }
    const std::uint64_t page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    if (wraps(size, page)) return kNone;
    const std::uint64_t base = reserve_aligned(size + page, alignment);
    if (base == kNone) return kNone;
    if (free(base, page)) return base + page;
    free(base, size + page);
    return kNone;
}

// What gives something back must not fail because the process is out of map areas.
template <class Operation>
bool AddressSpace::undo(Operation operation) {
    bool done = operation();
    if (!done && errno == ENOMEM) {
        ballast_.drop();
        done = operation();
    }
    ballast_.refill();
    return done;
}

bool AddressSpace::free(std::uint64_t base, std::uint64_t size) {
    return undo([&] { return munmap(pointer(base), size) == 0; });
}

bool AddressSpace::map(std::uint64_t address, std::uint64_t size, int fd, std::uint64_t offset) {
    return mmap(pointer(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(offset)) !=
           MAP_FAILED;
}

bool AddressSpace::unmap(std::uint64_t address, std::uint64_t size) {
    return undo([&] { return map_addresses(address, size, MAP_FIXED) != kNone; });
}

bool AddressSpace::protect(std::uint64_t address, std::uint64_t size, int protection, bool undoing) {
    auto operation = [&] { return mprotect(pointer(address), size, protection) == 0; };
    return undoing ? undo(operation) : operation();
}

}  // namespace vmm
