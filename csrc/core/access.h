// Which devices may read and write one mapping.
#pragma once

#include <cstdint>

#include <sys/mman.h>

namespace vmm {

// The driver's access flags: none, read, read and write. Bit 0 reads, bit 1 writes.
constexpr int kAccessNone = 0;
constexpr int kAccessRead = 1;
constexpr int kAccessReadWrite = 3;

// Two bits a device in one word: there is one of these for every mapping, and there may be many thousand mappings.
class Access {
public:
    static constexpr int kMaxDevices = 32;

    int of(int device) const { return static_cast<int>(bits_ >> (2 * device) & 3); }

    Access with(int device, int access) const {
        Access changed;
        changed.bits_ = (bits_ & ~(std::uint64_t{3} << (2 * device))) | std::uint64_t(access) << (2 * device);
        return changed;
    }

    // The CPU cannot tell our devices apart, so the pages allow what any of them may do.
    int protection() const {
        constexpr std::uint64_t reads = 0x5555555555555555, writes = reads << 1;
        return (bits_ & reads ? PROT_READ : PROT_NONE) | (bits_ & writes ? PROT_WRITE : PROT_NONE);
    }

private:
    std::uint64_t bits_ = 0;
};

}  // namespace vmm
