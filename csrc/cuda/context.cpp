#include "cuda/context.h"

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "emulation/emulation.h"

namespace vmm::cuda {

struct Context {
    Device device = 0;
    unsigned retained = 0;
};

namespace {

using emulation::Side;

std::atomic<bool> initialized{false};

// They outlive a reset of the model, as a process keeps its contexts.
struct PrimaryContexts {
    std::mutex mutex;
    std::array<Context, Access::kMaxDevices> of;

    PrimaryContexts() {
        for (std::size_t i = 0; i < of.size(); ++i) of[i].device = static_cast<Device>(i);
    }
};

PrimaryContexts &primary() {
    static PrimaryContexts &only = *new PrimaryContexts;
    return only;
}

thread_local std::vector<Context *> stack;
thread_local int thread_capture_mode = kCaptureGlobal;

// Whether a caller's pointer is a context of ours that is retained, of a device that is still there.
bool alive(const Context *context) {
    auto &contexts = primary();
    std::lock_guard lock(contexts.mutex);
    for (const Context &known : contexts.of)
        if (&known == context) return known.retained > 0 && has_device(known.device);
    return false;
}

Result enter_context() {
    if (Result refused = require_init()) return refused;
    return emulation::enter(Side::context);
}

Result enter_context(Device device) {
    if (Result refused = enter_context()) return refused;
    return has_device(device) ? kSuccess : kInvalidDevice;
}

}  // namespace

Result require_init() {
    if (Result refused = emulation::enter()) return refused;
    return initialized ? kSuccess : emulation::kNotInitialized;
}

Result initialize() {
    if (Result refused = emulation::enter(Side::init)) return refused;
    initialized = true;
    return kSuccess;
}

Answer current_device() {
    if (Result refused = require_init()) return {refused, 0};
    if (stack.empty() || !stack.back()) return {kInvalidContext, 0};
    if (!alive(stack.back())) return {kContextIsDestroyed, 0};
    return {kSuccess, static_cast<std::uint64_t>(stack.back()->device)};
}

bool has_device(Device device) { return device >= 0 && device < emulation::model()->devices(); }

void forget_thread() {
    stack.clear();
    thread_capture_mode = kCaptureGlobal;
}

int &capture_mode() { return thread_capture_mode; }

}  // namespace vmm::cuda

using namespace vmm::cuda;
using vmm::kInvalidValue;
using vmm::kSuccess;

VMM_EXPORT Result cuDevicePrimaryCtxRetain(Context **context, Device device) {
    if (Result refused = enter_context(device)) return refused;
    if (!context) return kInvalidValue;
    auto &contexts = primary();
    std::lock_guard lock(contexts.mutex);
    *context = &contexts.of[static_cast<std::size_t>(device)];
    ++(*context)->retained;
    return kSuccess;
}

VMM_EXPORT Result cuDevicePrimaryCtxRelease_v2(Device device) {
    if (Result refused = enter_context(device)) return refused;
    auto &contexts = primary();
    std::lock_guard lock(contexts.mutex);
    Context &context = contexts.of[static_cast<std::size_t>(device)];
    if (context.retained == 0) return kInvalidContext;
    --context.retained;
    return kSuccess;
}

VMM_EXPORT Result cuDevicePrimaryCtxGetState(Device device, unsigned *flags, int *active) {
    if (Result refused = enter_context(device)) return refused;
    auto &contexts = primary();
    std::lock_guard lock(contexts.mutex);
    if (flags) *flags = 0;
    if (active) *active = contexts.of[static_cast<std::size_t>(device)].retained > 0;
    return kSuccess;
}

VMM_EXPORT Result cuCtxPushCurrent_v2(Context *context) {
    if (Result refused = enter_context()) return refused;
    if (!alive(context)) return kInvalidContext;
    stack.push_back(context);
    return kSuccess;
}

VMM_EXPORT Result cuCtxPopCurrent_v2(Context **context) {
    if (Result refused = enter_context()) return refused;
    if (stack.empty()) return kInvalidContext;
    if (context) *context = stack.back();
    stack.pop_back();
    return kSuccess;
}

VMM_EXPORT Result cuCtxGetCurrent(Context **context) {
    if (Result refused = enter_context()) return refused;
    if (!context) return kInvalidValue;
    *context = stack.empty() ? nullptr : stack.back();
    return kSuccess;
}

// Takes the place of the top of the stack; null takes the top away.
VMM_EXPORT Result cuCtxSetCurrent(Context *context) {
    if (Result refused = enter_context()) return refused;
    if (context && !alive(context)) return kInvalidContext;
    if (!stack.empty()) stack.pop_back();
    if (context) stack.push_back(context);
    return kSuccess;
}

VMM_EXPORT Result cuCtxGetDevice(Device *device) {
    if (Result refused = enter_context()) return refused;
    auto [status, current] = current_device();
    if (status) return status;
    if (!device) return kInvalidValue;
    *device = static_cast<Device>(current);
    return kSuccess;
}

VMM_EXPORT Result cuCtxSynchronize() {
    if (Result refused = enter_context()) return refused;
    return current_device().first;
}
