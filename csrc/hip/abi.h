// What of hip_runtime_api.h the emulated library needs, declared by hand so that it builds where no ROCm is installed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/status.h"

namespace vmm::hip {

// Statuses beyond those of core/status.h and emulation.h.
constexpr Status kInvalidHandle = 400;
constexpr Status kUnknown = 999;

constexpr int kAllocationPinned = 1, kAllocationUncached = 0x40000000;
constexpr int kLocationDevice = 1;
constexpr int kGranularityMinimum = 0, kGranularityRecommended = 1;
constexpr int kHandleNone = 0, kHandlePosixFile = 1, kHandleFabric = 8;
constexpr int kCaptureGlobal = 0, kCaptureRelaxed = 2;

// As in HIP 6 and 7.
enum Attribute {
    kIntegrated = 16,
    kPciBusId = 67,
    kPciDeviceId = 68,
    kPciDomainId = 69,
    kVirtualMemorySupported = 89,
    kRdmaWithVmmSupported = 94,
    kFabricSupported = 95,
};

enum PointerAttribute {
    kPointerDeviceOrdinal = 9,
    kPointerRangeStart = 11,
    kPointerRangeSize = 12,
};

struct Location {
    int type;
    int id;
};

struct AllocationProp {
    int type;
    int requested_handle_type;
    Location location;
    void *win32_handle_meta_data;
    struct {
        unsigned char compression_type;
        unsigned char rdma_capable;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
};

struct AccessDesc {
    Location location;
    int flags;
};

struct Uuid {
    char bytes[16];
};

// hip-python writes requested_handle_type by its offset.
static_assert(sizeof(AllocationProp) == 32 && offsetof(AllocationProp, requested_handle_type) == 4);
static_assert(offsetof(AllocationProp, location) == 8 && offsetof(AllocationProp, flags) == 24);
static_assert(sizeof(AccessDesc) == 12 && offsetof(AccessDesc, flags) == 8);

}  // namespace vmm::hip
