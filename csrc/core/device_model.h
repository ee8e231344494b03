// Devices with a byte budget each, one address space, one pool of memory: the rules of a GPU driver's virtual memory
// calls on memory of this process. Knows nothing of who calls it.
//
// Every public function may be called from any thread. The lock is never held while foreign code runs.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/address_space.h"
#include "core/dialect.h"
#include "core/faults.h"
#include "core/mapping_table.h"
#include "core/physical_memory.h"
#include "core/status.h"

namespace vmm {

class DeviceModel {
public:
    // Throws std::invalid_argument, or std::bad_alloc where the pool cannot be made.
    DeviceModel(const std::vector<std::uint64_t> &budgets, std::uint64_t granule, const Dialect &dialect = {});
    ~DeviceModel();
    DeviceModel(const DeviceModel &) = delete;
    DeviceModel &operator=(const DeviceModel &) = delete;

    std::uint64_t granule() const { return granule_; }
    int devices() const { return memory_.devices(); }

    // The primitives. One that does not answer kSuccess has changed nothing.
    Answer reserve(std::uint64_t size, std::uint64_t alignment, std::uint64_t hint, std::uint64_t flags);
    Status free_address(std::uint64_t base, std::uint64_t size);
    Answer create(int device, std::uint64_t size, std::uint64_t flags, Traits traits = {});
    Status release(Handle handle);
    Status map(std::uint64_t address, std::uint64_t size, std::uint64_t offset, Handle handle, std::uint64_t flags);
    Status unmap(std::uint64_t address, std::uint64_t size);
    struct Grant {
        int device, access;
    };
    Status set_access(std::uint64_t address, std::uint64_t size, const std::vector<Grant> &grants);
    Answer get_access(std::uint64_t address, int device);
    struct MemInfo {
        Status status;
        std::uint64_t free, total;
    };
    MemInfo mem_info(int device);
    Status zero(std::uint64_t address, std::uint64_t size, int device, int byte = 0);

    // A call of a primitive that a front end refuses with `status`: counted and made to fail like all others.
    Status refuse(Call call, Status status);

    // One more reference to the handle whose memory lies at an address; the handle that it was made with (L2).
    // These four are no primitives: neither counted nor made to fail.
    Answer retain(std::uint64_t address);
    Answer export_file(Handle handle);
    Answer import_file(int fd, int device);
    Answer import(Handle exported);

    // Memory that something other than a handle holds, against the same budget. Neither counted nor made to fail.
    Status charge(int device, std::uint64_t size);
    Status credit(int device, std::uint64_t size);

    // Readings: neither counted nor made to fail. std::invalid_argument for a device that is not there.
    std::uint64_t used(int device);
    std::uint64_t budget(int device);
    std::uint64_t peak_used(int device);
    void reset_peak(int device);
    std::map<std::string, std::uint64_t> live();
    std::map<std::string, std::uint64_t> calls();
    std::vector<std::pair<std::uint64_t, std::uint64_t>> mapped();

    // What lies at an address, and what a handle stands for. Empty: nothing, or no handle.
    struct Span {
        std::uint64_t base, size;
    };
    std::optional<Span> reservation_at(std::uint64_t address);
    struct Placed {
        Span span;
        Allocation allocation;
        Access access;
    };
    std::optional<Placed> mapping_at(std::uint64_t address);
    std::optional<Allocation> allocation(Handle handle);

    // The reservations and what is mapped in them stay in the process when this model goes.
    void leave_addresses();

    // For tests.
    Switches switches;
    void fail(const std::string &call, std::int64_t nth, Status status);
    void clear_faults();
    void seal();

private:
    template <class Body>
    Status primitive(Call call, Body body);
    template <class Body>
    auto reading(int device, Body body);

    struct Reservation {
        std::uint64_t size;
        std::uint64_t serial;  // never used twice, while addresses are
        bool busy = false;     // cannot be freed any more (B2)
    };
    using Reservations = std::map<std::uint64_t, Reservation>;  // by base

    std::uint64_t find_addresses(std::uint64_t size, std::uint64_t alignment, std::uint64_t hint);
    Reservations::iterator reservation_of(std::uint64_t address, std::uint64_t size);
    bool summed_from_first(std::uint64_t address, std::uint64_t size);
    bool change_access(MappingTable::Run run, const std::vector<Grant> &grants);

    const std::uint64_t granule_;
    const Dialect dialect_;
    std::mutex mutex_;
    PhysicalMemory memory_;
    AddressSpace addresses_;
    Reservations reservations_;
    std::uint64_t next_serial_ = 1;
    MappingTable mappings_;
    Faults faults_;
};

}  // namespace vmm
