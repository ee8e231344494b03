// The list of primitives, and what stands at the door of each: a counter, armed faults, the seal.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/status.h"

namespace vmm {

enum class Call { reserve, free_address, create, release, map, unmap, set_access, get_access, mem_info, zero };

class Faults {
public:
    // To be asked once by every call of a primitive, before it does anything. Success: go ahead. Else: answer this.
    Status enter(Call call);

    // Arms one fault: the nth call from now of `name`, or of any primitive, answers `status`.
    // Throws std::invalid_argument.
    void arm(const std::string &name, std::int64_t nth, Status status);
    void clear() { armed_.clear(); }

    // From now on a call ends the process: proof for a test that nobody calls.
    void seal() { sealed_ = true; }

    std::map<std::string, std::uint64_t> counts() const;

private:
    static constexpr std::size_t kCalls = static_cast<std::size_t>(Call::zero) + 1;
    static constexpr std::size_t kAny = kCalls;

    struct Fault {
        std::size_t call;
        std::int64_t left;
        Status status;
    };

    std::array<std::uint64_t, kCalls> counts_{};
    std::vector<Fault> armed_;
    bool sealed_ = false;
};

}  // namespace vmm
