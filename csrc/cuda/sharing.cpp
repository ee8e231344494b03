// Handles beyond their first owner: retained by address, exported, imported; and what they were made with.
#include <cstring>

#include <unistd.h>

#include "cuda/context.h"
#include "emulation/emulation.h"

using namespace vmm::cuda;
using namespace vmm::emulation;
using vmm::Handle;
using vmm::kInvalidValue;
using vmm::kSuccess;

namespace {

// What our fabric handle holds. It is good in the process that exported it, which is all that a test needs.
struct FabricContents {
    char magic[8];
    std::uint64_t process;
    Handle handle;

    static FabricContents of(Handle handle) {
        FabricContents contents{{}, static_cast<std::uint64_t>(getpid()), handle};
        std::memcpy(contents.magic, "vmm_kv", 6);
        return contents;
    }
};
static_assert(sizeof(FabricContents) <= sizeof(FabricHandle));

bool one_known_type(int type) { return type == kHandlePosixFile || type == kHandleFabric; }

Result export_file(Handle handle, void *shareable) {
    auto [status, fd] = model()->export_file(handle);
    if (status == kSuccess) *static_cast<int *>(shareable) = static_cast<int>(fd);
    return status;
}

Result export_fabric(Handle handle, void *shareable) {
    const FabricContents contents = FabricContents::of(handle);
    std::memset(shareable, 0, sizeof(FabricHandle));
    std::memcpy(shareable, &contents, sizeof contents);
    return kSuccess;
}

vmm::Answer import_fabric(const void *shareable) {
    FabricContents contents;
    std::memcpy(&contents, shareable, sizeof contents);
    const FabricContents expected = FabricContents::of(contents.handle);
    if (std::memcmp(&contents, &expected, sizeof contents) != 0) return {kInvalidValue, 0};
    return model()->import(contents.handle);
}

}  // namespace

VMM_EXPORT Result cuMemRetainAllocationHandle(AllocationHandle *handle, void *address) {
    auto [status, _] = current_device();
    if (status) return status;
    if (!handle) return kInvalidValue;
    auto [refused, retained] = model()->retain(reinterpret_cast<std::uint64_t>(address));
    if (refused == kSuccess) *handle = retained;
    return refused;
}

VMM_EXPORT Result cuMemGetAllocationPropertiesFromHandle(AllocationProp *prop, AllocationHandle handle) {
    auto [status, _] = current_device();
    if (status) return status;
    auto found = model()->allocation(handle);
    if (!prop || !found) return kInvalidValue;
    *prop = {};
    prop->type = kAllocationPinned;
    prop->requested_handle_types = found->traits.handle_types;
    prop->location = {kLocationDevice, found->device};
    prop->flags.rdma_capable = found->traits.rdma;
    return kSuccess;
}

// X1. The caller closes a file descriptor.
VMM_EXPORT Result cuMemExportToShareableHandle(void *shareable, AllocationHandle handle, int type,
                                               unsigned long long flags) {
    auto [status, _] = current_device();
    if (status) return status;
    auto found = model()->allocation(handle);
    if (!shareable || flags != 0 || !found || !one_known_type(type) || !(found->traits.handle_types & type))
        return kInvalidValue;
    return type == kHandlePosixFile ? export_file(handle, shareable) : export_fabric(handle, shareable);
}

// X2. A file descriptor comes as the number itself, a fabric handle as a pointer.
VMM_EXPORT Result cuMemImportFromShareableHandle(AllocationHandle *handle, void *shareable, int type) {
    auto [status, device] = current_device();
    if (status) return status;
    if (!handle) return kInvalidValue;
    if (!one_known_type(type)) return kNotSupported;
    if (type == kHandleFabric && value(Switch::fabric) < 2)
        return on(Switch::fabric) ? kNotPermitted : kNotSupported;
    if (type == kHandleFabric && !shareable) return kInvalidValue;
    auto [refused, imported] =
        type == kHandleFabric
            ? import_fabric(shareable)
            : model()->import_file(static_cast<int>(reinterpret_cast<std::intptr_t>(shareable)), static_cast<int>(device));
    if (refused == kSuccess) *handle = imported;
    return refused;
}
