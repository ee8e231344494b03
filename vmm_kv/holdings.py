"""Everything of the driver's that one cache owns, and what happens to it when nobody closes the cache.

A cache that is garbage collected cannot call the driver: a finalizer runs anywhere, perhaps inside a capture. It moves
its holdings to a graveyard, which the next call on that device outside a capture empties, and interpreter exit.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from threading import Lock

from vmm_kv.capture import capturing
from vmm_kv.driver import Driver
from vmm_kv.errors import DriverGone, FaultedError, VmmError
from vmm_kv.interrupts import deferred
from vmm_kv.pages import Chunk, Mapping, Reservation

log = logging.getLogger(__name__)


class Holdings:
    """The live driver objects of one cache. What is in here exists in the driver, and the other way round.

    `chunks` holds every chunk created and not released. Among them are those that resisted a release (`unreleased`)
    and, with the quirk `memory_with_addresses`, the spares: chunks that were unmapped and wait to be mapped again,
    since a release would not return their memory while the addresses stay.
    """

    __slots__ = (
        "_spares",
        "_undoing",
        "addresses_lost",
        "chunks",
        "driver",
        "mappings",
        "pid",
        "reservation",
        "stranded_bytes",
        "unreleased",
    )

    def __init__(self, driver: Driver, reservation: Reservation) -> None:
        self.driver = driver
        self.reservation: Reservation | None = reservation
        self.mappings: dict[int, Mapping] = {}
        self.chunks: dict[int, Chunk] = {}
        self.unreleased: list[Chunk] = []
        self.stranded_bytes = 0
        """Bytes of chunks that are released and whose memory the driver keeps until the addresses are freed."""
        self.addresses_lost = False
        """The addresses that tensors lie over are not ours any more, although nobody closed."""
        self.pid = os.getpid()
        self._spares: dict[int, list[Chunk]] = {}
        self._undoing = Lock()

    @property
    def physical_bytes(self) -> int:
        """Bytes of the device's memory that are taken; a chunk mapped many times counts once."""
        return sum(chunk.size for chunk in list(self.chunks.values())) + self.stranded_bytes

    @property
    def unreleased_bytes(self) -> int:
        """Bytes that are of no use and did not come back: chunks that resisted a release, and what is stranded."""
        return sum(chunk.size for chunk in self.unreleased) + self.stranded_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes of chunks that are kept for the next `create` of their size."""
        return sum(size * len(chunks) for size, chunks in list(self._spares.items()))

    @property
    def empty(self) -> bool:
        return not (self.mappings or self.chunks or self.reservation)

    def create(self, size: int) -> Chunk:
        """A spare of that size, or a new chunk."""
        if spares := self._spares.get(size):
            return spares.pop()
        chunk = Chunk(self.driver, size)
        self.chunks[chunk.handle] = chunk
        return chunk

    def map(self, address: int, chunk: Chunk) -> Mapping:
        mapping = self.mappings[address] = Mapping(self.driver, address, chunk)
        chunk.mapped_in = self.reservation
        return mapping

    def unmap(self, mapping: Mapping) -> None:
        with suppress(DriverGone):
            mapping.unmap()
        del self.mappings[mapping.address]

    def release(self, chunks: Iterable[Chunk]) -> None:
        """Releases each, or makes it a spare where a release would not return its memory.

        One that fails does not fail the caller: it is kept, reported, and tried again later.
        """
        for chunk in chunks:
            if self._bound(chunk):
                self._spares.setdefault(chunk.size, []).append(chunk)
            else:
                self._release_or_keep(chunk)

    def give_back(self, chunks: Iterable[Chunk]) -> None:
        """Releases what a shrink has unmapped, and with it every spare where nothing is mapped any more.

        Raises `FaultedError` if the addresses are lost in doing so.
        """
        self.release(chunks)
        if not (spare := self.spare_bytes):
            return
        if self.mappings:
            text = "%s returns memory only with its addresses: %d bytes stay with the cache, which grows into them"
            log.warning(text, self.driver.name, spare)
        else:
            self._vacate()

    def retry_unreleased(self) -> None:
        """Tries once more what resisted before: chunks, and addresses that stranded memory waits for.

        Raises `FaultedError` if the addresses are lost in doing so.
        """
        if self.unreleased:
            resisting, self.unreleased = self.unreleased, []
            self.release(resisting)
        if self.stranded_bytes and not self.mappings:
            self._vacate()

    def undo(self) -> list[Exception]:
        """Unmaps, releases and frees everything that can be, in that order, and returns what failed.

        A chunk still mapped is not released, and addresses still mapped or under a live tensor are not freed (but let
        go for a moment where memory waits for that): what is left stays in the holdings, so that the call can be made
        again.
        """
        errors: list[Exception] = []
        with self._undoing:  # the graveyard may have them as well as close()
            for mapping in list(self.mappings.values()):
                with _collecting(errors):
                    self.unmap(mapping)
            still_mapped = {mapping.chunk.handle for mapping in self.mappings.values()}
            self.unreleased, self._spares = [], {}
            for chunk in [chunk for handle, chunk in self.chunks.items() if handle not in still_mapped]:
                with _collecting(errors):
                    self._release(chunk)
            if not self.mappings:
                self._undo_addresses(errors)
        return errors

    def forget(self) -> None:
        """Drops everything without a call: the driver has shut down, and all of this went with it."""
        with self._undoing:
            self.mappings.clear()
            self.chunks.clear()
            self.unreleased, self._spares = [], {}
            self.reservation, self.stranded_bytes = None, 0

    def _bound(self, chunk: Chunk) -> bool:
        """Whether the chunk's memory returns only with the present addresses."""
        within = chunk.mapped_in
        return within is not None and within is self.reservation and self.driver.quirks.memory_with_addresses

    def _release(self, chunk: Chunk) -> None:
        with suppress(DriverGone):
            chunk.release()
        del self.chunks[chunk.handle]
        if self._bound(chunk):
            self.stranded_bytes += chunk.size

    def _release_or_keep(self, chunk: Chunk) -> None:
        try:
            self._release(chunk)
        except VmmError as error:
            log.warning("%d bytes are not released yet and will be tried again: %s", chunk.size, error)
            self.unreleased.append(chunk)

    def _vacate(self) -> None:
        """Nothing is mapped: releases the spares, and lets the addresses go for a moment so that the memory returns."""
        spares, self._spares = self._spares, {}
        for chunk in chain(*spares.values()):
            self._release_or_keep(chunk)
        if self.stranded_bytes:
            try:
                self._renew_addresses()
            except FaultedError:
                raise
            except VmmError as error:
                text = "%d bytes stay away until their addresses are freed, which will be tried again: %s"
                log.warning(text, self.stranded_bytes, error)

    def _renew_addresses(self) -> None:
        """Frees the addresses and at once reserves the same again, under the tensors that lie over them.

        If the free fails, nothing has changed. After it there is no way back: `FaultedError` where the same addresses
        do not come. Others that came in their place are kept for `undo` to free.
        """
        old = self.reservation
        assert old is not None
        old.free()
        self.stranded_bytes = 0
        new = None
        try:
            new = Reservation(self.driver, old.size, hint=old.base)
            if new.base != old.base:
                raise VmmError(f"the driver gave {new.base:#x}")
        except BaseException as failure:
            self.reservation, self.addresses_lost = new, True
            raise _lost(old, failure) from failure
        new.lease = old.lease
        self.reservation = new

    def _undo_addresses(self, errors: list[Exception]) -> None:
        if self.reservation and self.reservation.in_use and self.stranded_bytes:
            with _collecting(errors), suppress(DriverGone):
                self._renew_addresses()
        if self.reservation and not self.reservation.in_use:
            with _collecting(errors):
                with suppress(DriverGone):
                    self.reservation.free()
                self.reservation, self.stranded_bytes = None, 0


