// Addresses, memory, and what brings them together. The rules are the model's; here are structs and their checks.
#include <algorithm>

#include "cuda/primitive.h"

using namespace vmm::cuda;
using vmm::Call;
using vmm::DeviceModel;
using vmm::kInvalidDevice;
using vmm::kInvalidValue;
using vmm::kSuccess;
using vmm::emulation::kNotSupported;
using vmm::emulation::on;
using vmm::emulation::Switch;
using vmm::emulation::value;

namespace {

// C5: fabric handles need hardware and a running service, and each lack has an answer of its own.
Result fabric_refusal() {
    switch (value(Switch::fabric)) {
        case 0: return kNotSupported;
        case 1: return kNotPermitted;
        default: return kSuccess;
    }
}

Result handle_type_refusal(int types) {
    if (types & ~(kHandlePosixFile | kHandleFabric)) return kNotSupported;
    return types & kHandleFabric ? fabric_refusal() : kSuccess;
}

// What of a property the model does not know (C3 to C6).
Result refusal(const AllocationProp *prop) {
    if (!prop || prop->type != kAllocationPinned || prop->win32_handle_meta_data) return kInvalidValue;
    const auto &flags = prop->flags;
    if (std::any_of(std::begin(flags.reserved), std::end(flags.reserved), [](auto byte) { return byte != 0; }))
        return kInvalidValue;
    const Location &location = prop->location;
    if (location.type >= kLocationHost && location.type <= kLocationHostNumaCurrent)
        return prop->requested_handle_types != kHandleNone ? kInvalidValue : kNotSupported;
    if (location.type != kLocationDevice) return kInvalidValue;
    if (!has_device(location.id)) return kInvalidDevice;
    if (flags.compression_type > kCompressionGeneric || flags.usage != 0) return kNotSupported;
    if (flags.rdma_capable && !on(Switch::rdma)) return kNotSupported;
    return handle_type_refusal(prop->requested_handle_types);
}

}  // namespace

VMM_EXPORT Result cuMemGetAllocationGranularity(std::size_t *granularity, const AllocationProp *prop, int option) {
    auto [status, _] = current_device();
    if (status) return status;
    if (Result refused = vmm::emulation::enter(vmm::emulation::Side::device)) return refused;
    if (!on(Switch::vmm_supported)) return kNotSupported;
    if (!granularity || (option != kGranularityMinimum && option != kGranularityRecommended)) return kInvalidValue;
    if (Result refused = refusal(prop); refused && refused != kNotSupported && refused != kNotPermitted) return refused;
    *granularity = vmm::emulation::granularity(option == kGranularityRecommended);
    return kSuccess;
}

VMM_EXPORT Result cuMemAddressReserve(DevicePointer *base, std::size_t size, std::size_t alignment, DevicePointer hint,
                                      unsigned long long flags) {
    return primitive(Call::reserve, [&](DeviceModel &model, Device) {
        if (!base) return model.refuse(Call::reserve, kInvalidValue);
        auto [status, reserved] = model.reserve(size, alignment, hint, flags);
        if (status == kSuccess) *base = reserved;
        return status;
    });
}

VMM_EXPORT Result cuMemAddressFree(DevicePointer base, std::size_t size) {
    return primitive(Call::free_address, [&](DeviceModel &model, Device) { return model.free_address(base, size); });
}

VMM_EXPORT Result cuMemCreate(AllocationHandle *handle, std::size_t size, const AllocationProp *prop,
                              unsigned long long flags) {
    return primitive(Call::create, [&](DeviceModel &model, Device) {
        Result refused = handle ? refusal(prop) : kInvalidValue;
        if (refused) return model.refuse(Call::create, refused);
        const vmm::Traits traits{prop->requested_handle_types, prop->flags.rdma_capable != 0};
        auto [status, created] = model.create(prop->location.id, size, flags, traits);
        if (status == kSuccess) *handle = created;
        return status;
    });
}

VMM_EXPORT Result cuMemRelease(AllocationHandle handle) {
    return primitive(Call::release, [&](DeviceModel &model, Device) { return model.release(handle); });
}

VMM_EXPORT Result cuMemMap(DevicePointer address, std::size_t size, std::size_t offset, AllocationHandle handle,
                           unsigned long long flags) {
    return primitive(Call::map, [&](DeviceModel &model, Device) {
        return model.map(address, size, offset, handle, flags);
    });
}

VMM_EXPORT Result cuMemUnmap(DevicePointer address, std::size_t size) {
    return primitive(Call::unmap, [&](DeviceModel &model, Device) { return model.unmap(address, size); });
}

VMM_EXPORT Result cuMemSetAccess(DevicePointer address, std::size_t size, const AccessDesc *descs, std::size_t count) {
    return primitive(Call::set_access, [&](DeviceModel &model, Device) {
        std::vector<DeviceModel::Grant> grants;
        for (std::size_t i = 0; descs && i < count; ++i) {
            if (descs[i].location.type != kLocationDevice) return model.refuse(Call::set_access, kInvalidValue);
            grants.push_back({descs[i].location.id, descs[i].flags});
        }
        return model.set_access(address, size, grants);
    });
}

VMM_EXPORT Result cuMemGetAccess(unsigned long long *access, const Location *location, DevicePointer address) {
    return primitive(Call::get_access, [&](DeviceModel &model, Device) {
        if (!access || !location || location->type != kLocationDevice)
            return model.refuse(Call::get_access, kInvalidValue);
        auto [status, found] = model.get_access(address, location->id);
        if (status == kSuccess) *access = found;
        return status;
    });
}

VMM_EXPORT Result cuMemGetInfo_v2(std::size_t *free, std::size_t *total) {
    return primitive(Call::mem_info, [&](DeviceModel &model, Device device) {
        auto info = model.mem_info(device);
        if (info.status != kSuccess) return info.status;
        if (free) *free = info.free;
        if (total) *total = info.total;
        return kSuccess;
    });
}

VMM_EXPORT Result cuMemsetD8_v2(DevicePointer address, unsigned char byte, std::size_t size) {
    return primitive(Call::zero, [&](DeviceModel &model, Device device) {
        return model.zero(address, size, device, byte);
    });
}
