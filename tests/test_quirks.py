"""Drivers that depart from the contract: what goes wrong with naive calls, and what the cache does instead.

The device model has each misbehaviour as a switch; `Quirks` tell the library of it. B1, B2 and B4 are bugs of ROCm,
listed in DESIGN.md section 9.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_layout import LAYOUTS

from vmm_kv._native import DeviceModel
from vmm_kv.cache import KVCache
from vmm_kv.device import Device
from vmm_kv.driver import Driver, Quirks, Span
from vmm_kv.driver.host import HostDriver
from vmm_kv.errors import (
    DriverError,
    DriverGone,
    FaultedError,
    OutOfPhysicalMemory,
    StateError,
    UnsupportedError,
    VmmError,
)
from vmm_kv.holdings import empty_graveyard
from vmm_kv.host import HostFramework
from vmm_kv.layout import Layout, TensorSpec
from vmm_kv.state import State

G = 4096
UNKNOWN, DEINITIALIZED = 999, 4
NOTHING = {"handles": 0, "mappings": 0, "reservations": 0}
UNIFORM = Quirks(uniform_chunks=True)
KEEPS = Quirks(uniform_chunks=True, memory_with_addresses=True)


class Contested(HostDriver):
    """Somebody else takes the next address that is asked for by name, where a test says so."""

    contest = False

    def reserve(self, size: int, alignment: int = 0, hint: int = 0) -> int:
        if hint and self.contest:
            self.taken, self.taken_bytes = super().reserve(size, alignment, hint), size
        return super().reserve(size, alignment, hint)


def open_quirky(quirks: Quirks, budget: int = 4096 * G, **switches: bool) -> tuple[Device, DeviceModel]:
    model = DeviceModel([budget], G)
    model.poison = True
    for name, on in switches.items():
        setattr(model, f"quirk_{name}", on)
    return Device(Contested(model, quirks=quirks), torch.device("cpu"), HostFramework(model)), model


def keeping(budget: int = 4096 * G, quirks: Quirks = KEEPS) -> tuple[Device, DeviceModel]:
    """A device whose memory returns only with the addresses (B4)."""
    return open_quirky(quirks, budget, memory_with_addresses=True, access_from_first=True, joint_unmap_busy=True)


def spec(name: str) -> TensorSpec:
    return TensorSpec(name, (2, None, 512), torch.bfloat16)


def make(device: Device, capacity: int = 40, chunk: Any = G, **options: Any) -> KVCache:
    """K and V of two layers: four segments of ten granules each, four blocks to a granule."""
    return KVCache.reserve(device, [spec("l0"), spec("l1")], capacity, chunk=chunk, **options)


def contested(device: Device) -> Contested:
    assert isinstance(device.driver, Contested)
    return device.driver


def lose_addresses(device: Device) -> None:
    contested(device).contest = True


def leave_no_trace(device: Device, cache: KVCache) -> None:
    driver = contested(device)
    assert cache.reserved_bytes == 0
    driver.free_address(driver.taken, driver.taken_bytes)
    assert driver.model.live() == NOTHING


def fill(cache: KVCache, value: int) -> None:
    for name in ("l0", "l1"):
        cache.view(name).fill_(value)


def check(cache: KVCache, value: int, stop: int) -> None:
    """Blocks before `stop` are as they were filled, and those after it are zero, whatever chunk they got."""
    for name in ("l0", "l1"):
        assert cache.view(name)[:, :stop].eq(value).all()
        assert not cache.view(name)[:, stop:].any()


# --- B1: access grants are summed from the first mapping --------------------------------------------------------------


def map_in_a_row(driver: Driver, sizes: Sequence[int]) -> tuple[int, list[int]]:
    base = driver.reserve(sum(sizes))
    handles = [driver.create(size) for size in sizes]
    address = base
    for size, handle in zip(sizes, handles, strict=True):
        driver.map(address, size, handle)
        address += size
    return base, handles


def test_b1_access_to_a_later_mapping_of_another_size_is_refused() -> None:
    device, _ = open_quirky(Quirks(), access_from_first=True)
    driver = device.driver
    base, _ = map_in_a_row(driver, [2 * G, G])
    with pytest.raises(DriverError, match=r"set_access .* invalid value"):
        driver.set_access(base + 2 * G, G)
    driver.set_access(base, 3 * G)
    base, _ = map_in_a_row(driver, [G, G, G])
    driver.set_access(base + G, 2 * G)


def test_b1_a_cache_that_does_not_know_of_it_fails_and_is_as_before() -> None:
    device, model = open_quirky(Quirks(), access_from_first=True)
    cache = make(device, chunk=2 * G)
    cache.commit(5)  # two granules of each segment, as one chunk
    before = cache.chunk_table()
    with pytest.raises(DriverError, match="set_access"):
        cache.commit(9)  # one more of each, behind chunks of two
    assert (cache.blocks, cache.chunk_table(), model.used(0)) == (5, before, 8 * G)
    cache.close()


@pytest.mark.parametrize("chunk", [G, 2 * G, 3 * G, 8 * G])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b1_uniform_chunks_pass_whatever_the_layout(layout: str, chunk: int) -> None:
    """C71. Most segments are no multiple of the chunk, so neighbours share one, and some chunks outlive a shrink."""
    device, model = open_quirky(UNIFORM, access_from_first=True)
    capacity = 150
    made: Layout = LAYOUTS[layout](capacity)
    for backing in ("none", "prefix", "alias"):
        cache = KVCache(device, made, chunk=chunk)
        if backing != "none":
            cache.back(3 if backing == "prefix" else None, alias=backing == "alias")
        for blocks in (20, 99, 37, 38, capacity, 0, 7):
            cost = cache.cost(blocks)
            if blocks < cache.blocks:
                held = cache.physical_bytes
                assert cache.shrink(blocks) == held - cache.physical_bytes
                assert cache.backed >= blocks
            else:
                assert cache.commit(blocks) == blocks
                assert cost == cache.mapped_bytes == cache.physical_bytes == model.used(0)
                for name in cache.tensors:
                    cache.view(name).zero_()
            offsets = {(address - cache.base) % chunk for address, _, _ in cache.chunk_table()}
            sizes = {size for _, size, _ in cache.chunk_table()}
            assert (offsets <= {0}, sizes <= {chunk}) == (True, True)
        cache.close()
        assert model.live() == NOTHING


# --- B2: an unmap over several mappings -------------------------------------------------------------------------------


def test_b2_one_unmap_over_several_mappings_leaves_the_addresses_busy() -> None:
    device, model = open_quirky(Quirks(single_unmap=True), joint_unmap_busy=True)
    base, handles = map_in_a_row(device.driver, [G, G])
    device.driver.unmap(base, 2 * G)
    for handle in handles:
        device.driver.release(handle)
    with pytest.raises(DriverError, match="free_address"):
        device.driver.free_address(base, 2 * G)
    assert model.live()["reservations"] == 1


@pytest.mark.parametrize("alias", [False, True])
def test_b2_c73_the_cache_unmaps_each_mapping_by_itself(alias: bool) -> None:
    device, model = open_quirky(Quirks(uniform_chunks=True, single_unmap=True), joint_unmap_busy=True)
    cache = make(device)
    if alias:
        cache.back(alias=True)
    for blocks in (4, 20, 40):
        cache.commit(blocks)
    cache.shrink(3)
    cache.close()
    calls = model.calls()
    assert calls["unmap"] == calls["map"] == (40 if alias else 0) + 40
    assert calls["free_address"] == 1
    assert model.live() == NOTHING


# --- B4: memory returns only with the addresses -----------------------------------------------------------------------


def test_b4_a_release_returns_nothing_while_the_addresses_stay() -> None:
    device, model = keeping()
    base, handles = map_in_a_row(device.driver, [G, G])
    for i, handle in enumerate(handles):
        device.driver.unmap(base + i * G, G)
        device.driver.release(handle)
    assert model.used(0) == 2 * G
    device.driver.free_address(base, 2 * G)
    assert model.used(0) == 0


def test_b4_a_cache_that_does_not_know_of_it_measures_what_it_gave_back(caplog: pytest.LogCaptureFixture) -> None:
    device, model = keeping(quirks=UNIFORM)
    cache = make(device)
    cache.commit(40)
    assert cache.shrink(20) == 0
    assert (cache.physical_bytes, model.used(0)) == (20 * G, 40 * G)
    assert f"{20 * G} bytes were released on host:0, 0 are back" in caplog.text
    cache.close()
    assert model.used(0) == 0


def test_b4_what_a_shrink_unmaps_is_kept_and_mapped_again_by_growth(caplog: pytest.LogCaptureFixture) -> None:
    device, model = keeping()
    cache = make(device)
    cache.commit(40)
    fill(cache, 5)
    with caplog.at_level(logging.WARNING):
        assert cache.shrink(20) == 0
    assert f"returns memory only with its addresses: {20 * G} bytes stay with the cache" in caplog.text
    assert (cache.spare_bytes, cache.mapped_bytes, cache.unreleased_bytes) == (20 * G, 20 * G, 0)
    assert cache.physical_bytes == model.used(0) == 40 * G
    model.charge(0, 4056 * G)  # there is no memory but the cache's own
    calls = model.calls()
    assert cache.commit(36) == 36
    assert (cache.spare_bytes, cache.physical_bytes, model.used(0)) == (4 * G, 40 * G, 4096 * G)
    assert (model.calls()["create"], model.calls()["release"]) == (calls["create"], calls["release"])
    check(cache, 5, 20)
    cache.close()
    model.credit(0, 4056 * G)
    assert (model.live(), model.used(0)) == (NOTHING, 0)


def test_b4_a_spare_is_no_fresh_zero() -> None:
    device, model = keeping(quirks=Quirks(fresh_zero=True, uniform_chunks=True, memory_with_addresses=True))
    model.poison = False
    cache = make(device)
    cache.commit(8)
    assert model.calls()["zero"] == 0
    fill(cache, 1)
    cache.shrink(4)
    cache.commit(12)
    check(cache, 1, 4)
    step = cache.prepare(16)
    cache.shrink(4)
    step.discard()
    assert (cache.spare_bytes, model.used(0)) == (8 * G, 12 * G), "what was never mapped is released, as anywhere"
    cache.close()


def test_b4_the_alias_chunk_is_the_first_that_growth_takes() -> None:
    device, model = keeping()
    cache = make(device)
    cache.back(alias=True)
    cache.commit(4)
    assert (cache.spare_bytes, cache.physical_bytes, model.used(0)) == (G, 5 * G, 5 * G)
    created = model.calls()["create"]
    cache.commit(8)
    assert (cache.spare_bytes, cache.physical_bytes) == (0, 8 * G)
    assert model.calls()["create"] == created + 3
    assert not any(cache.view(name).any() for name in ("l0", "l1"))
    cache.close()


def test_b4_a_prepared_step_of_spares_goes_back_to_them() -> None:
    device, model = keeping()
    cache = make(device)
    cache.commit(40)
    cache.shrink(20)
    step = cache.prepare(36)
    assert (step.bytes, cache.spare_bytes, cache.physical_bytes) == (16 * G, 4 * G, 40 * G)
    step.discard()
    assert (cache.spare_bytes, model.used(0)) == (20 * G, 40 * G)
    cache.close()


def test_b4_a_commit_that_ran_out_keeps_the_spares_it_took_and_releases_the_rest() -> None:
    device, model = keeping(48 * G)
    cache = make(device, capacity=80)
    cache.commit(40)
    cache.shrink(20)
    with pytest.raises(OutOfPhysicalMemory):
        cache.commit(80)
    assert (cache.spare_bytes, cache.physical_bytes, model.used(0)) == (20 * G, 40 * G, 40 * G)
    assert cache.commit(48) == 48
    cache.close()


def test_b4_a_map_that_failed_leaves_spares_for_the_next_try() -> None:
    device, model = keeping()
    cache = make(device)
    model.fail("set_access", 1, UNKNOWN)
    with pytest.raises(DriverError):
        cache.commit(40)
    assert (cache.state, cache.spare_bytes, model.used(0)) == (State.RESERVED, 40 * G, 40 * G)
    created = model.calls()["create"]
    cache.commit(40)
    assert (cache.spare_bytes, model.calls()["create"]) == (0, created)
    cache.close()


def test_b4_chunks_are_alike_so_that_any_spare_fits() -> None:
    """ROCm 6.4 has this bug and not B1."""
    device, model = open_quirky(Quirks(memory_with_addresses=True), memory_with_addresses=True)
    with pytest.raises(UnsupportedError, match="needs chunks of one size"):
        make(device, chunk=None)
    cache = make(device, chunk=3 * G)
    cache.commit(12)
    cache.commit(40)
    assert {size for _, size, _ in cache.chunk_table()} == {3 * G}
    cache.shrink(8)
    held, spare = cache.physical_bytes, cache.spare_bytes
    assert spare > 0
    created = model.calls()["create"]
    cache.commit(40)
    assert (cache.physical_bytes, cache.spare_bytes, model.calls()["create"]) == (held, 0, created)
    assert cache.shrink(0) == held
    assert model.used(0) == 0
    cache.close()


def test_b4_a_shrink_to_nothing_returns_all_at_the_same_addresses() -> None:
    device, model = keeping()
    cache = make(device)
    heard: list[tuple[str, tuple[Span, ...], int]] = []
    cache.add_listener(Hearing(heard))
    pointers = {name: tensor.data_ptr() for name, tensor in cache.tensors.items()}
    cache.commit(40)
    cache.shrink(20)
    heard.clear()
    assert cache.shrink(0) == 40 * G
    assert (model.used(0), cache.physical_bytes, cache.spare_bytes, cache.unreleased_bytes) == (0, 0, 0, 0)
    assert model.live() == {"handles": 0, "mappings": 0, "reservations": 1}
    assert [(kind, generation) for kind, _, generation in heard] == [("before", 1)], "addresses that go for a moment"
    assert (cache.state, cache.generation) == (State.COMMITTED, 2)
    assert {name: tensor.data_ptr() for name, tensor in cache.tensors.items()} == pointers  # invariant 1
    cache.commit(12)
    cache.view("l1").fill_(3)
    assert ctypes.string_at(pointers["l1"], 1) != b"\0"
    view = cache.view("l1")
    cache.close()
    assert model.live() == {"handles": 0, "mappings": 0, "reservations": 1}, "tensors still count on the addresses"
    del view
    empty_graveyard(device.name)
    assert model.live() == NOTHING


class Hearing:
    def __init__(self, heard: list[tuple[str, tuple[Span, ...], int]]) -> None:
        self.heard = heard

    def before_unmap(self, spans: Sequence[Span], generation: int) -> None:
        self.heard.append(("before", tuple(spans), generation))

    def after_map(self, spans: Sequence[Span], generation: int) -> None:
        self.heard.append(("after", tuple(spans), generation))


def test_b4_a_stale_step_keeps_its_chunks_over_a_shrink_to_nothing() -> None:
    device, model = keeping()
    cache = make(device)
    cache.commit(40)
    cache.shrink(20)
    step = cache.prepare(36)
    assert cache.shrink(0) == 24 * G
    assert (cache.physical_bytes, model.used(0)) == (16 * G, 16 * G)
    with pytest.raises(StateError, match="stale"):
        step.publish()
    step.discard()
    assert (cache.physical_bytes, cache.spare_bytes, model.used(0)) == (0, 0, 0)
    cache.close()


# --- addresses that do not come back ----------------------------------------------------------------------------------


def taken_by_another(device: Device) -> None:
    contested(device).contest = True


def refused(device: Device) -> None:
    contested(device).model.fail("reserve", 1, UNKNOWN)


@pytest.mark.parametrize(("how", "text"), [(taken_by_another, "the driver gave 0x"), (refused, "reserve on host:0")])
def test_b4_lost_addresses_fault_the_cache_and_hand_out_no_tensor(how: Callable[[Device], None], text: str) -> None:
    device, model = keeping()
    cache = make(device)
    cache.commit(40)
    cache.shrink(20)
    kept = cache.view("l0")
    how(device)
    with pytest.raises(
        FaultedError, match=rf"could not be reserved again: {text}.*tensors over them must not be used"
    ) as e:
        cache.shrink(0)
    assert (isinstance(e.value.failure, VmmError), e.value.undo_failure) == (True, None)
    assert (cache.state, cache.blocks, cache.physical_bytes, model.used(0)) == (State.FAULTED, 0, 0, 0)
    for handed_out in (lambda: cache.tensors, lambda: cache.view("l0")):
        with pytest.raises(StateError, match="addresses were lost"):
            handed_out()
    with pytest.raises(StateError, match="faulted"):
        cache.commit(1)
    cache.close()
    cache.close()
    assert cache.state is State.CLOSED
    if how is taken_by_another:
        leave_no_trace(device, cache)
    assert model.live() == NOTHING
    del kept
    gc.collect()
    empty_graveyard(device.name)
    assert model.live() == NOTHING


def test_b4_a_free_that_fails_strands_the_memory_until_the_next_operation() -> None:
    device, model = keeping()
    cache = make(device)
    cache.commit(40)
    for nth in (1, 2):
        model.fail("free_address", nth, UNKNOWN)
    assert cache.shrink(0) == 0
    assert (cache.blocks, cache.state) == (0, State.COMMITTED)
    assert cache.physical_bytes == cache.unreleased_bytes == model.used(0) == 40 * G
    cache.commit(4)  # tried and failed once more
    assert (cache.unreleased_bytes, cache.physical_bytes, model.used(0)) == (40 * G, 44 * G, 44 * G)
    frees = model.calls()["free_address"]
    assert cache.commit(8) == 8
    assert model.calls()["free_address"] == frees, "with something mapped the addresses cannot go"
    assert cache.unreleased_bytes == 40 * G
    assert cache.shrink(0) == 48 * G
    assert (cache.physical_bytes, model.used(0)) == (0, 0)
    cache.close()
    assert model.live() == NOTHING


def test_b4_a_retry_may_lose_the_addresses_as_well() -> None:
    device, model = keeping()
    cache = make(device)
    cache.commit(40)
    model.fail("free_address", 1, UNKNOWN)
    cache.shrink(0)
    refused(device)
    with pytest.raises(FaultedError, match="could not be reserved again"):
        cache.commit(4)
    assert (cache.state, model.used(0)) == (State.FAULTED, 0)
    cache.close()
    assert model.live() == NOTHING


def test_b4_a_close_tries_stranded_memory_again_and_cannot_fault() -> None:
    device, model = keeping()
    cache = make(device)
    cache.commit(40)
    model.fail("free_address", 1, UNKNOWN)
    cache.shrink(0)
    model.fail("free_address", 1, UNKNOWN)
    with pytest.raises(VmmError, match="is not complete, close again: free_address"):
        cache.close()
    assert model.used(0) == 40 * G
    cache.close()
    assert (model.live(), model.used(0)) == (NOTHING, 0)


def test_b4_a_chunk_that_resists_does_not_keep_the_rest() -> None:
    device, model = keeping()
    cache = make(device)
    cache.commit(40)
    model.fail("release", 3, UNKNOWN)
    assert cache.shrink(0) == 39 * G
    assert cache.physical_bytes == cache.unreleased_bytes == model.used(0) == G
    cache.commit(4)
    assert (cache.unreleased_bytes, cache.physical_bytes, model.used(0)) == (0, 4 * G, 4 * G)
    cache.close()


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", [False, True])
def test_b4_c86_memory_returns_at_close_under_a_live_tensor(dropped: bool) -> None:
    """By close, or by whoever empties the graveyard; the addresses go with the last tensor, as anywhere."""
    device, model = keeping()
    cache = make(device)
    cache.commit(40)
    view, base = cache.view("l0"), cache.base
    if dropped:
        del cache
        gc.collect()
        empty_graveyard(device.name)
    else:
        cache.close()
    assert (model.used(0), model.live()) == (0, {"handles": 0, "mappings": 0, "reservations": 1})
    other = make(device)
    assert other.base != base
    other.close()
    del view
    gc.collect()
    empty_graveyard(device.name)
    assert model.live() == NOTHING


def test_b4_addresses_lost_in_close_are_told_and_nothing_is_left() -> None:
    device, model = keeping()
    cache = make(device)
    cache.commit(40)
    view = cache.view("l0")
    taken_by_another(device)
    with pytest.raises(VmmError, match=r"is complete, but .* could not be reserved again: the driver gave"):
        cache.close()
    cache.close()
    assert (cache.state, model.used(0)) == (State.CLOSED, 0)
    leave_no_trace(device, cache)
    del view


def test_b4_a_free_that_fails_in_close_under_a_live_tensor_is_tried_again() -> None:
    device, model = keeping()
    cache = make(device)
    cache.commit(40)
    view = cache.view("l0")
    model.fail("free_address", 1, UNKNOWN)
    with pytest.raises(VmmError, match="is not complete, close again: free_address"):
        cache.close()
    cache.close()
    assert (model.used(0), model.live()["reservations"]) == (0, 1)
    del view
    gc.collect()
    empty_graveyard(device.name)
    assert model.live() == NOTHING


def test_b4_threads_take_turns_and_readers_never_wait_nor_see_lost_addresses() -> None:
    """Invariants 2 and 15. The addresses go and come while others read."""
    device, model = keeping()
    cache = make(device)
    cache.commit(40)
    errors: list[BaseException] = []
    done = threading.Event()

    def operate(seed: int) -> None:
        for i in range(30):
            try:
                cache.commit(1 + (seed + i) % 40)
                cache.shrink((seed * i) % 3 * 5)
            except ValueError:
                pass  # another thread has committed more or shrunk below
            except BaseException as error:
                errors.append(error)

    def read() -> None:
        while not done.is_set():
            try:
                assert set(cache.tensors) == {"l0", "l1"}
                assert cache.spare_bytes >= 0
                assert cache.physical_bytes >= 0
                cache.chunk_table()
            except BaseException as error:
                errors.append(error)
                return

    reader = threading.Thread(target=read)
    workers = [threading.Thread(target=operate, args=(seed,)) for seed in range(3)]
    for thread in (reader, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    reader.join()
    assert errors == []
    assert cache.physical_bytes == model.used(0) == cache.mapped_bytes + cache.spare_bytes
    cache.close()
    assert (model.live(), model.used(0)) == (NOTHING, 0)


# --- what a shrink says it gave back ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("taken", "returned"), [(0, 20), (7, 13), (50, 0), (-9, 20)])
def test_a_shrink_measures_what_is_free_again(taken: int, returned: int) -> None:
    """Others take (or give back) memory meanwhile: never below 0, never more than was released."""
    device, model = open_quirky(Quirks())
    model.charge(0, 100 * G)

    def meanwhile() -> None:
        if taken > 0:
            model.charge(0, taken * G)
        elif taken < 0:
            model.credit(0, -taken * G)

    cache = make(device, quiesce=meanwhile)
    cache.commit(40)
    assert cache.shrink(20) == returned * G
    cache.close()


def test_a_first_reading_that_fails_stops_the_shrink_and_a_second_one_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device, model = open_quirky(Quirks())
    cache = make(device)
    cache.commit(40)
    before = (cache.blocks, cache.generation, cache.chunk_table())
    model.fail("mem_info", 1, UNKNOWN)
    with pytest.raises(DriverError, match="mem_info"):
        cache.shrink(20)
    assert (cache.blocks, cache.generation, cache.chunk_table()) == before
    model.fail("mem_info", 2, UNKNOWN)
    assert cache.shrink(20) == 20 * G
    assert f"{20 * G} bytes were released, and whether they came back cannot be read" in caplog.text
    cache.close()


# --- a driver that has shut down --------------------------------------------------------------------------------------


def shut_down(model: DeviceModel, calls: int = 400) -> None:
    for nth in range(1, calls):
        model.fail("any", nth, DEINITIALIZED)


@pytest.mark.parametrize("quirks", [Quirks(), KEEPS])
@pytest.mark.parametrize("viewed", [False, True])
def test_c84_close_is_silent_when_the_driver_has_shut_down(
    caplog: pytest.LogCaptureFixture, quirks: Quirks, viewed: bool
) -> None:
    device, model = open_quirky(quirks)
    cache = make(device)
    cache.commit(40)
    view = cache.view("l0") if viewed else None
    shut_down(model)
    cache.close()
    cache.close()
    assert (cache.state, cache.blocks, cache.chunk_table(), cache.mapped_bytes) == (
        State.CLOSED,
        0,
        (),
        cache.mapped_bytes,
    )
    assert caplog.text == ""
    del view
    empty_graveyard(device.name)
    assert caplog.text == ""


def test_c84_the_graveyard_is_silent_when_the_driver_has_shut_down(caplog: pytest.LogCaptureFixture) -> None:
    device, model = open_quirky(Quirks())
    cache = make(device)
    cache.commit(40)
    shut_down(model)
    del cache
    gc.collect()
    empty_graveyard()
    calls = model.calls()
    empty_graveyard()
    assert model.calls() == calls, "nothing is buried any more"
    assert caplog.text == ""


def test_c84_the_interpreter_exits_in_silence_when_the_driver_has_shut_down() -> None:
    script = f"""
