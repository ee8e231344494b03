#include "core/faults.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace vmm {

const std::vector<const char *> kPrimitives = {"reserve", "free_address", "create",     "release",  "map",
                                               "unmap",   "set_access",   "get_access", "mem_info", "zero"};

Status Faults::enter(std::size_t call) {
    if (sealed_) {
        std::fprintf(stderr, "vmm_kv: %s was called on a sealed device\n", names_[call]);
        std::abort();
    }
    ++counts_[call];

    // Every fault counts every call that it watches. Where several come due at once the first armed answers.
    Status answer = kSuccess;
    for (Fault &fault : armed_) {
        if (fault.call != call && fault.call != names_.size()) continue;
        if (--fault.left == 0 && answer == kSuccess) answer = fault.status;
    }
    auto spent = [](const Fault &fault) { return fault.left == 0; };
    armed_.erase(std::remove_if(armed_.begin(), armed_.end(), spent), armed_.end());
    return answer;
}

std::size_t Faults::index(const std::string &name) const {
    return static_cast<std::size_t>(std::find(names_.begin(), names_.end(), name) - names_.begin());
}

void Faults::arm(const std::string &name, std::int64_t nth, Status status) {
    if (!knows(name) && name != "any") throw std::invalid_argument("no primitive is called \"" + name + "\"");
    if (nth < 1) throw std::invalid_argument("nth is " + std::to_string(nth) + "; the next call is 1");
    if (status == kSuccess) throw std::invalid_argument("status 0 is success and no fault");
    armed_.push_back({index(name), nth, status});
}

std::map<std::string, std::uint64_t> Faults::counts() const {
    std::map<std::string, std::uint64_t> named;
    for (std::size_t i = 0; i < names_.size(); ++i) named[names_[i]] = counts_[i];
    return named;
}

}  // namespace vmm
