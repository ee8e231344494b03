"""The cache's states, sizes, contents, listeners and owners, in every set-up, with poisoned fresh memory.

Where a test says `keeps`, memory returns only with its addresses (B4): what would be released stays as spares.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from setups import SETUPS, G, Model, OpenedDevice, opened

from vmm_kv._native import DeviceModel
from vmm_kv.cache import KVCache
from vmm_kv.capture import capture_in_progress, capturing
from vmm_kv.device import Device, open_host
from vmm_kv.driver import Quirks
from vmm_kv.driver.host import HostDriver
from vmm_kv.errors import (
    DriverError,
    OutOfAddressSpace,
    OutOfPhysicalMemory,
    StateError,
    UnsupportedError,
    VmmError,
)
from vmm_kv.host import HostFramework
from vmm_kv.layout import Layout, TensorSpec
from vmm_kv.prepared import PreparedCommit
from vmm_kv.spans import Span, length, union
from vmm_kv.state import State

NOTHING = {"handles": 0, "mappings": 0, "reservations": 0}


def model(device: Device) -> Model:
    if isinstance(device, OpenedDevice):
        return device.model
    assert isinstance(device.driver, HostDriver)
    return device.driver.model


@pytest.fixture(params=SETUPS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with opened(request.param, 512 * G) as device:
        yield device


def keeps(device: Device) -> bool:
    return device.driver.quirks.memory_with_addresses


def alike(device: Device) -> Any:
    """As the chunk of a cache: a granule where the driver wants all alike, which by itself would be several."""
    return G if device.driver.quirks.uniform_chunks else "auto"


def spec(name: str, shape: tuple[int | None, ...] = (2, None, 512), dtype: torch.dtype = torch.bfloat16) -> TensorSpec:
    return TensorSpec(name, shape, dtype)


def make(device: Device, capacity: int = 40, **options: Any) -> KVCache:
    """K and V of two layers: four segments of ten granules each, four blocks to a granule."""
    return KVCache.reserve(device, [spec("l0"), spec("l1")], capacity, **options)


def peek(cache: KVCache, start: int, stop: int) -> bytes:
    return ctypes.string_at(cache.base + start, stop - start)


def poke(cache: KVCache, start: int, stop: int, byte: int) -> None:
    ctypes.memset(cache.base + start, byte, stop - start)


def mapped_and_spare(cache: KVCache) -> int:
    return sum(size for _, size, _ in cache.chunk_table()) + cache.spare_bytes


def mapped(cache: KVCache) -> tuple[Span, ...]:
    return union((a - cache.base, a - cache.base + size) for a, size in model(cache.device).mapped())


class Recorder:
    """A listener that keeps what it hears, and does what it is told."""

    def __init__(
        self, log: list[Any], name: str = "", before: Callable[[], object] | None = None, after: Any = None
    ) -> None:
        self.log, self.name, self.before, self.after = log, name, before, after

    def before_unmap(self, spans: Sequence[Span], generation: int) -> None:
        self.log.append((f"before{self.name}", tuple(spans), generation))
        if self.before:
            self.before()

    def after_map(self, spans: Sequence[Span], generation: int) -> None:
        self.log.append((f"after{self.name}", tuple(spans), generation))
        if self.after:
            self.after()


def fail(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


# --- states -----------------------------------------------------------------------------------------------------------


def reserved(device: Device) -> KVCache:
    return make(device)


def backed(device: Device) -> KVCache:
    cache = make(device)
    cache.back(2)
    return cache


def aliased(device: Device) -> KVCache:
    cache = make(device)
    cache.back(alias=True)
    return cache


def alias_chunk(device: Device) -> int:
    """A 256th of the device, or like all other chunks."""
    return G if device.driver.quirks.uniform_chunks else 2 * G


def committed(device: Device) -> KVCache:
    cache = make(device)
    cache.commit(10)
    return cache


def faulted(device: Device) -> KVCache:
    cache = make(device)
    model(device).fail("set_access", 1, 999)
    model(device).fail("unmap", 1, 999)
    with pytest.raises(VmmError, match="so did undoing it"):
        cache.commit(1)
    return cache


def closed(device: Device) -> KVCache:
    cache = make(device)
    cache.close()
    return cache


OPERATIONS: dict[str, Callable[[KVCache], object]] = {
    "back": lambda cache: cache.back(5),
    "alias": lambda cache: cache.back(alias=True),
    "prepare": lambda cache: cache.prepare(12),
    "commit": lambda cache: cache.commit(12),
    "shrink": lambda cache: cache.shrink(0),
    "close": lambda cache: cache.close(),
}
STATES: dict[Callable[[Device], KVCache], set[str]] = {
    reserved: {"back", "alias", "prepare", "commit", "close"},
    backed: {"back", "prepare", "commit", "close"},
    aliased: {"prepare", "commit", "close"},
    committed: {"prepare", "commit", "shrink", "close"},
    faulted: {"close"},
    closed: {"close"},
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("start", STATES)
def test_which_operation_fits_which_state(device: Device, start: Callable[[Device], KVCache], operation: str) -> None:
    cache = start(device)
    state, calls, table = cache.state, model(device).calls(), cache.chunk_table()
    if operation in STATES[start]:
        OPERATIONS[operation](cache)
        return
    text = "has an alias backing" if start is aliased and operation == "back" else f"a cache that is {state.value}"
    with pytest.raises(StateError, match=text):
        OPERATIONS[operation](cache)
    assert (cache.state, model(device).calls(), cache.chunk_table()) == (state, calls, table)


def test_the_states_of_one_life(device: Device) -> None:
    cache = make(device)
    used = [model(device).used(0)]
    assert (cache.state, cache.blocks, cache.backed, cache.capacity) == (State.RESERVED, 0, 0, 40)
    assert cache.reserved_bytes >= cache.layout.nbytes
    pointers = {name: tensor.data_ptr() for name, tensor in cache.tensors.items()}
    cache.back(1)
    assert (cache.state, cache.blocks, cache.backed) == (State.BACKED, 0, 4)
    assert cache.mapped_bytes == cache.physical_bytes == model(device).used(0) == 4 * G
    assert cache.commit(10) == 10
    assert (cache.state, cache.blocks, cache.backed) == (State.COMMITTED, 10, 12)
    assert cache.mapped_bytes == cache.cost(10) == cache.cost(12) == 12 * G
    assert (cache.shrink(5), cache.spare_bytes) == ((0, 4 * G) if keeps(device) else (4 * G, 0))
    assert (cache.blocks, cache.backed, cache.mapped_bytes) == (5, 8, 8 * G)
    assert {name: tensor.data_ptr() for name, tensor in cache.tensors.items()} == pointers  # invariant 1
    cache.close()
    assert (cache.state, cache.blocks, model(device).used(0)) == (State.CLOSED, 0, used[0])
    assert model(device).live() == NOTHING
    assert repr(cache) == f"<KVCache closed on {device.name}: 0 of 40 blocks>"
    with pytest.raises(StateError, match="tensors of a closed cache"):
        _ = cache.tensors


def test_back_takes_blocks_or_alias(device: Device) -> None:
    cache = make(device)
    with pytest.raises(ValueError, match="a number of blocks, or alias=True"):
        cache.back()
    with pytest.raises(ValueError, match="a number of blocks, or alias=True"):
        cache.back(3, alias=True)


def test_a_prefix_grows_and_is_zero(device: Device) -> None:
    cache = make(device)
    cache.back(1)
    assert not any(peek(cache, *cache.layout.segments[0].span(cache.backed)))
    poke(cache, 0, 4000, 0x11)
    cache.back(9)
    assert cache.backed == 12
    assert peek(cache, 0, 4000) == b"\x11" * 4000
    for segment in cache.layout.segments:
        assert not any(peek(cache, segment.block(4)[0], segment.block(11)[1]))
    calls = model(device).calls()["create"]
    cache.back(2)
    assert (cache.backed, model(device).calls()["create"]) == (12, calls), "it never gets smaller"


def test_an_alias_costs_one_chunk_and_lies_everywhere(device: Device) -> None:
    cache = make(device)
    cache.back(alias=True)
    chunk = alias_chunk(device)
    assert (cache.backed, cache.blocks, cache.mapped_bytes) == (40, 0, 0)
    assert cache.physical_bytes == model(device).used(0) == chunk
    assert mapped(cache) == ((0, cache.reserved_bytes),)
    assert cache.cost(10) == 12 * G, "the alias does not count"
    assert not any(peek(cache, 0, cache.reserved_bytes))
    poke(cache, chunk, chunk + 1, 7)
    assert peek(cache, 0, 1) == b"\7"
    cache.commit(10)
    assert mapped(cache) == cache.layout.granules(10, G)
    assert cache.spare_bytes == (chunk if keeps(device) else 0)
    assert cache.physical_bytes == model(device).used(0) == 12 * G + cache.spare_bytes


def test_a_commit_from_alias_holds_the_alias_until_it_is_done(device: Device) -> None:
    cache = make(device)
    cache.back(alias=True)
    model(device).charge(0, 512 * G - alias_chunk(device) - 11 * G)
    with pytest.raises(
        OutOfPhysicalMemory, match=rf"create on {device.name} failed: .* \(2\); asked for \d+ bytes"
    ) as e:
        cache.commit(10)
    assert f"The whole operation needs {12 * G} bytes, " in str(e.value)
    assert (cache.state, cache.generation, mapped(cache)) == (State.BACKED, 0, ((0, cache.reserved_bytes),))
    model(device).credit(0, G)
    assert cache.commit(10) == 10


def test_the_same_commit_twice_calls_nothing(device: Device) -> None:
    cache = committed(device)
    calls, generation = model(device).calls(), cache.generation
    assert cache.commit(10) == 10
    assert cache.shrink(10) == 0
    assert (model(device).calls(), cache.generation) == (calls, generation)


def test_a_context_closes(device: Device) -> None:
    with make(device) as cache:
        cache.commit(3)
    assert cache.state is State.CLOSED
    assert model(device).live() == NOTHING


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [-1, 0, 41, 1 << 62])
@pytest.mark.parametrize("operation", ["back", "prepare", "commit"])
def test_counts_out_of_bounds_are_refused_with_the_numbers(device: Device, operation: str, number: int) -> None:
    """Invariant 10."""
    cache = make(device)
    word = "back" if operation == "back" else "commit"
    with pytest.raises(ValueError, match=rf"{word} of {number} blocks: it must be 1 to 40"):
        getattr(cache, operation)(number)
    assert device.driver.calls()["create"] == 0


def test_shrink_and_commit_go_one_way_each(device: Device) -> None:
    cache = committed(device)
    for number in (11, -1):
        with pytest.raises(ValueError, match=rf"shrink of {number} blocks: it must be 0 to 10"):
            cache.shrink(number)
    with pytest.raises(ValueError, match=r"commit of 9 blocks where 10 are usable: shrink\(\)"):
        cache.commit(9)
    with pytest.raises(TypeError):
        cache.commit(12.0)  # type: ignore[arg-type]
    assert cache.blocks == 10


@pytest.mark.parametrize("block", [1, 3, 4095, 4096, 4097, 6144, 10000])
@pytest.mark.parametrize("capacity", [1, 2, 13])
def test_blocks_that_do_not_divide(device: Device, block: int, capacity: int) -> None:
    cache = KVCache.reserve(device, [spec("a", (None, block), torch.int8)], capacity, chunk=alike(device))
    for count in sorted({1, (capacity + 1) // 2, capacity}):
        assert cache.commit(count) == count
        assert cache.mapped_bytes == -(-count * block // G) * G == cache.cost(count)
        cache.view("a").fill_(1)
    assert cache.blocks_within(cache.cost(capacity)) == capacity
    cache.shrink(0)
    assert (cache.mapped_bytes, mapped(cache), cache.physical_bytes) == (0, (), 0)
    assert cache.commit(capacity) == capacity


def test_capacity_of_none_and_beyond_what_a_process_can_address(device: Device) -> None:
    for capacity, text in ((0, "at least 1 block, got 0"), (-3, "got -3"), (1 << 40, "a process has at most")):
        with pytest.raises(ValueError, match=text):
            KVCache.reserve(device, [spec("a", (None, 4096), torch.int8)], capacity)
    with pytest.raises(OutOfAddressSpace, match=f"asked for {1 << 47} bytes of addresses"):
        KVCache.reserve(device, [spec("a", (None, 4096), torch.int8)], 1 << 35)
    with pytest.raises(ValueError, match="outermost='layer': it is 'tensor' or 'block'"):
        make(device, outermost="layer")
    assert model(device).live() == NOTHING


def test_far_more_addresses_than_memory(device: Device) -> None:
    specs = [spec("a", (None, 4096), torch.int8)]
    cache = KVCache.reserve(device, specs, 1 << 28, chunk=alike(device))  # 1 TiB
    assert cache.blocks_within(512 * G) == 512
    cache.commit(3)
    with pytest.raises(OutOfPhysicalMemory):
        cache.commit(513)
    assert (cache.blocks, cache.physical_bytes) == (3, 3 * G)
    assert cache.commit(512) == 512


@pytest.mark.parametrize("setup", SETUPS)
def test_a_budget_below_one_block(setup: str) -> None:
    with opened(setup, G) as device:
        cache = KVCache.reserve(device, [spec("a", (None, 2 * G), torch.int8)], 4)
        assert (cache.blocks_within(G), cache.cost(1)) == (0, 2 * G)
        with pytest.raises(OutOfPhysicalMemory, match=rf"asked for {G} bytes; 0 of {G} bytes are free"):
            cache.commit(1)
        with pytest.raises(OutOfPhysicalMemory):
            cache.back(1)
        assert (cache.state, model(device).live()["handles"]) == (State.RESERVED, 0)


def test_a_budget_below_one_granule() -> None:
    with pytest.raises(ValueError, match="cannot hold one granule"):
        open_host(G - 1, granule=G)


@pytest.mark.parametrize("chunk", ["auto", None, G, 3 * G])
def test_chunks_of_any_size_map_the_same_granules(device: Device, chunk: Any) -> None:
    if chunk is None and device.driver.quirks.uniform_chunks:
        with pytest.raises(UnsupportedError, match=f"{device.name} needs chunks of one size"):
            make(device, chunk=chunk)
        return
    cache = make(device, chunk=chunk)
    for count in (1, 7, 40):
        cache.commit(count)
        assert mapped(cache) == cache.layout.granules(count, cache.unit)
    if isinstance(chunk, int):
        assert max(size for _, size, _ in cache.chunk_table()) <= chunk
    cache.shrink(7)
    keep = cache.layout.granules(7, cache.unit)
    assert length(union(mapped(cache), keep)) == length(mapped(cache))


@pytest.mark.parametrize("chunk", [0, -G, 1, G + 1])
def test_chunks_are_whole_granules(device: Device, chunk: int) -> None:
    with pytest.raises(ValueError, match=f"a chunk of {chunk} bytes on {device.name}: it must be a multiple of {G}"):
        make(device, chunk=chunk)


# --- generation and listeners -----------------------------------------------------------------------------------------


def test_generation_rises_only_when_pages_behind_mapped_addresses_change(device: Device) -> None:
    cache = make(device)
    steps: list[tuple[Callable[[], object], int]] = [
        (lambda: cache.back(2), 0),
        (lambda: cache.commit(10), 0),
        (lambda: cache.commit(30), 0),
        (lambda: cache.shrink(29), 0),  # nothing can be unmapped
        (lambda: cache.shrink(5), 1),
        (lambda: cache.commit(20), 1),
        (lambda: cache.shrink(0), 2),
    ]
    for step, generation in steps:
        step()
        assert cache.generation == generation
    other = aliased(device)
    assert other.generation == 0
    other.commit(3)
    assert other.generation == 1


def test_listeners_hear_in_order_with_absolute_spans(device: Device) -> None:
    log: list[Any] = []
    cache = make(device, quiesce=lambda: log.append("quiesce"))
    for name in "AB":
        cache.add_listener(Recorder(log, name))
    whole = ((cache.base, cache.base + cache.reserved_bytes),)

    def heard(kind: str, spans: Sequence[Span], generation: int) -> list[Any]:
        return [(f"{kind}{name}", tuple(spans), generation) for name in "AB"]

    def absolute(spans: Sequence[Span]) -> list[Span]:
        return [(cache.base + start, cache.base + stop) for start, stop in spans]

    cache.back(alias=True)
    assert log == heard("after", whole, 0)
    log.clear()
    cache.commit(4)
    few = absolute(cache.layout.granules(4, G))
    assert log == ["quiesce", *heard("before", whole, 0), *heard("after", few, 1)]
    log.clear()
    cache.commit(8)
    grown = [(start + G, stop + G) for start, stop in few]
    assert log == heard("after", grown, 1)
    log.clear()
    cache.shrink(4)
    assert log == ["quiesce", *heard("before", grown, 1)]
    log.clear()
    cache.close()
    assert log == ["quiesce", *heard("before", few, 2)]


@pytest.mark.parametrize("operation", ["commit", "shrink"])
def test_a_listener_that_refuses_an_unmap_stops_it(device: Device, operation: str) -> None:
    log: list[Any] = []
    cache = aliased(device) if operation == "commit" else committed(device)
    cache.add_listener(Recorder(log, "A"))
    refusing = Recorder(log, "B", before=fail(RuntimeError("not now")))
    cache.add_listener(refusing)
    cache.add_listener(Recorder(log, "C"))
    before = (cache.state, cache.blocks, cache.generation, cache.chunk_table(), cache.physical_bytes)
    with pytest.raises(RuntimeError, match="not now"):
        OPERATIONS[operation](cache)
    assert (cache.state, cache.blocks, cache.generation, cache.chunk_table(), cache.physical_bytes) == before
    assert [kind for kind, _, _ in log] == ["beforeA", "beforeB", "afterA"], "only A had let go"
    refusing.before = None
    OPERATIONS[operation](cache)


def test_a_listener_that_was_removed_hears_no_more(device: Device) -> None:
    log: list[Any] = []
    cache = committed(device)
    refusing, other = Recorder(log, "A", before=fail(RuntimeError("gone"))), Recorder(log, "B")
    cache.add_listener(refusing)
    cache.add_listener(other)
    with pytest.raises(RuntimeError, match="gone"):
        cache.shrink(0)
    cache.remove_listener(refusing)
    log.clear()
    cache.shrink(0)
    assert [kind for kind, _, _ in log] == ["beforeB"]
    with pytest.raises(ValueError, match="is no listener of this cache"):
        cache.remove_listener(refusing)


def test_a_listener_is_an_instance(device: Device) -> None:
    with pytest.raises(TypeError, match="is a class"):
        make(device).add_listener(Recorder)  # type: ignore[arg-type]


def test_a_close_that_only_a_live_tensor_holds_up_says_so(device: Device) -> None:
    cache = committed(device)
    view = next(iter(cache.tensors.values()))
    cache.add_listener(Recorder([], before=fail(RuntimeError("busy"))))
    with pytest.raises(VmmError, match=r"gave all memory back \(the addresses follow with the last tensor\), but busy"):
        cache.close()
    cache.close()
    del view


@pytest.mark.parametrize("wrong", [2.0, "4", None])
def test_a_count_is_a_whole_number(device: Device, wrong: Any) -> None:
    with pytest.raises(TypeError, match="commit: the number of blocks must be a whole number, got"):
        make(device).commit(wrong)


def test_one_spec_is_no_sequence_of_specs(device: Device) -> None:
    with pytest.raises(TypeError, match=r"such as \[spec\]"):
        KVCache.reserve(device, TensorSpec("kv", (None, 64), torch.uint8), 4)  # type: ignore[arg-type]


def test_listeners_that_fail_after_a_map_are_collected(device: Device) -> None:
    log: list[Any] = []
    cache = make(device)
    cache.add_listener(Recorder(log, "A", after=fail(RuntimeError("full"))))
    cache.add_listener(Recorder(log, "B"))
    assert cache.commit(5) == 5
    assert [str(error) for error in cache.listener_errors] == ["full"]
    assert [kind for kind, _, _ in log] == ["afterA", "afterB"]
    cache.prepare(5).publish()
    assert cache.listener_errors == ()


@pytest.mark.parametrize("start", [reserved, backed, aliased, committed])
def test_an_interrupt_in_a_listener_after_the_map_leaves_a_whole_cache(
    device: Device, start: Callable[[Device], KVCache]
) -> None:
    """The chunks are mapped by then, so nobody may release them."""
    cache = start(device)
    cache.add_listener(Recorder([], after=fail(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        cache.commit(30)
    assert (cache.state, cache.blocks) == (State.COMMITTED, 30)
    assert cache.spare_bytes == (G if keeps(device) and start is aliased else 0)
    assert cache.physical_bytes == model(device).used(0) == mapped_and_spare(cache)
    assert model(device).live()["handles"] == len(cache.chunk_table()) + cache.spare_bytes // G
    step = cache.prepare(40)
    with pytest.raises(KeyboardInterrupt):
        step.publish()
    step.discard()
    assert cache.blocks == 40
    assert model(device).live()["handles"] == len(cache.chunk_table())
    cache.close()
    assert model(device).live() == NOTHING


@pytest.mark.parametrize("operation", ["commit", "shrink"])
def test_quiesce_that_fails_stops_the_operation(device: Device, operation: str) -> None:
    hook: list[Callable[[], None]] = [fail(RuntimeError("still running"))]
    cache = make(device, quiesce=lambda: hook[0]())
    if operation == "commit":
        cache.back(alias=True)
    else:
        cache.commit(10)
    table, blocks, held = cache.chunk_table(), cache.blocks, cache.physical_bytes
    with pytest.raises(RuntimeError, match="still running"):
        OPERATIONS[operation](cache)
    assert (cache.chunk_table(), cache.blocks, cache.physical_bytes) == (table, blocks, held)
    hook[0] = lambda: None
    OPERATIONS[operation](cache)


def test_quiesce_comes_before_the_first_unmap_and_sees_the_lowered_count(device: Device) -> None:
    """Invariants 4 and 7."""
    seen: list[tuple[int, int]] = []
    hook: list[Callable[[], None]] = []
    cache = make(device, quiesce=lambda: hook[0]())
    hook.append(lambda: seen.append((cache.blocks, model(device).calls()["unmap"])))
    cache.commit(20)
    cache.commit(30)
    cache.shrink(29)
    assert seen == [], "no page goes, so nobody need stop"
    cache.shrink(3)
    assert seen == [(3, 0)]


def test_a_grown_count_is_raised_last(device: Device) -> None:
    seen: list[int] = []
    cache = committed(device)
    cache.add_listener(Recorder([], after=lambda: seen.append(cache.blocks)))
    cache.commit(20)
    assert (seen, cache.blocks) == ([10], 20)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("threaded", [False, True])
def test_an_operation_from_a_listener_is_refused(device: Device, operation: str, threaded: bool) -> None:
    """Whichever thread it comes from: the listener may be waiting for that thread."""
    caught: list[BaseException] = []
    heard: list[tuple[int, int, int]] = []
    cache = make(device)

    def call() -> None:
        try:
            OPERATIONS[operation](cache)
        except BaseException as error:
            caught.append(error)

    def listen() -> None:
        heard.append((cache.capacity, cache.generation, len(cache.chunk_table())))  # reading is allowed
        if threaded:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        else:
            call()

    cache.add_listener(Recorder([], after=listen))
    assert cache.commit(3) == 3
    assert heard == [(40, 0, 4)]
    assert [type(error) for error in caught] == [StateError]
    assert "while commit is in its callbacks" in str(caught[0])
    assert cache.listener_errors == ()


def test_two_threads_take_turns(device: Device) -> None:
    cache = make(device)
    cache.commit(1)
    barrier = threading.Barrier(4)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        barrier.wait()
        for i in range(40):
            try:
                cache.commit(1 + (seed + i) % 40)
                cache.shrink(1 + (seed * i) % 20)
            except ValueError as error:
                # another thread has committed more or shrunk below
                assert "usable" in str(error) or "shrink of" in str(error), error
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert cache.physical_bytes == model(device).used(0) == cache.mapped_bytes + cache.spare_bytes
    assert keeps(device) or not cache.spare_bytes
    assert model(device).mapped() == [(address, size) for address, size, _ in cache.chunk_table()]
    cache.close()
    assert model(device).live() == NOTHING


# --- prepare ----------------------------------------------------------------------------------------------------------


def test_a_prepared_step_takes_memory_and_nothing_else(device: Device) -> None:
    cache = committed(device)
    table, maps = cache.chunk_table(), model(device).calls()["map"]
    step = cache.prepare(20)
    assert (step.blocks, step.bytes) == (20, 8 * G)
    assert (cache.blocks, cache.chunk_table(), cache.physical_bytes) == (10, table, 20 * G)
    assert model(device).calls()["map"] == maps
    assert step.publish() == cache.blocks == 20
    step.discard()  # nothing is left to give back
    assert (cache.mapped_bytes, cache.physical_bytes) == (20 * G, 20 * G)
    with pytest.raises(StateError, match="this prepared commit of 20 blocks was published or discarded before"):
        step.publish()


def test_a_discarded_step_gives_everything_back(device: Device) -> None:
    cache = aliased(device)
    step = cache.prepare(20)
    step.discard()
    step.discard()
    chunk = alias_chunk(device)
    assert (cache.state, cache.physical_bytes, model(device).used(0)) == (State.BACKED, chunk, chunk)
    with pytest.raises(StateError, match="discarded before"):
        step.publish()


@pytest.mark.parametrize("overtake", [lambda c: c.commit(11), lambda c: c.shrink(3), lambda c: c.prepare(12).publish()])
def test_a_stale_step_is_refused(device: Device, overtake: Callable[[KVCache], object]) -> None:
    cache = committed(device)
    step = cache.prepare(20)
    overtake(cache)
    blocks, table = cache.blocks, cache.chunk_table()
    with pytest.raises(StateError, match="this prepared commit of 20 blocks is stale"):
        step.publish()
    assert (cache.blocks, cache.chunk_table()) == (blocks, table)
    step.discard()
    assert cache.physical_bytes == model(device).used(0) == cache.mapped_bytes + cache.spare_bytes
    assert (cache.spare_bytes > 0) == (keeps(device) and blocks == 3), "never mapped is released, as anywhere"


def test_a_step_that_failed_may_be_published_again(device: Device) -> None:
    cache = aliased(device)
    step = cache.prepare(20)
    model(device).fail("set_access", 1, 999)
    with pytest.raises(DriverError):
        step.publish()
    assert (cache.state, cache.generation) == (State.BACKED, 1)
    assert mapped(cache) == ((0, cache.reserved_bytes),)
    assert step.publish() == 20


@pytest.mark.parametrize("use", [PreparedCommit.publish, PreparedCommit.discard])
def test_a_step_after_close(device: Device, use: Callable[[PreparedCommit], object]) -> None:
    cache = make(device)
    step = cache.prepare(20)
    cache.close()
    assert model(device).live() == NOTHING
    if use is PreparedCommit.publish:
        with pytest.raises(StateError, match="closed"):
            use(step)
    else:
        use(step)
    assert model(device).live() == NOTHING


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outermost", ["tensor", "block"])
def test_views_of_every_dtype(device: Device, outermost: str) -> None:
    dtypes = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32, torch.int8]
    specs = [spec(str(dtype), (None, 2, 16, 8), dtype) for dtype in dtypes]
    cache = KVCache.reserve(device, specs, 12, outermost=outermost)
    cache.commit(5)
    for dtype in dtypes:
        whole, view = cache.tensors[str(dtype)], cache.view(str(dtype))
        assert (whole.dtype, view.dtype) == (dtype, dtype)
        assert (tuple(whole.shape), tuple(view.shape)) == ((12, 2, 16, 8), (5, 2, 16, 8))
        assert view.data_ptr() == whole.data_ptr()
        assert not view.float().any()
        values = torch.arange(5 * 256).remainder(7).reshape(5, 2, 16, 8)
        view.copy_(values)
        assert torch.equal(view.float(), values.float())
        assert torch.equal(whole[4].float(), values[4].float())


def test_a_view_follows_the_count(device: Device) -> None:
    cache = make(device)
    assert tuple(cache.view("l0").shape) == (2, 0, 512)
    cache.commit(10)
    assert tuple(cache.view("l0").shape) == (2, 10, 512)
    cache.shrink(3)
    assert tuple(cache.view("l1").shape) == (2, 3, 512)
    with pytest.raises(KeyError):
        cache.view("l2")


def test_segment_table(device: Device) -> None:
    cache = make(device)
    cache.commit(4)
    rows = cache.segment_table()
    assert [(row.tensor, row.index) for row in rows] == [("l0", 0), ("l0", 1), ("l1", 0), ("l1", 1)]
    for row in rows:
        assert (row.block_stride, row.block_bytes, row.capacity_bytes) == (1024, 1024, 40960)
        address = cache.tensors[row.tensor][row.index].data_ptr()
        assert row.address == address
    other = aliased(device)
    assert all(row.mapped_bytes == row.capacity_bytes for row in other.segment_table())


# --- zeroing ----------------------------------------------------------------------------------------------------------


def shared(device: Device, **options: Any) -> KVCache:
    """Segments of 10000 bytes without a gap, so that neighbours share granules."""
    specs = [spec(name, (2, None, 1000), torch.int8) for name in ("a", "b")]
    return KVCache(device, Layout.tensor_outermost(specs, 10, alignment=1), **options)


@pytest.mark.parametrize("start", [1, 3, 9])
@pytest.mark.parametrize("backing", ["none", "prefix", "alias"])
def test_growth_zeroes_exactly_the_new_spans(device: Device, backing: str, start: int) -> None:
    """The byte before and after may be a neighbour's, in the same granule."""
    cache = shared(device)
    if backing != "none":
        cache.back(None if backing == "alias" else 2, alias=backing == "alias")
        dirty = cache.backed if backing == "prefix" else cache.capacity
        for first, stop in cache.layout.spans(dirty):
            poke(cache, first, stop, 0x77)
    cache.commit(start)
    for segment in cache.layout.segments:
        assert not any(peek(cache, *segment.span(start)))
    # every mapped byte gets a pattern: usable blocks and what lies beyond them
    for first, stop in mapped(cache):
        poke(cache, first, min(stop, cache.layout.nbytes), 0x55)
    cache.commit(10)
    for segment in cache.layout.segments:
        assert peek(cache, *segment.span(start)) == b"\x55" * (1000 * start)
        assert not any(peek(cache, segment.block(start)[0], segment.block(9)[1])), "a reused tail is dirty too"


