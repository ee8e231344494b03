"""A fault at every driver call of a cache's life, one by one and in pairs (invariants 3, 5, 8 and 9)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import pytest
import torch
from setups import HOST, QUIRKS, QUIRKY, SETUPS, G, OpenedDevice

from vmm_kv.cache import KVCache
from vmm_kv.errors import DriverError, FaultedError, StateError, VmmError
from vmm_kv.layout import Layout, TensorSpec
from vmm_kv.spans import Span, difference, touches, union
from vmm_kv.state import State

CAPACITY = 12
UNKNOWN = 999


def spec(name: str, shape: tuple[int | None, ...]) -> TensorSpec:
    return TensorSpec(name, shape, torch.int8)


LAYOUTS: dict[str, Callable[[], Layout]] = {
    # four segments of 8.8 KiB each that start anywhere, so that neighbours share granules
    "kv_split": lambda: Layout.tensor_outermost(
        [spec("a", (2, None, 750)), spec("b", (2, None, 750))], CAPACITY, alignment=1
    ),
    "block_outermost": lambda: Layout.block_outermost([spec("a", (None, 1500)), spec("b", (None, 600))], CAPACITY),
    "overlay": lambda: Layout.overlay(
        [[spec("a0", (None, 900)), spec("a1", (None, 900))], [spec("m0", (None, 1300))]], CAPACITY
    ),
}
BACKINGS = ("prefix", "alias")
CASES = [(layout, backing) for layout in LAYOUTS for backing in BACKINGS]
PRIMITIVES = ("reserve", "free_address", "create", "release", "map", "unmap", "set_access", "mem_info", "zero")


class Recorder:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, tuple[Span, ...], int]] = []

    def before_unmap(self, spans: Sequence[Span], generation: int) -> None:
        self.heard.append(("before", tuple(spans), generation))

    def after_map(self, spans: Sequence[Span], generation: int) -> None:
        self.heard.append(("after", tuple(spans), generation))


@dataclass(frozen=True)
class Snapshot:
    """All that an operation which failed must leave as it was, the generation aside.

    Spares are taken off, since a driver with `memory_with_addresses` turns chunks that were mapped into them.
    """

    state: State
    blocks: int
    backed: int
    mapped: list[tuple[int, int]]
    chunks: tuple[tuple[int, int, int], ...]
    used: int
    physical: int
    contents: tuple[bytes, ...]


class Life:
    """One cache on a device of its own, taken through its life step by step."""

    def __init__(self, layout: str, backing: str, setup: str = HOST) -> None:
        self.layout = LAYOUTS[layout]()
        self.alias = backing == "alias"
        self.failed: list[str] = []
        self.device = OpenedDevice(setup, 512 * G)  # an alias chunk of two granules
        self.model, driver = self.device.model, self.device.driver
        for name in PRIMITIVES:
            setattr(driver, name, self._noting(getattr(driver, name)))
        self.quirks = driver.quirks
        self.recorder = Recorder()
        self.cache: KVCache | None = None
        back = [partial(self._back, None)] if self.alias else [partial(self._back, 1), partial(self._back, 3)]
        self.steps: list[tuple[str, Callable[[], object]]] = [
            ("reserve", self._reserve),
            *(("back", step) for step in back),
            ("commit", partial(self._commit, 4)),
            ("grow", partial(self._commit, 9)),
            ("shrink", partial(self._shrink, 2)),
            ("grow", partial(self._commit, 6)),
            ("shrink", partial(self._shrink, 0)),
            ("grow", partial(self._commit, CAPACITY)),
            ("close", self._close),
        ]

    def _noting(self, primitive: Callable[..., Any]) -> Callable[..., Any]:
        """Which calls failed, also those whose failure fails nobody."""

        @wraps(primitive)
        def call(*arguments: Any, **options: Any) -> Any:
            try:
                return primitive(*arguments, **options)
            except DriverError as error:
                self.failed.append(error.call)
                raise

        return call

    def _reserve(self) -> None:
        self.cache = KVCache(self.device, self.layout, chunk=G if self.quirks.uniform_chunks else "auto")
        self.cache.add_listener(self.recorder)

    def _back(self, blocks: int | None) -> None:
        self.there.back(blocks, alias=blocks is None)

    def _commit(self, blocks: int) -> None:
        assert self.there.commit(blocks) == blocks

    def _shrink(self, blocks: int) -> None:
        used, waiting = self.model.used(0), self.there.unreleased_bytes
        back = self.there.shrink(blocks)
        assert self.there.blocks == blocks
        # what resisted before is released ahead of the first reading, if it is
        assert used - waiting - self.model.used(0) <= back <= used - self.model.used(0)
        if self.quirks.memory_with_addresses and blocks:
            assert back == 0

    def _close(self) -> None:
        self.there.close()

    @property
    def there(self) -> KVCache:
        assert self.cache is not None
        return self.cache

    def usable(self) -> list[Span]:
        cache = self.there
        return [(cache.base + start, cache.base + stop) for start, stop in self.layout.spans(cache.blocks)]

    def snapshot(self) -> Snapshot | None:
        cache = self.cache
        if cache is None:
            return None
        return Snapshot(
            cache.state,
            cache.blocks,
            cache.backed,
            self.model.mapped(),
            cache.chunk_table(),
            self.model.used(0) - cache.unreleased_bytes - cache.spare_bytes,
            cache.physical_bytes - cache.unreleased_bytes - cache.spare_bytes,
            tuple(ctypes.string_at(start, stop - start) for start, stop in self.usable()),
        )

    def pattern(self, block: int) -> int:
        return 0x40 + block

    def fill(self, first: int, stop: int) -> None:
        """The engine writes a pattern of its own to each block."""
        for block in range(first, stop):
            for start, end in difference(self.layout.spans(block + 1), self.layout.spans(block)):
                ctypes.memset(self.there.base + start, self.pattern(block), end - start)

    def read(self, block: int) -> set[int]:
        new = difference(self.layout.spans(block + 1), self.layout.spans(block))
        return {byte for start, end in new for byte in ctypes.string_at(self.there.base + start, end - start)}

    def called(self) -> int:
        return sum(self.model.calls().values())

    def check_mapped(self) -> None:
        """Invariants 3 and 5: the books are the model's, and only whole chunks are mapped."""
        cache = self.there
        assert self.model.mapped() == [(address, size) for address, size, _ in cache.chunk_table()]
        assert self.model.live()["mappings"] == len(cache.chunk_table())
        assert self.model.used(0) == cache.physical_bytes
        sizes = {handle: size for _, size, handle in cache.chunk_table()}
        held = sum(sizes.values()) + cache.unreleased_bytes + cache.spare_bytes
        assert held == cache.physical_bytes
        assert self.quirks.memory_with_addresses or not cache.spare_bytes

    def check_done(self, name: str, before: int) -> None:
        """What a step that worked leaves: new blocks are zero, old ones untouched, nothing is mapped in vain."""
        cache = self.there
        self.check_mapped()
        for block in range(min(before, cache.blocks)):
            assert self.read(block) == {self.pattern(block)}, (name, block)
        for block in range(before, cache.blocks):
            assert self.read(block) == {0}, (name, block)
        self.fill(before, cache.blocks)
        mapped = union((address - cache.base, address - cache.base + size) for address, size in self.model.mapped())
        needed = self.layout.granules(cache.blocks, cache.unit)
        if cache.state is State.COMMITTED:
            assert not difference(needed, mapped)
        if name == "shrink":
            spans = [(a - cache.base, a - cache.base + size) for a, size in self.model.mapped()]
            assert all(touches(span, needed) for span in spans)
        if name == "commit" and self.alias:
            assert mapped == needed, "nothing of the alias is left beyond"

    def check_failed(
        self, name: str, error: DriverError, before: Snapshot | None, generation: int, unmaps: int
    ) -> None:
        """Invariants 3 and 8, for one fault."""
        assert self.snapshot() == before
        if self.cache is None:
            assert self.model.live() == {"handles": 0, "mappings": 0, "reservations": 0}
            return
        self.check_mapped()
        takes_away = name == "shrink" or (name == "commit" and self.alias)
        gone = self.model.calls()["unmap"] - unmaps - (error.call == "unmap")
        assert self.there.generation == generation + (1 if takes_away and gone else 0)
        heard = self.recorder.heard
        befores = [spans for kind, spans, _ in heard if kind == "before"]
        afters = [spans for kind, spans, _ in heard if kind == "after"]
        assert befores == afters, "who deregistered hears that the pages are there again"
        assert all(told == self.there.generation for kind, _, told in heard if kind == "after")
        assert takes_away or not heard

    def check_clean(self) -> None:
        """Invariant 9."""
        assert self.model.live() == {"handles": 0, "mappings": 0, "reservations": 0}
        assert self.model.used(0) == 0
        assert self.there.state is State.CLOSED
        assert (self.there.physical_bytes, self.there.unreleased_bytes) == (0, 0)


