// Devices with a byte budget each, one address space, one pool of memory: the rules of a GPU driver's virtual memory
// calls on memory of this process. Knows nothing of who calls it.
//
// Every public function may be called from any thread. The lock is never held while foreign code runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/address_space.h"
#include "core/faults.h"
#include "core/mapping_table.h"
#include "core/physical_memory.h"
#include "core/status.h"

namespace vmm {

class DeviceModel {
public:
    // Throws std::invalid_argument, or std::bad_alloc where the pool cannot be made.
    DeviceModel(const std::vector<std::uint64_t> &budgets, std::uint64_t granule);
    ~DeviceModel();
    DeviceModel(const DeviceModel &) = delete;
    DeviceModel &operator=(const DeviceModel &) = delete;

    std::uint64_t granule() const { return granule_; }
    int devices() const { return memory_.devices(); }

    // The primitives. One that does not answer kSuccess has changed nothing.
    Answer reserve(std::uint64_t size, std::uint64_t alignment, std::uint64_t hint, std::uint64_t flags);
    Status free_address(std::uint64_t base, std::uint64_t size);
    Answer create(int device, std::uint64_t size, std::uint64_t flags);
    Status release(Handle handle);
    Status map(std::uint64_t address, std::uint64_t size, std::uint64_t offset, Handle handle, std::uint64_t flags);
    Status unmap(std::uint64_t address, std::uint64_t size);
    Status set_access(std::uint64_t address, std::uint64_t size, int device, int access);
    Answer get_access(std::uint64_t address, int device);
    struct MemInfo {
        Status status;
        std::uint64_t free, total;
    };
    MemInfo mem_info(int device);
    Status zero(std::uint64_t address, std::uint64_t size, int device);

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

    // For tests.
    bool poison() const { return poison_; }
    void set_poison(bool poison) { poison_ = poison; }
    void fail(const std::string &call, std::int64_t nth, Status status);
    void clear_faults();
    void seal();

private:
    template <class Body>
    Status primitive(Call call, Body body);
    template <class Body>
    auto reading(int device, Body body);

    bool in_one_reservation(std::uint64_t address, std::uint64_t size) const;
    bool change_access(MappingTable::Run run, int device, int access);

    const std::uint64_t granule_;
    std::mutex mutex_;
    PhysicalMemory memory_;
    AddressSpace addresses_;
    std::map<std::uint64_t, std::uint64_t> reservations_;  // base -> size
    MappingTable mappings_;
    Faults faults_;
    std::atomic<bool> poison_{false};
};

}  // namespace vmm
