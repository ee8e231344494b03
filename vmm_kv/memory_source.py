"""Which figures for a device's free and total memory to believe. Pure: figures in, figures out.

A driver's pair is right for most devices. It is not where a device shares the machine's memory, where linked cards are
added up, where the total is of something else than the free bytes, and a tool's figure is not where a slice (MIG) is
meant. What was told is kept beside what is used. Bytes throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

from vmm_kv.budget import exactly, readable
from vmm_kv.driver import DeviceProperties
from vmm_kv.errors import VmmError

DRIVER, HOST_AVAILABLE = "driver", "host available"


@dataclass(frozen=True)
class HostFigures:
    """The machine's memory, as the kernel tells."""

    total: int
    free: int
    """Used by nobody at all (MemFree)."""
    available: int
    """What could be had without swapping: free, and page cache that can go, less the watermarks (MemAvailable)."""


@dataclass(frozen=True)
class SecondSource:
    """What somebody other than the driver tells of the memory that is the device's own."""

    source: str
    total: int
    free: int | None = None
    """None where it does not tell, or may not: never 0 for an answer that was refused."""
    pool: int | None = None
    """Of the machine's memory, what the device may take besides."""


@dataclass(frozen=True)
class DeviceMemory:
    """What is free and in all, whose figures these are, and what to know about them."""

    free: int
    total: int
    source: str = DRIVER
    """`"driver"`, `"host available"`, or the name of a second source."""
    notes: tuple[str, ...] = ()
    told: tuple[int, int] | None = None
    """(free, total) as the driver told, where these are not the figures used."""


def resolve(
    free: int,
    total: int,
    properties: DeviceProperties,
    host: HostFigures | None = None,
    second: SecondSource | None = None,
) -> DeviceMemory:
    """The figures to use, given the driver's pair and what else is known. `VmmError` where none can be trusted.

    No budget is ever computed from a pair that contradicts itself: more free than there is.
    """
    told = (free, total)
    if properties.multi_instance:
        second = None  # whoever else tells, tells of the whole GPU
    contradicts = not 0 <= free <= total
    if contradicts and second is None:
        raise VmmError(f"{_pair(properties, told)}; no budget can be computed from it, and nobody else tells")
    if properties.integrated and host is not None and _shares(total, host, second):
        return _shared(told, host, second)
    if contradicts or total == 0:
        return _second(properties, told, second)
    if 0 < properties.total < total:
        return _capped(told, properties)
    return DeviceMemory(free, total)


def as_told(free: int, total: int) -> DeviceMemory:
    """The driver's pair, believed unless it contradicts itself (`VmmError`)."""
    if not 0 <= free <= total:
        raise VmmError(f"{_inconsistent((free, total))}; no budget can be computed from it")
    return DeviceMemory(free, total)


def _shares(total: int, host: HostFigures, second: SecondSource | None) -> bool:
    """Whether memory for the device is taken from the machine's rather than from a carve-out of its own.

    Linux takes it from whichever is larger (amdgpu's KFD since 6.10). A carve-out is no part of the machine's total.
    """
    own = total if second is None else second.total
    return own <= _pool(host, second)


def _pool(host: HostFigures, second: SecondSource | None) -> int:
    return second.pool if second is not None and second.pool else host.total


def _shared(told: tuple[int, int], host: HostFigures, second: SecondSource | None) -> DeviceMemory:
    pool = _pool(host, second)
    # A driver that counts the pool knows best how large it is; one that tells of a small carve-out does not count it.
    total = told[1] if 2 * told[1] >= pool else pool
    note = (
        f"the device shares the machine's memory: free is what the host has available, {exactly(host.available)} "
        f"(MemAvailable; MemFree is {exactly(host.free)}; the driver tells {exactly(told[0])} free of "
        f"{exactly(told[1])}). Page cache counts as available; other processes' memory and what the kernel keeps back "
        "(vm.min_free_kbytes) does not"
    )
    return DeviceMemory(max(0, min(host.available, total)), total, HOST_AVAILABLE, (note,), told)


def _second(properties: DeviceProperties, told: tuple[int, int], second: SecondSource | None) -> DeviceMemory:
    if second is None:
        raise VmmError(f"{_pair(properties, told)}; nobody else tells how much memory it has")
    free = told[0] if second.free is None else second.free
    if not 0 <= free <= second.total or not second.total:
        raise VmmError(
            f"{_pair(properties, told)}, and {second.source}: {exactly(free)} free of {exactly(second.total)}; "
            "no budget can be computed from either"
        )
    note = f"the driver tells {exactly(told[0])} free of {exactly(told[1])}; the figures used are from {second.source}"
    return DeviceMemory(free, second.total, second.source, (note,), told)


def _capped(told: tuple[int, int], properties: DeviceProperties) -> DeviceMemory:
    note = (
        f"the driver tells {readable(told[1])} in all, the device has {exactly(properties.total)}: linked devices are "
        "added up there, so the device's own figure is used"
    )
    free, total = min(told[0], properties.total), properties.total
    return DeviceMemory(free, total, "device property", (note,), told)


def _pair(properties: DeviceProperties, told: tuple[int, int]) -> str:
    return f"{properties.name}: {_inconsistent(told)}"


def _inconsistent(told: tuple[int, int]) -> str:
    return f"the driver's memory figures are inconsistent: it tells {exactly(told[0])} free of {exactly(told[1])}"
