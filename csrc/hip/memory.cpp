// The emulated libamdhip64.so: addresses, memory, mappings.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulation/emulation.h"
#include "hip/abi.h"
#include "hip/thread.h"

using namespace vmm;
using namespace vmm::emulation;
using namespace vmm::hip;

namespace {

constexpr int kFabricWorks = 2;  // of the switch; 1: the device says yes, and create refuses

std::uint64_t number(const void *pointer) { return reinterpret_cast<std::uint64_t>(pointer); }
void *pointer(std::uint64_t number) { return reinterpret_cast<void *>(number); }

// Hands a handle or an address out, null where there is none.
Status hand_out(Answer answer, void **out) {
    *out = pointer(answer.first == kSuccess ? answer.second : 0);
    return answer.first;
}

// What granularity query and create ask of an allocation alike (C4). Memory of the host is not emulated.
bool well_formed(const AllocationProp *prop) {
    return prop && (prop->type == kAllocationPinned || prop->type == kAllocationUncached) &&
           prop->location.type == kLocationDevice;
}

bool can_make(int handle_type) {
    return handle_type == kHandleNone || handle_type == kHandlePosixFile ||
           (handle_type == kHandleFabric && value(Switch::fabric) == kFabricWorks);
}

}  // namespace

// Addresses.

VMM_EXPORT Status hipMemAddressReserve(void **address, std::size_t size, std::size_t alignment, void *hint,
                                       unsigned long long flags) {
    return primitive(Call::reserve, [&](DeviceModel &model, int) {
        if (!address) return model.refuse(Call::reserve, kInvalidValue);
        const std::uint64_t wish = number(hint) % 4096 == 0 ? number(hint) : 0;  // R3: one that cannot be is ignored
        return hand_out(model.reserve(size, alignment, wish, flags), address);
    });
}

VMM_EXPORT Status hipMemAddressFree(void *address, std::size_t size) {
    return primitive(Call::free_address,
                     [&](DeviceModel &model, int) { return model.free_address(number(address), size); });
}

// Memory.

VMM_EXPORT Status hipMemGetAllocationGranularity(std::size_t *size, const AllocationProp *prop, int which) {
    if (Status refused = enter(Side::device)) return refused;
    if (!size || !well_formed(prop) || !has_device(prop->location.id)) return kInvalidValue;
    if (which != kGranularityMinimum && which != kGranularityRecommended) return kInvalidValue;
    *size = granularity(which == kGranularityRecommended);
    return kSuccess;
}

namespace {

Status creation_refusal(const void *handle, const AllocationProp *prop) {
    if (!handle || !well_formed(prop)) return kInvalidValue;
    if (!has_device(prop->location.id)) return kInvalidDevice;                    // C3
    return can_make(prop->requested_handle_type) ? kSuccess : kNotSupported;  // C5
}

}  // namespace

// G3: on the current device. The location's must exist, and is otherwise not looked at.
VMM_EXPORT Status hipMemCreate(void **handle, std::size_t size, const AllocationProp *prop, unsigned long long flags) {
    return primitive(Call::create, [&](DeviceModel &model, int device) {
        if (Status refusal = creation_refusal(handle, prop)) return model.refuse(Call::create, refusal);
        const Traits traits{prop->requested_handle_type, prop->flags.rdma_capable != 0};  // C6: not checked
        return hand_out(model.create(device, size, flags, traits), handle);
    });
}

VMM_EXPORT Status hipMemRelease(void *handle) {
    return primitive(Call::release, [&](DeviceModel &model, int) { return model.release(number(handle)); });
}

VMM_EXPORT Status hipMemGetInfo(std::size_t *free, std::size_t *total) {
    return primitive(Call::mem_info, [&](DeviceModel &model, int device) {
        auto info = model.mem_info(device);
        *free = info.free;
        *total = info.total;
        return info.status;
    });
}

VMM_EXPORT Status hipMemRetainAllocationHandle(void **handle, void *address) {
    if (Status refused = enter()) return refused;
    return handle ? hand_out(model()->retain(number(address)), handle) : kInvalidValue;
}

