"""Readings of a device's memory, kept raw and signed, and what follows from two or more of them.

A reading is two views at one moment: the driver's (device-wide) and the framework allocator's (this process). Their
difference is what neither explains: libraries, graphs, a neighbour. Only `vmm_kv.budget` clamps.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from vmm_kv.budget import BudgetError, Items, Plan, Terms, exactly, plan, transient
from vmm_kv.errors import VmmError
from vmm_kv.memory_source import DRIVER, DeviceMemory, as_told
from vmm_kv.request import Request


class FrameworkMemory(Protocol):
    """A framework's caching allocator on one device, all of its pools. Bytes."""

    def allocated(self) -> int:
        """In use by live tensors."""

    def reserved(self) -> int:
        """Taken from the device: in use and cached."""

    def peak_reserved(self) -> int:
        """The most that was reserved since `reset_peak`."""

    def reset_peak(self) -> None: ...

    def empty_cache(self) -> None: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class MemoryReading:
    """One moment. Bytes, as told: never clamped (invariant 13)."""

    label: str
    free: int
    """Device-wide, as `source` tells."""
    total: int
    """Device-wide, as `source` tells."""
    reserved: int
    """This process's framework allocator on this device, all pools."""
    allocated: int
    """The part of `reserved` that live tensors use."""
    kv: int
    """Physical bytes of our own chunks, from our books."""
    seconds: float
    """Time of the reading on the clock that was passed."""
    process_used: int | None = None
    """What the driver tells of this process, where it does."""
    source: str = DRIVER
    """Whose figures `free` and `total` are. See `vmm_kv.memory_source`."""
    told: tuple[int, int] | None = None
    """(free, total) as the driver told, where these are not the figures used."""
    notes: tuple[str, ...] = ()
    """Why these are not the figures used."""


@dataclass(frozen=True)
class Footprint:
    """What stayed between two readings, our own chunks not counted. Bytes, signed."""

    before: MemoryReading
    after: MemoryReading

    @property
    def raw(self) -> int:
        """Device-wide; negative where memory was freed, by us or by a neighbour."""
        return self.before.free - self.after.free - (self.after.kv - self.before.kv)

    @property
    def allocator(self) -> int:
        """The part in the framework's allocator: graph pools, scratch that stays."""
        return self.after.reserved - self.before.reserved

    @property
    def outside(self) -> int:
        """The rest: what the driver and libraries keep, and a neighbour's changes."""
        return self.raw - self.allocator

    @property
    def bytes(self) -> int:
        """`raw`, counted as 0 where it is negative."""
        return max(0, self.raw)