def one_fault(layout: str, backing: str, setup: str, nth: int) -> str | None:
    """A life with the nth call failing: which step and call it hit, None where no call was the nth."""
    life = Life(layout, backing, setup)
    start = life.called()
    life.model.fail("any", nth, UNKNOWN)
    hit = None
    for name, step in life.steps:
        before = life.snapshot()
        blocks = life.cache.blocks if life.cache else 0
        generation = life.cache.generation if life.cache else 0
        unmaps, called = life.model.calls()["unmap"], life.called() - start
        life.recorder.heard.clear()
        life.failed.clear()
        try:
            step()
        except FaultedError as error:
            assert (name, life.failed, life.quirks) == ("shrink", ["reserve"], QUIRKS)
            check_lost(life, error)
            return "shrink/reserve"
        except VmmError as error:
            hit = f"{name}/{error.call}" if isinstance(error, DriverError) else f"{name}/?"
            assert called < nth <= life.called() - start
            if name == "close":
                assert not isinstance(error, DriverError)
                assert "close again" in str(error)
                assert life.there.state is State.CLOSED
            else:
                assert isinstance(error, DriverError)
                assert (error.status, error.call != "release") == (UNKNOWN, True)
                life.check_failed(name, error, before, generation, unmaps)
            step()  # the cause is gone
        else:
            if life.failed and name != "close":  # what gives back, and the reading after it, fail nobody
                hit = f"{name}/{life.failed[0]}"
                assert called < nth <= life.called() - start
                assert hit in ("commit/release", "shrink/release", "shrink/free_address", "shrink/mem_info")
                assert (life.there.unreleased_bytes > 0) == (hit != "shrink/mem_info")
                life.check_done(name, blocks)
                continue
        if name == "close":
            life.check_clean()
        else:
            assert life.there.unreleased_bytes == 0, "tried again by the next operation"
            life.check_done(name, blocks)
    return hit


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize(("layout", "backing"), CASES)
def test_any_call_may_fail_once(layout: str, backing: str, setup: str) -> None:
    hits = set()
    nth = 0
    while hit := one_fault(layout, backing, setup, nth := nth + 1):
        hits.add(hit)
    # that the sweep went where it should
    assert {"reserve/reserve", "back/create", "back/map", "back/set_access", "back/zero"} <= hits
    assert {"commit/create", "commit/map", "commit/set_access", "commit/zero"} <= hits
    assert {"grow/create", "grow/map", "grow/set_access", "grow/zero", "shrink/unmap", "shrink/release"} <= hits
    assert {"shrink/mem_info", "close/?"} <= hits
    assert ("commit/unmap" in hits) == (backing == "alias")
    assert ("commit/release" in hits) == (backing == "alias" and setup != QUIRKY)
    assert ({"shrink/free_address", "shrink/reserve"} <= hits) == (setup == QUIRKY)


