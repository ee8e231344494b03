"""Memory that graphs keep to themselves: blocks at fixed addresses, out of segments charged to the budget.

Best fit, split and coalesce, as in CUDA's private pools: a block that died is there for the next operation, in the same
capture or the next one. So the largest graph first leaves a pool of about its size, the smallest first about the sum.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vmm_kv._native import Lease
from vmm_kv.host.memory import GRAIN, HostMemory, drain, round_up, when_dead

SEGMENT = 2 << 20
"""Bytes; a segment is a multiple of it."""


class _Segment:
    """Real memory of this process, and which of it is free."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.size = size
        self.gaps = [(self.base, self.base + size)]  # in order of address, no two adjacent

    def free(self) -> bool:
        return self.gaps == [(self.base, self.base + self.size)]

    def cut(self, gap: tuple[int, int], nbytes: int) -> int:
        start, end = gap
        self.gaps.remove(gap)
        if start + nbytes < end:
            insort(self.gaps, (start + nbytes, end))
        return start

    def give(self, start: int, end: int) -> None:
        at = bisect(self.gaps, (start, end))
        if at < len(self.gaps) and self.gaps[at][0] == end:
            end = self.gaps.pop(at)[1]
        if at and self.gaps[at - 1][1] == start:
            start = self.gaps.pop(at - 1)[0]
        insort(self.gaps, (start, end))


@dataclass(frozen=True)
class _Block:
    """Bytes in use. Two storages lie over them: the user's, whose death frees the block, and its twin for graphs."""

    segment: _Segment
    address: int
    size: int
    twin: torch.UntypedStorage


class GraphPool:
    """The private pool of one or more graphs of `memory`, which may share it if they never replay at the same time.

    Its segments return to `memory` as cached bytes when no graph uses it any more and no tensor lies in them.
    """

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.segments: list[_Segment] = []
        self._lease = Lease()
        self._live: dict[int, _Block] = {}
        self._dead: deque[_Block] = deque()
        self._graphs = 0
        self._ended: deque[None] = deque()

    @property
    def bytes(self) -> int:
        """Bytes of the segments held."""
        with self.memory.settled():
            return sum(segment.size for segment in self.segments)

    @property
    def used(self) -> int:
        """Bytes of the blocks in use, each a multiple of 512."""
        with self.memory.settled():
            return sum(block.size for block in self._live.values())

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """A storage in the pool. The block is free again when the last tensor of it dies. Raises OutOfMemoryError."""
        size = round_up(nbytes, GRAIN)
        with self.memory.settled():
            segment, address = self._take(size)
            block = _Block(segment, address, size, self._storage(address, nbytes))
            self._live[address] = block
        storage = self._storage(address, nbytes)
        when_dead(storage, self._dead.append, block)
        return storage

    def twin(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Another storage over the same bytes, that does not keep them from being reused; None if not of this pool."""
        block = self._live.get(storage.data_ptr())
        return None if block is None else block.twin

    def join(self, graph: object) -> Callable[[], object]:
        """Keeps the segments until `graph` dies or what is returned is called, once."""
        with self.memory.settled():
            self._graphs += 1
        return when_dead(graph, self._ended.append, None)

    def settle(self) -> int:
        """Frees the blocks whose storage died; without a graph, the free segments too. Returns their bytes.

        For `HostMemory`, which calls it with its lock held.
        """
        for block in drain(self._dead):
            del self._live[block.address]
            block.segment.give(block.address, block.address + block.size)
        self._graphs -= sum(1 for _ in drain(self._ended))
        if self._graphs:
            return 0
        kept = [segment for segment in self.segments if not segment.free()]
        freed = sum(segment.size for segment in self.segments) - sum(segment.size for segment in kept)
        self.segments = kept
        return freed

    def _take(self, size: int) -> tuple[_Segment, int]:
        fits = [
            (end - start, start, end, segment)
            for segment in self.segments
            for start, end in segment.gaps
            if end - start >= size
        ]
        if not fits:
            self._grow(size)
            return self._take(size)
        _, start, end, segment = min(fits, key=lambda fit: fit[:2])
        return segment, segment.cut((start, end), size)

    def _grow(self, size: int) -> None:
        segment = _Segment(round_up(size, SEGMENT))
        self.memory.take_segment(self, segment.size)
        self.segments.append(segment)

    def _storage(self, address: int, nbytes: int) -> torch.UntypedStorage:
        capsule = self._lease.capsule(address, nbytes, 1, 0)  # 1: DLPack's CPU
        return torch.utils.dlpack.from_dlpack(capsule).untyped_storage()
