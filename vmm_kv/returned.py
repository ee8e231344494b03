"""Whether memory came back: what a device has free before and after, held against the books."""

from __future__ import annotations

import logging

from vmm_kv.driver import Driver
from vmm_kv.errors import VmmError
from vmm_kv.holdings import Holdings

log = logging.getLogger(__name__)


class ReturnedMemory:
    """Made before anything is released, with a reading that may fail. `bytes` afterwards never does."""

    def __init__(self, driver: Driver, holdings: Holdings) -> None:
        self._driver = driver
        self._holdings = holdings
        self._held = holdings.physical_bytes
        self._free = driver.mem_info()[0]

    def bytes(self) -> int:
        """How much more is free than before: at least 0, at most what was released since.

        What others took or gave back meanwhile is in the readings as well, hence the bounds. What was released,
        without a proof, where the second reading fails.
        """
        released = self._held - self._holdings.physical_bytes
        if not released:
            return 0
        try:
            free = self._driver.mem_info()[0]
        except VmmError as error:
            log.warning("%d bytes were released, and whether they came back cannot be read: %s", released, error)
            return released
        if (returned := min(released, max(0, free - self._free))) < released:
            log.warning("%d bytes were released on %s, %d are back", released, self._driver.name, returned)
        return returned