def two_faults(layout: str, backing: str, setup: str, nth: int) -> str | None:
    """The same with the call after it failing as well: how it ended, None where no call was the nth."""
    life = Life(layout, backing, setup)
    start = life.called()
    life.model.fail("any", nth, UNKNOWN)
    life.model.fail("any", nth + 1, UNKNOWN)
    ending = None
    for name, step in life.steps:
        blocks = life.cache.blocks if life.cache else 0
        for _ in range(3):  # the second fault may hit the repetition
            before = life.snapshot()
            try:
                step()
            except FaultedError as error:
                if error.undo_failure is None:
                    check_lost(life, error)
                    return "lost"
                check_faulted(life, error)
                return "faulted"
            except VmmError:
                ending = "undone"
                if name != "close":
                    assert life.snapshot() == before
            else:
                break
        else:
            raise AssertionError(f"{name} failed three times for two faults")
        if name != "close":
            life.check_done(name, blocks)
    assert (ending is not None) or life.called() - start < nth + 1 or life.failed
    life.check_clean()
    return (ending or "kept for later") if life.called() - start >= nth else None


def check_faulted(life: Life, error: FaultedError) -> None:
    """Invariant 3: the error carries both failures, nothing is usable, and close gives everything back."""
    assert isinstance(error.failure, DriverError)
    assert isinstance(error.undo_failure, DriverError)
    assert str(error.failure) in str(error)
    assert str(error.undo_failure) in str(error)
    check_only_close_is_left(life)


def check_lost(life: Life, error: FaultedError) -> None:
    """The addresses were freed to get the memory back and did not come again: nobody gets a tensor over them."""
    cache = life.there
    assert isinstance(error.failure, DriverError)
    assert (error.failure.call, error.undo_failure) == ("reserve", None)
    assert "tensors over them must not be used" in str(error)
    with pytest.raises(StateError, match="addresses were lost"):
        _ = cache.tensors
    with pytest.raises(StateError, match="addresses were lost"):
        cache.view(life.layout.placements[0].spec.name)
    assert (life.model.used(0), cache.physical_bytes) == (cache.unreleased_bytes,) * 2
    check_only_close_is_left(life)


