"""The start-up of an engine as one object: reserve, back, profile, capture, measure, commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vmm_kv.budget import BudgetError, Plan, capacity_bound, exactly, transient
from vmm_kv.cache import KVCache
from vmm_kv.capture import capture_in_progress
from vmm_kv.device import Device
from vmm_kv.errors import LayoutError, OutOfPhysicalMemory, StateError
from vmm_kv.fingerprint import Fingerprint
from vmm_kv.layout import TensorSpec, most_blocks
from vmm_kv.measure import Footprint, MemoryReading, flush, other, plan_from_readings, step_peak
from vmm_kv.pin import Pin, record
from vmm_kv.report import CommitTry, StartupReport
from vmm_kv.request import Request
from vmm_kv.sizes import whole
from vmm_kv.state import State

log = logging.getLogger(__name__)

_TRIES = 3
_SMALLER = 16
"""A try that failed although memory looked free is followed by one smaller by this part."""


class Startup:
    """Sizes one KV cache, or several that share one budget and one block count.

    The order is `Startup` (takes the first reading, before weights) -> `load` -> `reserve` -> `back` -> `profile` ->
    `capture` -> `worst_step` -> `commit`. Phases that an engine does not have are left out. Inside a phase the device
    is torch's current one; tensors are made there with `device=device.torch_device`.
    """

    def __init__(
        self,
        device: Device,
        *,
        utilization: float | None = None,
        kv_bytes: int | None = None,
        blocks: int | None = None,
        headroom: Mapping[str, int] | None = None,
        min_blocks: int = 1,
        first: MemoryReading | None = None,
        fingerprint: Fingerprint | None = None,
        pinned: StartupReport | None = None,
    ) -> None:
        """Takes the first reading, or the engine's own from before its communicators and libraries came up.

        utilization: share of the whole device for all that this process holds; 0.9 if nothing is asked for.
        kv_bytes: upper bound on the KV cache alone. blocks: an exact count. At most one of the three.
        headroom: named items to leave free, in bytes; the transient of the worst step is measured and comes on top.
        min_blocks: what one longest request needs, at least 1. Fewer is an error that itemises where the memory went.
        fingerprint: what the size depends on, for later starts; the device and versions alone if not given.
        pinned: the report of an earlier start, whose block count and reservation this one reproduces, in place of the
            three. Its headroom and transient hold where none are given or measured. Raises `PinError` with what differs
            where fingerprint, caches or memory do not fit.
        """
        _check_device(device)
        self.device = device
        self.fingerprint = Fingerprint.of(device) if fingerprint is None else fingerprint
        self._pin = None if pinned is None else Pin(pinned)
        self.request = _request(utilization, kv_bytes, blocks, self._pin)
        if headroom is None:
            headroom = self._pin.headroom if self._pin else {}
        self.headroom = _headroom(headroom)
        self.min_blocks = _min_blocks(min_blocks, self.request)
        self.caches: list[KVCache] = []
        self.phases: dict[str, float] = {}
        self.footprints: list[Footprint] = []
        self.report: StartupReport | None = None
        self._backing = "none"
        self._transient: int | None = None
        self._profile_blocks = 0
        self._calls = dict(device.driver.calls())
        self._captures = device.captures
        if self._pin:
            self._pin.check_fingerprint(self.fingerprint)
        self.readings = [first or device.reading("start")]
        if self._pin:
            self._pin.check_free(self.readings[0], self.headroom)

    @contextmanager
    def load(self) -> Iterator[None]:
        """Around the loading of weights. What is free afterwards bounds the reservation."""
        with self._phase("load"):
            yield
        self._flushed_reading("loaded")

    def reserve(self, specs: Sequence[TensorSpec], capacity: int | None = None, **options: Any) -> KVCache:
        """Reserves a cache for the specs and adds it. `options` are those of `KVCache.reserve`.

        capacity: blocks; None for an upper bound worked out from the request and what is free now, as if nothing but
        the cache were to come (addresses are no memory), or what the pinned start-up had. Raises `BudgetError` where
        that bound holds fewer than `min_blocks`.
        """
        with self._timed("reserve"):
            blocks = self._upper_bound(specs) if capacity is None else capacity
            return self.add(KVCache.reserve(self.device, specs, blocks, **options))

    def add(self, cache: KVCache) -> KVCache:
        """Adds a cache that the engine reserved itself, with a layout of its own."""
        if cache.device is not self.device:
            mine, other_device = (f"{d!r} (object {id(d):#x})" for d in (self.device, cache.device))
            raise ValueError(f"the cache is on another device, {other_device}, than the start-up, {mine}")
        if cache in self.caches:
            raise ValueError(f"{cache!r} was added before")
        self.caches.append(cache)
        return cache

    def back(self, blocks: int | None = None, *, alias: bool = False) -> None:
        """Backs every cache: the first `blocks` of it, or all of it by an alias. See `KVCache.back`.

        Where it fails for one of several caches, those before it stay backed, and the same call goes on from there.
        """
        with self._timed("back"):
            for cache in self._known_caches("back"):
                if not (alias and _has_alias(cache)):
                    cache.back(blocks, alias=alias)
                self._backing = "alias" if alias else "prefix"

    @contextmanager
    def profile(self) -> Iterator[None]:
        """Around warm-up: eager steps that make libraries set themselves up before anything is captured."""
        with self._phase("profile"):
            yield
        self._flushed_reading("profiled")

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Around graph capture. Measures what it keeps; no cache of the process may be remapped meanwhile."""
        before = self._flushed_reading("before capture")
        with self._phase("capture"), capture_in_progress():
            yield
        self.footprints.append(Footprint(before, self._flushed_reading("captured")))

    @contextmanager
    def worst_step(self) -> Iterator[None]:
        """Around one eager step of the largest kind that serving can meet. Its peak is kept free."""
        memory = self.device.memory
        with step_peak(memory) as peak, self._phase("worst step"):
            yield
        flush(memory)
        # Against what stays now: what comes or goes between here and a later commit is no part of the step.
        self._transient = max(transient(peak.reserved, memory.reserved()), self._transient or 0)

    def commit(self) -> StartupReport:
        """Measures, sizes and maps. Called again, it grows to what is there by now, or raises with the excess.

        Raises `BudgetError` (with the plan) where not even `min_blocks` fit or an explicit request does not,
        `OutOfPhysicalMemory` if three tries, each with a fresh reading, did not get the memory. Backed caches stay as
        they are then. Where less fits than a prefix backs already, the first commit makes usable just what is backed,
        and the plan's status is `over_budget`.
        """
        caches = self._known_caches("commit")
        # Usable blocks without a report: the last commit mapped one cache and failed on the next.
        again = self.report is not None or self._usable() > 0
        if not again:
            self._profile_blocks = min(cache.backed for cache in caches)
        if self._pin and not again:
            prefixes = [cache.backed for cache in caches if cache.mapped_bytes]
            self._pin.check_caches([record(cache) for cache in caches], max(prefixes, default=0))
        plan = self._plan()
        if again and plan.status == "over_budget":
            raise BudgetError(f"the caches hold more than the budget allows now: {self._way_out(plan)}\n{plan}", plan)
        with self._timed("commit"):
            plan, tries = self._commit_in_tries(plan)
        after = self.device.reading("committed", self._kv_bytes())
        self.report = self._report(plan, tries, after)
        log.info("%s", self.report.table())
        return self.report

    def _commit_in_tries(self, plan: Plan) -> tuple[Plan, list[CommitTry]]:
        tries: list[CommitTry] = []
        blocks = plan.blocks
        while True:
            try:
                self._commit_all(blocks)
            except OutOfPhysicalMemory as error:
                tries.append(CommitTry(blocks, str(error)))
                plan = self._plan()
                smaller = min(plan.blocks, blocks - max(1, blocks // _SMALLER))
                if len(tries) == _TRIES or self.request.blocks or smaller < max(self.min_blocks, self._usable(), 1):
                    raise
                log.warning("%d blocks could not be committed, trying %d: %s", blocks, smaller, error)
                blocks = smaller
            else:
                return plan, [*tries, CommitTry(blocks, None)]

    def _commit_all(self, blocks: int) -> None:
        """Takes the memory for every cache before any of them is mapped, since that is what runs out."""
        steps = []
        try:
            for cache in self.caches:
                if cache.blocks != blocks:
                    steps.append(cache.prepare(blocks))
            for step in steps:
                step.publish()
        finally:
            for step in steps:
                step.discard()

    def _plan(self) -> Plan:
        if self._pin is None:
            return self._sized()
        try:
            return self._pin.noted(self._sized())
        except BudgetError as error:
            raise self._pin.refused(error) from error

    def _sized(self) -> Plan:
        """Reads what is there now and sizes. The reading takes the place of an earlier one of its kind."""
        if len(self.readings) > 1 and self.readings[-1].label in ("sized", "committed"):
            self.readings.pop()
        self._flushed_reading("sized")
        mapped = any(cache.mapped_bytes for cache in self.caches)
        return plan_from_readings(
            self.readings,
            request=self.request,
            capacity=min(cache.capacity for cache in self.caches),
            cost=self._cost,
            blocks_within=self._blocks_within,
            peak_of_step=None if self._transient is None else self.readings[-1].reserved + self._transient,
            headroom=self._named_headroom(),
            context=self.device.context_bytes,
            in_place=sum(_kept(cache) for cache in self.caches),
            backed=min(cache.backed for cache in self.caches) if mapped else 0,
            captures=self.footprints,
            min_blocks=self.min_blocks,
        )

    def _way_out(self, plan: Plan) -> str:
        """How far to shrink before a commit can succeed. Whole chunks stay mapped, so fewer blocks than would fit."""
        if self.device.driver.quirks.memory_with_addresses:
            return "shrink(0) every cache, since memory returns only with its addresses here, and commit again"

        def left(blocks: int) -> int:
            return sum(cache.mapped_after_shrink(min(blocks, cache.blocks)) for cache in self.caches)

        fits = most_blocks(left, plan.kv_bytes, self._usable())
        return f"shrink to at most {fits} blocks first, or give memory back elsewhere"

    def _named_headroom(self) -> Mapping[str, int]:
        """The named items; of a pinned start-up, what its worst step took, where none was measured here."""
        if self._pin is None or self._pin.transient is None or self._transient is not None:
            return self.headroom
        return {"transient": self._pin.transient, **self.headroom}

    def _cost(self, blocks: int) -> int:
        return sum(_held(cache, blocks) for cache in self.caches)

    def _blocks_within(self, budget: int) -> int:
        return most_blocks(self._cost, budget, min(cache.capacity for cache in self.caches))

    def _upper_bound(self, specs: Sequence[TensorSpec]) -> int:
        if self._pin:
            return self._pin.capacity(len(self.caches))
        if self.request.blocks is not None:
            return self.request.blocks
        if not specs:
            raise LayoutError("a layout needs at least one tensor")
        now = self._flushed_reading("reserving")
        own = now.reserved + max(0, other(self.readings[0], now)) + (self.device.context_bytes or 0)
        block_bytes = sum(spec.block_bytes for spec in specs)
        bound = capacity_bound(self.request, now.total, now.free, own)
        blocks, need = bound // block_bytes, self.min_blocks * block_bytes
        if blocks < self.min_blocks:
            raise BudgetError(
                f"the KV cache comes to {blocks} blocks, one longest request needs {self.min_blocks}: they take "
                f"{exactly(need)} or more, at most {exactly(bound)} are there (this process holds {exactly(own)}, free "
                f"are {exactly(now.free)}); ask for more, free memory on the device, or shorten the longest request"
            )
        return blocks

    def _usable(self) -> int:
        return max(cache.blocks for cache in self.caches)

    def _kv_bytes(self) -> int:
        return sum(cache.physical_bytes for cache in self.caches)

    def _flushed_reading(self, label: str) -> MemoryReading:
        flush(self.device.memory)
        reading = self.device.reading(label, self._kv_bytes())
        self.readings.append(reading)
        return reading

    def _known_caches(self, operation: str) -> Collection[KVCache]:
        if not self.caches:
            raise StateError(f"{operation} before any cache was reserved: call reserve() first")
        for cache in self.caches:
            if cache.state in (State.CLOSED, State.FAULTED):
                raise StateError(f"{operation} with a cache that is {cache.state.value}: {cache!r}")
        return self.caches

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self._timed(name), self.device.active():
            yield

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start

    def _report(self, plan: Plan, tries: Sequence[CommitTry], after: MemoryReading) -> StartupReport:
        calls = {name: count - self._calls.get(name, 0) for name, count in self.device.driver.calls().items()}
        return StartupReport(
            device=self.device.name,
            fingerprint=self.fingerprint,
            caches=tuple(record(cache) for cache in self.caches),
            backing=self._backing,
            plan=plan,
            planned_blocks=tries[0].blocks,
            blocks=tries[-1].blocks,
            capacity=plan.capacity,
            profile_blocks=self._profile_blocks,
            reserved_bytes=sum(cache.reserved_bytes for cache in self.caches),
            mapped_bytes=sum(cache.mapped_bytes for cache in self.caches),
            readings=(*self.readings, after),
            footprints=tuple(self.footprints),
            captures=self.device.captures - self._captures,
            tries=tuple(tries),
            phases=dict(self.phases),
            driver_calls=calls,
        )


def _check_device(device: object) -> None:
    if not isinstance(device, Device):
        raise TypeError(f"Startup takes a Device, which open_device(name) gives; got {device!r}")


def _request(utilization: float | None, kv_bytes: int | None, blocks: int | None, pin: Pin | None) -> Request:
    asked = [size for size in (utilization, kv_bytes, blocks) if size is not None]
    if pin is None:
        return Request(0.9 if not asked else utilization, kv_bytes, blocks)
    if asked:
        raise ValueError("pinned reproduces a size: give it, or one of utilization, kv_bytes and blocks, not both")
    return pin.request


def _min_blocks(min_blocks: int, request: Request) -> int:
    number = whole("min_blocks", min_blocks)
    if number < 1:
        raise ValueError(f"min_blocks must be at least 1, got {number}")
    if request.blocks is not None and request.blocks < number:
        raise ValueError(f"blocks={request.blocks} is below min_blocks={number}, which one longest request needs")
    return number


def _headroom(items: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(items, Mapping):
        raise TypeError(f"headroom is a mapping of names to bytes, such as {{'sampler': 8 << 20}}; got {items!r}")
    sizes = {name: whole(f"headroom {name!r}", size) for name, size in items.items()}
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"headroom {name!r} must not be negative, got {size}")
    return sizes


def _kept(cache: KVCache) -> int:
    """Bytes of memory that stay with the cache whatever is committed: mapped, or spare for growth."""
    return cache.mapped_bytes + cache.spare_bytes + _alias_kept(cache)


def _held(cache: KVCache, blocks: int) -> int:
    """Bytes of memory that the cache has after a commit of `blocks`. Never below `_kept`, nor falling in `blocks`."""
    return max(cache.cost(blocks), cache.mapped_bytes + cache.spare_bytes) + _alias_kept(cache)


def _alias_kept(cache: KVCache) -> int:
    """Bytes of an alias chunk that becomes a spare when it is replaced, after all the others were made."""
    return cache.unit if _has_alias(cache) and cache.device.driver.quirks.memory_with_addresses else 0


def _has_alias(cache: KVCache) -> bool:
    return cache.state is State.BACKED and cache.mapped_bytes == 0
