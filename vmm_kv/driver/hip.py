"""The HIP runtime of ROCm, by the unmodified hip-python 6.4 and later.

Rules cited (G3, B1, ...) are those of ROCm's `hipamd/src/hip_vm.cpp` and of its public issues, see `BUGS`.
Nothing of the binding is imported, and no runtime is looked for, before a device is opened, counted or asked for.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vmm_kv.driver import DeviceProperties, Driver, MemoryTraits, Quirks, Span, handle_types
from vmm_kv.driver.failures import OUT_OF_MEMORY, failure, refuse_forked_child
from vmm_kv.driver.hip_binding import HipBinding
from vmm_kv.errors import DriverError, UnsupportedError
from vmm_kv.interrupts import deferred

PRIMITIVES = (
    "reserve", "free_address", "create", "release", "map", "unmap", "set_access", "get_access", "mem_info", "zero",
)  # fmt: skip

_STREAM_CAPTURE_IMPLICIT = 906


@dataclass(frozen=True)
class Bug:
    """A bug in a range of HIP versions, each (major, minor), and the quirk under which the library goes around it."""

    quirk: str
    first: tuple[int, int]
    fixed: tuple[int, int] | None
    """None: in no version that is known."""
    source: str


BUGS = (
    # B1: set-access sums the size from the reservation's first mapping and refuses correct calls.
    Bug("uniform_chunks", (7, 0), (7, 14), "ROCm/rocm-systems #2516, ROCm/mori #640, llama.cpp #18650 and #23900"),
    # B2: one unmap of several mappings leaves the addresses in use, and freeing them fails.
    Bug("single_unmap", (0, 0), (7, 0), "ROCm/ROCR-Runtime #285"),
    # B4: memory that was released returns only when the addresses that it lay at are freed.
    Bug("memory_with_addresses", (6, 4), (7, 14), "ROCm/hip #3781, ROCm/rocm-systems #4363, vLLM #37533 and #46203"),
    # B13: a memset fills one memory object, and to it every mapping is one. Beyond its end it is at best refused.
    Bug("single_memset", (0, 0), None, "ROCm/clr hipamd/src/hip_memory.cpp, ihipMemsetCommand and getMemoryObject"),
)


def quirks_of(version: int) -> Quirks:
    """Quirks of the HIP version `major * 10000000 + minor * 100000 + patch`, as `hipRuntimeGetVersion` gives it."""
    release = version // 10_000_000, version // 100_000 % 100
    found = [bug.quirk for bug in BUGS if bug.first <= release and (bug.fixed is None or release < bug.fixed)]
    return Quirks(**dict.fromkeys(found, True))


class HipDriver(Driver):
    """Drives one AMD GPU. Statuses are HIP's; those that matter are the same numbers as CUDA's.

    index: as HIP counts, after HIP_VISIBLE_DEVICES. handle_types: the most wanted first, see `handle_types.choose`.
    quirks: None takes those known of the runtime's version. least_granule: bytes, a power of two; a smaller granule is
    not believed, since runtimes reported 4 KiB where kernels fault at such mappings (B7: ROCm/rocm-systems #9360).
    current_stream: the handle of the calling thread's current stream, 0 for the default stream.

    Raises `UnsupportedError` where binding, runtime, device or the device's support of virtual memory management is
    missing, `OutOfPhysicalMemory` where not even one granule is free.
    """

    kind = "hip"

    def __init__(
        self,
        index: int = 0,
        *,
        handle_types: Sequence[str] = ("none",),
        quirks: Quirks | None = None,
        least_granule: int = 2 << 20,
        current_stream: Callable[[], int] | None = None,
    ) -> None:
        self.index = index = operator.index(index)
        self._padded: dict[int, Span] = {}  # by the base that was handed out: base and size of the whole
        self._pid = os.getpid()
        self._current_stream = current_stream if current_stream is not None else lambda: 0
        self._counting = threading.Lock()
        self._calls = dict.fromkeys(PRIMITIVES, 0)
        self._binding = HipBinding()
        self._api = self._binding.api
        self._check_device()
        self.quirks = quirks if quirks is not None else quirks_of(self._binding.version(self.name))
        self._access = self._binding.access(index)
        with self.scope():
            self._probe(handle_types, least_granule)
            self._stream = self._binding.stream(index, self.name)
        with self._counting:
            self._calls = dict.fromkeys(PRIMITIVES, 0)

    @staticmethod
    def count() -> int:
        """How many devices the runtime sees. Raises `UnsupportedError` where the binding or the runtime is missing."""
        return HipBinding().devices

    @staticmethod
    def versions() -> dict[str, str]:
        """Of `binding`, `driver` and `runtime`; the latter two are HIP's own versions. Raises as `count`."""
        return HipBinding().versions()

    # Opening.

    def _check_device(self) -> None:
        count = self._binding.devices
        if self.index < 0:
            raise ValueError(f"device {self.index}: devices count from 0")
        if self.index >= count:
            raise UnsupportedError(
                f"{self.name}: the ROCm runtime sees {count} device{'' if count == 1 else 's'}. Choose one of those, "
                "or look at HIP_VISIBLE_DEVICES, at what `rocminfo` lists, and at who may read /dev/kfd"
            )
        if not self._attribute("VirtualMemoryManagementSupported"):
            raise UnsupportedError(
                f"{self.name} does not support virtual memory management: RDNA 3 and 4 cards have none under ROCm 7.1 "
                "and 7.2 (B12: ROCm/rocm-systems #2516). Install another ROCm, or use another GPU"
            )

    def _attribute(self, name: str) -> int:
        return self._binding.attribute(self.index, name, self.name)

    def _probe(self, order: Sequence[str], least_granule: int) -> None:
        """Finds the kind of handles and the granule for exactly that kind, by making one."""
        rdma = self._attribute("GPUDirectRDMAWithHipVMMSupported") != 0

        def attempt(handle_type: str) -> None:
            if handle_type == "fabric" and not self._attribute("HandleTypeFabricSupported"):
                raise UnsupportedError(f"{self.name} says that it has no such handles (HandleTypeFabricSupported)")
            self._allocation = self._binding.allocation(self.index, handle_type, rdma)
            self.granule = max(self._binding.granularity(self._allocation, self.name), least_granule)
            self.release(self.create(self.granule))

        chosen, refusals = handle_types.choose(order, attempt)
        recommended = self._binding.granularity(self._allocation, self.name, recommended=True)
        self.memory_traits = MemoryTraits(chosen, refusals, rdma, recommended)

    def properties(self) -> DeviceProperties:
        return DeviceProperties(
            name=self._binding.device_name(self.index, self.name),
            uuid=self._binding.uuid(self.index, self.name),
            pci=self._binding.pci(self.index, self.name),
            integrated=self._attribute("Integrated") != 0,
            total=self._binding.total_memory(self.index, self.name),
            multi_instance=False,  # HIP counts the partitions of a GPU as devices in their own right
        )

    # Scope.

    @contextmanager
    def scope(self) -> Iterator[None]:
        # The current device matters: memory is made on it, whatever the allocation's location says (G3).
        refuse_forked_child(self.name, self._pid)
        binding, where = self._binding, self.name
        with deferred(), binding.current(self.index, where), binding.relaxed_capture(where):
            yield

    # Primitives.

    def reserve(self, size: int, alignment: int = 0, hint: int = 0) -> int:
        # By itself a runtime aligns to the granule that it reports, which may be too small (B7).
        asked = alignment or self.granule
        step = max(asked, self.granule)
        function = self._api.hipMemAddressReserve
        status, base = self._primitive("reserve", function, size, asked, hint or None, 0)
        if not status and int(base) % step:
            status, base = self._reserve_padded(int(base), size, step)
        if status:
            raise self._failure("reserve", status, f"{size} bytes of addresses")
        return int(base)

    def _reserve_padded(self, askew: int, size: int, step: int) -> tuple[int, int]:
        """Where the runtime does not look at the alignment (against R2): the aligned part of a larger reservation.

        Part of the same `reserve`, for its failures and for who counts the calls.
        """
        ask, api = self._binding.ask, self._api
        status, _ = ask(api.hipMemAddressFree, askew, size)
        if status:
            return status, 0
        status, start = ask(api.hipMemAddressReserve, size + step, step, None, 0)
        if status:
            return status, 0
        base = -(-int(start) // step) * step
        self._padded[base] = int(start), size + step
        return 0, base

    def free_address(self, base: int, size: int) -> None:
        padded = self._padded.pop(base, None)  # first: once it is free, another thread may get the same base
        status, _ = self._primitive("free_address", self._api.hipMemAddressFree, *(padded or (base, size)))
        if status:
            if padded:
                self._padded[base] = padded
            raise self._failure("free_address", status, f"{size} bytes at {base:#x}")

    def create(self, size: int) -> int:
        status, handle = self._primitive("create", self._api.hipMemCreate, size, self._allocation, 0)
        if status:
            raise self._failure("create", status, f"{size} bytes")
        return int(handle)

    def release(self, handle: int) -> None:
        status, _ = self._primitive("release", self._api.hipMemRelease, handle)
        if status:
            raise self._failure("release", status, f"handle {handle:#x}")

    def map(self, address: int, size: int, handle: int) -> None:
        status, _ = self._primitive("map", self._api.hipMemMap, address, size, 0, handle, 0)
        if status:
            raise self._failure("map", status, f"{size} bytes at {address:#x}")

    def unmap(self, address: int, size: int) -> None:
        status, _ = self._primitive("unmap", self._api.hipMemUnmap, address, size)
        if status:
            raise self._failure("unmap", status, f"{size} bytes at {address:#x}")

    def set_access(self, address: int, size: int) -> None:
        status, _ = self._primitive("set_access", self._api.hipMemSetAccess, address, size, self._access, 1)
        if status:
            raise self._failure("set_access", status, f"{size} bytes at {address:#x}")

    def get_access(self, address: int) -> int:
        status, access = self._primitive("get_access", self._api.hipMemGetAccess, self._access.location, address)
        if status:
            raise self._failure("get_access", status, f"{address:#x}")
        return int(access)

    def mem_info(self) -> tuple[int, int]:
        status, free_and_total = self._primitive("mem_info", self._api.hipMemGetInfo)
        if status:
            raise self._failure("mem_info", status, "free and total memory")
        free, total = free_and_total
        return int(free), int(total)

    def zero(self, spans: Sequence[Span]) -> None:
        if not spans:
            return
        status, start, stop = 0, 0, 0
        for start, stop in spans:
            status, _ = self._primitive("zero", self._api.hipMemsetD8Async, start, 0, stop - start, self._stream)
            if status:
                break
        # Also after a failure: nobody may unmap what is still being written.
        drained, _ = self._binding.ask(self._api.hipStreamSynchronize, self._stream)
        if status:
            raise self._failure("zero", status, f"{stop - start} bytes at {start:#x}")
        if drained:
            raise self._failure("stream", drained, f"{len(spans)} zeroed spans to be there")

    def synchronize(self) -> None:
        status, _ = self._binding.ask(self._api.hipDeviceSynchronize)
        if status:
            raise self._failure("device", status, "the device to finish")

    def calls(self) -> dict[str, int]:
        with self._counting:
            return dict(self._calls)

    def peak_used(self, *, reset: bool = False) -> None:
        return None

    def capturing(self) -> bool:
        with self.scope():
            status, capture = self._binding.capture_status(self._current_stream())
        # The null stream waits for all blocking streams, so the capture of any of them is its business as well.
        if status == _STREAM_CAPTURE_IMPLICIT:
            return True
        if status:
            raise self._failure("stream", status, "whether the current stream is being captured")
        return capture != 0

    def _primitive(self, name: str, function: Callable[..., Any], *arguments: object) -> tuple[int, Any]:
        with self._counting:
            self._calls[name] += 1
        return self._binding.ask(function, *arguments)

    def _failure(self, call: str, status: int, asked: str) -> DriverError:
        memory = self._memory_text() if call == "create" and status == OUT_OF_MEMORY else ""
        return failure(self.name, call, status, self._binding.status_name(status), asked, memory)

    def _memory_text(self) -> str:
        """Costs a call of the runtime, so only where running out of memory is the point."""
        try:
            free, total = self.mem_info()
        except DriverError:
            return "how many bytes are free is unknown"
        return f"{free} of {total} bytes are free"