def check_only_close_is_left(life: Life) -> None:
    cache = life.there
    assert (cache.state, cache.blocks) == (State.FAULTED, 0)
    life.model.clear_faults()
    calls = life.called()
    refused: list[Callable[[], object]] = [
        lambda: cache.back(1),
        lambda: cache.back(alias=True),
        lambda: cache.prepare(CAPACITY),
        lambda: cache.commit(CAPACITY),
        lambda: cache.shrink(0),
    ]
    for operation in refused:
        with pytest.raises(StateError, match="faulted"):
            operation()
    assert life.called() == calls
    assert life.model.mapped() == [(address, size) for address, size, _ in cache.chunk_table()]
    cache.close()
    life.check_clean()


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize(("layout", "backing"), CASES)
def test_any_two_calls_in_a_row_may_fail(layout: str, backing: str, setup: str) -> None:
    endings = set()
    nth = 0
    while ending := two_faults(layout, backing, setup, nth := nth + 1):
        endings.add(ending)
    assert {"undone", "faulted"} <= endings
    assert ("lost" in endings) == (setup == QUIRKY)


@pytest.mark.parametrize("setup", SETUPS)
def test_a_release_that_keeps_failing_is_kept_and_tried_again(setup: str) -> None:
    life = Life("kv_split", "prefix", setup)
    model = life.model
    life._reserve()
    cache = life.there
    cache.commit(CAPACITY)
    held = cache.physical_bytes
    for nth in range(1, 60):
        model.fail("release", nth, UNKNOWN)
    assert cache.shrink(0) == 0, "nothing came back"
    assert cache.unreleased_bytes == cache.physical_bytes == held == model.used(0)
    assert (cache.blocks, model.mapped()) == (0, [])
    cache.commit(1)
    # tried and failed once more; or, as long as the addresses stay, spares that are used first
    left = (0, held - cache.mapped_bytes) if setup == QUIRKY else (held, 0)
    assert (cache.unreleased_bytes, cache.spare_bytes) == left
    model.clear_faults()
    cache.commit(2)
    assert cache.unreleased_bytes == 0
    life.check_mapped()
    cache.close()
    life.check_clean()


@pytest.mark.parametrize("setup", SETUPS)
def test_close_goes_through_everything_and_names_all_that_failed(setup: str) -> None:
    life = Life("kv_split", "prefix", setup)
    model = life.model
    life._reserve()
    cache = life.there
    cache.commit(CAPACITY)
    count = len(cache.chunk_table())
    assert count > 3
    model.fail("unmap", 2, UNKNOWN)
    model.fail("release", 1, UNKNOWN)
    with pytest.raises(
        VmmError, match=rf"close on {life.device.name} is not complete, close again: unmap .*; release "
    ):
        cache.close()
    assert model.live() == {"handles": 2, "mappings": 1, "reservations": 1}
    assert (cache.state, cache.blocks) == (State.CLOSED, 0)
    cache.close()
    life.check_clean()
    calls = life.called()
    cache.close()
    assert life.called() == calls


@pytest.mark.parametrize("setup", SETUPS)
def test_close_that_only_a_listener_disturbed_says_that_it_is_complete(setup: str) -> None:
    life = Life("kv_split", "prefix", setup)
    life._reserve()
    life.there.commit(CAPACITY)

    class Disturbing:
        def before_unmap(self, spans: object, generation: int) -> None:
            raise RuntimeError("cannot deregister")

        def after_map(self, spans: object, generation: int) -> None: ...

    life.there.add_listener(Disturbing())
    with pytest.raises(VmmError, match=f"close on {life.device.name} is complete, but cannot deregister"):
        life.there.close()
    life.check_clean()


@pytest.mark.parametrize("setup", SETUPS)
def test_c69_a_failure_in_the_second_half_leaks_nothing(setup: str) -> None:
    """C69: K is taken, V fails: all of K goes back."""
    life = Life("kv_split", "prefix", setup)
    life._reserve()
    create = len(life.layout.granules(CAPACITY, G))
    life.model.fail("create", create + 1, 2)
    with pytest.raises(DriverError, match=rf"create on {life.device.name} failed: .* \(2\); asked for"):
        life.there.commit(CAPACITY)
    assert life.model.live() == {"handles": 0, "mappings": 0, "reservations": 1}
    assert life.model.used(0) == 0
    assert life.there.commit(CAPACITY) == CAPACITY