def test_a_straddlers_tail_is_zero_when_it_comes_back(device: Device) -> None:
    cache = shared(device)
    cache.commit(10)
    poke(cache, 0, cache.layout.nbytes, 0x55)
    cache.shrink(3)
    assert cache.backed > 3
    cache.commit(4)
    for segment in cache.layout.segments:
        assert peek(cache, *segment.span(3)) == b"\x55" * 3000
        assert not any(peek(cache, *segment.block(3)))


@pytest.mark.parametrize(("zero", "names"), [(False, set()), (True, {"a", "b"}), (["b"], {"b"}), ((), set())])
def test_zeroing_is_optional_by_tensor(device: Device, zero: Any, names: set[str]) -> None:
    """C67: fresh memory is poisoned here, so what is not zeroed shows."""
    cache = shared(device, zero=zero)
    cache.commit(10)
    for name in ("a", "b"):
        values = set(cache.view(name).flatten().tolist())
        assert values == ({0} if name in names else {-1})


def test_zero_names_must_exist(device: Device) -> None:
    with pytest.raises(ValueError, match=re.escape("zero names tensors that the layout does not have: ['c', 'd']")):
        shared(device, zero=["d", "a", "c"])
    assert model(device).live() == NOTHING


@pytest.mark.parametrize("setup", SETUPS)
def test_fresh_zeros_are_not_written_again(setup: str) -> None:
    with opened(setup, 512 * G, fresh_zero=True) as device:
        cache = make(device)
        cache.commit(4)
        assert model(device).calls()["zero"] == 0
        assert not cache.view("l0").any()
        cache.view("l0").fill_(1)
        cache.shrink(2)
        cache.commit(40)
        assert not cache.view("l0")[:, 2:].any()
        assert cache.view("l0")[:, :2].all()


