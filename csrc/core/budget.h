// The bytes of one device: how many there are, how many are taken, and the most that ever were.
#pragma once

#include <algorithm>
#include <cstdint>

namespace vmm {

class Budget {
public:
    explicit Budget(std::uint64_t total) : total_(total) {}

    std::uint64_t total() const { return total_; }
    std::uint64_t used() const { return used_; }
    std::uint64_t free() const { return total_ - used_; }
    std::uint64_t peak() const { return peak_; }
    void reset_peak() { peak_ = used_; }

    // Takes all of it or nothing.
    bool take(std::uint64_t size) {
        if (size > free()) return false;
        used_ += size;
        peak_ = std::max(peak_, used_);
        return true;
    }
    void give_back(std::uint64_t size) { used_ -= size; }

    // Bytes that something other than a handle holds: part of used(), known apart so that no more can be credited.
    bool charge(std::uint64_t size) {
        if (!take(size)) return false;
        charged_ += size;
        return true;
    }
    bool credit(std::uint64_t size) {
        if (size > charged_) return false;
        charged_ -= size;
        give_back(size);
        return true;
    }

private:
    std::uint64_t total_;
    std::uint64_t used_ = 0;
    std::uint64_t peak_ = 0;
    std::uint64_t charged_ = 0;
};

}  // namespace vmm
