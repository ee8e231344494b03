"""How long the calls take. Nothing here can fail: the numbers are the point."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from vmm_kv.testing.gpu_registry import check
from vmm_kv.testing.gpu_rig import GIB, MIB, Rig

_COUNTS = ((2 * MIB, 512), (64 * MIB, 64), (GIB, 16))
_ALIASED = 64 * GIB
_ALIASED_QUICK = 2 * GIB
_KERNEL_CYCLES = 200_000_000
"""About a tenth of a second on a GPU of 2 GHz."""


def _timed(call: Callable[[], object]) -> float:
    """Microseconds."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1000


def _each(calls: Sequence[Callable[[], object]]) -> tuple[float, float]:
    """Median and mean microseconds of calls made one after another."""
    times = [_timed(call) for call in calls]
    return statistics.median(times), statistics.fmean(times)


@check("times.chunks", "", seconds=45)
def chunks(rig: Rig) -> None:
    """Microseconds of create, map, set_access, unmap and release for chunks of 2 MiB, 64 MiB and 1 GiB."""
    for size, wanted in _COUNTS:
        count = min(wanted, rig.free() // 2 // size) if rig.real and not rig.quick else min(8, rig.free() // 2 // size)
        if count < 1 or size % rig.granule:
            continue
        times = _time_chunks(rig, size, count)
        rig.findings.details[f"{size // MIB} MiB"] = {"count": count, **times}
        medians = ", ".join(f"{name} {values['median']:.1f}" for name, values in times.items())
        rig.say(f"{count} x {size // MIB} MiB: {medians}")


def _time_chunks(rig: Rig, size: int, count: int) -> dict[str, dict[str, float]]:
    driver, base = rig.driver, rig.reserve(size * count)
    places = [base + i * size for i in range(count)]
    handles: list[int] = []
    times: dict[str, dict[str, float]] = {}

    def note(name: str, calls: Sequence[Callable[[], object]]) -> None:
        median, mean = _each(calls)
        times[name] = {"median": round(median, 2), "mean": round(mean, 2)}

    with driver.scope():
        note("create", [lambda: handles.append(driver.create(size))] * count)
        pairs = list(zip(places, handles, strict=True))
        note("map", [partial(driver.map, place, size, handle) for place, handle in pairs])
        note("set_access", [partial(driver.set_access, place, size) for place in places])
        note("unmap", [partial(driver.unmap, place, size) for place in places])
        for place, handle in pairs:
            driver.map(place, size, handle)
        note("one set_access", [lambda: driver.set_access(base, size * count)])
        singly = rig.driver.quirks.single_memset
        spans = [(place, place + size) for place in places] if singly else [(base, base + size * count)]
        note("zero all", [lambda: driver.zero(spans)])
        if rig.driver.quirks.single_unmap:
            for place in places:
                driver.unmap(place, size)
        else:
            note("one unmap", [lambda: driver.unmap(base, size * count)])
        note("release", [partial(driver.release, handle) for handle in handles])
    rig.free_address(base)
    return times


@check("times.alias", "M5 S4", seconds=60)
def alias(rig: Rig) -> None:
    """Milliseconds to alias one chunk of 64 MiB, and one of 2 MiB, over 64 GiB of addresses."""
    total = _ALIASED if rig.real and not rig.quick else _ALIASED_QUICK
    for size in (64 * MIB, 2 * MIB):
        if size % rig.granule or size > rig.free():
            continue
        base, handle = rig.reserve(total), rig.create(size)
        times = _time_alias(rig, base, total, size, handle)
        rig.findings.details[f"{size // MIB} MiB"] = {"addresses": total, "mappings": total // size, **times}
        rig.say(f"{size // MIB} MiB x {total // size}: " + ", ".join(f"{n} {t:.1f} ms" for n, t in times.items()))
        rig.free_address(base)
        rig.release(handle)


def _time_alias(rig: Rig, base: int, total: int, size: int, handle: int) -> dict[str, float]:
    driver, places = rig.driver, range(base, base + total, size)

    def for_all(call: Callable[[int], object]) -> float:
        return _timed(lambda: [call(place) for place in places]) / 1000

    with driver.scope():
        times = {"map": for_all(lambda place: driver.map(place, size, handle))}
        times["one set_access"] = _timed(lambda: driver.set_access(base, total)) / 1000
        times["unmap"] = for_all(lambda place: driver.unmap(place, size))
    return {name: round(value, 3) for name, value in times.items()}


@check("times.addresses", "R6 S4")
def addresses(rig: Rig) -> None:
    """Microseconds to reserve 64 GiB, 1 TiB and 8 TiB of addresses, and to give them back."""
    for size in (64 * GIB, 1024 * GIB, 8192 * GIB):
        start = time.perf_counter_ns()
        base = rig.reserve(size)
        there = (time.perf_counter_ns() - start) / 1000
        back = _timed(partial(rig.free_address, base))
        rig.findings.details[f"{size // GIB} GiB"] = {"reserve": round(there, 1), "free_address": round(back, 1)}
        rig.say(f"{size // GIB} GiB: reserve {there:.0f}, free {back:.0f} us")


@check("times.busy", "U2", needs="torch", emulated=False, seconds=30)
def busy(rig: Rig) -> None:
    """Which calls wait for a kernel that runs on another stream and has nothing to do with them."""
    size, waited = rig.size(64 * MIB), []
    sleep: Any = torch.cuda._sleep
    with rig.device.active():
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        sleep(1000)
        base = rig.reserve(2 * size)
        handles: list[int] = []
        calls: dict[str, Callable[[], object]] = {
            "create": lambda: handles.append(rig.create(size)),
            "map": lambda: rig.map(base, size, handles[0]),
            "set_access": lambda: rig.set_access(base, size),
            "zero": lambda: _zero(rig, base, size),
            "mem_info": rig.free,
            "unmap": lambda: rig.unmap(base, size),
            "release": lambda: rig.release(handles[0]),
            "free_address": lambda: rig.free_address(base),
        }
        for name, call in calls.items():
            rig.settle()
            with torch.cuda.stream(stream):
                sleep(_KERNEL_CYCLES)
            done: Any = stream.record_event()
            spent = _timed(call) / 1000
            if done.query():
                waited.append(name)
            rig.findings.details[name] = {"ms": round(spent, 3), "kernel finished": name in waited}
        rig.settle()
    rig.say(f"calls that waited: {', '.join(waited) or 'none'}")


def _zero(rig: Rig, base: int, size: int) -> None:
    with rig.driver.scope():
        rig.driver.zero([(base, base + size)])