# --- capture ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "operation"),
    [(start, name) for start in (reserved, backed, aliased, committed) for name in OPERATIONS if name in STATES[start]],
)
def test_operations_are_refused_inside_a_capture(
    device: Device, start: Callable[[Device], KVCache], operation: str
) -> None:
    """Invariant 7: before the driver is touched."""
    cache = start(device)
    calls, table = model(device).calls(), cache.chunk_table()
    with capture_in_progress():
        with capture_in_progress(), pytest.raises(StateError, match="while a graph is being captured"):
            OPERATIONS[operation](cache)
        with pytest.raises(StateError, match=f"reserve on {device.name} while a graph is being captured"):
            make(device)
    assert (model(device).calls(), cache.chunk_table()) == (calls, table)
    OPERATIONS[operation](cache)


# --- drivers that want uniform chunks ---------------------------------------------------------------------------------


@pytest.fixture
def uniform() -> Device:
    driver = HostDriver(DeviceModel([4096 * G], G), quirks=Quirks(uniform_chunks=True))
    driver.model.poison = True
    return Device(driver, torch.device("cpu"), HostFramework(driver.model))


@pytest.mark.parametrize("chunk", ["auto", 2 * G, 8 * G])
def test_uniform_chunks_lie_on_one_grid(uniform: Device, chunk: Any) -> None:
    cache = make(uniform, capacity=200, chunk=chunk)
    unit = cache.unit
    assert unit == (8 * G if chunk == "auto" else chunk)
    steps: list[Callable[[], object]] = [
        lambda: cache.back(alias=True),
        lambda: cache.commit(20),
        lambda: cache.commit(150),
        lambda: cache.shrink(33),
        lambda: cache.commit(200),
    ]
    for step in steps:
        step()
        assert all(size == unit and (address - cache.base) % unit == 0 for address, size in model(uniform).mapped())
        assert cache.cost(cache.blocks) <= cache.physical_bytes
    assert mapped(cache) == cache.layout.granules(200, unit)
    cache.close()
    assert model(uniform).live() == NOTHING
    other = make(uniform, chunk=chunk)
    other.back(2)
    assert other.mapped_bytes == length(mapped(other)) == other.cost(2)
    assert other.mapped_bytes % unit == 0


