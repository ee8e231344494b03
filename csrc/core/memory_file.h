// Files in memory: what all physical memory of the model is made of.
#pragma once

#include <cstdint>

namespace vmm {

// Writes `byte` all over a stretch of a file. False where the machine has no pages for it.
bool fill_file(int fd, std::uint64_t offset, std::uint64_t size, int byte);

// A file of exactly `size` bytes whose length nobody can change any more, so that another process may map it without
// fear of a signal. Costs nothing until it is written. The descriptor, or -1.
int make_sealed_file(std::uint64_t size);

// The size of a file that make_sealed_file made, here or in another process; 0 for any other.
std::uint64_t size_of_sealed_file(int fd);

// Whether two descriptors are of one file.
bool same_file(int a, int b);

}  // namespace vmm
