"""The host device's driver: real virtual memory of this process under a byte budget, with the rules of a GPU driver."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vmm_kv._native import DeviceModel
from vmm_kv.driver import DeviceProperties, Driver, MemoryTraits, Quirks, Span
from vmm_kv.driver.failures import failure, refuse_forked_child
from vmm_kv.errors import DriverError

_STATUS_NAMES = {
    1: "invalid value",
    2: "out of memory",
    3: "not initialized",
    4: "deinitialized",
    101: "invalid device",
    201: "invalid context",
    800: "not permitted",
    801: "not supported",
    900: "stream is capturing",
    999: "unknown",
}
_READ_WRITE = 3


class HostDriver(Driver):
    """Drives one device of a `DeviceModel`. Errors carry the CUDA driver's status numbers."""

    kind = "host"

    def __init__(self, model: DeviceModel, index: int = 0, *, quirks: Quirks | None = None) -> None:
        if not 0 <= index < model.devices:
            raise ValueError(f"device {index} of a model with {model.devices}")
        self.model = model
        self.index = index
        self.granule = model.granule
        self.memory_traits = MemoryTraits()
        self._quirks = quirks
        self._pid = os.getpid()

    @property
    def quirks(self) -> Quirks:  # type: ignore[override]
        # A pool file reads as zeros where it was never written; poisoned memory does not.
        return self._quirks if self._quirks is not None else Quirks(fresh_zero=not self.model.poison)

    @contextmanager
    def scope(self) -> Iterator[None]:
        refuse_forked_child(self.name, self._pid)
        yield

    def properties(self) -> DeviceProperties:
        total = self.model.budget(self.index)
        return DeviceProperties(name="host", uuid="", pci="", integrated=False, total=total, multi_instance=False)

    def reserve(self, size: int, alignment: int = 0, hint: int = 0) -> int:
        status, base = self.model.reserve(size, alignment, hint)
        if status:
            raise self._failure("reserve", status, f"{size} bytes of addresses")
        return base

    def free_address(self, base: int, size: int) -> None:
        if status := self.model.free_address(base, size):
            raise self._failure("free_address", status, f"{size} bytes at {base:#x}")

    def create(self, size: int) -> int:
        status, handle = self.model.create(self.index, size)
        if status:
            raise self._failure("create", status, f"{size} bytes")
        return handle

    def release(self, handle: int) -> None:
        if status := self.model.release(handle):
            raise self._failure("release", status, f"handle {handle:#x}")

    def map(self, address: int, size: int, handle: int) -> None:
        if status := self.model.map(address, size, 0, handle):
            raise self._failure("map", status, f"{size} bytes at {address:#x}")

    def unmap(self, address: int, size: int) -> None:
        if status := self.model.unmap(address, size):
            raise self._failure("unmap", status, f"{size} bytes at {address:#x}")

    def set_access(self, address: int, size: int) -> None:
        if status := self.model.set_access(address, size, self.index, _READ_WRITE):
            raise self._failure("set_access", status, f"{size} bytes at {address:#x}")

    def get_access(self, address: int) -> int:
        status, access = self.model.get_access(address, self.index)
        if status:
            raise self._failure("get_access", status, f"{address:#x}")
        return access

    def mem_info(self) -> tuple[int, int]:
        status, free, total = self.model.mem_info(self.index)
        if status:
            raise self._failure("mem_info", status, "free and total memory")
        return free, total

    def zero(self, spans: Sequence[Span]) -> None:
        for start, stop in spans:
            if status := self.model.zero(start, stop - start, self.index):
                raise self._failure("zero", status, f"{stop - start} bytes at {start:#x}")

    def synchronize(self) -> None:
        """The host runs every operation to its end before it returns."""

    def calls(self) -> dict[str, int]:
        return self.model.calls()

    def peak_used(self, *, reset: bool = False) -> int:
        peak = self.model.peak_used(self.index)
        if reset:
            self.model.reset_peak(self.index)
        return peak

    def capturing(self) -> bool:
        """Host graphs run eagerly on no stream; only the process-wide counter knows of their capture."""
        return False

    def _failure(self, call: str, status: int, asked: str) -> DriverError:
        # Read from the model's books, not by mem_info: an error's text must not be another driver call.
        total = self.model.budget(self.index)
        free = total - self.model.used(self.index)
        memory = f"{free} of {total} bytes are free"
        return failure(self.name, call, status, _STATUS_NAMES.get(status, "status"), asked, memory)
