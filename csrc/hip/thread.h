// What HIP keeps for each thread, what its streams are here, and what every primitive passes first.
#pragma once

#include "emulation/emulation.h"

namespace vmm::hip {

// G2: a thread needs no context, and starts on device 0.
int current_device();
void forget_thread();

bool has_device(int device);

// A stream is known by its device: all streams of a device are alike where every call is done when it returns.
void *stream_of(int device);
// The current device for the null stream; -1 for what is no stream.
int device_of(const void *stream);

// Makes a call of the model as the current device: body(model, device).
template <class Body>
Status primitive(Call call, Body body) {
    if (Status refused = emulation::enter()) return refused;
    const int device = current_device();
    emulation::count_on(device);
    auto model = emulation::model();
    if (call <= Call::get_access && !emulation::on(emulation::Switch::vmm_supported))
        return model->refuse(call, emulation::kNotSupported);  // G5
    return body(*model, device);
}

}  // namespace vmm::hip
