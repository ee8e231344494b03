// Contexts: which device a thread works on. Only primary contexts exist here.
#pragma once

#include "core/status.h"
#include "cuda/abi.h"

namespace vmm::cuda {

struct Context;

// From cuInit on the library answers. 3 before it, and after a fork; 4 where the driver is on its way out.
Result require_init();
Result initialize();

// The device of the calling thread's context, or why no call can be made: 3, 4, 201 without a context (G2).
Answer current_device();

bool has_device(Device device);

// The calling thread is as a fresh one: no context, capture mode global.
void forget_thread();

// The calling thread's capture mode, for cuThreadExchangeStreamCaptureMode.
int &capture_mode();

}  // namespace vmm::cuda
