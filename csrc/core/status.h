// The answers of the device model: the CUDA driver's numbers, so that a front end for CUDA passes them on unchanged.
#pragma once

#include <cstdint>
#include <utility>

namespace vmm {

static_assert(sizeof(void *) == 8, "reserving terabytes of addresses needs 64 bits");

// A plain int and no enum: an injected fault may carry any number of the driver's.
using Status = int;

constexpr Status kSuccess = 0;
constexpr Status kInvalidValue = 1;
constexpr Status kOutOfMemory = 2;
constexpr Status kInvalidDevice = 101;
constexpr Status kOperatingSystem = 304;
constexpr Status kCaptureUnsupported = 900;

// A status, and a value that means something only after success.
using Answer = std::pair<Status, std::uint64_t>;

// Whether [start, start + size) leaves the 64-bit numbers. Ask before adding what a caller passed in.
inline bool wraps(std::uint64_t start, std::uint64_t size) { return size > UINT64_MAX - start; }

}  // namespace vmm
