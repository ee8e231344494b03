"""Owners of driver objects. Each is undone by exactly one driver call (invariant 2).

The order is unmap, release, free address. An owner whose undoing call failed still owns: the call may be made again.
No owner undoes itself when it is garbage collected; whoever drops one hands it to `vmm_kv.graveyard`.
"""

from __future__ import annotations

from vmm_kv._native import Lease
from vmm_kv.driver import Driver


class Chunk:
    """One physical allocation of `size` bytes: one driver handle."""

    __slots__ = ("_driver", "handle", "mapped_in", "size")

    def __init__(self, driver: Driver, size: int) -> None:
        self.handle = driver.create(size)
        self.size = size
        self.mapped_in: Reservation | None = None
        """Where it was mapped last. None: nowhere yet, so that its contents are what the driver made them."""
        self._driver = driver

    def release(self) -> None:
        """Gives the memory back. Not before the last mapping of the chunk is gone: ROCm would keep its addresses."""
        self._driver.release(self.handle)


class Mapping:
    """One whole chunk mapped at `address`."""

    __slots__ = ("_driver", "address", "chunk")

    def __init__(self, driver: Driver, address: int, chunk: Chunk) -> None:
        driver.map(address, chunk.size, chunk.handle)
        self.address = address
        self.chunk = chunk
        self._driver = driver

    @property
    def end(self) -> int:
        return self.address + self.chunk.size

    def unmap(self) -> None:
        """Takes the mapping away. The chunk stays, with its contents, until it is released."""
        self._driver.unmap(self.address, self.chunk.size)


class Reservation:
    """A range of `size` bytes of addresses from `base`, and the count of tensors that still lie over it."""

    __slots__ = ("_driver", "base", "lease", "size")

    def __init__(self, driver: Driver, size: int, hint: int = 0) -> None:
        """`hint` is an address that is wanted and need not be given: compare `base`."""
        self.base = driver.reserve(size, hint=hint)
        self.size = size
        self.lease = Lease()
        self._driver = driver

    @property
    def in_use(self) -> bool:
        """Whether a tensor still lies over the addresses. They must not go to anybody else while one does."""
        return self.lease.count > 0

    def free(self) -> None:
        """Gives the addresses back. Nothing may be mapped in them, and no tensor may lie over them."""
        self._driver.free_address(self.base, self.size)