def test_uniform_chunks_cannot_be_one_a_span(uniform: Device) -> None:
    with pytest.raises(UnsupportedError, match="needs chunks of one size"):
        make(uniform, chunk=None)


# --- ends -------------------------------------------------------------------------------------------------------------


def test_c81_closing_and_shrinking_twice_are_balanced(device: Device) -> None:
    cache = committed(device)
    for _ in range(2):
        cache.shrink(0)
    for _ in range(2):
        cache.commit(10)
    for _ in range(2):
        cache.close()
    calls = model(device).calls()
    assert (calls["create"], calls["map"], calls["reserve"]) == (
        calls["release"],
        calls["unmap"],
        calls["free_address"],
    )
    assert model(device).live() == NOTHING


def test_c86_memory_returns_at_close_and_addresses_with_the_last_tensor(device: Device) -> None:
    """Invariant 11."""
    cache = committed(device)
    view, base, size = cache.view("l1"), cache.base, cache.reserved_bytes
    for _ in range(2):
        cache.close()
        assert model(device).live() == {"handles": 0, "mappings": 0, "reservations": 1}
        assert model(device).used(0) == 0
    other = make(device)
    assert other.base + other.reserved_bytes <= base or base + size <= other.base
    frees = model(device).calls()["free_address"]
    del view
    gc.collect()
    assert model(device).calls()["free_address"] == frees, "a tensor's end calls no driver"
    other.commit(1)
    assert model(device).live()["reservations"] == 1, "the next operation on the device frees them, once"
    assert model(device).calls()["free_address"] == frees + 1
    other.close()
    assert model(device).live() == NOTHING


