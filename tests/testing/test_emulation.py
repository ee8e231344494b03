"""The books, faults and switches of the emulated libraries: the same for both, whatever stands before them."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_rig import (
    INVALID,
    OK,
    OUT_OF_MEMORY,
    G,
    Rig,
    cuda,
    desc,
    free_address,
    peek,
    poke,
    prop,
    release,
    status,
    unmap,
    value,
)

from vmm_kv._native import DeviceModel
from vmm_kv.errors import StateError
from vmm_kv.testing import EmulatedModel, load_cuda, load_hip

Load = Callable[..., EmulatedModel]


@pytest.fixture(params=[load_cuda, load_hip], ids=["cuda", "hip"])
def load(request: pytest.FixtureRequest) -> Load:
    chosen: Load = request.param
    return chosen


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(load_cuda(devices=2, budget=16 * G, granule=G))
    rig.use(0)
    yield rig
    rig.close()


# Books.


def test_a_fresh_model_has_the_devices_asked_for(load: Load) -> None:
    model = load(devices=3, budget=5 * G, granule=G, recommended=4 * G)
    assert (model.devices, model.granule) == (3, G)
    assert [model.budget(device) for device in range(3)] == [5 * G] * 3
    assert model.live() == {"handles": 0, "mappings": 0, "reservations": 0}
    assert (model.get("minimum_granularity"), model.get("recommended_granularity")) == (G, 4 * G)
    assert model.calls() == DeviceModel([G]).calls(), "the same primitives as on the host"


def test_charge_credit_and_peak(load: Load) -> None:
    model = load(budget=8 * G)
    assert model.charge(0, 5 * G) == OK
    assert model.charge(0, 4 * G) == OUT_OF_MEMORY
    assert model.credit(0, 6 * G) == INVALID
    assert model.credit(0, 5 * G) == OK
    assert (model.used(0), model.peak_used(0)) == (0, 5 * G)
    model.reset_peak(0)
    assert model.peak_used(0) == 0


def test_a_device_that_is_not_there(load: Load) -> None:
    model = load(devices=2)
    readings = (model.used, model.budget, model.peak_used, model.reset_peak, model.calls_on)
    for reading in readings:
        for device in (-1, 2):
            with pytest.raises(ValueError, match=f"no device {device}; the model has 2"):
                reading(device)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("devices", value) for value in (0, -1, 33, "2", 1.5)),
        *(("budget", value) for value in (0, -1, 2**63, 2**64 + G, 1.5, "2GiB")),
        *(("granule", value) for value in (0, 1, -1, 3 * G, 2**63, 2**64 + 4096)),
        *(("recommended", value) for value in (0, -1, 1, 3 * G // 2, 2**64 + G)),
    ],
)
def test_devices_that_cannot_be_change_nothing(load: Load, name: str, value: Any) -> None:
    model = load(devices=2, budget=8 * G)
    model.charge(1, G)
    with pytest.raises(ValueError, match=f"^{name} is {re.escape(repr(value))}: it must be a"):
        load(**{name: value})
    assert (model.devices, model.used(1), model.charge(1, G)) == (2, G, OK)


@pytest.mark.parametrize("budgets", [[], [G] * 33, [G, 0], [G, 2**64 + G]])
def test_a_reset_to_devices_that_cannot_be_changes_nothing(load: Load, budgets: list[int]) -> None:
    model = load(devices=2, budget=8 * G)
    model.charge(1, G)
    with pytest.raises(ValueError, match=r"^(the number of budgets|budgets\[1\]) is \d+: it must be a whole number"):
        model.reset(budgets)
    assert (model.devices, model.used(1)) == (2, G)


def test_sizes_that_cannot_be_charged(load: Load) -> None:
    model = load(budget=8 * G)
    for call in (model.charge, model.credit):
        for size in (-1, 2**63, 1.5):
            with pytest.raises(ValueError, match=f"size is {size}: it must be a whole number from 0"):
                call(0, size)  # type: ignore[arg-type]
    assert model.used(0) == 0


def test_mapped_tells_every_mapping_in_order(rig: Rig) -> None:
    base = rig.reserve(16 * G)
    handle = rig.create()
    for i in (5, 1, 9):
        rig.map(base + i * G, handle)
    assert rig.model.mapped() == [(base + i * G, G) for i in (1, 5, 9)]


def test_calls_are_counted_on_the_current_device(rig: Rig) -> None:
    rig.reserve()
    rig.use(1)
    rig.create(made=prop(1))
    rig.free()
    assert (rig.model.calls_on(0), rig.model.calls_on(1)) == (1, 2)
    assert sum(rig.model.calls().values()) == 3


# Resets.


def test_a_reset_leaves_nothing_but_the_bytes(rig: Rig) -> None:
    base = rig.reserve()
    handle = rig.chunk(base)
    poke(base, b"a tensor may still lie here")
    rig.model.set("rdma", 1)
    rig.model.fail("map", 1, 999)
    rig.model.charge(0, G)

    fresh = load_cuda(devices=1, budget=4 * G)
    assert fresh.live() == {"handles": 0, "mappings": 0, "reservations": 0}
    assert (fresh.used(0), fresh.get("rdma"), sum(fresh.calls().values())) == (0, 0, 0)
    assert peek(base, 8) == b"a tensor"
    rig.use(0)
    assert [unmap(base), free_address(base, 8 * G), status(cuda.cuMemRelease(handle))] == [INVALID] * 3
    other = rig.reserve(8 * G, hint=base)
    assert other != base
    rig.chunk(other)


def test_a_reset_forgets_what_is_current(rig: Rig) -> None:
    load_cuda()
    assert int(value(cuda.cuCtxGetCurrent())) == 0


def test_many_resets_cost_neither_descriptors_nor_map_areas(load: Load) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())

    load()
    descriptors, areas = held()
    for _ in range(50):
        load()
    assert held()[0] == descriptors
    assert held()[1] < areas + 20


def test_the_model_of_devices_that_were_replaced_leaves_the_new_ones_alone(load: Load) -> None:
    """A tensor of the old device that dies gives nothing back to the budget of the new one."""
    old = load(budget=8 * G)
    assert old.charge(0, 2 * G) == OK
    new = load(budget=8 * G)
    assert new.charge(0, 2 * G) == OK
    assert old.credit(0, 2 * G) == OK
    assert new.used(0) == 2 * G
    for change in (lambda: old.charge(0, G), lambda: old.set("poison", 1), lambda: old.fail("create", 1, 2)):
        with pytest.raises(StateError, match=f"devices of {re.escape(old.library.name)} were replaced by others"):
            change()
    assert (new.used(0), new.poison) == (2 * G, False)
    old.reset([G])
    assert old.charge(0, G) == OK, "its devices are the latest again"


def test_a_stale_handle_is_nobody_elses(rig: Rig) -> None:
    stale = [rig.create() for _ in range(3)]
    rig.model.reset([16 * G], G)
    rig.use(0)
    fresh = [rig.create() for _ in range(3)]
    assert not set(stale) & set(fresh)
    assert [release(handle) for handle in stale] == [INVALID] * 3
    assert rig.model.live()["handles"] == 3


# Faults.


def test_faults_answer_once_and_by_any_name_of_a_primitive(rig: Rig) -> None:
    rig.model.fail("create", 2, 999)
    assert [rig.try_create() for _ in range(3)] == [OK, 999, OK]
    rig.model.fail("any", 1, 719)
    cuda.cuCtxGetCurrent()
    assert rig.try_create() == 719, "a call that is no primitive is not any"
    rig.model.fail("create", 1, 999)
    rig.model.clear_faults()
    assert rig.try_create() == OK


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("device", lambda: cuda.cuDeviceGetCount()),
        ("context", lambda: cuda.cuCtxGetCurrent()),
        ("stream", lambda: cuda.cuStreamIsCapturing(0)),
        ("capture_mode", lambda: cuda.cuThreadExchangeStreamCaptureMode(cuda.CUstreamCaptureMode(0))),
        ("init", lambda: cuda.cuInit(0)),
    ],
)
def test_other_calls_fail_by_their_own_names(rig: Rig, name: str, call: Callable[[], tuple[object, ...]]) -> None:
    before = rig.model.other_calls()[name]
    rig.model.fail(name, 2, 999)
    assert [status(call()) for _ in range(3)] == [OK, 999, OK]
    assert rig.model.other_calls()[name] == before + 3
    rig.model.fail(name, 1, 999)
    rig.model.clear_faults()
    assert status(call()) == OK


def test_a_call_that_the_front_end_refuses_counts_like_any_other(rig: Rig) -> None:
    """A sweep that fails the nth call must meet each of them, also the ones with a bad struct."""
    rig.model.fail("create", 2, 719)
    bad = prop(kind=0)
    assert [rig.try_create(made=bad) for _ in range(3)] == [INVALID, 719, INVALID]
    assert rig.model.calls()["create"] == 3


@pytest.mark.parametrize(
    ("name", "nth", "code", "said"),
    [
        ("charge", 1, 2, "no call is named 'charge'"),
        ("", 1, 2, "no call is named ''"),
        ("map", 0, 2, "nth is 0"),
        ("map", 2**64 + 1, 2, "nth is 18446744073709551617"),
        ("stream", 1, 0, "status is 0"),
        ("stream", 1, 2**32 + 1, "status is 4294967297"),
    ],
)
def test_a_fault_that_cannot_be(load: Load, name: str, nth: int, code: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load().fail(name, nth, code)


@pytest.mark.emulated
def test_a_sealed_library_ends_the_process() -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from cuda_rig import *
from vmm_kv.testing import load_cuda
rig = Rig(load_cuda())
rig.use(0)
rig.model.seal()
rig.model.used(0), rig.model.calls(), cuda.cuCtxGetCurrent()
print("reads", flush=True)
rig.free()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.returncode) == ("reads\n", -6)
    assert "mem_info was called on a sealed device" in done.stderr


# Switches.


def test_switches_are_set_and_read_and_cleared_by_a_reset(load: Load) -> None:
    model = load()
    off = ("poison", "capturing", "rdma", "fabric", "ignore_hint", "ignore_alignment", "integrated", "deinitialized")
    quirks = ("access_from_first", "joint_unmap_busy", "memory_with_addresses", "4k_granularity", "single_memset")
    for switch in (*off, *(f"quirk_{quirk}" for quirk in quirks)):
        assert model.get(switch) == 0
        model.set(switch, 1)
        assert model.get(switch) == 1
    assert (model.get("vmm_supported"), model.poison) == (1, True)
    model = load()
    assert [model.get(switch) for switch in off] == [0] * len(off)


def test_a_switch_that_is_not_there(load: Load) -> None:
    model = load()
    with pytest.raises(ValueError, match="no switch is called 'warp_speed'"):
        model.set("warp_speed", 1)
    with pytest.raises(ValueError, match="no switch is called 'warp_speed'"):
        model.get("warp_speed")


def test_a_switch_cannot_be_set_to_what_c_has_no_number_for(load: Load) -> None:
    with pytest.raises(ValueError, match="value is 18446744073709551616: it must be a whole number"):
        load().set("driver_version", 2**64)


def test_what_a_device_says_of_itself(rig: Rig) -> None:
    attributes = cuda.CUdevice_attribute
    integrated = attributes.CU_DEVICE_ATTRIBUTE_INTEGRATED
    assert value(cuda.cuDeviceGetAttribute(integrated, 0)) == 0
    rig.model.set("integrated", 1)
    assert value(cuda.cuDeviceGetAttribute(integrated, 0)) == 1
    uuids = [bytes(value(cuda.cuDeviceGetUuid(device)).bytes) for device in (0, 1)]
    assert len(set(uuids)) == 2
    pci = [value(cuda.cuDeviceGetPCIBusId(16, device)).split(b"\0")[0] for device in (0, 1)]
    assert pci == [b"0000:01:00.0", b"0000:02:00.0"]
    assert int(value(cuda.cuDeviceGetByPCIBusId(pci[1]))) == 1
    assert value(cuda.cuDeviceTotalMem(1)) == 16 * G
    assert status(cuda.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_MAX, 0)) == INVALID


def test_b7_the_query_says_4_kib_and_the_rules_demand_more(rig: Rig) -> None:
    minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    rig.model.set("quirk_4k_granularity", 1)
    assert value(cuda.cuMemGetAllocationGranularity(prop(), minimum)) == 4096
    assert rig.try_create(4096) == INVALID
    assert rig.try_create(G) == OK


def test_b14_addresses_lie_a_page_off_the_alignment(rig: Rig) -> None:
    """So that a whole granule within lies elsewhere. At a hint they lie exactly there."""
    rig.model.set("ignore_alignment", 1)
    base = rig.reserve(2 * G, alignment=4 * G)
    assert base % (4 * G) == 4096
    handle = rig.create()
    assert rig.try_map(base, handle) == INVALID
    inside = base + G - 4096
    rig.map(inside, handle)
    rig.grant(inside)
    poke(inside + G - 1, b"x")
    assert unmap(inside) == OK
    assert free_address(base, 2 * G) == OK
    assert rig.reserve(2 * G, hint=base) == base
    assert rig.reserve(2 * G, hint=inside) % G == 4096, "which is taken"


def test_b14_where_the_granule_is_a_page_there_is_nothing_to_ignore() -> None:
    rig = Rig(load_cuda(budget=16 * G, granule=4096))
    rig.use(0)
    rig.model.set("ignore_alignment", 1)
    assert rig.reserve(8192, alignment=G) % G == 0
    rig.close()


def test_quirks_reach_the_model(rig: Rig) -> None:
    """B1, B2, B4, B13 by the library's switches; what each of them does is in test_native_quirks.py."""
    base = rig.reserve(8 * G)
    rig.model.set("quirk_access_from_first", 1)
    rig.map(base, rig.create(2 * G), 2 * G)
    rig.map(base + 2 * G, rig.create())
    assert status(cuda.cuMemSetAccess(base + 2 * G, G, [desc()], 1)) == INVALID
    rig.grant(base, 3 * G)
    assert status(cuda.cuMemsetD8(base + G, 0, 2 * G)) == OK
    rig.model.set("quirk_single_memset", 1)
    assert status(cuda.cuMemsetD8(base + G, 0, 2 * G)) == INVALID
    rig.model.set("quirk_joint_unmap_busy", 1)
    rig.model.set("quirk_memory_with_addresses", 1)
    assert unmap(base, 3 * G) == OK
    assert free_address(base, 8 * G) == INVALID
    assert rig.free() == 13 * G


def test_the_library_lives_beside_the_other_one() -> None:
    cuda_model, hip_model = load_cuda(budget=4 * G), load_hip(budget=6 * G)
    cuda_model.charge(0, G)
    assert (cuda_model.used(0), hip_model.used(0)) == (G, 0)
    assert cuda_model.library.name == "libcuda.so.1"
    assert hip_model.library.name == "libamdhip64.so"
    assert ctypes.CDLL("libcuda.so.1")._handle == ctypes.CDLL(str(cuda_model.library))._handle