VMM_EXPORT Status hipMemGetAllocationPropertiesFromHandle(AllocationProp *prop, void *handle) {
    if (Status refused = enter()) return refused;
    auto allocation = model()->allocation(number(handle));
    if (!prop || !allocation) return kInvalidValue;
    *prop = {};
    prop->type = kAllocationPinned;
    prop->requested_handle_type = allocation->traits.handle_types;
    prop->location = {kLocationDevice, allocation->device};
    prop->flags.rdma_capable = allocation->traits.rdma;
    return kSuccess;
}

// Sharing, by file descriptors only.

// X1: any mismatch is an invalid value.
VMM_EXPORT Status hipMemExportToShareableHandle(void *shareable, void *handle, int type, unsigned long long flags) {
    if (Status refused = enter()) return refused;
    auto allocation = model()->allocation(number(handle));
    if (!shareable || !allocation || flags != 0) return kInvalidValue;
    if (type != kHandlePosixFile || allocation->traits.handle_types != type) return kInvalidValue;
    auto [status, descriptor] = model()->export_file(number(handle));
    if (status == kSuccess) *static_cast<int *>(shareable) = static_cast<int>(descriptor);
    return status;
}

// X2: whatever goes wrong is an invalid value. The descriptor comes as the number itself.
VMM_EXPORT Status hipMemImportFromShareableHandle(void **handle, void *shareable, int type) {
    if (Status refused = enter()) return refused;
    if (!handle || type != kHandlePosixFile) return kInvalidValue;
    auto imported = model()->import_file(static_cast<int>(number(shareable)), current_device());
    return hand_out(imported, handle) == kSuccess ? kSuccess : kInvalidValue;
}

// Mapping.

VMM_EXPORT Status hipMemMap(void *address, std::size_t size, std::size_t offset, void *handle,
                            unsigned long long flags) {
    return primitive(Call::map, [&](DeviceModel &model, int) {
        return model.map(number(address), size, offset, number(handle), flags);
    });
}

VMM_EXPORT Status hipMemUnmap(void *address, std::size_t size) {
    return primitive(Call::unmap, [&](DeviceModel &model, int) { return model.unmap(number(address), size); });
}

VMM_EXPORT Status hipMemSetAccess(void *address, std::size_t size, const AccessDesc *descs, std::size_t count) {
    return primitive(Call::set_access, [&](DeviceModel &model, int) {
        std::vector<DeviceModel::Grant> grants;
        for (std::size_t i = 0; descs && i < count; ++i) {
            if (descs[i].location.type != kLocationDevice) return model.refuse(Call::set_access, kInvalidValue);
            grants.push_back({descs[i].location.id, descs[i].flags});
        }
        return model.set_access(number(address), size, grants);
    });
}

VMM_EXPORT Status hipMemGetAccess(unsigned long long *flags, const Location *location, void *address) {
    return primitive(Call::get_access, [&](DeviceModel &model, int) {
        if (!flags || !location || location->type != kLocationDevice || !has_device(location->id))
            return model.refuse(Call::get_access, kInvalidValue);  // A3
        auto [status, access] = model.get_access(number(address), location->id);
        if (status == kSuccess) *flags = access;
        return status;
    });
}

// P1: of what is mapped only; the runtime finds nothing at an address that is merely reserved.
VMM_EXPORT Status hipPointerGetAttribute(void *data, int which, void *address) {
    if (Status refused = enter()) return refused;
    auto placed = model()->mapping_at(number(address));
    if (!data || !placed) return kInvalidValue;
    switch (which) {
        case kPointerDeviceOrdinal: *static_cast<int *>(data) = placed->allocation.device; return kSuccess;
        case kPointerRangeStart: *static_cast<void **>(data) = pointer(placed->span.base); return kSuccess;
        case kPointerRangeSize: *static_cast<std::size_t *>(data) = placed->span.size; return kSuccess;
        default: return kInvalidValue;
    }
}

// Contents. Done when the call returns, which is within what a stream promises.

VMM_EXPORT Status hipMemsetD8Async(void *address, unsigned char byte, std::size_t count, void *stream) {
    return primitive(Call::zero, [&](DeviceModel &model, int) {
        const int device = device_of(stream);
        if (device < 0) return model.refuse(Call::zero, kInvalidHandle);
        return model.zero(number(address), count, device, byte);
    });
}

VMM_EXPORT Status hipMemsetD8(void *address, unsigned char byte, std::size_t count) {
    return hipMemsetD8Async(address, byte, count, nullptr);
}