def test_c86_three_lives_leave_nothing(device: Device) -> None:
    for _ in range(3):
        cache = committed(device)
        cache.close()
        assert (model(device).used(0), model(device).live()) == (0, NOTHING)


def test_a_cache_that_is_dropped_is_undone_by_the_next_call(device: Device) -> None:
    """Invariant 11: not by the finalizer, and not inside a capture."""
    committed(device)
    gc.collect()
    assert model(device).used(0) > 0
    with capture_in_progress(), pytest.raises(StateError):
        make(device)
    assert model(device).used(0) > 0
    cache = make(device)
    assert model(device).used(0) == 0
    assert model(device).live() == {"handles": 0, "mappings": 0, "reservations": 1}
    cache.close()


def test_close_goes_on_when_listeners_and_quiesce_fail(device: Device) -> None:
    log: list[Any] = []
    cache = make(device, quiesce=fail(RuntimeError("busy")))
    cache.add_listener(Recorder(log, "A", before=fail(RuntimeError("stuck"))))
    cache.add_listener(Recorder(log, "B"))
    cache.commit(4)
    log.clear()
    with pytest.raises(VmmError, match="busy; stuck"):
        cache.close()
    assert [kind for kind, _, _ in log] == ["beforeA", "beforeB"]
    assert model(device).live() == NOTHING
    cache.close()


