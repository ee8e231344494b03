// What the emulated driver libraries have in common: one process-wide device model, its switches, and the moments in
// which a driver answers nothing but "no". A library is a front end that translates structs, codes and names.
//
// The control functions for tests (vmm_emu_...) are in control.cpp.
#pragma once

#include <cstdint>
#include <memory>

#include "core/device_model.h"
#include "core/dialect.h"
#include "core/status.h"

#define VMM_EXPORT extern "C" __attribute__((visibility("default")))

namespace vmm::emulation {

constexpr Status kNotInitialized = 3;
constexpr Status kDeinitialized = 4;
constexpr Status kNoDevices = 100;
constexpr Status kNotSupported = 801;

// What a front end says of itself. Each library defines its own.
struct FrontEnd {
    Dialect dialect;
    bool capture_refuses_mapping;    // S1
    void (*forget_thread)();         // what is current for the calling thread, at a reset
    std::int64_t driver_version, runtime_version;
};
extern const FrontEnd kFrontEnd;

// What a test can change at any time; their names are in emulation.cpp.
enum class Switch {
    poison,
    capturing,
    vmm_supported,
    rdma,
    fabric,
    ignore_hint,
    integrated,
    driver_version,
    runtime_version,
    minimum_granularity,
    recommended_granularity,
    deinitialized,
    access_from_first,
    joint_unmap_busy,
    memory_with_addresses,
    granularity_4k,
    single_memset,
    ignore_alignment,
};
std::int64_t value(Switch which);
inline bool on(Switch which) { return value(which) != 0; }

// The model of the moment. Hold it for the length of a call: a reset puts another in its place.
std::shared_ptr<DeviceModel> model();

// To be asked first by every call of the driver, primitive or not. A driver does not survive a fork. There are no devices
// before a test has asked for some: whoever comes upon the library by accident must not take it for a GPU.
Status enter();

// The calls that are no primitives. They are counted and made to fail by these names, and "any" does not mean them.
enum class Side { init, device, context, stream, capture_mode };
Status enter(Side side);

// A primitive is made while `device` is current (one that creates: on `device`).
void count_on(int device);

// What the granularity query says: perhaps not what the rules demand.
std::uint64_t granularity(bool recommended);

// Identity of a device, the same in both libraries: "GPU-..." bytes and "0000:01:00.0".
constexpr const char *kDeviceName = "vmm_kv emulated device";
constexpr int kPciDomain = 0, kPciDevice = 0;
inline int pci_bus(int device) { return device + 1; }
void uuid_of(int device, char (&bytes)[16]);
int pci_bus_id(int device, char *text, int room);  // as snprintf
int device_at_pci(const char *text);               // -1: none

}  // namespace vmm::emulation
