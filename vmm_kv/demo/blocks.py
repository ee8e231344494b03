"""Hands out the cache's blocks to sequences and remembers which have been written."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable

from vmm_kv.demo.paging import NULL_BLOCK


class BlockAllocator:
    """A first-in, first-out free list over the block ids 1 .. blocks - 1; block 0 is the null block.

    The ids start in a shuffled order fixed by `seed`, so that a short run already draws from the whole cache.
    """

    def __init__(self, blocks: int, seed: int = 0) -> None:
        if blocks < 2:
            raise ValueError(f"{blocks} blocks: a null block and at least one to hand out are needed")
        self.blocks = blocks
        ids = list(range(NULL_BLOCK + 1, blocks))
        random.Random(seed).shuffle(ids)
        self._free = deque(ids)
        self._written: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def distinct_written(self) -> int:
        """Number of different blocks written so far."""
        return len(self._written)

    @property
    def highest_written(self) -> int:
        """Highest id written so far; 0 if none."""
        return max(self._written, default=NULL_BLOCK)

    def take(self, count: int) -> list[int]:
        """The ids of `count` blocks. Raises `ValueError` if fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} of {self.blocks - 1} are free")
        return [self._free.popleft() for _ in range(count)]

    def give_back(self, ids: Iterable[int]) -> None:
        """Returns blocks to the end of the list. Raises `ValueError` for an id that never was in it."""
        ids = list(ids)
        self.check(ids)
        self._free.extend(ids)

    def check(self, ids: Iterable[int]) -> None:
        """Raises `ValueError` if an id is not usable: beyond the blocks there are, addresses may have no memory."""
        for block in ids:
            if not NULL_BLOCK < block < self.blocks:
                raise ValueError(f"block {block} is not usable: usable ids are 1 to {self.blocks - 1}")

    def wrote(self, ids: Iterable[int]) -> None:
        """Notes that blocks are about to be written. Raises `ValueError` for an id that is not usable."""
        ids = list(ids)
        self.check(ids)
        self._written.update(ids)
