// Streams. Work on them is done before the call returns, so there is never anything to wait for.
#include <mutex>
#include <set>

#include "cuda/primitive.h"

using namespace vmm::cuda;
using vmm::Call;
using vmm::DeviceModel;
using vmm::kInvalidValue;
using vmm::kSuccess;
using vmm::emulation::on;
using vmm::emulation::Side;
using vmm::emulation::Switch;

namespace {

struct Stream {
    char unused;
};

struct Streams {
    std::mutex mutex;
    std::set<const Stream *> live;
};

Streams &streams() {
    static Streams &only = *new Streams;
    return only;
}

// 0, 1 and 2 name the default streams of process and thread.
bool is_stream(const Stream *stream) {
    if (reinterpret_cast<std::uintptr_t>(stream) <= 2) return true;
    std::lock_guard lock(streams().mutex);
    return streams().live.count(stream) != 0;
}

Result enter_stream() {
    auto [status, _] = current_device();
    return status ? status : vmm::emulation::enter(Side::stream);
}

}  // namespace

VMM_EXPORT Result cuStreamCreate(Stream **stream, unsigned flags) {
    if (Result refused = enter_stream()) return refused;
    if (!stream || flags > kStreamNonBlocking) return kInvalidValue;
    *stream = new Stream;
    std::lock_guard lock(streams().mutex);
    streams().live.insert(*stream);
    return kSuccess;
}

VMM_EXPORT Result cuStreamDestroy_v2(Stream *stream) {
    if (Result refused = enter_stream()) return refused;
    std::lock_guard lock(streams().mutex);
    if (streams().live.erase(stream) == 0) return kInvalidHandle;
    delete stream;
    return kSuccess;
}

VMM_EXPORT Result cuStreamSynchronize(Stream *stream) {
    if (Result refused = enter_stream()) return refused;
    return is_stream(stream) ? kSuccess : kInvalidHandle;
}

VMM_EXPORT Result cuStreamIsCapturing(Stream *stream, int *status) {
    if (Result refused = enter_stream()) return refused;
    if (!is_stream(stream)) return kInvalidHandle;
    if (!status) return kInvalidValue;
    *status = on(Switch::capturing) ? kCaptureActive : kCaptureNone;
    return kSuccess;
}

VMM_EXPORT Result cuThreadExchangeStreamCaptureMode(int *mode) {
    if (Result refused = require_init()) return refused;
    if (Result refused = vmm::emulation::enter(Side::capture_mode)) return refused;
    if (!mode || *mode < kCaptureGlobal || *mode > kCaptureRelaxed) return kInvalidValue;
    std::swap(*mode, capture_mode());
    return kSuccess;
}

VMM_EXPORT Result cuMemsetD8Async(DevicePointer address, unsigned char byte, std::size_t size, Stream *stream) {
    return primitive(Call::zero, [&](DeviceModel &model, Device device) {
        if (!is_stream(stream)) return model.refuse(Call::zero, kInvalidHandle);
        return model.zero(address, size, device, byte);
    });
}
