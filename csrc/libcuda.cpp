// The emulated libcuda.so.1: what it says of itself, its errors' names, and the door by which bindings find the rest.
// The entry points are in csrc/cuda. It is for tests: vmm_kv.testing.load_cuda() puts it in place, nothing else does.
#include <algorithm>
#include <cstring>
#include <iterator>

#include <dlfcn.h>

#include "cuda/context.h"
#include "emulation/emulation.h"

using namespace vmm::cuda;
using vmm::kInvalidValue;
using vmm::kSuccess;

const vmm::emulation::FrontEnd vmm::emulation::kFrontEnd = {
    /*dialect=*/{}, /*capture_refuses_mapping=*/true, &forget_thread, /*driver_version=*/13000, /*runtime_version=*/0};

namespace {

struct ErrorText {
    Result error;
    const char *name, *text;
};

constexpr ErrorText kErrors[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {vmm::kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {vmm::emulation::kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {vmm::emulation::kDeinitialized, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {vmm::emulation::kNoDevices, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {vmm::kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {vmm::kOperatingSystem, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {kNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {vmm::emulation::kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {vmm::kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

Result describe(Result error, const char **answer, const char *ErrorText::*field) {
    if (!answer) return kInvalidValue;
    auto found = std::find_if(std::begin(kErrors), std::end(kErrors), [=](auto &known) { return known.error == error; });
    *answer = found == std::end(kErrors) ? nullptr : found->*field;
    return *answer ? kSuccess : kInvalidValue;
}

// Bindings ask for plain names and a CUDA version. Between versions the same name stands for functions of other
// signatures: `since` is the version that brought ours, `before` the one that replaced it.
constexpr int kNever = 1 << 30;

struct EntryPoint {
    const char *name;
    int since;
    const char *exported;
    int before = kNever;
};

constexpr EntryPoint kEntryPoints[] = {
    {"cuGetErrorName", 6000, "cuGetErrorName"},
    {"cuGetErrorString", 6000, "cuGetErrorString"},
    {"cuInit", 2000, "cuInit"},
    {"cuDriverGetVersion", 2020, "cuDriverGetVersion"},
    {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
    {"cuDeviceGet", 2000, "cuDeviceGet"},
    {"cuDeviceGetCount", 2000, "cuDeviceGetCount"},
    {"cuDeviceGetName", 2000, "cuDeviceGetName"},
    {"cuDeviceGetUuid", 9020, "cuDeviceGetUuid_v2"},
    {"cuDeviceGetUuid_v2", 11040, "cuDeviceGetUuid_v2"},
    {"cuDeviceGetPCIBusId", 4010, "cuDeviceGetPCIBusId"},
    {"cuDeviceGetByPCIBusId", 4010, "cuDeviceGetByPCIBusId"},
    {"cuDeviceTotalMem", 3020, "cuDeviceTotalMem_v2"},
    {"cuDeviceGetAttribute", 2000, "cuDeviceGetAttribute"},
    {"cuDevicePrimaryCtxRetain", 7000, "cuDevicePrimaryCtxRetain"},
    {"cuDevicePrimaryCtxRelease", 11000, "cuDevicePrimaryCtxRelease_v2"},
    {"cuDevicePrimaryCtxGetState", 7000, "cuDevicePrimaryCtxGetState"},
    {"cuCtxPushCurrent", 4000, "cuCtxPushCurrent_v2"},
    {"cuCtxPopCurrent", 4000, "cuCtxPopCurrent_v2"},
    {"cuCtxGetCurrent", 4000, "cuCtxGetCurrent"},
    {"cuCtxSetCurrent", 4000, "cuCtxSetCurrent"},
    {"cuCtxGetDevice", 2000, "cuCtxGetDevice", 13000},
    {"cuCtxSynchronize", 2000, "cuCtxSynchronize", 13000},
    {"cuMemGetInfo", 3020, "cuMemGetInfo_v2"},
    {"cuMemGetAllocationGranularity", 10020, "cuMemGetAllocationGranularity"},
    {"cuMemAddressReserve", 10020, "cuMemAddressReserve"},
    {"cuMemAddressFree", 10020, "cuMemAddressFree"},
    {"cuMemCreate", 10020, "cuMemCreate"},
    {"cuMemRelease", 10020, "cuMemRelease"},
    {"cuMemMap", 10020, "cuMemMap"},
    {"cuMemUnmap", 10020, "cuMemUnmap"},
    {"cuMemSetAccess", 10020, "cuMemSetAccess"},
    {"cuMemGetAccess", 10020, "cuMemGetAccess"},
    {"cuMemRetainAllocationHandle", 11000, "cuMemRetainAllocationHandle"},
    {"cuMemGetAllocationPropertiesFromHandle", 10020, "cuMemGetAllocationPropertiesFromHandle"},
    {"cuMemExportToShareableHandle", 10020, "cuMemExportToShareableHandle"},
    {"cuMemImportFromShareableHandle", 10020, "cuMemImportFromShareableHandle"},
    {"cuMemsetD8", 3020, "cuMemsetD8_v2"},
    {"cuMemsetD8Async", 3020, "cuMemsetD8Async"},
    {"cuStreamCreate", 2000, "cuStreamCreate"},
    {"cuStreamDestroy", 4000, "cuStreamDestroy_v2"},
    {"cuStreamSynchronize", 2000, "cuStreamSynchronize"},
    {"cuStreamIsCapturing", 10000, "cuStreamIsCapturing"},
    {"cuThreadExchangeStreamCaptureMode", 10010, "cuThreadExchangeStreamCaptureMode"},
    {"cuPointerGetAttribute", 4000, "cuPointerGetAttribute"},
    {"cuPointerGetAttributes", 7000, "cuPointerGetAttributes"},
};

// This library, among perhaps several in the process that export the same names.
void *find_exported(const char *name) {
    static void *self = [] {
        Dl_info info;
        return dladdr(kErrors, &info) ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
    }();
    return self ? dlsym(self, name) : nullptr;
}

}  // namespace

VMM_EXPORT Result cuGetErrorName(Result error, const char **name) { return describe(error, name, &ErrorText::name); }

VMM_EXPORT Result cuGetErrorString(Result error, const char **text) { return describe(error, text, &ErrorText::text); }

VMM_EXPORT Result cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long,
                                      int *found_status) {
    if (!name || !function) return kInvalidValue;
    int outcome = kSymbolNotFound;
    *function = nullptr;
    for (const EntryPoint &entry : kEntryPoints) {
        if (std::strcmp(entry.name, name) != 0 || version >= entry.before) continue;
        outcome = version < entry.since ? kSymbolVersionNotSufficient : kSymbolFound;
        if (outcome == kSymbolFound) *function = find_exported(entry.exported);
        break;
    }
    if (found_status) *found_status = outcome;
    return *function ? kSuccess : kNotFound;
}
