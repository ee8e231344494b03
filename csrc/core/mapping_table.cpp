#include "core/mapping_table.h"

#include <iterator>

#include "core/status.h"

namespace vmm {

MappingTable::Run MappingTable::filling(std::uint64_t address, std::uint64_t size) {
    const Run nothing{table_.end(), table_.end()};
    if (size == 0 || wraps(address, size)) return nothing;

    Run run{table_.find(address), table_.find(address)};
    std::uint64_t filled = address;
    while (run.last != table_.end() && run.last->first == filled && filled < address + size) {
        filled += run.last->second.size;
        ++run.last;
    }
    return filled == address + size ? run : nothing;
}

MappingTable::Table::const_iterator MappingTable::find(std::uint64_t address) const {
    auto after = table_.upper_bound(address);
    if (after == table_.begin()) return table_.end();
    auto it = std::prev(after);
    return address - it->first < it->second.size ? it : table_.end();
}

const Mapping *MappingTable::at(std::uint64_t address) const {
    auto it = find(address);
    return it == table_.end() ? nullptr : &it->second;
}

bool MappingTable::any_in(std::uint64_t address, std::uint64_t size) const {
    if (at(address)) return true;
    auto next = table_.lower_bound(address);
    return next != table_.end() && next->first - address < size;
}

bool MappingTable::writable(std::uint64_t address, std::uint64_t size, int device) const {
    if (wraps(address, size)) return false;
    const std::uint64_t end = address + size;
    for (auto it = find(address); address < end; ++it) {
        if (it == table_.end() || it->first > address || it->second.access.of(device) != kAccessReadWrite) return false;
        address = it->first + it->second.size;
    }
    return true;
}

bool MappingTable::in_one(std::uint64_t address, std::uint64_t size) const {
    auto it = find(address);
    return it != table_.end() && size <= it->second.size - (address - it->first);
}

}  // namespace vmm
