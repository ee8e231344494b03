"""What `vmm_kv.driver.cuda` needs of `cuda.bindings.driver` beside the primitives: statuses, devices, contexts.

A call returns a tuple of the status and what comes with it, which is None after a failure. It raises where there is no
driver or where the driver lacks the function.
"""

from __future__ import annotations

import importlib
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vmm_kv.driver.binding import load, restore
from vmm_kv.driver.failures import DEINITIALIZED, INVALID_VALUE, NOT_INITIALIZED, NOT_SUPPORTED, failure
from vmm_kv.errors import DriverError, StateError, UnsupportedError
from vmm_kv.interrupts import deferred

_PACKAGE = "cuda-python>=12.6"
_NEEDED = (
    "cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute", "cuDeviceGetName",
    "cuDeviceTotalMem", "cuDeviceGetPCIBusId", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease",
    "cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuCtxSynchronize", "cuThreadExchangeStreamCaptureMode",
    "cuStreamCreate", "cuStreamSynchronize", "cuStreamIsCapturing", "cuMemGetAllocationGranularity",
    "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap",
    "cuMemSetAccess", "cuMemGetAccess", "cuMemGetInfo", "cuMemsetD8Async", "CUresult",
)  # fmt: skip

_NO_DEVICE = 100
_DEAD_CONTEXT = (201, 709)  # invalid, destroyed
# What cuInit says where the driver as such cannot be used, and what helps.
_UNUSABLE = {
    34: "only the toolkit's stub of libcuda.so.1 was found: install NVIDIA's display driver, and take the stub off "
    "LD_LIBRARY_PATH",
    802: "the system is not ready: start the NVIDIA fabric manager",
    803: "the driver's kernel part and libcuda.so.1 differ in version: restart the machine after an update",
    804: "the forward compatibility package does not support this GPU: remove it or update the driver",
}

_primary: dict[int, tuple[int, int]] = {}
_primary_lock = threading.Lock()


def _import_binding() -> Any:
    try:
        return load(_PACKAGE, "cuda", lambda: importlib.import_module("cuda.bindings.driver"), _NEEDED)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"CUDA devices need NVIDIA's binding, which cannot be imported ({error}): "
            f"pip install '{_PACKAGE}', or vmm-kv[cuda]"
        ) from error


