"""The compiled part: the device model that the host driver drives, and owners for tensors over raw addresses.

Statuses are the CUDA driver's numbers: 0 success, 1 invalid value, 2 out of memory, 101 invalid device, 999 unknown.
Sizes and addresses are bytes. Every call of the model releases the GIL and may come from any thread.
"""

from collections.abc import Sequence

class DeviceModel:
    """Devices with a byte budget each, one address space, one pool of memory. Enforces the rules of real drivers.

    budgets: bytes of each device, 1 to 32 of them. granule: bytes, a power of two and a multiple of the host page.
    Raises ValueError on a bad argument, MemoryError where the pool file cannot be made.

    A process can hold about 65,000 map areas (vm.max_map_count); neighbours that were created and mapped in the same
    order share one. Out of areas, a primitive answers out of memory and has changed nothing.
    """

    def __init__(self, budgets: Sequence[int], granule: int = 2097152) -> None: ...
    @property
    def granule(self) -> int: ...
    @property
    def devices(self) -> int: ...

    # The primitives: a status, or (status, value). One that fails has changed nothing, and its value is 0.
    def reserve(self, size: int, alignment: int, hint: int, flags: int = 0) -> tuple[int, int]: ...
    def free_address(self, base: int, size: int) -> int: ...
    def create(self, device: int, size: int, flags: int = 0) -> tuple[int, int]: ...
    def release(self, handle: int) -> int: ...
    def map(self, address: int, size: int, offset: int, handle: int, flags: int = 0) -> int: ...
    def unmap(self, address: int, size: int) -> int: ...
    def set_access(self, address: int, size: int, device: int, access: int) -> int: ...
    def get_access(self, address: int, device: int) -> tuple[int, int]: ...
    def mem_info(self, device: int) -> tuple[int, int, int]:
        """(status, free, total)."""
    def zero(self, address: int, size: int, device: int) -> int:
        """Writes zeros; invalid value where a byte of the range is not writable for the device."""

    # Memory that something other than a handle holds (the framework stand-in), against the same budget.
    def charge(self, device: int, size: int) -> int:
        """Takes bytes from the budget: 0, or 2 and nothing taken."""
    def credit(self, device: int, size: int) -> int:
        """Gives charged bytes back: 0, or 1 where fewer are charged and nothing given back."""

    # Readings that are no driver calls: never counted, never made to fail. ValueError where there is no such device.
    def used(self, device: int) -> int: ...
    def budget(self, device: int) -> int: ...
    def peak_used(self, device: int) -> int: ...
    def reset_peak(self, device: int) -> None: ...
    def live(self) -> dict[str, int]:
        """Counts of live `handles`, `mappings`, `reservations`. A released handle is not live, even while mapped."""
    def calls(self) -> dict[str, int]:
        """How often each primitive was called since the start, failed calls included, by name."""
    def mapped(self) -> list[tuple[int, int]]:
        """(address, size) of every live mapping, in order of address."""

    # For tests.
    poison: bool
    """Fill fresh memory with 0xff (a NaN in float32, bfloat16 and float8), so that nobody relies on zeros."""
    quirk_access_from_first: bool
    """B1, as ROCm 7.0 to 7.2: set_access sums sizes from the reservation's first mapping, wherever its range lies, and
    answers invalid value where they do not come to the size of the range."""
    quirk_joint_unmap_busy: bool
    """B2, as ROCm before 7: after one unmap of several mappings the reservation cannot be freed any more."""
    quirk_memory_with_addresses: bool
    """B4, as ROCm 6.4 to 7: memory that was mapped returns only when the reservation it was mapped in last is freed."""
    quirk_single_memset: bool
    """B13, as ROCm: zero answers invalid value where the range goes beyond the mapping that it begins in."""
    def fail(self, call: str, nth: int, status: int) -> None:
        """Arms one fault: the nth call from now (1 is the next) of primitive `call`, or of any with `"any"`,
        answers `status` and does nothing. Faults add up, each counts for itself and fires once; where several come
        due at one call, the first armed answers. ValueError for an unknown name, nth below 1 or status 0."""
    def clear_faults(self) -> None: ...
    def seal(self) -> None:
        """From now on any primitive prints its name to stderr and aborts the process: proof that nobody calls."""
    def map_chunks(self, base: int, chunk: int, count: int, device: int) -> tuple[int, list[int]]:
        """create and map `count` chunks one after another, then one set_access over all: the calls that the library
        makes, from a C++ loop. For benchmarks. Stops at the first failure and leaves what was done.
        Returns (status, handles created)."""

class Lease:
    """Counts the tensors that still lie over a range of addresses. The count is atomic: a tensor's end needs no GIL."""

    def __init__(self) -> None: ...
    @property
    def count(self) -> int: ...
    def capsule(self, address: int, nbytes: int, device_type: int, device_id: int) -> object:
        """A DLPack capsule of a uint8 vector over the raw address. Touches no memory. The count rises now, and falls
        when the last tensor made of the capsule, or the unused capsule, is gone."""
