// What every primitive of the CUDA front end passes first.
#pragma once

#include "cuda/context.h"
#include "emulation/emulation.h"

namespace vmm::cuda {

// Makes a call of the model as the current device: body(model, device). Without a driver or a context no primitive is
// made, so nothing is counted.
template <class Body>
Result primitive(Call call, Body body) {
    auto [status, current] = current_device();
    if (status) return status;
    const Device device = static_cast<Device>(current);
    emulation::count_on(device);
    auto model = emulation::model();
    if (call <= Call::get_access && !emulation::on(emulation::Switch::vmm_supported))
        return model->refuse(call, emulation::kNotSupported);  // G5
    return body(*model, device);
}

}  // namespace vmm::cuda
