// What the driver knows of an address (P1): a reserved one has a range even where nothing is mapped.
#include "cuda/context.h"
#include "emulation/emulation.h"

using namespace vmm::cuda;
using namespace vmm::emulation;
using vmm::DeviceModel;
using vmm::kInvalidValue;
using vmm::kSuccess;

namespace {

template <class T, class Value>
Result answer(void *data, Value value) {
    *static_cast<T *>(data) = static_cast<T>(value);
    return kSuccess;
}

Result answer_for_mapping(void *data, int attribute, DevicePointer address, const DeviceModel::Placed &placed,
                          Device current) {
    switch (attribute) {
        case kPointerMemoryType: return answer<unsigned>(data, kMemoryTypeDevice);
        case kPointerDevicePointer: return answer<DevicePointer>(data, address);
        case kPointerDeviceOrdinal: return answer<int>(data, placed.allocation.device);
        case kPointerAllowedHandleTypes: return answer<std::uint64_t>(data, placed.allocation.traits.handle_types);
        case kPointerAccessFlags: return answer<unsigned>(data, placed.access.of(current));
        case kPointerMappingSize: return answer<std::size_t>(data, placed.span.size);
        case kPointerMappingBase: return answer<DevicePointer>(data, placed.span.base);
        default: return kNotSupported;
    }
}

Result attribute_of(void *data, int attribute, DevicePointer address, Device current) {
    auto model = vmm::emulation::model();
    auto reservation = model->reservation_at(address);
    if (!data || !reservation) return kInvalidValue;
    auto placed = model->mapping_at(address);
    switch (attribute) {
        case kPointerRangeStart: return answer<DevicePointer>(data, reservation->base);
        case kPointerRangeSize: return answer<std::size_t>(data, reservation->size);
        case kPointerMapped: return answer<unsigned char>(data, placed.has_value());
        default: return placed ? answer_for_mapping(data, attribute, address, *placed, current) : kInvalidValue;
    }
}

}  // namespace

VMM_EXPORT Result cuPointerGetAttribute(void *data, int attribute, DevicePointer address) {
    auto [status, device] = current_device();
    return status ? status : attribute_of(data, attribute, address, static_cast<Device>(device));
}

// What is unknown is left alone, and is no error.
VMM_EXPORT Result cuPointerGetAttributes(unsigned count, const int *attributes, void **data, DevicePointer address) {
    auto [status, device] = current_device();
    if (status) return status;
    if (count == 0 || !attributes || !data) return kInvalidValue;
    for (unsigned i = 0; i < count; ++i) attribute_of(data[i], attributes[i], address, static_cast<Device>(device));
    return kSuccess;
}
