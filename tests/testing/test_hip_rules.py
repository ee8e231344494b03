"""The rules of ROCm's virtual memory as the emulated runtime shows them to unmodified hip-python.

One test a rule, named by it, where HIP differs from CUDA or has an answer of its own; rules in which both agree are the
model's and are tested for CUDA. Then the known bugs: what goes wrong, and the shape of calls that goes around it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vmm_kv.driver.hip import HipDriver
from vmm_kv.errors import DriverError, UnsupportedError
from vmm_kv.testing import load_hip
from vmm_kv.testing.emulation import EmulatedModel

hip: Any = importlib.import_module("hip").hip  # the binding says of its functions that they have no types

GRANULE = 2 << 20
PAGE = os.sysconf("SC_PAGESIZE")
OK, INVALID, NO_MEMORY, NOT_INITIALIZED, DEINITIALIZED = 0, 1, 2, 3, 4
INVALID_DEVICE, NOT_SUPPORTED, UNKNOWN = 101, 801, 999
POSIX_FD, FABRIC = 1, 8
READ_WRITE = 3


@pytest.fixture(autouse=True)
def model() -> Iterator[EmulatedModel]:
    yield load_hip(devices=2, budget=32 * GRANULE, granule=GRANULE)
    hip.hipSetDevice(0)


# hip-python, with plain numbers in and out.


def properties(device: int = 0, handle_type: int = 0, kind: int = 1, where: int = 1) -> Any:
    made = hip.hipMemAllocationProp()
    made.type = hip.hipMemAllocationType(kind)
    made.location.type = hip.hipMemLocationType(where)
    made.location.id = device
    # The binding leaves out the union that the handle type is in.
    ctypes.c_int.from_address(int(made) + 4).value = handle_type
    return made


def access_for(device: int = 0, flags: int = READ_WRITE) -> Any:
    access = hip.hipMemAccessDesc()
    access.location.type = hip.hipMemLocationType.hipMemLocationTypeDevice
    access.location.id = device
    ctypes.c_int.from_address(int(access) + 8).value = flags
    return access


def try_reserve(size: int, alignment: int = 0, hint: int = 0, flags: int = 0) -> tuple[int, int]:
    status, base = hip.hipMemAddressReserve(size, alignment, hint, flags)
    return int(status), int(base or 0)


def try_create(size: int = GRANULE, flags: int = 0, made: Any = None) -> tuple[int, int]:
    status, handle = hip.hipMemCreate(size, made if made is not None else properties(), flags)
    return int(status), int(handle or 0)


def free_address(base: int, size: int) -> int:
    return int(hip.hipMemAddressFree(base, size)[0])


def map_at(address: int, handle: int, size: int = GRANULE, offset: int = 0, flags: int = 0) -> int:
    return int(hip.hipMemMap(address, size, offset, handle, flags)[0])


def unmap(address: int, size: int) -> int:
    return int(hip.hipMemUnmap(address, size)[0])


def set_access(address: int, size: int, access: Any = None, count: int = 1) -> int:
    return int(hip.hipMemSetAccess(address, size, access if access is not None else access_for(), count)[0])


def get_access(address: int, device: int = 0) -> tuple[int, int]:
    description = access_for(device)  # which the location is a part of
    status, flags = hip.hipMemGetAccess(description.location, address)
    return int(status), int(flags)


def release(handle: int) -> int:
    return int(hip.hipMemRelease(handle)[0])


def free_memory() -> int:
    status, free, _ = hip.hipMemGetInfo()
    assert status == OK
    return int(free)


def reserve(granules: int) -> int:
    status, base = try_reserve(granules * GRANULE)
    assert status == OK
    return base


def create(granules: int = 1) -> int:
    status, handle = try_create(granules * GRANULE)
    assert status == OK
    return handle


def chunk(address: int, granules: int = 1) -> int:
    handle = create(granules)
    assert map_at(address, handle, granules * GRANULE) == OK
    return handle


def in_a_thread(action: Callable[[], Any]) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(action()))
    thread.start()
    thread.join()
    return answers[0]


# Beginning.


def test_g1_the_first_call_initializes() -> None:
    """CUDA answers 3 before cuInit. hipInit is there all the same."""
    assert hip.hipGetDeviceCount() == (OK, 2)
    assert hip.hipInit(0) == (OK,)
    assert hip.hipInit(1) == (INVALID,)


def test_g2_no_context_and_every_thread_starts_on_device_0() -> None:
    """CUDA answers 201 to a thread without a context."""
    assert hip.hipSetDevice(1) == (OK,)

    def action() -> tuple[object, tuple[int, int]]:
        return hip.hipGetDevice()[1], try_create()

    device, (status, handle) = in_a_thread(action)
    assert (device, status) == (0, OK)
    assert handle
    assert hip.hipGetDevice() == (OK, 1)
    assert hip.hipSetDevice(2) == (INVALID_DEVICE,)
    assert hip.hipSetDevice(-1) == (INVALID_DEVICE,)
    assert hip.hipGetDevice() == (OK, 1)


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("location", [0, 1])
def test_g3_memory_is_made_on_the_current_device(model: EmulatedModel, current: int, location: int) -> None:
    """Whatever the location says."""
    hip.hipSetDevice(current)
    status, _ = try_create(made=properties(location))
    assert status == OK
    assert [model.used(0), model.used(1)] == [GRANULE if device == current else 0 for device in (0, 1)]
    assert free_memory() == 31 * GRANULE


def test_g4_after_a_fork_the_child_has_no_driver() -> None:
    pid = os.fork()
    if pid == 0:
        try:
            code = int(hip.hipGetDevice()[0]) * 16 + try_create()[0]
        except BaseException:
            code = 255
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert (code // 16, code % 16) == (NOT_INITIALIZED, NOT_INITIALIZED)


def test_g5_support_of_virtual_memory_is_an_attribute(model: EmulatedModel) -> None:
    attribute = hip.hipDeviceAttribute_t.hipDeviceAttributeVirtualMemoryManagementSupported
    assert hip.hipDeviceGetAttribute(attribute, 0) == (OK, 1)
    model.set("vmm_supported", 0)
    assert hip.hipDeviceGetAttribute(attribute, 1) == (OK, 0)
    assert hip.hipDeviceGetAttribute(attribute, 2)[0] == INVALID_DEVICE
    assert try_reserve(GRANULE) == (NOT_SUPPORTED, 0)
    assert try_create() == (NOT_SUPPORTED, 0)


def test_an_unknown_attribute_is_an_invalid_value() -> None:
    """As a runtime answers that is older than the binding."""
    assert hip.hipDeviceGetAttribute(hip.hipDeviceAttribute_t.hipDeviceAttributeWarpSize, 0)[0] == INVALID


# Addresses.


def test_r1_to_r4_what_can_be_reserved() -> None:
    for size in (0, 1, GRANULE - 1, GRANULE + PAGE):
        assert try_reserve(size) == (INVALID, 0)
    for alignment in (3, GRANULE + 1, 3 * GRANULE):
        assert try_reserve(GRANULE, alignment) == (INVALID, 0)
    assert try_reserve(GRANULE, flags=1) == (INVALID, 0)
    for alignment in (0, PAGE, GRANULE, 4 * GRANULE):
        status, base = try_reserve(GRANULE, alignment)
        assert (status, base % max(alignment, GRANULE)) == (OK, 0)


def test_r3_a_hint_that_is_no_address_is_ignored(model: EmulatedModel) -> None:
    """CUDA answers =1. A hint is a wish in any case: another address may come, without an error."""
    status, base = try_reserve(GRANULE, hint=PAGE + 1)
    assert status == OK
    assert base % GRANULE == 0
    free_address(base, GRANULE)
    assert try_reserve(GRANULE, hint=base) == (OK, base)
    status, other = try_reserve(GRANULE, hint=base)
    assert status == OK
    assert other != base
    free_address(base, GRANULE)
    model.set("ignore_hint", 1)
    status, other = try_reserve(GRANULE, hint=base)
    assert status == OK
    assert other != base


def test_r5_addresses_run_out() -> None:
    assert try_reserve(1 << 60) == (NO_MEMORY, 0)


def test_f1_freeing_looks_at_the_base_and_not_at_the_size(model: EmulatedModel) -> None:
    """CUDA wants exactly the size of the reservation."""
    base = reserve(4)
    assert free_address(base + GRANULE, 3 * GRANULE) == INVALID
    assert free_address(base, 0) == INVALID
    assert free_address(base, GRANULE) == OK
    assert model.live()["reservations"] == 0
    assert free_address(base, 4 * GRANULE) == INVALID


def test_f2_freeing_what_is_mapped_in_is_an_unknown_error(model: EmulatedModel) -> None:
    """CUDA answers =1."""
    base = reserve(2)
    chunk(base + GRANULE)
    assert free_address(base, 2 * GRANULE) == UNKNOWN
    assert model.live()["reservations"] == 1
    assert unmap(base + GRANULE, GRANULE) == OK
    assert free_address(base, 2 * GRANULE) == OK


# Memory.


def test_c1_c2_sizes_of_memory() -> None:
    for size in (0, 1, PAGE, GRANULE + 1):
        assert try_create(size) == (INVALID, 0)
    assert try_create(33 * GRANULE) == (NO_MEMORY, 0)
    assert try_create(32 * GRANULE)[0] == OK
    assert try_create(GRANULE) == (NO_MEMORY, 0)


def test_c3_a_device_that_is_not_there() -> None:
    for device in (2, -1):
        assert try_create(made=properties(device)) == (INVALID_DEVICE, 0)


def test_c4_pinned_or_uncached_memory_of_the_device() -> None:
    """CUDA knows pinned memory only."""
    assert try_create(made=properties(kind=1))[0] == OK
    assert try_create(made=properties(kind=0x40000000))[0] == OK
    for kind in (0, 2):
        assert try_create(made=properties(kind=kind)) == (INVALID, 0)
    assert try_create(made=properties(where=0)) == (INVALID, 0)
    assert try_create(flags=1) == (INVALID, 0)


def test_c5_handle_types_that_are_not_supported(model: EmulatedModel) -> None:
    """CUDA answers 800 to a fabric handle without an IMEX channel; HIP has no such status."""
    assert try_create(made=properties(handle_type=POSIX_FD))[0] == OK
    for handle_type in (2, 4, FABRIC):
        assert try_create(made=properties(handle_type=handle_type)) == (NOT_SUPPORTED, 0)
    attribute = hip.hipDeviceAttribute_t.hipDeviceAttributeHandleTypeFabricSupported
    for fabric, says, status in ((0, 0, NOT_SUPPORTED), (1, 1, NOT_SUPPORTED), (2, 1, OK)):
        model.set("fabric", fabric)
        assert hip.hipDeviceGetAttribute(attribute, 0) == (OK, says)
        assert try_create(made=properties(handle_type=FABRIC))[0] == status


def test_c6_the_rdma_flag_is_not_checked() -> None:
    """CUDA wants the attribute to be asked first."""
    attribute = hip.hipDeviceAttribute_t.hipDeviceAttributeGPUDirectRDMAWithHipVMMSupported
    assert hip.hipDeviceGetAttribute(attribute, 0) == (OK, 0)
    made = properties()
    made.allocFlags.gpuDirectRDMACapable = 1
    status, handle = try_create(made=made)
    assert status == OK
    status, answer = hip.hipMemGetAllocationPropertiesFromHandle(handle)
    assert status == OK
    assert answer.allocFlags.gpuDirectRDMACapable == 1


def test_granularity_of_what_cannot_be_made() -> None:
    flags = hip.hipMemAllocationGranularity_flags
    minimum, recommended = flags.hipMemAllocationGranularityMinimum, flags.hipMemAllocationGranularityRecommended
    assert hip.hipMemGetAllocationGranularity(properties(), minimum) == (OK, GRANULE)
    assert hip.hipMemGetAllocationGranularity(properties(1), recommended) == (OK, GRANULE)
    assert hip.hipMemGetAllocationGranularity(properties(2), minimum)[0] == INVALID
    assert hip.hipMemGetAllocationGranularity(properties(kind=0), minimum)[0] == INVALID


# Mapping and access.


def test_m1_to_m4_what_can_be_mapped() -> None:
    base, handle = reserve(4), create(2)
    size = 2 * GRANULE
    assert map_at(base + 3 * GRANULE, handle, size) == INVALID, "M1"
    assert map_at(base + PAGE, handle, size) == INVALID, "M3"
    assert map_at(base, handle, size, offset=GRANULE) == INVALID, "M3"
    assert map_at(base, handle, size, flags=1) == INVALID, "M3"
    assert map_at(base, handle, GRANULE) == INVALID, "M4"
    assert map_at(base, handle, 3 * GRANULE) == INVALID, "M4"
    assert map_at(base, 12345, size) == INVALID
    assert map_at(base, handle, size) == OK
    assert map_at(base + GRANULE, handle, size) == INVALID, "M2"
    assert map_at(base + size, handle, size) == OK, "M5"
    assert release(handle) == OK, "M7"
    assert release(handle) == INVALID, "L1"


def test_a1_a2_what_access_can_be_granted_to() -> None:
    base = reserve(4)
    chunk(base)
    chunk(base + GRANULE, 2)
    assert set_access(base, 3 * GRANULE) == OK
    for start, granules in ((0, 2), (1, 1), (2, 1), (0, 4), (3, 1)):
        assert set_access(base + start * GRANULE, granules * GRANULE) == INVALID, "A1"
    assert set_access(base, GRANULE, access_for(flags=2)) == INVALID, "A2"
    assert int(hip.hipMemSetAccess(base, GRANULE, None, 1)[0]) == INVALID, "A2"
    assert set_access(base, GRANULE, count=0) == INVALID, "A2"


def test_a3_access_for_a_device_that_is_not_there() -> None:
    """CUDA answers 101."""
    base = reserve(1)
    chunk(base)
    for device in (2, -1):
        assert set_access(base, GRANULE, access_for(device)) == INVALID
        assert get_access(base, device)[0] == INVALID
    assert get_access(base) == (OK, 0)


def test_a4_access_is_by_device_and_ends_with_the_mapping() -> None:
    base, handle = reserve(1), create()
    assert map_at(base, handle) == OK
    assert set_access(base, GRANULE, access_for(1)) == OK
    assert (get_access(base, 0), get_access(base, 1)) == ((OK, 0), (OK, READ_WRITE))
    assert unmap(base, GRANULE) == OK
    assert map_at(base, handle) == OK
    assert get_access(base, 1) == (OK, 0)


def test_a5_access_of_what_is_not_mapped() -> None:
    base = reserve(2)
    chunk(base)
    assert get_access(base + GRANULE)[0] == INVALID
    assert get_access(GRANULE)[0] == INVALID


def test_u1_unmapping_takes_whole_mappings() -> None:
    base = reserve(4)
    chunk(base, 2)
    chunk(base + 2 * GRANULE)
    for start, granules in ((0, 1), (1, 1), (1, 2), (0, 4), (3, 1)):
        assert unmap(base + start * GRANULE, granules * GRANULE) == INVALID
    assert unmap(base, 3 * GRANULE) == OK, "a release without B2"
    assert free_address(base, 4 * GRANULE) == OK


def test_l2_retaining_takes_one_more_reference(model: EmulatedModel) -> None:
    base = reserve(2)
    handle = chunk(base)
    status, retained = hip.hipMemRetainAllocationHandle(base + PAGE)
    assert (int(status), int(retained)) == (OK, handle)
    assert hip.hipMemRetainAllocationHandle(base + GRANULE)[0] == INVALID
    unmap(base, GRANULE)
    assert release(handle) == OK
    assert model.used(0) == GRANULE
    assert release(handle) == OK
    assert model.used(0) == 0


# Sharing.


def export(handle: int, handle_type: int = POSIX_FD, flags: int = 0) -> tuple[int, int]:
    fd = ctypes.c_int(-1)
    kind = hip.hipMemAllocationHandleType(handle_type)
    (status,) = hip.hipMemExportToShareableHandle(ctypes.addressof(fd), handle, kind, flags)
    return int(status), fd.value


def import_fd(fd: int, handle_type: int = POSIX_FD) -> tuple[int, int]:
    status, handle = hip.hipMemImportFromShareableHandle(fd, hip.hipMemAllocationHandleType(handle_type))
    return int(status), int(handle or 0)


def test_x1_only_what_was_made_for_it_is_exported() -> None:
    _, plain = try_create()
    _, shared = try_create(made=properties(handle_type=POSIX_FD))
    assert export(plain)[0] == INVALID
    assert export(shared, FABRIC)[0] == INVALID
    assert export(shared, flags=1)[0] == INVALID
    assert export(12345)[0] == INVALID
    status, fd = export(shared)
    assert status == OK
    os.close(fd)


def test_x2_an_import_is_the_same_memory_and_has_its_own_release(model: EmulatedModel) -> None:
    """Whatever cannot be imported is =1; CUDA answers 801."""
    _, handle = try_create(made=properties(handle_type=POSIX_FD))
    status, fd = export(handle)
    assert status == OK
    status, imported = import_fd(fd)
    assert status == OK
    os.close(fd)
    assert model.used(0) == GRANULE, "not charged again"
    base = reserve(2)
    assert map_at(base, handle) == map_at(base + GRANULE, imported) == OK
    assert set_access(base, 2 * GRANULE) == OK
    ctypes.memmove(base + 5, b"shared", 6)
    assert ctypes.string_at(base + GRANULE + 5, 6) == b"shared"
    assert unmap(base, 2 * GRANULE) == OK
    assert release(handle) == OK
    assert release(imported) == OK
    assert release(imported) == INVALID
    assert model.used(0) == 0

    for other, handle_type in ((fd, POSIX_FD), (os.open(os.devnull, os.O_RDONLY), POSIX_FD), (1, FABRIC)):
        assert import_fd(other, handle_type) == (INVALID, 0)


# Pointers, streams, captures.


def test_p1_nothing_is_known_of_an_address_that_is_merely_reserved() -> None:
    """CUDA knows the reservation."""
    base = reserve(4)
    chunk(base + GRANULE, 2)
    attributes = hip.hipPointer_attribute
    answer = ctypes.c_uint64()
    for attribute, expected in (
        (attributes.HIP_POINTER_ATTRIBUTE_RANGE_START_ADDR, base + GRANULE),
        (attributes.HIP_POINTER_ATTRIBUTE_RANGE_SIZE, 2 * GRANULE),
    ):
        target = ctypes.addressof(answer)
        assert hip.hipPointerGetAttribute(target, attribute, base) == (INVALID,)
        assert hip.hipPointerGetAttribute(target, attribute, base + 2 * GRANULE) == (OK,)
        assert answer.value == expected


def test_p2_one_write_does_not_span_two_reservations() -> None:
    """Adjacent ones. CUDA takes it; on ROCm it is =1."""
    whole = reserve(2)
    free_address(whole, 2 * GRANULE)
    first, second = (try_reserve(GRANULE, hint=whole + i * GRANULE)[1] for i in range(2))
    assert (first, second) == (whole, whole + GRANULE)
    for base in (first, second):
        chunk(base)
        assert set_access(base, GRANULE) == OK
    status, stream = hip.hipStreamCreateWithFlags(hip.hipStreamNonBlocking)
    assert status == OK
    assert hip.hipMemsetD8Async(second - 1, 0, 2, stream) == (INVALID,)
    assert hip.hipMemsetD8Async(second - 1, 0, 1, stream) == (OK,)
    assert hip.hipMemsetD8Async(second, 0, 1, None) == (OK,)
    assert hip.hipStreamDestroy(stream) == (OK,)


def test_s1_mapping_calls_succeed_in_a_capture(model: EmulatedModel) -> None:
    """ROCm's own tests expect it in every capture mode. The emulated CUDA answers 900."""
    model.set("capturing", 1)
    capturing = hip.hipStreamCaptureStatus.hipStreamCaptureStatusActive
    assert hip.hipStreamIsCapturing(None) == (OK, capturing)
    base = reserve(1)
    handle = chunk(base)
    assert set_access(base, GRANULE) == OK
    assert unmap(base, GRANULE) == OK
    assert release(handle) == OK
    assert free_address(base, GRANULE) == OK
    model.set("capturing", 0)
    assert hip.hipStreamIsCapturing(None) == (OK, hip.hipStreamCaptureStatus.hipStreamCaptureStatusNone)


