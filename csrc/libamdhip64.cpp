// The emulated libamdhip64.so: the runtime, its devices, threads and streams. Memory is in csrc/hip/memory.cpp. It is
// for tests: vmm_kv.testing.load_hip() puts it in place, nothing else does.
//
// Rules cited (G2, F1, ...) follow ROCm's hipamd/src/hip_vm.cpp; where HIP and CUDA agree they are the model's own.
#include <cstring>
#include <utility>

#include "emulation/emulation.h"
#include "hip/abi.h"
#include "hip/thread.h"

using namespace vmm;
using namespace vmm::emulation;
using namespace vmm::hip;

// A release without the known bugs.
const FrontEnd vmm::emulation::kFrontEnd = {
    {/*busy=*/kUnknown, /*no_such_grantee=*/kInvalidValue, /*frees_with_any_size=*/true,
     /*writes_across_reservations=*/false},  // F2, A3, F1, P2
    /*capture_refuses_mapping=*/false, &forget_thread, /*driver_version=*/71500000, /*runtime_version=*/71500000};

namespace {

thread_local int chosen_device = 0;
thread_local int capture_mode = kCaptureGlobal;

char streams[Access::kMaxDevices];

}  // namespace

namespace vmm::hip {

int current_device() { return has_device(chosen_device) ? chosen_device : 0; }

void forget_thread() {
    chosen_device = 0;
    capture_mode = kCaptureGlobal;
}

bool has_device(int device) { return device >= 0 && device < model()->devices(); }

void *stream_of(int device) { return &streams[device]; }

int device_of(const void *stream) {
    if (!stream) return current_device();
    for (int device = 0; has_device(device); ++device)
        if (stream == stream_of(device)) return device;
    return -1;
}

}  // namespace vmm::hip

// The runtime.

VMM_EXPORT Status hipInit(unsigned flags) {
    if (Status refused = enter(Side::init)) return refused;
    return flags == 0 ? kSuccess : kInvalidValue;
}

VMM_EXPORT Status hipDriverGetVersion(int *version) {
    if (Status refused = enter()) return refused;
    *version = static_cast<int>(value(Switch::driver_version));
    return kSuccess;
}

VMM_EXPORT Status hipRuntimeGetVersion(int *version) {
    if (Status refused = enter()) return refused;
    *version = static_cast<int>(value(Switch::runtime_version));
    return kSuccess;
}

// Devices.

VMM_EXPORT Status hipGetDeviceCount(int *count) {
    if (Status refused = enter(Side::device)) return refused;
    *count = model()->devices();
    return kSuccess;
}

VMM_EXPORT Status hipGetDevice(int *device) {
    if (Status refused = enter(Side::device)) return refused;
    *device = current_device();
    return kSuccess;
}

VMM_EXPORT Status hipSetDevice(int device) {
    if (Status refused = enter(Side::device)) return refused;
    if (!has_device(device)) return kInvalidDevice;
    chosen_device = device;
    return kSuccess;
}

VMM_EXPORT Status hipDeviceSynchronize() { return enter(Side::device); }

namespace {

// One that is not known answers as all do that a runtime is too old for.
Status attribute(int which, int device, int &answer) {
    switch (which) {
        case kIntegrated: answer = on(Switch::integrated); return kSuccess;
        case kPciBusId: answer = pci_bus(device); return kSuccess;
        case kPciDeviceId: answer = emulation::kPciDevice; return kSuccess;
        case kPciDomainId: answer = emulation::kPciDomain; return kSuccess;
        case kVirtualMemorySupported: answer = on(Switch::vmm_supported); return kSuccess;
        case kRdmaWithVmmSupported: answer = on(Switch::rdma); return kSuccess;
        case kFabricSupported: answer = on(Switch::fabric); return kSuccess;
        default: return kInvalidValue;
    }
}

// The door of a question about a device.
Status enter_about(int device) {
    if (Status refused = enter(Side::device)) return refused;
    return has_device(device) ? kSuccess : kInvalidDevice;
}

}  // namespace

