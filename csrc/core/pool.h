// The physical memory of the model, but for what can be exported: one sparse file in memory, cut into extents.
//
// One file and not one for each handle: it takes one descriptor, and the kernel merges neighbouring extents that are
// mapped at neighbouring addresses into one area, so that many thousand chunks do not run into its limit on areas.
#pragma once

#include <cstdint>
#include <map>

namespace vmm {

class Pool {
public:
    // Throws std::bad_alloc where the file cannot be made.
    Pool();
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    int fd() const { return fd_; }

    // Finds room for an extent and returns its offset in the file, or kNone. Its bytes are zero and cost nothing until
    // they are written. The lowest free offset wins, so extents made one after another lie one after another.
    static constexpr std::uint64_t kNone = UINT64_MAX;
    std::uint64_t take(std::uint64_t size);

    // Gives the pages of an extent back to the machine, and the extent to the next taker.
    void give_back(std::uint64_t offset, std::uint64_t size) noexcept;

private:
    bool grow(std::uint64_t end);

    int fd_;
    std::uint64_t length_ = 0;                    // of the file
    std::uint64_t end_ = 0;                       // of the highest extent so far
    std::map<std::uint64_t, std::uint64_t> free_;  // offset -> size, below end_, neighbours joined
};

}  // namespace vmm
