"""The rules of CUDA's virtual memory as the emulated library shows them to unmodified cuda-python.

One test a rule, named by its row. What the device model does beyond that (limits, threads) is in test_native.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cuda_rig import (
    BAD_CONTEXT,
    BAD_DEVICE,
    BAD_HANDLE,
    CAPTURING,
    CONTEXT_DESTROYED,
    DEINITIALIZED,
    FABRIC,
    INVALID,
    MIB,
    NONE,
    NOT_INITIALIZED,
    NOT_PERMITTED,
    NOT_SUPPORTED,
    OK,
    OUT_OF_MEMORY,
    POSIX_FD,
    READ,
    READ_WRITE,
    WIN32,
    G,
    Rig,
    cuda,
    desc,
    free_address,
    location,
    peek,
    poke,
    prop,
    release,
    status,
    unmap,
    value,
)

from vmm_kv.testing import load_cuda

TIB = 1 << 40
PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(load_cuda(devices=2, budget=16 * G, granule=G))
    rig.use(0)
    yield rig
    rig.close()


# Every call that needs a context, with arguments that are right where they are looked at.
CALLS: dict[str, Callable[[int, int], tuple[Any, ...]]] = {
    "reserve": lambda base, handle: cuda.cuMemAddressReserve(G, 0, 0, 0),
    "free_address": lambda base, handle: cuda.cuMemAddressFree(base, 8 * G),
    "create": lambda base, handle: cuda.cuMemCreate(G, prop(), 0),
    "release": lambda base, handle: cuda.cuMemRelease(handle),
    "map": lambda base, handle: cuda.cuMemMap(base + 2 * G, G, 0, handle, 0),
    "unmap": lambda base, handle: cuda.cuMemUnmap(base, G),
    "set_access": lambda base, handle: cuda.cuMemSetAccess(base, G, [desc()], 1),
    "get_access": lambda base, handle: cuda.cuMemGetAccess(location(), base),
    "mem_info": lambda base, handle: cuda.cuMemGetInfo(),
    "zero": lambda base, handle: cuda.cuMemsetD8(base, 0, G),
}
MAPPING_CALLS = ("reserve", "free_address", "create", "release", "map", "unmap", "set_access")
OTHER_CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "device": lambda: cuda.cuDeviceGetCount(),
    "context": lambda: cuda.cuCtxGetCurrent(),
    "stream": lambda: cuda.cuStreamIsCapturing(0),
    "capture_mode": lambda: cuda.cuThreadExchangeStreamCaptureMode(cuda.CUstreamCaptureMode(0)),
}


def on_a_new_thread(action: Callable[[], Any]) -> Any:
    results: list[Any] = []
    worker = threading.Thread(target=lambda: results.append(action()))
    worker.start()
    worker.join()
    return results[0]


@pytest.mark.emulated
def test_g1_nothing_answers_before_init() -> None:
    script = """
