#include "lease.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "dlpack.h"

namespace vmm {
namespace {

constexpr const char *kUnconsumed = "dltensor";  // a consumer renames the capsule and owns the tensor from then on
constexpr std::uint8_t kUInt = 1;

void end_capsule(PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, kUnconsumed)) return;
    auto *tensor = static_cast<DLManagedTensor *>(PyCapsule_GetPointer(capsule, kUnconsumed));
    tensor->deleter(tensor);
}

}  // namespace

// One allocation holds all that a consumer may look at.
struct Lease::LeasedTensor {
    DLManagedTensor managed{};
    std::int64_t shape;
    std::int64_t stride = 1;
    std::shared_ptr<Count> count;

    LeasedTensor(void *data, std::int64_t nbytes, DLDevice device, std::shared_ptr<Count> shared)
        : shape(nbytes), count(std::move(shared)) {
        managed.dl_tensor = {data, device, 1, {kUInt, 8, 1}, &shape, &stride, 0};
        managed.manager_ctx = this;
        managed.deleter = end;
        ++*count;
    }
    ~LeasedTensor() { --*count; }

    // Runs on any thread, without the GIL, perhaps after the interpreter is gone: counts down and frees, no more.
    static void end(DLManagedTensor *managed) { delete static_cast<LeasedTensor *>(managed->manager_ctx); }
};

nanobind::object Lease::capsule(std::uint64_t address, std::uint64_t nbytes, int device_type, int device_id) const {
    if (nbytes > std::uint64_t(INT64_MAX))
        throw std::invalid_argument("nbytes is " + std::to_string(nbytes) + ", more than a tensor can have");
    auto tensor = std::make_unique<LeasedTensor>(reinterpret_cast<void *>(address), static_cast<std::int64_t>(nbytes),
                                                 DLDevice{device_type, device_id}, count_);
    PyObject *capsule = PyCapsule_New(&tensor->managed, kUnconsumed, end_capsule);
    if (!capsule) throw nanobind::python_error();
    tensor.release();
    return nanobind::steal(capsule);
}

}  // namespace vmm
