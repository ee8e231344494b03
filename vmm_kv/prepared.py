"""A commit in two steps: the memory is taken first, and mapped when the engine is ready for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from vmm_kv.backing import Pieces

if TYPE_CHECKING:
    from vmm_kv.cache import KVCache


class PreparedCommit:
    """The chunks for a commit, taken and not yet mapped. Made by `KVCache.prepare`."""

    def __init__(self, cache: KVCache, blocks: int, pieces: Pieces, version: int) -> None:
        self.blocks = blocks
        self.pieces = pieces
        self.version = version
        """The cache's version at the time. Another operation since then makes the step stale."""
        self._cache = cache
        self.done = False
        """Whether the chunks were published or given back."""

    @property
    def bytes(self) -> int:
        """Bytes of memory that the chunks hold."""
        return sum(chunk.size for _, chunk in self.pieces)

    def publish(self) -> int:
        """Maps, grants access, zeroes, and raises the usable count, which it returns.

        If it fails, everything but these chunks is as it was before: publish again, or discard. Raises `StateError`
        for a step that is stale or done.
        """
        return self._cache._publish(self)

    def discard(self) -> None:
        """Gives the chunks back. Does nothing if they were published or given back before."""
        if not self.done:
            self._cache._discard(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a prepared commit owns memory of its device: it can be neither copied nor pickled")
