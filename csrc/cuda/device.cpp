// Which devices there are and what they can do. No context is needed for any of it.
#include <cstdio>

#include "cuda/context.h"
#include "emulation/emulation.h"

using namespace vmm::cuda;
using namespace vmm::emulation;
using vmm::kInvalidDevice;
using vmm::kInvalidValue;
using vmm::kSuccess;

namespace {

constexpr int kFabricSince = 12030, kRdmaWithVmmSince = 11000;

Result enter_device() {
    if (Result refused = require_init()) return refused;
    return enter(Side::device);
}

Result enter_device(const void *answer, Device device) {
    if (Result refused = enter_device()) return refused;
    if (!answer) return kInvalidValue;
    return has_device(device) ? kSuccess : kInvalidDevice;
}

// A driver that is older than an attribute does not know its number.
bool knows(int attribute) {
    const std::int64_t version = value(Switch::driver_version);
    if (attribute >= kFabricSupported && version < kFabricSince) return false;
    if (attribute >= kRdmaWithVmmSupported && version < kRdmaWithVmmSince) return false;
    return attribute > 0 && attribute < kAttributesEnd;
}

int attribute_of(int attribute, Device device) {
    switch (attribute) {
        case kMultiprocessorCount: return 1;
        case kIntegrated: return on(Switch::integrated);
        case kPciBusId: return pci_bus(device);
        case kPciDeviceId: return kPciDevice;
        case kUnifiedAddressing: return 1;
        case kPciDomainId: return kPciDomain;
        case kComputeCapabilityMajor: return 9;
        case kComputeCapabilityMinor: return 0;
        case kVirtualMemorySupported: return on(Switch::vmm_supported);
        case kPosixFileSupported: return on(Switch::vmm_supported);
        case kRdmaWithVmmSupported: return on(Switch::rdma);
        case kFabricSupported: return on(Switch::fabric);
        default: return 0;
    }
}

}  // namespace

VMM_EXPORT Result cuInit(unsigned flags) { return flags == 0 ? initialize() : kInvalidValue; }

// Needs no cuInit.
VMM_EXPORT Result cuDriverGetVersion(int *version) {
    if (Result refused = enter()) return refused;
    if (!version) return kInvalidValue;
    *version = static_cast<int>(value(Switch::driver_version));
    return kSuccess;
}

VMM_EXPORT Result cuDeviceGetCount(int *count) {
    if (Result refused = enter_device()) return refused;
    if (!count) return kInvalidValue;
    *count = model()->devices();
    return kSuccess;
}

VMM_EXPORT Result cuDeviceGet(Device *device, int ordinal) {
    if (Result refused = enter_device(device, ordinal)) return refused;
    *device = ordinal;
    return kSuccess;
}

VMM_EXPORT Result cuDeviceGetName(char *name, int room, Device device) {
    if (Result refused = enter_device(name, device)) return refused;
    std::snprintf(name, static_cast<std::size_t>(room > 0 ? room : 0), "%s", kDeviceName);
    return kSuccess;
}

VMM_EXPORT Result cuDeviceGetUuid_v2(Uuid *uuid, Device device) {
    if (Result refused = enter_device(uuid, device)) return refused;
    uuid_of(device, uuid->bytes);
    return kSuccess;
}

VMM_EXPORT Result cuDeviceGetPCIBusId(char *text, int room, Device device) {
    if (Result refused = enter_device(text, device)) return refused;
    pci_bus_id(device, text, room > 0 ? room : 0);
    return kSuccess;
}

VMM_EXPORT Result cuDeviceGetByPCIBusId(Device *device, const char *text) {
    if (Result refused = enter_device()) return refused;
    if (!device || !text) return kInvalidValue;
    const int found = device_at_pci(text);
    if (found < 0) return kInvalidDevice;
    *device = found;
    return kSuccess;
}

VMM_EXPORT Result cuDeviceTotalMem_v2(std::size_t *bytes, Device device) {
    if (Result refused = enter_device(bytes, device)) return refused;
    *bytes = model()->budget(device);
    return kSuccess;
}

VMM_EXPORT Result cuDeviceGetAttribute(int *answer, int attribute, Device device) {
    if (Result refused = enter_device(answer, device)) return refused;
    if (!knows(attribute)) return kInvalidValue;
    *answer = attribute_of(attribute, device);
    return kSuccess;
}