def test_c79_blocks_beyond_the_count_are_not_mapped_after_an_alias(device: Device) -> None:
    """C79: aliases are for the warm-up only; no address beyond the committed blocks answers afterwards."""
    cache = aliased(device)
    cache.commit(4)
    driver = device.driver
    for segment in cache.layout.segments:
        with driver.scope():
            assert driver.get_access(cache.base + segment.block(3)[1] - 1) == 3
        with pytest.raises(DriverError, match="get_access"), driver.scope():
            driver.get_access(cache.base + segment.block(5)[0])
    with pytest.raises(IndexError):
        _ = cache.view("l0")[0][4]


def test_a_step_is_published_or_discarded_once_whoever_asks(device: Device) -> None:
    """The question whether it is done is asked inside the operation: here a publish waits while a discard runs."""
    cache = make(device)
    step = cache.prepare(8)
    with cache._gate.operation("test"):
        results: list[object] = []

        def publish() -> None:
            try:
                results.append(step.publish())
            except StateError as error:
                results.append(error)

        threads = [threading.Thread(target=step.discard), threading.Thread(target=step.discard)]
        threads.append(threading.Thread(target=publish))
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    published = results == [8]
    assert published or "published or discarded before" in str(results[0])
    assert (cache.unreleased_bytes, cache.blocks) == (0, 8 if published else 0)
    assert cache.physical_bytes == model(device).used(0) == (length(union(mapped(cache))) if published else 0)
    cache.close()