def test_a_driver_that_is_gone_says_so(model: EmulatedModel) -> None:
    base = reserve(1)
    model.set("deinitialized", 1)
    assert try_create() == (DEINITIALIZED, 0)
    assert free_address(base, GRANULE) == DEINITIALIZED
    assert hip.hipGetDevice()[0] == DEINITIALIZED
    assert hip.hipDeviceSynchronize()[0] == DEINITIALIZED


def test_names_of_statuses() -> None:
    for status in (hip.hipError_t.hipErrorOutOfMemory, hip.hipError_t.hipErrorUnknown):
        assert bytes(hip.hipGetErrorName(status)[1]).rstrip(b"\0").decode() == status.name
        assert bytes(hip.hipGetErrorString(status)[1])


# The known bugs: the naive sequence through the seam fails, and another one does not.


def mapped(driver: HipDriver, address: int, granules: int) -> int:
    handle = driver.create(granules * GRANULE)
    driver.map(address, granules * GRANULE, handle)
    return handle


def test_b1_access_to_a_mixed_run_is_refused(model: EmulatedModel) -> None:
    """The size is summed from the reservation's first mapping, wherever the range lies."""
    model.set("quirk_access_from_first", 1)
    driver = HipDriver()
    with driver.scope():
        base = driver.reserve(8 * GRANULE)
        mapped(driver, base, 4)
        driver.set_access(base, 4 * GRANULE)
        mapped(driver, base + 4 * GRANULE, 1)
        with pytest.raises(DriverError, match=r"set_access on hip:0 failed: hipErrorInvalidValue \(1\)"):
            driver.set_access(base + 4 * GRANULE, GRANULE)
        driver.set_access(base, 5 * GRANULE)  # the prefix from the base

        uniform = driver.reserve(8 * GRANULE)
        for i in range(4):
            mapped(driver, uniform + 2 * i * GRANULE, 2)
            driver.set_access(uniform + 2 * i * GRANULE, 2 * GRANULE)


