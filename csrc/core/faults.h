// What stands at the door of each call of a list: a counter, armed faults, the seal. And the list of primitives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/status.h"

namespace vmm {

enum class Call { reserve, free_address, create, release, map, unmap, set_access, get_access, mem_info, zero };

// In the order of Call.
extern const std::vector<const char *> kPrimitives;

class Faults {
public:
    explicit Faults(const std::vector<const char *> &names) : names_(names), counts_(names.size()) {}

    // To be asked once by every call, before it does anything; `call` counts in the list of names. Success: go ahead.
    // Else: answer this.
    Status enter(std::size_t call);

    bool knows(const std::string &name) const { return index(name) < names_.size(); }

    // Arms one fault: the nth call from now of `name`, or of any in the list, answers `status`.
    // Throws std::invalid_argument.
    void arm(const std::string &name, std::int64_t nth, Status status);
    void clear() { armed_.clear(); }

    // From now on a call ends the process: proof for a test that nobody calls.
    void seal() { sealed_ = true; }

    std::map<std::string, std::uint64_t> counts() const;

private:
    struct Fault {
        std::size_t call;  // names_.size(): any
        std::int64_t left;
        Status status;
    };

    std::size_t index(const std::string &name) const;

    std::vector<const char *> names_;
    std::vector<std::uint64_t> counts_;
    std::vector<Fault> armed_;
    bool sealed_ = false;
};

}  // namespace vmm
