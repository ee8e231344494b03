// The part of DLPack's C interface that a capsule named "dltensor" carries (dlpack.h, the unversioned structs).
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct DLDevice {
    std::int32_t device_type;
    std::int32_t device_id;
};

struct DLDataType {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
};

struct DLTensor {
    void *data;
    DLDevice device;
    std::int32_t ndim;
    DLDataType dtype;
    std::int64_t *shape;
    std::int64_t *strides;
    std::uint64_t byte_offset;
};

struct DLManagedTensor {
    DLTensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(DLManagedTensor *);
};

}  // extern "C"

static_assert(sizeof(DLTensor) == 48 && sizeof(DLManagedTensor) == 64, "the layout is fixed by DLPack");
