// What is mapped where. Bookkeeping only: no page is touched here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "core/access.h"
#include "core/physical_memory.h"

namespace vmm {

struct Mapping {
    std::uint64_t size;
    Handle made_with;  // the handle that its memory was made with
    Access access;
};

class MappingTable {
public:
    using Table = std::map<std::uint64_t, Mapping>;
    using Iterator = Table::iterator;

    // Mappings one after another; empty where first == last.
    struct Run {
        Iterator first, last;
        bool empty() const { return first == last; }
        Iterator begin() const { return first; }
        Iterator end() const { return last; }
    };

    // The whole mappings that fill a range without a gap; empty where it is not made of such.
    Run filling(std::uint64_t address, std::uint64_t size);

    // The mapping that an address lies in, or all().end().
    Table::const_iterator find(std::uint64_t address) const;

    // The same, or null.
    const Mapping *at(std::uint64_t address) const;

    bool any_in(std::uint64_t address, std::uint64_t size) const;
    bool writable(std::uint64_t address, std::uint64_t size, int device) const;

    // Whether one mapping holds all of a range that is not empty.
    bool in_one(std::uint64_t address, std::uint64_t size) const;

    Iterator add(std::uint64_t address, const Mapping &mapping) { return table_.emplace(address, mapping).first; }
    void remove(Run run) { table_.erase(run.first, run.last); }
    void remove(Iterator mapping) { table_.erase(mapping); }

    const Table &all() const { return table_; }

private:
    Table table_;  // by address
};

}  // namespace vmm
