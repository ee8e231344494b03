// A few kernel map areas held in reserve, so that giving memory back works when the process has used up its areas.
//
// The kernel allows a process about 65,000 areas (vm.max_map_count). At that limit it refuses an mmap even where the
// mmap would put an area back. Ballast is areas that nobody needs: drop them, undo, take them up again.
#pragma once

#include <cstdint>

namespace vmm {

class Ballast {
public:
    Ballast();
    ~Ballast();
    Ballast(const Ballast &) = delete;
    Ballast &operator=(const Ballast &) = delete;

    // Frees the areas. Needs none itself, so it works at the limit.
    void drop();

    // Takes up as many areas as the kernel gives. Cheap where there is nothing to do.
    void refill();

private:
    // Pages of alternating protection do not merge: every page is an area of its own. An odd number of them, so that
    // the first and the last are alike and drop() cuts no area in two.
    static constexpr std::uint64_t kPages = 129;

    char *page(std::uint64_t index) const { return base_ + index * page_size_; }

    std::uint64_t page_size_;
    char *base_ = nullptr;          // null where even one area was refused: then there is no ballast
    std::uint64_t refilled_ = 0;    // pages below this one alternate
};

}  // namespace vmm
