#include "core/ballast.h"

#include <sys/mman.h>
#include <unistd.h>

namespace vmm {

Ballast::Ballast() : page_size_(static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE))) {
    void *base = mmap(nullptr, kPages * page_size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base != MAP_FAILED) base_ = static_cast<char *>(base);
    refill();
}

Ballast::~Ballast() {
    if (base_) munmap(base_, kPages * page_size_);
}

void Ballast::drop() {
    if (base_) mprotect(page(1), (kPages - 2) * page_size_, PROT_NONE);
    refilled_ = 0;
}

void Ballast::refill() {
    if (!base_) return;
    for (; refilled_ + 2 < kPages; refilled_ += 2)
        if (mprotect(page(refilled_ + 1), page_size_, PROT_READ) != 0) return;
}

}  // namespace vmm
