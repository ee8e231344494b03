"""The seam: what a device driver must offer, as a short list of primitives on plain ints.

Addresses, handles and sizes are `int`, sizes in bytes. Every primitive checks its status and raises one of
`vmm_kv.errors`; a primitive that raised has changed nothing. Whoever calls a primitive is inside `scope()`.
Only this package names a driver's functions; how drivers differ is data (`Quirks`), not code elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

Span = tuple[int, int]


@dataclass(frozen=True)
class Quirks:
    """How a driver departs from the common contract. All false for one that behaves."""

    fresh_zero: bool = False
    """A chunk that was just created reads as zeros, so it need not be zeroed again."""
    uniform_chunks: bool = False
    """All chunks of a reservation must have one size and lie on one grid from its base (ROCm 7.0 to 7.2)."""
    memory_with_addresses: bool = False
    """Memory that was unmapped and released returns only when the addresses it lay at are freed (ROCm 6.4 to 7.x)."""
    single_unmap: bool = False
    """An unmap takes one mapping at a time (ROCm before 7.0)."""
    single_memset: bool = False
    """A memset stays within one mapping: one across the border of two is refused (ROCm, every version known)."""


@dataclass(frozen=True)
class DeviceProperties:
    """What a device is, for a report and for finding the framework's device that is the same one."""

    name: str
    """The vendor's name of it."""
    uuid: str
    """32 hexadecimal digits in groups, `8-4-4-4-12`; empty where there is none."""
    pci: str
    """`domain:bus:device.function` in hexadecimal, `0000:3b:00.0`; empty where there is none."""
    integrated: bool
    """Shares its memory with the machine, so that what is free belongs to both."""
    total: int
    """Bytes of memory that the driver gives the device."""
    multi_instance: bool
    """A slice of a larger GPU (MIG): what tools say of the GPU is not true of the slice."""


@dataclass(frozen=True)
class MemoryTraits:
    """How the handles of `Driver.create` are made, chosen once when the device is opened."""

    handle_type: str = "none"
    """`"none"`, `"posix_fd"` or `"fabric"`: how another process may be given the memory."""
    refusals: tuple[tuple[str, str], ...] = ()
    """(type, reason) of each type that was asked for before it and refused."""
    rdma: bool = False
    """A network card may reach the memory directly (GPUDirect RDMA)."""
    recommended_granule: int | None = None
    """Bytes: the size from which the driver promises its best mappings. None where it does not tell."""


class Driver(ABC):
    """One device as seen through its driver. Safe to call from any thread."""

    kind: str
    """`"host"`, `"cuda"` or `"hip"`."""
    index: int
    """Device number as the driver counts."""
    granule: int
    """Bytes; every size and address below is a multiple of it."""
    quirks: Quirks
    memory_traits: MemoryTraits

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.index}"

    @abstractmethod
    def scope(self) -> AbstractContextManager[None]:
        """Makes the device current for the calling thread, and on leaving restores what was current before.

        Entered once around an operation, not once a call. Signals wait until it is left (`vmm_kv.interrupts`). Leaving
        it raises no error: what cannot be restored in two tries is a warning, for what was done inside has happened.
        Entering it raises `StateError` in a forked child: a driver does not survive a fork.
        """

    @abstractmethod
    def properties(self) -> DeviceProperties:
        """What the device is. Reads attributes only: no primitive, no context, and no `scope()` needed."""

    @abstractmethod
    def reserve(self, size: int, alignment: int = 0, hint: int = 0) -> int:
        """Reserves `size` bytes of addresses and returns the base. Costs no memory. Undone by `free_address`.

        `alignment` is 0 (the driver's choice) or a power of two. `hint` is a wish: compare the result.
        Raises `OutOfAddressSpace`.
        """

    @abstractmethod
    def free_address(self, base: int, size: int) -> None:
        """Gives a reservation back: exactly the base and size of `reserve`, with nothing mapped in it."""

    @abstractmethod
    def create(self, size: int) -> int:
        """Takes `size` bytes of the device's memory and returns their handle. Undone by `release`.

        Contents are undefined unless `quirks.fresh_zero`. Raises `OutOfPhysicalMemory`.
        """

    @abstractmethod
    def release(self, handle: int) -> None:
        """Gives up a handle. The memory returns when it is mapped nowhere either."""

    @abstractmethod
    def map(self, address: int, size: int, handle: int) -> None:
        """Maps a whole handle of `size` bytes at `address`, inside one reservation, where nothing is mapped.

        The range cannot be touched before `set_access`. One handle may be mapped at many addresses.
        Undone by `unmap`.
        """

    @abstractmethod
    def unmap(self, address: int, size: int) -> None:
        """Unmaps whole mappings that fill the range without a gap. Does not wait for work on the device."""

    @abstractmethod
    def set_access(self, address: int, size: int) -> None:
        """Grants this device reading and writing of a range filled by whole mappings."""

    @abstractmethod
    def get_access(self, address: int) -> int:
        """0: none, 1: read, 3: read and write. An address with nothing mapped is an error."""

    @abstractmethod
    def mem_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device, as the driver tells."""

    @abstractmethod
    def zero(self, spans: Sequence[Span]) -> None:
        """Writes zeros to the half-open address intervals and returns when they are there.

        Runs on a stream of its own, so it is not ordered after the caller's work on other streams.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when the device has finished everything that was launched on it."""

    @abstractmethod
    def calls(self) -> Mapping[str, int]:
        """How often each primitive was called since the device was opened, failed calls included. No driver call."""

    @abstractmethod
    def peak_used(self, *, reset: bool = False) -> int | None:
        """The most bytes of the device in use since the last reset, None where the driver cannot tell. No driver call.

        `reset` starts anew from what is in use now, after reading.
        """

    @abstractmethod
    def capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured into a graph."""