from vmm_kv.testing import load_cuda
model = load_cuda()
from cuda.bindings import driver as cuda
calls = (cuda.cuDeviceGetCount, cuda.cuMemGetInfo, cuda.cuCtxGetCurrent, cuda.cuCtxSynchronize)
print(*(int(call()[0]) for call in calls), int(cuda.cuDriverGetVersion()[0]), sum(model.calls().values()))
print(int(cuda.cuInit(0)[0]), int(cuda.cuDeviceGetCount()[0]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("3 3 3 3 0 0\n0 0\n", "")


@pytest.mark.parametrize("name", CALLS)
def test_g2_a_context_must_be_current(rig: Rig, name: str) -> None:
    base = rig.reserve()
    handle = rig.chunk(base)
    counted = rig.model.calls()
    assert on_a_new_thread(lambda: status(CALLS[name](base, handle))) == BAD_CONTEXT
    assert rig.model.calls() == counted, "no driver to count the call"
    assert status(CALLS[name](base, handle)) == (INVALID if name == "free_address" else OK)


def test_g2_contexts_are_a_stack_of_the_thread(rig: Rig) -> None:
    assert int(value(cuda.cuCtxGetDevice())) == 0
    assert status(cuda.cuCtxPushCurrent(rig.contexts[1])) == OK
    assert int(value(cuda.cuCtxGetDevice())) == 1
    assert on_a_new_thread(lambda: int(value(cuda.cuCtxGetCurrent()))) == 0
    assert int(value(cuda.cuCtxPopCurrent())) == int(rig.contexts[1])
    assert int(value(cuda.cuCtxGetDevice())) == 0
    assert status(cuda.cuCtxPushCurrent(4096)) == BAD_CONTEXT
    assert status(cuda.cuCtxSetCurrent(0)) == OK
    assert [status(call()) for call in (cuda.cuCtxGetDevice, cuda.cuCtxPopCurrent, cuda.cuCtxSynchronize)] == [201] * 3


@pytest.mark.emulated
def test_g2_a_primary_context_lives_while_it_is_retained() -> None:
    """In a process of its own: references of drivers that were opened here before would keep it alive."""
    script = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from cuda_rig import *
from vmm_kv.testing import load_cuda
rig = Rig(load_cuda(devices=2))
rig.use(0)
print(cuda.cuDevicePrimaryCtxGetState(1)[2], status(cuda.cuDevicePrimaryCtxRelease(1)))
print(cuda.cuDevicePrimaryCtxGetState(1)[2], status(cuda.cuDevicePrimaryCtxRelease(1)))
print(status(cuda.cuCtxPushCurrent(rig.contexts[1])))
print(status(cuda.cuDevicePrimaryCtxRelease(0)), status(cuda.cuMemGetInfo()))
print(status(cuda.cuDevicePrimaryCtxRetain(0)), status(cuda.cuMemGetInfo()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    expected = f"1 0\n0 {BAD_CONTEXT}\n{BAD_CONTEXT}\n0 {CONTEXT_DESTROYED}\n0 0\n"
    assert (done.stdout, done.stderr) == (expected, "")


def test_g3_create_goes_by_location_and_info_by_the_current_device(rig: Rig) -> None:
    rig.create(3 * G, prop(1))
    assert (rig.model.used(0), rig.model.used(1)) == (0, 3 * G)
    assert rig.free() == 16 * G
    rig.use(1)
    assert rig.free() == 13 * G
    assert (rig.model.calls_on(0), rig.model.calls_on(1)) == (2, 1)


def test_g4_a_forked_child_has_no_driver(rig: Rig) -> None:
    base = rig.reserve()
    handle = rig.chunk(base)
    pid = os.fork()
    if pid == 0:
        answers = [status(call(base, handle)) for call in CALLS.values()]
        answers += [status(call()) for call in OTHER_CALLS.values()]
        answers += [status(cuda.cuInit(0)), status(cuda.cuStreamCreate(0))]
        os._exit(0 if set(answers) == {NOT_INITIALIZED} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert rig.model.calls()["unmap"] == 0


def test_g5_a_device_without_virtual_memory(rig: Rig) -> None:
    supported = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    assert value(cuda.cuDeviceGetAttribute(supported, 0)) == 1
    rig.model.set("vmm_supported", 0)
    assert value(cuda.cuDeviceGetAttribute(supported, 0)) == 0
    for name, call in CALLS.items():
        if name not in ("mem_info", "zero"):
            assert status(call(0, 0)) == NOT_SUPPORTED, name
    assert status(cuda.cuMemGetInfo()) == OK


def test_r1_reserve_takes_whole_granules(rig: Rig) -> None:
    for size in (0, 1, G - 1, G + PAGE):
        assert rig.try_reserve(size) == (INVALID, 0)


def test_r2_alignment_is_zero_or_a_power_of_two(rig: Rig) -> None:
    for alignment in (3, G + 1, 3 * G):
        assert rig.try_reserve(G, alignment) == (INVALID, 0)
    for alignment in (1, PAGE, 64 * MIB):
        assert rig.reserve(3 * G, alignment) % max(alignment, G) == 0


def test_r3_a_hint_is_a_wish(rig: Rig) -> None:
    base = rig.reserve(4 * G)
    assert free_address(base, 4 * G) == OK
    assert rig.reserve(4 * G, hint=base) == base
    assert rig.reserve(4 * G, hint=base) != base, "taken: another address, and no error"
    assert rig.try_reserve(G, 0, base + 1) == (INVALID, 0)


def test_r3_a_driver_may_ignore_every_hint(rig: Rig) -> None:
    base = rig.reserve(4 * G)
    assert free_address(base, 4 * G) == OK
    rig.model.set("ignore_hint", 1)
    for _ in range(4):
        elsewhere = rig.reserve(4 * G, hint=base)
        assert elsewhere != base
        assert free_address(elsewhere, 4 * G) == OK


def test_r4_reserve_knows_no_flags(rig: Rig) -> None:
    assert rig.try_reserve(G, flags=1) == (INVALID, 0)


def test_r5_addresses_run_out(rig: Rig) -> None:
    assert rig.try_reserve(1 << 62) == (OUT_OF_MEMORY, 0)


def test_r6_addresses_cost_no_memory_and_take_chunks_of_all_devices(rig: Rig) -> None:
    base = rig.reserve(TIB)
    assert rig.free() == 16 * G
    rig.map(base, rig.create(made=prop(0)))
    rig.map(base + G, rig.create(made=prop(1)))
    rig.grant(base, 2 * G)
    assert (rig.model.used(0), rig.model.used(1)) == (G, G)


def test_f1_free_takes_exactly_what_was_reserved(rig: Rig) -> None:
    base = rig.reserve(4 * G)
    for wrong in ((base, 2 * G), (base + G, 3 * G), (base, 8 * G), (0, 4 * G), (base, 0)):
        assert free_address(*wrong) == INVALID
    assert [free_address(base, 4 * G) for _ in range(2)] == [OK, INVALID]


def test_f2_free_refuses_what_is_mapped(rig: Rig) -> None:
    base = rig.reserve(4 * G)
    rig.chunk(base + 2 * G)
    assert free_address(base, 4 * G) == INVALID
    assert unmap(base + 2 * G) == OK
    assert free_address(base, 4 * G) == OK


def test_c1_create_takes_whole_granules_of_the_minimum(rig: Rig) -> None:
    rig.model.reset([64 * G], G, 8 * G)
    kinds = cuda.CUmemAllocationGranularity_flags
    minimum, recommended = kinds.CU_MEM_ALLOC_GRANULARITY_MINIMUM, kinds.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    rig.use(0)
    assert value(cuda.cuMemGetAllocationGranularity(prop(), minimum)) == G
    assert value(cuda.cuMemGetAllocationGranularity(prop(), recommended)) == 8 * G
    for size in (0, 1, G - 1, G + PAGE):
        assert rig.try_create(size) == INVALID
    rig.create(G)


def test_c2_memory_runs_out(rig: Rig) -> None:
    rig.create(15 * G)
    assert rig.try_create(2 * G) == OUT_OF_MEMORY
    assert rig.try_create(2 * G, prop(1)) == OK
    assert rig.free() == G


def test_c3_the_device_must_exist(rig: Rig) -> None:
    for device in (-1, 2, 1 << 20):
        assert rig.try_create(G, prop(device)) == BAD_DEVICE
        assert status(cuda.cuDeviceGet(device)) == BAD_DEVICE


def test_c4_a_property_is_pinned_on_a_device_and_without_flags(rig: Rig) -> None:
    assert rig.try_create(flags=1) == INVALID
    assert rig.try_create(made=prop(kind=0)) == INVALID
    assert rig.try_create(made=prop(where=0)) == INVALID
    assert rig.try_create(made=prop(where=2, types=POSIX_FD)) == INVALID, "host memory is not exported"
    with_metadata = prop()
    with_metadata.win32HandleMetaData = 1
    assert rig.try_create(made=with_metadata) == INVALID
    assert rig.model.calls()["create"] == 5, "refused by the front end, and counted"


@pytest.mark.parametrize(("fabric", "attribute", "answer"), [(0, 0, NOT_SUPPORTED), (1, 1, NOT_PERMITTED), (2, 1, OK)])
def test_c5_handle_types_are_refused_each_in_its_way(rig: Rig, fabric: int, attribute: int, answer: int) -> None:
    rig.model.set("fabric", fabric)
    attributes = cuda.CUdevice_attribute
    assert value(cuda.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, 0)) == attribute
    assert rig.try_create(made=prop(types=FABRIC)) == answer
    assert rig.try_create(made=prop(types=WIN32)) == NOT_SUPPORTED
    posix = attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    assert value(cuda.cuDeviceGetAttribute(posix, 0)) == 1
    assert rig.try_create(made=prop(types=POSIX_FD)) == OK


def test_c5_an_old_driver_does_not_know_the_attribute(rig: Rig) -> None:
    fabric = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
    rig.model.set("driver_version", 12020)
    assert value(cuda.cuDriverGetVersion()) == 12020
    assert status(cuda.cuDeviceGetAttribute(fabric, 0)) == INVALID


def test_c6_rdma_must_be_supported(rig: Rig) -> None:
    attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    assert value(cuda.cuDeviceGetAttribute(attribute, 0)) == 0
    assert rig.try_create(made=prop(rdma=True)) == NOT_SUPPORTED
    rig.model.set("rdma", 1)
    assert value(cuda.cuDeviceGetAttribute(attribute, 0)) == 1
    handle = rig.create(made=prop(rdma=True))
    assert value(cuda.cuMemGetAllocationPropertiesFromHandle(handle)).allocFlags.gpuDirectRDMACapable == 1


@pytest.mark.parametrize("types", [0, POSIX_FD])
def test_c7_fresh_memory_is_not_to_be_relied_on(rig: Rig, types: int) -> None:
    rig.model.poison = True
    base = rig.reserve()
    rig.map(base, rig.create(made=prop(types=types)))
    rig.grant(base)
    assert peek(base, G) == b"\xff" * G


@pytest.mark.parametrize("types", [0, POSIX_FD])
def test_c8_memory_counts_from_create_to_the_last_holder(rig: Rig, types: int) -> None:
    base = rig.reserve()
    handle = rig.create(2 * G, prop(types=types))
    assert rig.free() == 14 * G
    rig.map(base, handle, 2 * G)
    assert release(handle) == OK
    assert rig.free() == 14 * G
    assert unmap(base, 2 * G) == OK
    assert rig.free() == 16 * G


def test_m1_map_stays_inside_one_reservation(rig: Rig) -> None:
    base = rig.reserve(4 * G)
    rig.try_reserve(4 * G, hint=base + 4 * G)
    handle = rig.create(2 * G)
    for address in (base - G, base + 3 * G, 0):
        assert rig.try_map(address, handle, 2 * G) == INVALID


def test_m2_map_takes_nothing_that_is_mapped(rig: Rig) -> None:
    base = rig.reserve()
    rig.chunk(base + 2 * G, 2 * G)
    handle = rig.create(2 * G)
    assert [rig.try_map(base + i * G, handle, 2 * G) for i in (1, 2, 3)] == [INVALID] * 3


def test_m3_map_is_aligned_whole_and_without_flags(rig: Rig) -> None:
    base, handle = rig.reserve(), rig.create(2 * G)
    assert rig.try_map(base + PAGE, handle, 2 * G) == INVALID
    assert rig.try_map(base, handle, 0) == INVALID
    assert rig.try_map(base, handle, G, offset=G) == INVALID
    assert rig.try_map(base, handle, 2 * G, flags=1) == INVALID


def test_m4_map_takes_whole_handles(rig: Rig) -> None:
    base, handle = rig.reserve(), rig.create(2 * G)
    assert [rig.try_map(base, handle, size) for size in (G, 3 * G)] == [INVALID] * 2


def test_m5_one_handle_lies_at_many_addresses(rig: Rig) -> None:
    base, handle = rig.reserve(), rig.create()
    for i in range(8):
        rig.map(base + i * G, handle)
    rig.grant(base, 8 * G)
    poke(base + 3 * G, b"everywhere")
    assert all(peek(base + i * G, 10) == b"everywhere" for i in range(8))


def test_m6_no_access_before_it_is_granted(rig: Rig) -> None:
    base, handle = rig.reserve(), rig.create()
    rig.map(base, handle)
    assert rig.access(base) == NONE
    assert status(cuda.cuMemsetD8(base, 1, G)) == INVALID
    rig.grant(base, access=READ)
    assert status(cuda.cuMemsetD8(base, 1, G)) == INVALID
    rig.grant(base)
    assert status(cuda.cuMemsetD8(base, 1, G)) == OK
    assert peek(base, G) == b"\1" * G


def test_m7_the_handle_may_go_while_it_is_mapped(rig: Rig) -> None:
    base = rig.reserve()
    handle = rig.chunk(base)
    poke(base, b"kept")
    assert release(handle) == OK
    assert peek(base, 4) == b"kept"
    assert rig.try_map(base + G, handle) == INVALID


def test_a1_access_is_granted_to_whole_mappings(rig: Rig) -> None:
    base = rig.reserve()
    rig.map(base, rig.create(2 * G), 2 * G)
    rig.map(base + 2 * G, rig.create())
    rig.map(base + 4 * G, rig.create())
    for start, size in ((0, G), (G, 2 * G), (0, 4 * G), (2 * G, 3 * G), (3 * G, G), (0, 0)):
        assert rig.try_grant(base + start, size, desc()) == INVALID
    rig.grant(base, 3 * G)
    assert [rig.access(base + offset) for offset in (0, 2 * G, 4 * G)] == [3, 3, 0]


def test_a2_access_has_one_to_all_descriptors_of_known_flags(rig: Rig) -> None:
    base = rig.reserve()
    rig.map(base, rig.create())
    assert rig.try_grant(base, G) == INVALID, "no descriptor"
    for access in (READ, NONE, READ_WRITE):
        rig.grant(base, access=access)
        assert rig.access(base) == access
    wrong = desc()
    wrong.location.type = cuda.CUmemLocationType(0)
    assert rig.try_grant(base, G, wrong) == INVALID
    assert rig.try_grant(base, G, desc(0, READ), desc(1)) == OK
    assert (rig.access(base, 0), rig.access(base, 1)) == (READ, READ_WRITE)


def test_a3_access_is_for_a_device_that_exists(rig: Rig) -> None:
    base = rig.reserve()
    rig.chunk(base)
    assert rig.try_grant(base, G, desc(0, READ), desc(2)) == BAD_DEVICE
    assert rig.access(base) == READ_WRITE, "all descriptors or none"
    assert status(cuda.cuMemGetAccess(location(2), base)) == BAD_DEVICE


def test_a4_access_belongs_to_device_and_mapping(rig: Rig) -> None:
    base = rig.reserve()
    handle = rig.chunk(base)
    assert (rig.access(base, 0), rig.access(base, 1)) == (READ_WRITE, NONE)
    rig.use(1)
    assert status(cuda.cuMemsetD8(base, 0, G)) == INVALID, "the other device may not write"
    rig.use(0)
    assert unmap(base) == OK
    rig.map(base, handle)
    assert rig.access(base) == NONE, "lost with the mapping"


def test_a5_no_access_to_ask_for_where_nothing_is_mapped(rig: Rig) -> None:
    assert status(cuda.cuMemGetAccess(location(), rig.reserve())) == INVALID


def test_u1_unmap_takes_whole_mappings_without_a_gap(rig: Rig) -> None:
    base = rig.reserve()
    rig.chunk(base, 2 * G)
    rig.chunk(base + 2 * G)
    rig.chunk(base + 4 * G)
    for start, size in ((0, G), (G, 2 * G), (0, 4 * G), (2 * G, 3 * G), (3 * G, G), (0, 0)):
        assert unmap(base + start, size) == INVALID
    assert unmap(base, 3 * G) == OK


def test_l1_a_reference_is_released_once(rig: Rig) -> None:
    handle = rig.create()
    assert [release(handle), release(handle), release(0)] == [OK, INVALID, INVALID]
    assert rig.create() != handle, "never used again"


def test_l2_retain_by_any_address_is_one_more_reference(rig: Rig) -> None:
    base = rig.reserve()
    handle = rig.chunk(base, 2 * G)
    assert int(value(cuda.cuMemRetainAllocationHandle(base + G + 5))) == handle
    assert rig.model.live()["handles"] == 2
    assert unmap(base, 2 * G) == OK
    assert release(handle) == OK
    rig.map(base, handle, 2 * G)
    assert unmap(base, 2 * G) == OK
    assert [release(handle), release(handle)] == [OK, INVALID]
    assert rig.free() == 16 * G
    assert status(cuda.cuMemRetainAllocationHandle(base)) == INVALID


def test_l2_retain_brings_back_a_handle_that_was_released(rig: Rig) -> None:
    base = rig.reserve()
    handle = rig.chunk(base)
    assert release(handle) == OK
    assert int(value(cuda.cuMemRetainAllocationHandle(base))) == handle
    rig.map(base + G, handle)
    assert release(handle) == OK


def test_s1_mapping_calls_are_refused_while_a_stream_captures(rig: Rig) -> None:
    base = rig.reserve()
    handle = rig.chunk(base)
    rig.model.set("capturing", 1)
    assert int(value(cuda.cuStreamIsCapturing(0))) == 1
    for name, call in CALLS.items():
        assert status(call(base, handle)) == (CAPTURING if name in MAPPING_CALLS else OK), name
    rig.model.set("capturing", 0)
    assert int(value(cuda.cuStreamIsCapturing(0))) == 0
    assert unmap(base) == OK


def test_deinitialized_answers_every_call(rig: Rig) -> None:
    base = rig.reserve()
    handle = rig.chunk(base)
    rig.model.set("deinitialized", 1)
    answers = [status(call(base, handle)) for call in CALLS.values()]
    answers += [status(call()) for call in OTHER_CALLS.values()]
    assert set(answers) == {DEINITIALIZED}


def test_streams(rig: Rig) -> None:
    base = rig.reserve()
    rig.chunk(base)
    stream = value(cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))
    assert status(cuda.cuMemsetD8Async(base, 7, G, stream)) == OK
    assert status(cuda.cuStreamSynchronize(stream)) == OK
    assert peek(base, G) == b"\7" * G
    assert [status(cuda.cuStreamDestroy(stream)) for _ in range(2)] == [OK, BAD_HANDLE]
    assert status(cuda.cuMemsetD8Async(base, 7, G, stream)) == BAD_HANDLE
    assert status(cuda.cuStreamSynchronize(stream)) == BAD_HANDLE


def test_the_capture_mode_belongs_to_the_thread(rig: Rig) -> None:
    modes = cuda.CUstreamCaptureMode
    exchange = cuda.cuThreadExchangeStreamCaptureMode
    relaxed = modes.CU_STREAM_CAPTURE_MODE_RELAXED
    assert value(exchange(relaxed)) == modes.CU_STREAM_CAPTURE_MODE_GLOBAL
    assert on_a_new_thread(lambda: value(exchange(relaxed))) == modes.CU_STREAM_CAPTURE_MODE_GLOBAL
    assert value(exchange(modes.CU_STREAM_CAPTURE_MODE_GLOBAL)) == relaxed