def read_memory(
    label: str,
    mem_info: Callable[[], tuple[int, int]],
    framework: FrameworkMemory,
    kv: int,
    clock: Callable[[], float] = time.perf_counter,
    samples: int = 3,
    *,
    process_used: Callable[[], int | None] | None = None,
    resolve: Callable[[int, int], DeviceMemory] = as_told,
) -> MemoryReading:
    """Reads once: of `samples` device-wide readings the one with most free.

    A neighbour's spike can only lower what is free, so the best sample is the one nearest to what is ours. `mem_info`
    gives (free, total) bytes as the driver tells, `resolve` makes of them the figures to use. Raises `VmmError` if they
    contradict each other.
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    found = [_resolved(label, resolve, *mem_info()) for _ in range(samples)]
    best = max(found, key=lambda memory: (memory.free, memory.total))
    used = process_used() if process_used is not None else None
    return MemoryReading(
        label, best.free, best.total, framework.reserved(), framework.allocated(), kv, clock(), used,
        best.source, best.told, best.notes,
    )  # fmt: skip


def _resolved(label: str, resolve: Callable[[int, int], DeviceMemory], free: int, total: int) -> DeviceMemory:
    try:
        return resolve(free, total)
    except VmmError as error:
        raise VmmError(f"reading {label!r}: {error}") from error


def other(first: MemoryReading, reading: MemoryReading) -> int:
    """Bytes by which use grew since `first` that neither the allocator nor our chunks explain. Raw, signed."""
    return Footprint(first, reading).outside


def others(readings: Sequence[MemoryReading]) -> Items:
    """`other` for each reading against the first, with its label."""
    return tuple((reading.label, other(readings[0], reading)) for reading in readings)


def flush(framework: FrameworkMemory) -> None:
    """Gives back what is only cached, so that the next reading shows what stays.

    Garbage goes first, for its blocks become cached only then; the device is idle before and after, for a block in use
    by a running kernel is not given back, and giving back is work too.
    """
    framework.synchronize()
    gc.collect()
    framework.empty_cache()
    framework.synchronize()


@dataclass
class StepPeak:
    """`reserved`: the most bytes that the allocator held during the step, known when the step is over."""

    reserved: int = 0


@contextmanager
def step_peak(framework: FrameworkMemory) -> Iterator[StepPeak]:
    """Around the eager worst-case step.

    From a flushed cache: blocks cached by earlier work would count as if the step needed them.
    """
    flush(framework)
    framework.reset_peak()
    peak = StepPeak()
    yield peak
    framework.synchronize()
    peak.reserved = framework.peak_reserved()


def plan_from_readings(
    readings: Sequence[MemoryReading],
    *,
    request: Request,
    capacity: int,
    cost: Callable[[int], int],
    blocks_within: Callable[[int], int],
    peak_of_step: int | None,
    headroom: Mapping[str, int] | None = None,
    context: int | None = None,
    in_place: int = 0,
    backed: int = 0,
    captures: Sequence[Footprint] = (),
    min_blocks: int = 1,
) -> Plan:
    """Sizes the KV cache from the readings of a start-up: the first (R0), any between, the last after the flush (R1).

    `peak_of_step` is what `step_peak` found, or `None` if no step ran: then nothing is kept for transients unless
    `headroom` names it. `context` is what this process held outside its allocator at R0, `None` if not known.
    `captures` are reported, and explain an excess; they are not subtracted again. The rest, and what is raised: see
    `vmm_kv.budget.plan`. Also raises `VmmError` if a reading contradicts itself or another one.
    """
    _check_readings(readings)
    first, last = readings[0], readings[-1]
    named = dict(headroom or {})
    if peak_of_step is not None:
        if "transient" in named:
            raise ValueError(f"transient is given twice: peak_of_step {peak_of_step}, headroom {named['transient']}")
        named = {"transient": transient(peak_of_step, last.reserved), **named}
    terms = Terms(
        total=last.total,
        free_0=first.free,
        free=last.free,
        reserved=last.reserved,
        kv=last.kv,
        others=others(readings),
        context=context,
        process_used=last.process_used,
        headroom=tuple(named.items()),
        in_place=in_place,
        backed=backed,
        footprint=sum(capture.raw for capture in captures) if captures else None,
        graph_pool=sum(capture.allocator for capture in captures) if captures else None,
    )
    try:
        found = plan(terms, request, capacity=capacity, cost=cost, blocks_within=blocks_within, min_blocks=min_blocks)
    except BudgetError as error:
        if not last.notes or error.plan is None:
            raise
        noted = "\n".join([str(error), *(f"  note: {note}" for note in last.notes)])
        raise BudgetError(noted, _with_notes(error.plan, last)) from None
    return _with_notes(found, last)


def _with_notes(found: Plan, last: MemoryReading) -> Plan:
    """The plan, which says where the figures for free and total memory come from if not from the driver."""
    return replace(found, notes=(*found.notes, *last.notes))


def _check_pair(label: str, free: int, total: int) -> None:
    if not 0 <= free <= total:
        raise VmmError(
            f"reading {label!r} is inconsistent: the driver tells {exactly(free)} free of {exactly(total)}; "
            "no budget can be computed from it"
        )


def _check_readings(readings: Sequence[MemoryReading]) -> None:
    if len(readings) < 2:
        raise ValueError(f"sizing needs a first and a last reading, got {len(readings)}")
    for reading in readings:
        _check_pair(reading.label, reading.free, reading.total)
        if reading.total != readings[0].total:
            raise VmmError(
                f"readings {readings[0].label!r} and {reading.label!r} differ in the device's total: "
                f"{exactly(readings[0].total)} and {exactly(reading.total)}; are they of one device?"
            )
