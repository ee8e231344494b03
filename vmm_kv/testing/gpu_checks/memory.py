"""When memory goes and comes back, and what is in it."""

from __future__ import annotations

import torch

from vmm_kv.testing.gpu_raw import Raw
from vmm_kv.testing.gpu_registry import check
from vmm_kv.testing.gpu_rig import GIB, MIB, Rig

_NOISE = 8 * MIB
"""Page tables of the driver itself, and what a neighbour takes."""
_OLD = 0xA5


class _Deltas:
    """How free memory changes from step to step, in bytes."""

    def __init__(self, rig: Rig, size: int) -> None:
        self._rig, self._size = rig, size
        self._last = rig.free()

    def step(self, name: str, chunks: int) -> None:
        """After the step free memory is expected to have changed by as many chunks."""
        free = self._rig.free()
        delta, self._last = free - self._last, free
        self._rig.findings.details[name] = delta
        self._rig.say(f"{name} {delta / MIB:+.1f}")
        near = abs(delta - chunks * self._size) <= _NOISE
        self._rig.expect(f"{name}: change of free memory near {chunks * self._size}", delta if not near else True, True)


@check("memory.deltas", "C8 R6 M7 B4")
def deltas(rig: Rig) -> None:
    """Free memory at reserve, create, map, release while mapped and unmap; then unmap first, release after."""
    size = rig.size(256 * MIB)
    late = rig.driver.quirks.memory_with_addresses
    rig.say(f"MiB, chunk of {size / MIB:.0f}")
    track = _Deltas(rig, size)
    base = rig.reserve(2 * size)
    track.step("reserve", 0)
    handle = rig.create(size)
    track.step("create", -1)
    rig.map(base, size, handle)
    track.step("map", 0)
    rig.set_access(base, size)
    track.step("set_access", 0)
    rig.release(handle)
    track.step("release while mapped", 0)
    rig.unmap(base, size)
    track.step("unmap after release", 0 if late else 1)
    handle = rig.chunk(base + size, size)
    track.step("create, map, grant", -1)
    rig.unmap(base + size, size)
    track.step("unmap before release", 0)
    rig.release(handle)
    track.step("release after unmap", 0 if late else 1)
    rig.free_address(base)
    track.step("free_address", 2 if late else 0)


@check("memory.fresh", "C7", needs="torch")
def fresh(rig: Rig) -> None:
    """Whether memory that another chunk was just filled with comes back as zeros."""
    size = rig.size(GIB if rig.real else 16 * MIB)
    base = rig.reserve(size)
    dirty: list[float] = []
    for _ in range(3):
        handle = rig.chunk(base, size)
        tensor = rig.bytes_at(base, size)
        dirty.append(tensor.count_nonzero().item() / size)
        tensor.fill_(_OLD)
        rig.settle()
        rig.unmap(base, size)
        rig.release(handle)
    rig.findings.details["dirty"] = dirty
    rig.say("share of bytes that were not zero: " + ", ".join(f"{part:.3f}" for part in dirty))
    if rig.driver.quirks.fresh_zero:
        rig.expect("dirty chunks", sum(part > 0 for part in dirty), 0)


@check("memory.alias", "M5", needs="torch")
def alias(rig: Rig) -> None:
    """One chunk at eight addresses: what is written through one is read through the others."""
    size = rig.size(16 * MIB if rig.real else rig.granule)
    base, handle = rig.reserve(8 * size), rig.create(size)
    free = rig.free()
    for place in range(8):
        rig.map(base + place * size, size, handle)
    rig.set_access(base, 8 * size)
    taken = free - rig.free()
    views = [rig.bytes_at(base + place * size, size) for place in range(8)]
    for value, view in enumerate(views, start=1):
        view.fill_(value)
        counts = torch.stack([(other == value).sum() for other in views]).tolist()
        rig.require(counts == [size] * 8, f"after writing through alias {value - 1} others read {counts} of {size}")
    rig.settle()
    rig.say(f"all agree after each kernel; eight mappings took {taken} bytes")
    rig.expect("mappings take no memory", taken <= _NOISE, True)


@check("memory.pointer", "P1 S3")
def pointer(rig: Rig) -> None:
    """What the driver says of an address: reserved, mapped, granted."""
    size = 4 * rig.granule
    base = rig.reserve(size)
    with rig.driver.scope():
        raw = Raw(rig)
        told = {"reserved": raw.pointer(base)}
        handle = rig.create(rig.granule)
        rig.map(base, rig.granule, handle)
        told["mapped"] = raw.pointer(base)
        rig.set_access(base, rig.granule)
        told["granted"] = raw.pointer(base)
    rig.findings.details.update(told)
    for when, facts in told.items():
        values = {**facts, "range start": "base" if facts["range start"] == base else facts["range start"]}
        rig.say(f"{when}: " + ", ".join(f"{name} {value}" for name, value in values.items()))
    rig.expect("mapped where only reserved", told["reserved"]["mapped"], 0)
    rig.expect("mapped where granted", told["granted"]["mapped"], 1)
    rig.expect("range where only reserved", told["reserved"]["range size"], size)
