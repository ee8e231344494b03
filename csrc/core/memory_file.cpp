#include "core/memory_file.h"

#include <algorithm>
#include <cerrno>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace vmm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

// By writing to the file and not through a mapping: running out of pages is then an error and not a signal.
bool fill_file(int fd, std::uint64_t offset, std::uint64_t size, int byte) {
    const std::vector<unsigned char> block(std::min<std::uint64_t>(size, 1 << 20), static_cast<unsigned char>(byte));
    while (size > 0) {
        ssize_t written = pwrite(fd, block.data(), std::min<std::uint64_t>(size, block.size()),
                                 static_cast<off_t>(offset));
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return false;
        offset += static_cast<std::uint64_t>(written);
        size -= static_cast<std::uint64_t>(written);
    }
    return true;
}

int make_sealed_file(std::uint64_t size) {
    int fd = memfd_create("vmm_kv exportable", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return -1;
    if (size <= std::uint64_t(INT64_MAX) && ftruncate(fd, static_cast<off_t>(size)) == 0 &&
        fcntl(fd, F_ADD_SEALS, kSeals) == 0)
        return fd;
    close(fd);
    return -1;
}

std::uint64_t size_of_sealed_file(int fd) {
    struct stat found;
    if (fcntl(fd, F_GET_SEALS) != kSeals || fstat(fd, &found) != 0) return 0;
    return static_cast<std::uint64_t>(found.st_size);
}

bool same_file(int a, int b) {
    struct stat first, second;
    return fstat(a, &first) == 0 && fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
           first.st_ino == second.st_ino;
}

}  // namespace vmm
