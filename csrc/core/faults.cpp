#include "core/faults.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <stdexcept>

namespace vmm {
namespace {

// In the order of Call.
constexpr const char *kNames[] = {"reserve", "free_address", "create",     "release",  "map",
                                  "unmap",   "set_access",   "get_access", "mem_info", "zero"};

}  // namespace

Status Faults::enter(Call call) {
    const auto index = static_cast<std::size_t>(call);
    if (sealed_) {
        std::fprintf(stderr, "vmm_kv: %s was called on a sealed device\n", kNames[index]);
        std::abort();
    }
    ++counts_[index];

    // Every fault counts every call that it watches. Where several come due at once the first armed answers.
    Status answer = kSuccess;
    for (Fault &fault : armed_) {
        if (fault.call != index && fault.call != kAny) continue;
        if (--fault.left == 0 && answer == kSuccess) answer = fault.status;
    }
    auto spent = [](const Fault &fault) { return fault.left == 0; };
    armed_.erase(std::remove_if(armed_.begin(), armed_.end(), spent), armed_.end());
    return answer;
}

void Faults::arm(const std::string &name, std::int64_t nth, Status status) {
    static_assert(sizeof(kNames) / sizeof(*kNames) == kCalls);
    auto found = std::find(std::begin(kNames), std::end(kNames), name);
    if (found == std::end(kNames) && name != "any")
        throw std::invalid_argument("no primitive is called \"" + name + "\"");
    if (nth < 1) throw std::invalid_argument("nth is " + std::to_string(nth) + "; the next call is 1");
    if (status == kSuccess) throw std::invalid_argument("status 0 is success and no fault");
    armed_.push_back({static_cast<std::size_t>(found - std::begin(kNames)), nth, status});
}

std::map<std::string, std::uint64_t> Faults::counts() const {
    std::map<std::string, std::uint64_t> named;
    for (std::size_t i = 0; i < kCalls; ++i) named[kNames[i]] = counts_[i];
    return named;
}

}  // namespace vmm
