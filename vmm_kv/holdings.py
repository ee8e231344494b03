"""Everything of the driver's that one cache owns, and what happens to it when nobody closes the cache.

A cache that is garbage collected cannot call the driver: a finalizer runs anywhere, perhaps inside a capture. It moves
its holdings to a graveyard, which the next call on that device outside a capture empties, and interpreter exit.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections import deque
from collections.abc import Iterable

from vmm_kv.capture import capturing
from vmm_kv.driver import Driver
from vmm_kv.errors import VmmError
from vmm_kv.pages import Chunk, Mapping, Reservation

log = logging.getLogger(__name__)


class Holdings:
    """The live driver objects of one cache. What is in here exists in the driver, and the other way round.

    `chunks` holds every chunk created and not released, `unreleased` those of them that resisted a release.
    """

    __slots__ = ("chunks", "driver", "mappings", "pid", "reservation", "unreleased")

    def __init__(self, driver: Driver, reservation: Reservation) -> None:
        self.driver = driver
        self.reservation: Reservation | None = reservation
        self.mappings: dict[int, Mapping] = {}
        self.chunks: dict[int, Chunk] = {}
        self.unreleased: list[Chunk] = []
        self.pid = os.getpid()

    @property
    def physical_bytes(self) -> int:
        """Bytes of the device's memory that the chunks take; one mapped many times counts once."""
        return sum(chunk.size for chunk in list(self.chunks.values()))

    @property
    def empty(self) -> bool:
        return not (self.mappings or self.chunks or self.reservation)

    def create(self, size: int) -> Chunk:
        chunk = Chunk(self.driver, size)
        self.chunks[chunk.handle] = chunk
        return chunk

    def map(self, address: int, chunk: Chunk) -> Mapping:
        mapping = self.mappings[address] = Mapping(self.driver, address, chunk)
        return mapping

    def unmap(self, mapping: Mapping) -> None:
        mapping.unmap()
        del self.mappings[mapping.address]

    def release(self, chunks: Iterable[Chunk]) -> None:
        """Releases each. One that fails does not fail the caller: it is kept, reported, and tried again later."""
        for chunk in chunks:
            try:
                chunk.release()
            except VmmError as error:
                log.warning("%s bytes are not released yet and will be tried again: %s", chunk.size, error)
                self.unreleased.append(chunk)
            else:
                del self.chunks[chunk.handle]

    def retry_unreleased(self) -> None:
        """Tries the chunks that resisted a release once more."""
        if self.unreleased:
            resisting, self.unreleased = self.unreleased, []
            self.release(resisting)

    def undo(self) -> list[Exception]:
        """Unmaps, releases and frees everything that can be, in that order, and returns what failed.

        A chunk still mapped is not released, and addresses still mapped or under a live tensor are not freed: what is
        left stays in the holdings, so that the call can be made again.
        """
        errors: list[Exception] = []
        for mapping in list(self.mappings.values()):
            try:
                self.unmap(mapping)
            except VmmError as error:
                errors.append(error)
        still_mapped = {mapping.chunk.handle for mapping in self.mappings.values()}
        self.unreleased = []
        for chunk in [chunk for handle, chunk in self.chunks.items() if handle not in still_mapped]:
            try:
                chunk.release()
                del self.chunks[chunk.handle]
            except VmmError as error:
                errors.append(error)
        if self.reservation and not self.mappings and not self.reservation.in_use:
            try:
                self.reservation.free()
                self.reservation = None
            except VmmError as error:
                errors.append(error)
        return errors


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
        if (device is None or holdings.driver.name == device) and not capturing(holdings.driver):
            try:
                with holdings.driver.scope():
                    for error in holdings.undo():
                        log.warning("a cache that was dropped without close() cannot be undone yet: %s", error)
            except VmmError as error:
                log.warning("a cache that was dropped without close() cannot be undone yet: %s", error)
        bury(holdings)


@atexit.register
def _shutdown() -> None:
    """The last moment to call a driver. Caches still alive are left to the process's end, as are their users."""
    global _shut_down
    empty_graveyard()
    _shut_down = True
    _graves.clear()