class CudaBinding:
    """The binding, with the driver initialised. Raises `UnsupportedError` where either is missing."""

    def __init__(self) -> None:
        self.api = _import_binding()
        try:
            status, _ = self.ask(self.api.cuInit, 0)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"CUDA devices need NVIDIA's driver, and none was found ({error}): install the display driver; in a "
                "container, start it with the NVIDIA container toolkit (`--gpus all`)"
            ) from error
        self._has_device = status != _NO_DEVICE
        if status == NOT_INITIALIZED:
            raise StateError("CUDA was in use before this process was forked off: start the process with 'spawn'")
        if status == DEINITIALIZED:
            raise self._failure("cuda", "init", status, "the driver")
        if status and self._has_device:
            advice = _UNUSABLE.get(status, "see whether `nvidia-smi` works, and `dmesg` for the reason")
            raise UnsupportedError(f"the CUDA driver cannot be used: {self.status_name(status)} ({status}): {advice}")

    # Statuses.

    @staticmethod
    def ask(function: Callable[..., Any], *arguments: object) -> tuple[int, Any]:
        """One driver call: its status, and the value, a tuple where there are several, None after a failure."""
        try:
            status, *values = function(*arguments)
        except RuntimeError as error:  # no driver, or one too old to have the function
            raise UnsupportedError(f"{getattr(function, '__name__', 'the call')}: {error}") from error
        except ValueError as error:  # a status that is newer than the binding
            unknown = re.match(r"(\d+) is not a valid CUresult", str(error))
            if not unknown:
                raise
            return int(unknown[1]), None
        if status != 0 or not values:
            return int(status), None
        return 0, values[0] if len(values) == 1 else tuple(values)

    def status_name(self, status: int) -> str:
        """`CUDA_ERROR_OUT_OF_MEMORY`. From the binding's table: an error's text must not be a driver call."""
        try:
            return str(self.api.CUresult(status).name)
        except ValueError:
            return "a status that the binding does not know"

    def _failure(self, where: str, call: str, status: int, asked: str) -> Exception:
        return failure(where, call, status, self.status_name(status), asked)

    def _checked(self, where: str, call: str, asked: str, function: Callable[..., Any], *arguments: object) -> Any:
        status, value = self.ask(function, *arguments)
        if status:
            raise self._failure(where, call, status, asked)
        return value

    # The driver and its devices. `where` is the device's name, for the text of an error.

    def count(self) -> int:
        if not self._has_device:
            return 0
        return int(self._checked("cuda", "device", "the number of devices", self.api.cuDeviceGetCount))

    def versions(self) -> dict[str, str]:
        number = int(self._checked("cuda", "device", "the driver's version", self.api.cuDriverGetVersion))
        return {
            "binding": str(getattr(importlib.import_module("cuda.bindings"), "__version__", "unknown")),
            "driver": f"{number // 1000}.{number % 1000 // 10}",
        }

    def device(self, index: int, where: str) -> int:
        return int(self._checked(where, "device", f"device {index}", self.api.cuDeviceGet, index))

    def attribute(self, device: int, number: int, where: str) -> int:
        """An attribute that the driver or the binding is too old to know is 0: no."""
        try:
            attribute = self.api.CUdevice_attribute(number)
        except ValueError:
            return 0
        status, value = self.ask(self.api.cuDeviceGetAttribute, attribute, device)
        if status == INVALID_VALUE:
            return 0
        if status:
            raise self._failure(where, "device", status, f"attribute {number}")
        return int(value)

    def device_name(self, device: int, where: str) -> str:
        return _text(self._checked(where, "device", "its name", self.api.cuDeviceGetName, 256, device))

    def total_memory(self, device: int, where: str) -> int:
        return int(self._checked(where, "device", "its total memory", self.api.cuDeviceTotalMem, device))

    def uuid(self, device: int, where: str) -> str:
        # Before 13 the binding kept both versions of the call; the second knows the slices of a GPU.
        query = getattr(self.api, "cuDeviceGetUuid_v2", self.api.cuDeviceGetUuid)
        value = self._optional(where, "its UUID", query, device)
        return "" if value is None else str(uuid.UUID(bytes=bytes(value.bytes)[:16]))

    def pci(self, device: int, where: str) -> str:
        value = self._optional(where, "its PCI id", self.api.cuDeviceGetPCIBusId, 32, device)
        return "" if value is None else _text(value).lower()

    def _optional(self, where: str, asked: str, function: Callable[..., Any], *arguments: object) -> Any | None:
        """None where the device has no such thing."""
        status, value = self.ask(function, *arguments)
        if status in (INVALID_VALUE, NOT_SUPPORTED):
            return None
        if status:
            raise self._failure(where, "device", status, asked)
        return value

    # Memory of one kind.

    def allocation(self, index: int, handle_type: str, rdma: bool) -> Any:
        """What `cuMemCreate` is told: pinned memory on the device, `handle_type` as in `handle_types.HANDLE_TYPES`."""
        api = self.api
        kinds = api.CUmemAllocationHandleType
        allocation = api.CUmemAllocationProp()
        allocation.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        allocation.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        allocation.location.id = index
        allocation.requestedHandleTypes = {
            "none": kinds.CU_MEM_HANDLE_TYPE_NONE,
            "posix_fd": kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            "fabric": kinds.CU_MEM_HANDLE_TYPE_FABRIC,
        }[handle_type]
        allocation.allocFlags.gpuDirectRDMACapable = int(rdma)
        return allocation

    def access(self, index: int) -> list[Any]:
        """What `cuMemSetAccess` is told: the device may read and write."""
        api = self.api
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = index
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return [access]

    def granularity(self, allocation: Any, where: str, *, recommended: bool = False) -> int:
        """The minimum or what is recommended, in bytes, for exactly this allocation (C1, C74)."""
        flags = self.api.CUmemAllocationGranularity_flags
        kind = flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED if recommended else flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        query = self.api.cuMemGetAllocationGranularity
        return int(self._checked(where, "granularity", "the allocation granularity", query, allocation, kind))

    # Contexts.

    def primary_context(self, device: int, where: str) -> tuple[int, int]:
        """The device's primary context and a non-blocking stream in it, made once in a process and kept to its end.

        Made again where somebody destroyed the context meanwhile: `cudaDeviceReset` does, for everybody.
        """
        with deferred(), _primary_lock:
            if device in _primary and self._is_dead(_primary[device][0], where):
                del _primary[device]
            if device not in _primary:
                context = int(
                    self._checked(where, "context", "the primary context", self.api.cuDevicePrimaryCtxRetain, device)
                )
                try:
                    with self.current(context, where), self.relaxed_capture(where):
                        flags = int(self.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
                        stream = int(self._checked(where, "stream", "a stream", self.api.cuStreamCreate, flags))
                except BaseException:
                    self.ask(self.api.cuDevicePrimaryCtxRelease, device)
                    raise
                _primary[device] = context, stream
            return _primary[device]

    def _is_dead(self, context: int, where: str) -> bool:
        try:
            with self.current(context, where):
                return False
        except DriverError as error:
            if error.status in _DEAD_CONTEXT:
                return True
            raise

    # The two below leave nothing behind if signals are deferred, as they are in a scope.

    @contextmanager
    def current(self, context: int, where: str) -> Iterator[None]:
        """Makes the context current for the calling thread; where it is already, does nothing.

        Leaving it raises no error, see `restore`.
        """
        before = int(self._checked(where, "context", "the current context", self.api.cuCtxGetCurrent) or 0)
        if before == context:
            yield
            return
        self._checked(where, "context", "the primary context to be current", self.api.cuCtxPushCurrent, context)
        try:
            yield
        finally:
            asked = "the context before to be current again"
            restore(where, asked, lambda: self._checked(where, "context", asked, self.api.cuCtxPopCurrent))

    @contextmanager
    def relaxed_capture(self, where: str) -> Iterator[None]:
        """Lets the thread make calls that a capture going on elsewhere in the process would forbid it.

        Leaving it raises no error, see `restore`.
        """
        exchange, modes = self.api.cuThreadExchangeStreamCaptureMode, self.api.CUstreamCaptureMode
        relaxed = modes.CU_STREAM_CAPTURE_MODE_RELAXED
        before = modes(int(self._checked(where, "capture_mode", "the thread's relaxed mode", exchange, relaxed)))
        try:
            yield
        finally:
            asked = "the thread's capture mode before"
            restore(where, asked, lambda: self._checked(where, "capture_mode", asked, exchange, before))


def _text(value: bytes) -> str:
    return value.split(b"\0", 1)[0].decode(errors="replace")