def test_a_closed_cache_shows_nothing_mapped(device: Device) -> None:
    for alias in (False, True):
        cache = make(device)
        if alias:
            cache.back(alias=True)
        else:
            cache.commit(8)
        cache.close()
        assert (cache.mapped_bytes, cache.backed, cache.reserved_bytes, cache.physical_bytes) == (0, 0, 0, 0)
        assert {row.mapped_bytes for row in cache.segment_table()} == {0}


def test_a_cache_is_neither_copied_nor_pickled(device: Device) -> None:
    cache = make(device)
    for owner in (cache, cache.prepare(1)):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="neither copied nor pickled"):
                copied(owner)


def test_tensors_that_torch_has_moved_are_refused(device: Device) -> None:
    cache = make(device)
    cache.commit(40)
    cache.tensors["l0"].share_memory_()  # type: ignore[no-untyped-call]
    with pytest.raises(StateError, match="torch has moved the cache's tensors"):
        _ = cache.tensors
    for operation in (lambda: cache.view("l0"), lambda: cache.shrink(8), lambda: cache.prepare(40)):
        with pytest.raises(StateError, match="torch has moved the cache's tensors"):
            operation()
    assert cache.blocks == 40
    cache.close()
    assert model(device).live() == NOTHING


def test_a_device_capture_alone_refuses_operations(device: Device) -> None:
    """Invariant 7, without `Startup`."""
    cache = make(device)
    cache.commit(8)
    graph, pool = device.new_graph(), device.graph_pool()
    operations: tuple[Callable[[], object], ...] = (lambda: cache.commit(40), lambda: cache.shrink(4), cache.close)
    with torch.no_grad(), device.capture(graph, pool):
        for operation in operations:
            with pytest.raises(StateError, match="while a graph is being captured"):
                operation()
    assert cache.blocks == 8
    cache.close()


