"""The CUDA driver, by the unmodified `cuda.bindings.driver` of cuda-python 12.6 and later.

Rules cited are those of NVIDIA's `cuda.h` (group CUDA_VA) and the programming guide's chapter on virtual memory.
Nothing of the binding is imported, and no driver is looked for, before a device is opened, counted or asked for.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vmm_kv.driver import DeviceProperties, Driver, MemoryTraits, Quirks, Span, handle_types
from vmm_kv.driver.cuda_binding import CudaBinding
from vmm_kv.driver.failures import OUT_OF_MEMORY, failure, refuse_forked_child
from vmm_kv.errors import DriverError, UnsupportedError
from vmm_kv.interrupts import deferred

PRIMITIVES = (
    "reserve", "free_address", "create", "release", "map", "unmap", "set_access", "get_access", "mem_info", "zero",
)  # fmt: skip

# What a device says of itself: CUdevice_attribute.
_INTEGRATED = 18
_VIRTUAL_MEMORY = 102
_RDMA = 110
_HANDLE_TYPES = {"posix_fd": 103, "fabric": 128}

_STREAM_CAPTURE_IMPLICIT = 906


def count() -> int:
    """How many devices the driver sees. Raises `UnsupportedError` where the binding or the driver is missing."""
    return CudaBinding().count()


def versions() -> dict[str, str]:
    """Of `"binding"` and `"driver"`; the latter is the CUDA version that the driver goes up to. Raises as `count`."""
    return CudaBinding().versions()


class CudaDriver(Driver):
    """Drives one NVIDIA GPU, in its primary context: the one that torch and the CUDA runtime use as well.

    index: as the driver counts, after CUDA_VISIBLE_DEVICES. handle_types: the most wanted first, see
    `handle_types.choose`. quirks: None takes CUDA's, which has none. current_stream: tells the handle of the calling
    thread's current stream; None takes the default stream.

    Raises `UnsupportedError` where binding, driver, device or the device's support of virtual memory management is
    missing, `OutOfPhysicalMemory` where not even one granule is free.
    """

    kind = "cuda"

    def __init__(
        self,
        index: int,
        *,
        handle_types: Sequence[str] = ("none",),
        quirks: Quirks | None = None,
        current_stream: Callable[[], int] | None = None,
    ) -> None:
        self.index = index = operator.index(index)
        self.quirks = quirks if quirks is not None else Quirks()
        self._pid = os.getpid()
        self._current_stream = current_stream if current_stream is not None else lambda: 0
        self._counting = threading.Lock()
        self._calls = dict.fromkeys(PRIMITIVES, 0)
        self._binding = CudaBinding()
        self._api = self._binding.api
        self._device = self._open_device()
        self._context, self._stream = self._binding.primary_context(self._device, self.name)
        self._access = self._binding.access(index)
        with self.scope():
            self._probe(handle_types)
        with self._counting:
            self._calls = dict.fromkeys(PRIMITIVES, 0)

    # Opening.

    def _open_device(self) -> int:
        count = self._binding.count()
        if self.index < 0:
            raise ValueError(f"device {self.index}: devices count from 0")
        if self.index >= count:
            raise UnsupportedError(
                f"{self.name}: the CUDA driver sees {count} device{'' if count == 1 else 's'}. Choose one of those, or "
                "look at CUDA_VISIBLE_DEVICES and at what `nvidia-smi` lists"
            )
        device = self._binding.device(self.index, self.name)
        if not self._attribute(device, _VIRTUAL_MEMORY):
            raise UnsupportedError(
                f"{self.name} does not support virtual memory management (CUdevice_attribute {_VIRTUAL_MEMORY}): it "
                "needs a GPU and a driver that do, on bare metal or a full virtual GPU"
            )
        return device

    def _attribute(self, device: int, number: int) -> int:
        return self._binding.attribute(device, number, self.name)

    def _probe(self, order: Sequence[str]) -> None:
        """Finds the kind of handles and the granule for exactly that kind, by making one."""
        rdma = self._attribute(self._device, _RDMA) != 0

        def attempt(handle_type: str) -> None:
            number = _HANDLE_TYPES.get(handle_type)
            if number is not None and not self._attribute(self._device, number):
                raise UnsupportedError(f"{self.name} says that it has no such handles (CUdevice_attribute {number})")
            # The network flag is refused by a device that does not have it, so it follows the attribute (C6, C88).
            self._allocation = self._binding.allocation(self.index, handle_type, rdma)
            self.granule = self._binding.granularity(self._allocation, self.name)
            self.release(self.create(self.granule))

        chosen, refusals = handle_types.choose(order, attempt)
        recommended = self._binding.granularity(self._allocation, self.name, recommended=True)
        self.memory_traits = MemoryTraits(chosen, refusals, rdma, recommended)

    def properties(self) -> DeviceProperties:
        device = self._device
        name = self._binding.device_name(device, self.name)
        return DeviceProperties(
            name=name,
            uuid=self._binding.uuid(device, self.name),
            pci=self._binding.pci(device, self.name),
            integrated=self._attribute(device, _INTEGRATED) != 0,
            total=self._binding.total_memory(device, self.name),
            # The driver has no attribute for it, and puts the slice's profile into the name: "... MIG 1g.10gb".
            multi_instance=" MIG " in name,
        )

    # Scope.

    @contextmanager
    def scope(self) -> Iterator[None]:
        refuse_forked_child(self.name, self._pid)
        binding, where = self._binding, self.name
        with deferred(), binding.current(self._context, where), binding.relaxed_capture(where):
            yield

    # Primitives.

    def reserve(self, size: int, alignment: int = 0, hint: int = 0) -> int:
        status, base = self._primitive("reserve", self._api.cuMemAddressReserve, size, alignment, hint, 0)
        if status:
            raise self._failure("reserve", status, f"{size} bytes of addresses")
        return int(base)

    def free_address(self, base: int, size: int) -> None:
        status, _ = self._primitive("free_address", self._api.cuMemAddressFree, base, size)
        if status:
            raise self._failure("free_address", status, f"{size} bytes at {base:#x}")

    def create(self, size: int) -> int:
        status, handle = self._primitive("create", self._api.cuMemCreate, size, self._allocation, 0)
        if status:
            raise self._failure("create", status, f"{size} bytes")
        return int(handle)

    def release(self, handle: int) -> None:
        status, _ = self._primitive("release", self._api.cuMemRelease, handle)
        if status:
            raise self._failure("release", status, f"handle {handle:#x}")

    def map(self, address: int, size: int, handle: int) -> None:
        status, _ = self._primitive("map", self._api.cuMemMap, address, size, 0, handle, 0)
        if status:
            raise self._failure("map", status, f"{size} bytes at {address:#x}")

    def unmap(self, address: int, size: int) -> None:
        status, _ = self._primitive("unmap", self._api.cuMemUnmap, address, size)
        if status:
            raise self._failure("unmap", status, f"{size} bytes at {address:#x}")

    def set_access(self, address: int, size: int) -> None:
        status, _ = self._primitive("set_access", self._api.cuMemSetAccess, address, size, self._access, 1)
        if status:
            raise self._failure("set_access", status, f"{size} bytes at {address:#x}")

    def get_access(self, address: int) -> int:
        status, access = self._primitive("get_access", self._api.cuMemGetAccess, self._access[0].location, address)
        if status:
            raise self._failure("get_access", status, f"{address:#x}")
        return int(access)

    def mem_info(self) -> tuple[int, int]:
        status, free_and_total = self._primitive("mem_info", self._api.cuMemGetInfo)
        if status:
            raise self._failure("mem_info", status, "free and total memory")
        free, total = free_and_total
        return int(free), int(total)

    def zero(self, spans: Sequence[Span]) -> None:
        if not spans:
            return
        status, start, stop = 0, 0, 0
        for start, stop in spans:
            status, _ = self._primitive("zero", self._api.cuMemsetD8Async, start, 0, stop - start, self._stream)
            if status:
                break
        # Also after a failure: nobody may unmap what is still being written.
        drained, _ = self._binding.ask(self._api.cuStreamSynchronize, self._stream)
        if status:
            raise self._failure("zero", status, f"{stop - start} bytes at {start:#x}")
        if drained:
            raise self._failure("stream", drained, f"{len(spans)} zeroed spans to be there")

    def synchronize(self) -> None:
        status, _ = self._binding.ask(self._api.cuCtxSynchronize)
        if status:
            raise self._failure("context", status, "the device to finish")

    def calls(self) -> dict[str, int]:
        with self._counting:
            return dict(self._calls)

    def peak_used(self, *, reset: bool = False) -> None:
        return None

    def capturing(self) -> bool:
        with self.scope():
            status, capture = self._binding.ask(self._api.cuStreamIsCapturing, self._current_stream())
        # The legacy stream waits for all blocking streams, so the capture of any of them is its business as well.
        if status == _STREAM_CAPTURE_IMPLICIT:
            return True
        if status:
            raise self._failure("stream", status, "whether the current stream is being captured")
        return int(capture) != 0

    def _primitive(self, name: str, function: Callable[..., Any], *arguments: object) -> tuple[int, Any]:
        with self._counting:
            self._calls[name] += 1
        return self._binding.ask(function, *arguments)

    def _failure(self, call: str, status: int, asked: str) -> DriverError:
        memory = self._memory_text() if call == "create" and status == OUT_OF_MEMORY else ""
        return failure(self.name, call, status, self._binding.status_name(status), asked, memory)

    def _memory_text(self) -> str:
        """Costs a driver call, so only where running out of memory is the point."""
        try:
            free, total = self.mem_info()
        except DriverError:
            return "how many bytes are free is unknown"
        return f"{free} of {total} bytes are free"
