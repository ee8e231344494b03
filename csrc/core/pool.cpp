#include "core/pool.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <new>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace vmm {

Pool::Pool() : fd_(memfd_create("vmm_kv pool", MFD_CLOEXEC)) {
    if (fd_ < 0) throw std::bad_alloc();
}

Pool::~Pool() { close(fd_); }

std::uint64_t Pool::take(std::uint64_t size) {
    for (auto it = free_.begin(); it != free_.end(); ++it) {
        auto [offset, room] = *it;
        if (room < size) continue;
        if (room > size) free_.emplace_hint(std::next(it), offset + size, room - size);
        free_.erase(it);
        return offset;
    }
    if (size > std::uint64_t(INT64_MAX) - end_ || !grow(end_ + size)) return kNone;
    std::uint64_t offset = end_;
    end_ += size;
    return offset;
}

// Length costs nothing in a sparse file: doubling it saves a system call for most extents.
bool Pool::grow(std::uint64_t end) {
    if (end <= length_) return true;
    std::uint64_t generous = std::max(end, std::min(2 * length_, std::uint64_t(INT64_MAX)));
    for (std::uint64_t length : {generous, end}) {
        if (ftruncate(fd_, static_cast<off_t>(length)) != 0) continue;
        length_ = length;
        return true;
    }
    return false;
}

void Pool::give_back(std::uint64_t offset, std::uint64_t size) noexcept try {
    int rc;
    do {
        rc = fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                       static_cast<off_t>(size));
    } while (rc != 0 && errno == EINTR);
    if (rc != 0) return;  // still holds old contents: never handed out again

    auto it = free_.emplace(offset, size).first;
    if (auto next = std::next(it); next != free_.end() && offset + size == next->first) {
        it->second += next->second;
        free_.erase(next);
    }
    if (it == free_.begin()) return;
    if (auto previous = std::prev(it); previous->first + previous->second == offset) {
        previous->second += it->second;
        free_.erase(it);
    }
} catch (const std::bad_alloc &) {
    // The extent cannot be listed as free. Its pages are gone already: only a stretch of a sparse file is lost.
}

}  // namespace vmm
