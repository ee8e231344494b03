"""What is mapped behind one reservation, and how to change it so that a failure can be undone.

Each change here is the reversible half of an operation (invariant 3): it keeps every chunk, so that undoing it needs no
memory. What may be released afterwards is the caller's to release. Knows nothing of states, blocks or listeners.
"""

from __future__ import annotations

from collections.abc import Sequence

from vmm_kv.chunking import Chunking
from vmm_kv.driver import Driver, Span
from vmm_kv.errors import FaultedError, OutOfPhysicalMemory
from vmm_kv.holdings import Holdings
from vmm_kv.pages import Chunk, Mapping
from vmm_kv.spans import Spans, cut, difference, length, union

Pieces = list[tuple[int, Chunk]]
"""Chunks with the offsets in the reservation that they are for, in order of offset."""


class Backing:
    """Offsets are bytes from the reservation's base."""

    def __init__(self, driver: Driver, holdings: Holdings, chunking: Chunking, base: int, size: int) -> None:
        self.holdings = holdings
        self.chunking = chunking
        self.base = base
        self.size = size
        self.mapped: Spans = ()
        """What is mapped for good: a prefix backing or a commit, never an alias."""
        self.alias: Chunk | None = None
        self.generation = 0
        """Rises each time pages behind addresses that were mapped change."""
        self._driver = driver

    def span(self, mapping: Mapping) -> Span:
        return mapping.address - self.base, mapping.end - self.base

    def forget(self) -> None:
        """Nothing is mapped any more, and not by way of an operation here."""
        self.mapped, self.alias = (), None

    def absolute(self, spans: Spans) -> tuple[Span, ...]:
        return tuple((self.base + start, self.base + stop) for start, stop in spans)

    def mappings(self) -> list[Mapping]:
        """Every live mapping, in order of address."""
        return sorted(self.holdings.mappings.copy().values(), key=lambda mapping: mapping.address)

    def create(self, granules: Spans) -> Pieces:
        """Takes the memory for those granules that are not mapped yet. All or nothing."""
        pieces: Pieces = []
        missing = difference(granules, self.mapped)
        try:
            for start, stop in self.chunking.pieces(missing):
                pieces.append((start, self.holdings.create(stop - start)))
        except BaseException as failure:
            taken = sum(chunk.size for _, chunk in pieces)
            self.holdings.release(chunk for _, chunk in pieces)
            if isinstance(failure, OutOfPhysicalMemory):
                whole = f"The whole operation needs {length(missing)} bytes, {taken} were taken before and given back"
                raise OutOfPhysicalMemory(f"{failure}. {whole}", call=failure.call, status=failure.status) from failure
            raise
        return pieces

    def map(self, pieces: Pieces, zero: Spans) -> None:
        """Maps the pieces where nothing is mapped, grants access and zeroes `zero` (offsets, to the byte)."""
        new = self._install(pieces, zero)
        self.mapped = union(self.mapped, map(self.span, new))

    def map_alias(self) -> None:
        """Maps one zeroed chunk again and again over the whole reservation."""
        chunk = self.holdings.create(self.chunking.alias)
        try:
            self._install([(offset, chunk) for offset in range(0, self.size, chunk.size)], ((0, chunk.size),))
        except FaultedError:
            raise
        except BaseException:
            self.holdings.release([chunk])
            raise
        self.alias = chunk

    def replace_alias(self, pieces: Pieces, zero: Spans) -> Chunk:
        """Maps the pieces in place of the alias, and nothing beyond them. Returns the chunk that is free to release.

        Nothing is mapped for a moment, yet the addresses are not let go: that would put what can be undone at risk.
        """
        alias = self.alias
        assert alias is not None
        gone: list[Mapping] = []
        try:
            for mapping in self.mappings():
                self.holdings.unmap(mapping)
                gone.append(mapping)
            self.map(pieces, zero)
        except FaultedError:
            raise
        except BaseException as failure:
            self._restore(gone, failure)
            raise
        self.alias = None
        self.generation += 1
        return alias

    def unmap(self, doomed: Sequence[Mapping]) -> None:
        """Unmaps whole mappings, one call each: some ROCm versions cannot do several in one. Their chunks stay."""
        gone: list[Mapping] = []
        try:
            for mapping in doomed:
                self.holdings.unmap(mapping)
                gone.append(mapping)
        except BaseException as failure:
            self._restore(gone, failure)
            raise
        if gone:
            self.mapped = difference(self.mapped, union(map(self.span, gone)))
            self.generation += 1

    def _install(self, pieces: Pieces, zero: Spans) -> list[Mapping]:
        new: list[Mapping] = []
        if self._driver.quirks.fresh_zero:
            unused = union((offset, offset + chunk.size) for offset, chunk in pieces if chunk.mapped_in is None)
            zero = difference(zero, unused)
        try:
            for offset, chunk in pieces:
                new.append(self.holdings.map(self.base + offset, chunk))
            self._grant(new)
            if zero:
                self._zero(self.absolute(zero))
        except BaseException as failure:
            self._take_back(new, failure)
            raise
        return new

    def _zero(self, spans: Spans) -> None:
        """Addresses. They may reach into mappings that were there before."""
        borders = sorted(self.holdings.mappings) if self._driver.quirks.single_memset else ()
        self._driver.zero(cut(spans, borders, None))

    def _grant(self, mappings: Sequence[Mapping]) -> None:
        """Grants access once for each contiguous run.

        ROCm 7.0 to 7.2 compares a run's size with whole mappings counted from the reservation's first one, wherever
        the run lies (rocm-systems #2516). Uniform chunks make any run of k mappings as long as the first k, and there
        are at least k; with chunks of many sizes no such run would be sure to pass.
        """
        for start, stop in union((mapping.address, mapping.end) for mapping in mappings):
            self._driver.set_access(start, stop - start)

    def _take_back(self, new: Sequence[Mapping], failure: BaseException) -> None:
        try:
            for mapping in reversed(new):
                self.holdings.unmap(mapping)
        except BaseException as undo_failure:
            raise _faulted(failure, undo_failure) from undo_failure

    def _restore(self, gone: Sequence[Mapping], failure: BaseException) -> None:
        """Maps again, with the same chunks, what had been unmapped. The pages were away: the generation rises."""
        if not gone:
            return
        self.generation += 1
        try:
            self._grant([self.holdings.map(mapping.address, mapping.chunk) for mapping in gone])
        except BaseException as undo_failure:
            raise _faulted(failure, undo_failure) from undo_failure


def _faulted(failure: BaseException, undo_failure: BaseException) -> FaultedError:
    return FaultedError(
        f"an operation failed ({failure}) and so did undoing it ({undo_failure}). Close the cache and make a new one.",
        failure=failure,
        undo_failure=undo_failure,
    )
