// Counts the tensors that lie over a range of addresses, so that the range is not given up under one of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include <nanobind/nanobind.h>

namespace vmm {

class Lease {
public:
    std::int64_t count() const { return *count_; }

    // A DLPack capsule of a uint8 vector over a raw address. The address is passed on and never looked at.
    nanobind::object capsule(std::uint64_t address, std::uint64_t nbytes, int device_type, int device_id) const;

private:
    // Shared with every tensor: one may outlive the lease, and its end must touch no Python object.
    using Count = std::atomic<std::int64_t>;
    std::shared_ptr<Count> count_ = std::make_shared<Count>(0);

    struct LeasedTensor;
};

}  // namespace vmm
