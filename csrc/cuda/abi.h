// What of cuda.h the emulated library needs, declared by hand so that it builds where no CUDA is installed.
// tests/testing/test_struct_layouts.py compares it with the real header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vmm::cuda {

using Result = int;
using Device = int;
using DevicePointer = unsigned long long;
using AllocationHandle = unsigned long long;

// Results beyond those of core/status.h and emulation.h.
constexpr Result kInvalidContext = 201;
constexpr Result kInvalidHandle = 400;
constexpr Result kNotFound = 500;
constexpr Result kContextIsDestroyed = 709;
constexpr Result kNotPermitted = 800;

constexpr int kAllocationPinned = 1;
constexpr int kLocationDevice = 1, kLocationHost = 2, kLocationHostNumaCurrent = 4;
constexpr int kGranularityMinimum = 0, kGranularityRecommended = 1;
constexpr int kHandleNone = 0, kHandlePosixFile = 1, kHandleFabric = 8;
constexpr int kCompressionNone = 0, kCompressionGeneric = 1;
constexpr int kMemoryTypeDevice = 2;

constexpr int kCaptureNone = 0, kCaptureActive = 1;
constexpr int kCaptureGlobal = 0, kCaptureRelaxed = 2;
constexpr unsigned kStreamNonBlocking = 1;

constexpr int kSymbolFound = 0, kSymbolNotFound = 1, kSymbolVersionNotSufficient = 2;

enum Attribute {
    kMultiprocessorCount = 16,
    kIntegrated = 18,
    kPciBusId = 33,
    kPciDeviceId = 34,
    kUnifiedAddressing = 41,
    kPciDomainId = 50,
    kComputeCapabilityMajor = 75,
    kComputeCapabilityMinor = 76,
    kVirtualMemorySupported = 102,
    kPosixFileSupported = 103,
    kRdmaWithVmmSupported = 110,
    kFabricSupported = 128,
    kAttributesEnd = 148,  // CU_DEVICE_ATTRIBUTE_MAX of CUDA 13.0
};

enum PointerAttribute {
    kPointerMemoryType = 2,
    kPointerDevicePointer = 3,
    kPointerDeviceOrdinal = 9,
    kPointerRangeStart = 11,
    kPointerRangeSize = 12,
    kPointerMapped = 13,
    kPointerAllowedHandleTypes = 14,
    kPointerAccessFlags = 16,
    kPointerMappingSize = 18,
    kPointerMappingBase = 19,
};

struct Location {
    int type;
    int id;
};

struct AllocationProp {
    int type;
    int requested_handle_types;
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

struct FabricHandle {
    unsigned char data[64];
};

struct Uuid {
    char bytes[16];
};

}  // namespace vmm::cuda