def test_a_discard_that_a_close_overtakes_does_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(device)
    step = cache.prepare(8)
    enter = cache._gate.operation

    def late(name: str) -> Any:
        if name == "discard":
            cache.close()
        return enter(name)

    monkeypatch.setattr(cache._gate, "operation", late)
    step.discard()
    assert step.done
    assert model(device).live() == NOTHING


@pytest.mark.parametrize("chunk", [4096.0, float("nan"), [4096], b"auto"])
def test_a_chunk_size_is_an_integer(device: Device, chunk: Any) -> None:
    with pytest.raises(TypeError):
        make(device, chunk=chunk)
    with pytest.raises(ValueError, match="it is 'auto', a number of bytes, or None"):
        make(device, chunk="large")
    assert make(device, chunk=torch.tensor(G)).commit(8) == 8


def test_small_mistakes_are_named(device: Device) -> None:
    cache = make(device)
    cache.commit(8)
    with pytest.raises(TypeError):
        cache.commit(8.0)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="there are l0, l1"):
        cache.view("zz")
    with pytest.raises(TypeError, match="no remap listener"):
        cache.add_listener(None)  # type: ignore[arg-type]


def test_a_forked_child_does_not_wait_for_the_parents_operation(device: Device) -> None:
    """C85: an operation of another thread holds the gate at the fork."""
    cache = make(device)
    with cache._gate.operation("test"), capture_in_progress():
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                cache.commit(8)
            except StateError as error:
                code = 0 if "forked child" in str(error) else 2
                with suppress(StateError):  # a GPU driver is not asked: it does not survive the fork
                    code = 3 if capturing(device.driver) else code
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
