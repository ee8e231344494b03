"""Into which physical chunks a cache's memory is cut."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal

from vmm_kv.driver import Driver
from vmm_kv.errors import UnsupportedError
from vmm_kv.layout import Layout, cut_points, default_chunk
from vmm_kv.spans import Span, Spans, cut

ChunkSize = int | Literal["auto"] | None
_LARGEST = 64 << 20
_ALIAS_PARTS = 256
_UNIFORM_PERCENT = 100


@dataclass(frozen=True)
class Chunking:
    """How one cache cuts. All in bytes.

    Uniform chunks, where a driver needs them, all lie on one grid from the base, whole at its end too: spans rounded
    outward to the unit never start between, so no points are cut at, and segments that do not divide share a chunk.

    unit: what mapped memory is rounded outward to: the granule, or the chunk where all chunks must be alike.
    size: the largest chunk; None: one chunk for each span.
    alias: the one chunk of an alias backing.
    points: where no chunk may lie across: the granule in which a segment starts, so that a shrink frees tails. None
    with uniform chunks.
    """

    unit: int
    size: int | None
    alias: int
    points: tuple[int, ...]

    @classmethod
    def choose(cls, layout: Layout, driver: Driver, total: int, chunk: ChunkSize) -> Chunking:
        """For a device of `total` bytes. `chunk` is a size, `"auto"`, or None for one chunk a span.

        All chunks are alike where the driver wants that, and where it keeps memory with its addresses, so that growth
        can map any chunk that a shrink has left. Raises `ValueError` for a size that is no positive multiple of the
        granule, `TypeError` for one that is no integer, `UnsupportedError` for None where chunks must be alike.
        """
        granule = driver.granule
        if isinstance(chunk, str) and chunk != "auto":
            raise ValueError(f"chunk={chunk!r}: it is 'auto', a number of bytes, or None")
        if chunk is not None and chunk != "auto":
            chunk = operator.index(chunk)
            if chunk <= 0 or chunk % granule:
                raise ValueError(f"a chunk of {chunk} bytes on {driver.name}: it must be a multiple of {granule}")
        if driver.quirks.uniform_chunks or driver.quirks.memory_with_addresses:
            if chunk is None:
                raise UnsupportedError(f"{driver.name} needs chunks of one size; chunk=None makes them of any")
            size = _uniform(layout, granule, total) if chunk == "auto" else chunk
            return cls(unit=size, size=size, alias=size, points=())
        alias = max(granule, min(_LARGEST, total // _ALIAS_PARTS) // granule * granule)
        largest = default_chunk(layout, granule) if chunk == "auto" else chunk
        return cls(unit=granule, size=largest, alias=alias, points=tuple(cut_points(layout, granule)))

    def pieces(self, spans: Spans) -> list[Span]:
        """Cuts spans that are whole units into chunks, in order of address."""
        return list(cut(spans, self.points, self.size))


def _uniform(layout: Layout, granule: int, total: int) -> int:
    # Every segment wastes up to one chunk, so together they should waste about one percent of the device.
    share = total // (_UNIFORM_PERCENT * len(layout.segments))
    return max(granule, min(_LARGEST, 1 << max(0, share.bit_length() - 1)) // granule * granule)