def test_b2_one_unmap_of_many_leaves_the_addresses_busy(model: EmulatedModel) -> None:
    model.set("quirk_joint_unmap_busy", 1)
    driver = HipDriver()
    with driver.scope():
        for separately in (False, True):
            base = driver.reserve(4 * GRANULE)
            handles = [mapped(driver, base + i * GRANULE, 1) for i in range(3)]
            if separately:
                for i in range(3):
                    driver.unmap(base + i * GRANULE, GRANULE)
                driver.free_address(base, 4 * GRANULE)
            else:
                driver.unmap(base, 3 * GRANULE)
                with pytest.raises(DriverError, match=r"free_address on hip:0 failed: hipErrorUnknown \(999\)"):
                    driver.free_address(base, 4 * GRANULE)
            for handle in handles:
                driver.release(handle)


def test_b4_memory_returns_with_the_addresses(model: EmulatedModel) -> None:
    model.set("quirk_memory_with_addresses", 1)
    driver = HipDriver()
    with driver.scope():
        free, _ = driver.mem_info()
        base = driver.reserve(4 * GRANULE)
        handle = mapped(driver, base, 2)
        driver.unmap(base, 2 * GRANULE)
        driver.release(handle)
        assert driver.mem_info()[0] == free - 2 * GRANULE, "released and unmapped, and still gone"
        driver.free_address(base, 4 * GRANULE)
        assert driver.mem_info()[0] == free
        driver.release(driver.create(GRANULE))
        assert driver.mem_info()[0] == free, "what was never mapped returns at once"