VMM_EXPORT Status hipDeviceGetAttribute(int *answer, int which, int device) {
    if (Status refused = enter_about(device)) return refused;
    return attribute(which, device, *answer);
}

VMM_EXPORT Status hipDeviceGetName(char *name, int room, int device) {
    if (Status refused = enter_about(device)) return refused;
    if (!name || room <= static_cast<int>(std::strlen(kDeviceName))) return kInvalidValue;
    std::strcpy(name, kDeviceName);
    return kSuccess;
}

VMM_EXPORT Status hipDeviceGetUuid(Uuid *uuid, int device) {
    if (Status refused = enter_about(device)) return refused;
    uuid_of(device, uuid->bytes);
    return kSuccess;
}

VMM_EXPORT Status hipDeviceGetPCIBusId(char *id, int room, int device) {
    if (Status refused = enter_about(device)) return refused;
    return id && room > 0 && pci_bus_id(device, id, room) < room ? kSuccess : kInvalidValue;
}

VMM_EXPORT Status hipDeviceTotalMem(std::size_t *size, int device) {
    if (Status refused = enter_about(device)) return refused;
    *size = model()->budget(device);
    return kSuccess;
}

// Streams and capture.

VMM_EXPORT Status hipStreamCreateWithFlags(void **stream, unsigned) {
    if (Status refused = enter(Side::stream)) return refused;
    *stream = stream_of(current_device());
    return kSuccess;
}

VMM_EXPORT Status hipStreamDestroy(void *stream) {
    if (Status refused = enter(Side::stream)) return refused;
    return stream && device_of(stream) >= 0 ? kSuccess : kInvalidHandle;
}

VMM_EXPORT Status hipStreamSynchronize(void *stream) {
    if (Status refused = enter(Side::stream)) return refused;
    return device_of(stream) >= 0 ? kSuccess : kInvalidHandle;
}

VMM_EXPORT Status hipStreamIsCapturing(void *stream, int *capture) {
    if (Status refused = enter(Side::stream)) return refused;
    if (device_of(stream) < 0) return kInvalidHandle;
    *capture = on(Switch::capturing);
    return kSuccess;
}

VMM_EXPORT Status hipThreadExchangeStreamCaptureMode(int *mode) {
    if (Status refused = enter(Side::capture_mode)) return refused;
    if (!mode || *mode < kCaptureGlobal || *mode > kCaptureRelaxed) return kInvalidValue;
    std::swap(*mode, capture_mode);
    return kSuccess;
}

// Statuses. These two are plain look-ups and work at any time.

namespace {

struct ErrorText {
    Status status;
    const char *name, *text;
};

constexpr ErrorText kErrors[] = {
    {kSuccess, "hipSuccess", "no error"},
    {kInvalidValue, "hipErrorInvalidValue", "invalid argument"},
    {kOutOfMemory, "hipErrorOutOfMemory", "out of memory"},
    {kNotInitialized, "hipErrorNotInitialized", "initialization error"},
    {kDeinitialized, "hipErrorDeinitialized", "driver shutting down"},
    {kNoDevices, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {kInvalidDevice, "hipErrorInvalidDevice", "invalid device ordinal"},
    {kInvalidHandle, "hipErrorInvalidHandle", "invalid resource handle"},
    {kNotSupported, "hipErrorNotSupported", "operation not supported"},
    {kUnknown, "hipErrorUnknown", "unknown error"},
};

const ErrorText &described(Status status) {
    for (const ErrorText &known : kErrors)
        if (known.status == status) return known;
    return kErrors[sizeof kErrors / sizeof *kErrors - 1];
}

}  // namespace

VMM_EXPORT const char *hipGetErrorName(Status status) { return described(status).name; }
VMM_EXPORT const char *hipGetErrorString(Status status) { return described(status).text; }