import torch
from vmm_kv import KVCache, TensorSpec
from vmm_kv.device import open_host

device = open_host(64 * {G}, granule={G})
cache = KVCache.reserve(device, [TensorSpec("kv", (None, {G}), torch.uint8)], 16)
cache.commit(16)
del cache
for nth in range(1, 100):
    device.driver.model.fail("any", nth, {DEINITIALIZED})
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Dead(HostDriver):
    """One that cannot even be entered, or asked whether it captures, once it has shut down."""

    gone: str | None = None

    def scope(self) -> Any:
        if self.gone == "scope":
            raise DriverGone("scope: deinitialized", call="context", status=DEINITIALIZED)
        return super().scope()

    def capturing(self) -> bool:
        if self.gone == "capturing":
            raise DriverGone("capturing: deinitialized", call="stream", status=DEINITIALIZED)
        return super().capturing()

    def synchronize(self) -> None:
        if self.gone == "synchronize":
            raise DriverGone("synchronize: deinitialized", call="context", status=DEINITIALIZED)


@pytest.mark.parametrize("gone", ["scope", "capturing", "synchronize"])
@pytest.mark.parametrize("dropped", [False, True])
def test_c84_also_where_the_device_cannot_be_made_current(
    caplog: pytest.LogCaptureFixture, gone: str, dropped: bool
) -> None:
    model = DeviceModel([4096 * G], G)
    driver = Dead(model)
    device = Device(driver, torch.device("cpu"), HostFramework(model))
    cache = make(device)
    cache.commit(40)
    driver.gone = gone
    if dropped:
        del cache
        gc.collect()
        empty_graveyard()
    else:
        cache.close()
        assert (cache.state, cache.blocks, cache.physical_bytes) == (State.CLOSED, 0, 0)
    calls = model.calls()
    empty_graveyard()
    assert model.calls() == calls
    assert caplog.text == ""


def test_an_operation_on_a_driver_that_has_shut_down_says_so() -> None:
    device, model = open_quirky(Quirks())
    cache = make(device)
    cache.commit(20)
    shut_down(model)
    operations: list[Callable[[], object]] = [lambda: cache.commit(40), lambda: cache.shrink(4)]
    for operation in operations:
        with pytest.raises(DriverGone):
            operation()
        assert cache.blocks == 20
    cache.close()