def test_b13_a_memset_across_two_mappings_is_refused(model: EmulatedModel) -> None:
    model.set("quirk_single_memset", 1)
    driver = HipDriver()
    with driver.scope():
        base = driver.reserve(4 * GRANULE)
        for i in range(2):
            mapped(driver, base + i * GRANULE, 1)
        driver.set_access(base, 2 * GRANULE)
        with pytest.raises(DriverError, match=r"zero on hip:0 failed: hipErrorInvalidValue \(1\)"):
            driver.zero([(base, base + 2 * GRANULE)])
        driver.zero([(base, base + GRANULE), (base + GRANULE, base + 2 * GRANULE)])


def test_b14_addresses_lie_a_page_off_the_alignment(model: EmulatedModel) -> None:
    model.set("ignore_alignment", 1)
    status, base = try_reserve(2 * GRANULE, alignment=4 * GRANULE)
    assert (status, base % (4 * GRANULE)) == (OK, PAGE)
    assert map_at(base, create()) == INVALID
    assert free_address(base, 2 * GRANULE) == OK


def test_b7_a_granule_of_4_kib_is_reported_and_does_not_work(model: EmulatedModel) -> None:
    model.set("quirk_4k_granularity", 1)
    minimum = hip.hipMemAllocationGranularity_flags.hipMemAllocationGranularityMinimum
    assert hip.hipMemGetAllocationGranularity(properties(), minimum) == (OK, 4096)
    with pytest.raises(UnsupportedError, match="create on hip:0 failed"):
        HipDriver(least_granule=4096)
    driver = HipDriver()
    assert driver.granule == GRANULE
    with driver.scope():
        base = driver.reserve(GRANULE)
        mapped(driver, base, 1)
        driver.set_access(base, GRANULE)
