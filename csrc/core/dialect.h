// How drivers differ in what they answer, and how they depart from what they promise: data for the device model.
#pragma once

#include <atomic>

#include "core/status.h"

namespace vmm {

// Differences between drivers that both behave. The defaults are CUDA's.
struct Dialect {
    Status busy = kInvalidValue;                    // freeing addresses where something is mapped (F2)
    Status no_such_grantee = kInvalidDevice;        // granting access to a device that is not there (A3)
    bool frees_with_any_size = false;               // freeing addresses looks at the base only (F1)
    bool writes_across_reservations = true;         // one write may touch two reservations (P2)
};

// What a test may turn on and off while the model is in use. All off: a driver that behaves, on a good day.
struct Switches {
    std::atomic<bool> poison{false};       // fresh memory is 0xff and not 0
    std::atomic<bool> ignore_hint{false};  // a reservation never lies where it was wished for (R3)
    std::atomic<bool> ignore_alignment{false};  // a reservation lies a page off what was asked for, hints aside (B14)
    std::atomic<bool> capturing{false};    // a capture is in progress that refuses mapping calls (S1)

    // Bugs of ROCm releases.
    std::atomic<bool> access_from_first{false};      // B1: set-access sums sizes from the reservation's first mapping
    std::atomic<bool> joint_unmap_busy{false};       // B2: an unmap of several mappings leaves the reservation busy
    std::atomic<bool> memory_with_addresses{false};  // B4: memory that was mapped returns only with the addresses
    std::atomic<bool> single_memset{false};          // B13: a memset may not go beyond the mapping it begins in
};

}  // namespace vmm