def _lost(addresses: Reservation, failure: BaseException) -> FaultedError:
    return FaultedError(
        f"{addresses.size} bytes of addresses at {addresses.base:#x} were freed, which alone returns the memory that "
        f"was behind them, and could not be reserved again: {failure}. They may be anybody's now: tensors over them "
        "must not be used. Close the cache and make a new one.",
        failure=failure,
        undo_failure=None,
    )


@contextmanager
def _collecting(errors: list[Exception]) -> Iterator[None]:
    try:
        yield
    except VmmError as error:
        errors.append(error)


# A deque because its append and popleft are atomic: a finalizer may interrupt the very thread that empties it.
_graves: deque[Holdings] = deque()
_shut_down = False


def bury(holdings: Holdings) -> None:
    """Leaves holdings to the next call on their device. Calls no driver, takes no lock: fit for a finalizer."""
    if not _shut_down and holdings.pid == os.getpid() and not holdings.empty:
        _graves.append(holdings)


def empty_graveyard(device: str | None = None) -> None:
    """Undoes what is buried of the device (of every device for None). What cannot be undone yet is buried again."""
    for _ in range(len(_graves)):
        try:
            holdings = _graves.popleft()
        except IndexError:  # another thread was quicker
            return
        if holdings.pid != os.getpid():
            continue
        if device is None or holdings.driver.name == device:
            for error in _undo_outside_capture(holdings):
                log.warning("a cache that was dropped without close() cannot be undone yet: %s", error)
        bury(holdings)


def _undo_outside_capture(holdings: Holdings) -> list[Exception]:
    try:
        if capturing(holdings.driver):
            return []
        with deferred(), holdings.driver.scope():
            return holdings.undo()
    except DriverGone:
        holdings.forget()
        return []
    except VmmError as error:
        return [error]


@atexit.register
def _shutdown() -> None:
    """The last moment to call a driver. Caches still alive are left to the process's end, as are their users."""
    global _shut_down
    with deferred():
        empty_graveyard()
    _shut_down = True
    _graves.clear()
