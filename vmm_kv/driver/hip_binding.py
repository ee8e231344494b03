"""What `vmm_kv.driver.hip` needs of hip-python beside the primitives: statuses, devices, the thread's state.

The binding returns a tuple of the status and what there is beside it. It loads the runtime at its first call and looks
up each function at that function's first call; where either is missing it raises. Its gaps are stepped around here: the
handle type of an allocation, the capture mode of a thread, and whether a stream is being captured.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vmm_kv.driver.binding import broken, load, restore
from vmm_kv.driver.failures import DEINITIALIZED, INVALID_VALUE, NOT_INITIALIZED, NOT_SUPPORTED, failure
from vmm_kv.errors import StateError, UnsupportedError
from vmm_kv.installed import installed

_PACKAGE = "hip-python>=6.4"
_NEEDED = (
    "hipGetDeviceCount", "hipRuntimeGetVersion", "hipDriverGetVersion", "hipDeviceGetAttribute", "hipDeviceGetName",
    "hipDeviceTotalMem", "hipDeviceGetUuid", "hipDeviceGetPCIBusId", "hipGetDevice", "hipSetDevice",
    "hipDeviceSynchronize", "hipStreamCreateWithFlags", "hipStreamSynchronize", "hipMemGetAllocationGranularity",
    "hipMemAddressReserve", "hipMemAddressFree", "hipMemCreate", "hipMemRelease", "hipMemMap", "hipMemUnmap",
    "hipMemSetAccess", "hipMemGetAccess", "hipMemGetInfo", "hipMemsetD8Async", "hipError_t",
)  # fmt: skip

_NO_DEVICE = 100
_RELAXED = 2
_HANDLE_TYPE_OFFSET = 4  # bytes, of requestedHandleType in hipMemAllocationProp
# Where the binding's C layer is, by the name of its module: before hip-python 10, and since.
_C_LAYERS = {"hip.hip": "hip.chip", "rocm.bindings.hip": "rocm.bindings.cyhip"}

_streams: dict[int, int] = {}
_streams_lock = threading.Lock()


def _import_binding() -> Any:
    def load_module() -> Any:
        module = importlib.import_module("hip")
        if not hasattr(module, "hip"):
            raise ModuleNotFoundError("another package is called hip", name="hip.hip")
        return module.hip

    try:
        return load(_PACKAGE, "hip", load_module, _NEEDED)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"ROCm devices need AMD's binding, which cannot be imported ({error}): "
            f"pip install '{_PACKAGE}', or vmm-kv[rocm]"
        ) from error


class HipBinding:
    """The binding, with the runtime found. Raises `UnsupportedError` where either is missing."""

    def __init__(self) -> None:
        self.api = _import_binding()
        try:
            status, devices = self.ask(self.api.hipGetDeviceCount)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"ROCm devices need AMD's runtime, and none was found ({error}): install ROCm 6.2 or later, and set "
                "ROCM_PATH where it does not lie in /opt/rocm"
            ) from error
        self.devices = 0 if status == _NO_DEVICE else int(devices or 0)
        if status == NOT_INITIALIZED:
            raise StateError("HIP was in use before this process was forked off: start the process with 'spawn'")
        if status == DEINITIALIZED:
            raise self._failure("hip", "device", status, "the number of devices")
        if status not in (0, _NO_DEVICE):
            raise UnsupportedError(
                f"the ROCm runtime cannot be used: {self.status_name(status)} ({status}): see whether `rocminfo` "
                "works, and `dmesg` for the reason"
            )
        self._exchange, self._is_capturing = _c_functions(self.api)

    # Statuses.

    @staticmethod
    def ask(function: Callable[..., Any], *arguments: object) -> tuple[int, Any]:
        """One call: its status, and the value, a tuple where there are several, None after a failure."""
        try:
            status, *values = function(*arguments)
        except RuntimeError as error:  # no runtime, or one too old to have the function
            raise UnsupportedError(f"{getattr(function, '__name__', 'the call')}: {error}") from error
        except ValueError as error:  # a status that is newer than the binding
            unknown = re.match(r"(\d+) is not a valid hipError_t", str(error))
            if not unknown:
                raise
            return int(unknown[1]), None
        if status != 0 or not values:
            return int(status), None
        return 0, values[0] if len(values) == 1 else tuple(values)

    def status_name(self, status: int) -> str:
        """`hipErrorOutOfMemory`. From the binding's table: an error's text must not be a call of the runtime."""
        try:
            return str(self.api.hipError_t(status).name)
        except ValueError:
            return "a status that the binding does not know"

    def _failure(self, where: str, call: str, status: int, asked: str) -> Exception:
        return failure(where, call, status, self.status_name(status), asked)

    def _checked(self, where: str, call: str, asked: str, function: Callable[..., Any], *arguments: object) -> Any:
        status, value = self.ask(function, *arguments)
        if status:
            raise self._failure(where, call, status, asked)
        return value

    # The runtime and its devices. `where` is the device's name, for the text of an error.

    def version(self, where: str) -> int:
        """The runtime's: major * 10000000 + minor * 100000 + patch."""
        return int(self._checked(where, "device", "the runtime's version", self.api.hipRuntimeGetVersion))

    def versions(self) -> dict[str, str]:
        driver = int(self._checked("hip", "device", "the driver's version", self.api.hipDriverGetVersion))
        return {
            "binding": installed("hip-python") or "unknown",
            "driver": version_text(driver),
            "runtime": version_text(self.version("hip")),
        }

    def attribute(self, index: int, name: str, where: str) -> int:
        """A hipDeviceAttribute by the end of its name. One that the runtime or the binding is too old for is 0: no.

        By name, since the numbers moved between HIP versions.
        """
        attribute = getattr(self.api.hipDeviceAttribute_t, f"hipDeviceAttribute{name}", None)
        if attribute is None:
            return 0
        return int(self._optional(where, f"attribute {name}", self.api.hipDeviceGetAttribute, attribute, index) or 0)

    def device_name(self, index: int, where: str) -> str:
        return _text(self._checked(where, "device", "its name", self.api.hipDeviceGetName, 256, index))

    def total_memory(self, index: int, where: str) -> int:
        return int(self._checked(where, "device", "its total memory", self.api.hipDeviceTotalMem, index))

    def uuid(self, index: int, where: str) -> str:
        value = self._optional(where, "its UUID", self.api.hipDeviceGetUuid, index)
        digits = bytes(16) if value is None else bytes(value.bytes)[:16]
        return str(uuid.UUID(bytes=digits)) if any(digits) else ""

    def pci(self, index: int, where: str) -> str:
        value = self._optional(where, "its PCI id", self.api.hipDeviceGetPCIBusId, 32, index)
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
        """What `hipMemCreate` is told: pinned memory on the device, `handle_type` as in `handle_types.HANDLE_TYPES`."""
        api = self.api
        allocation = api.hipMemAllocationProp()
        allocation.type = api.hipMemAllocationType.hipMemAllocationTypePinned
        allocation.location.type = api.hipMemLocationType.hipMemLocationTypeDevice
        allocation.location.id = index
        allocation.allocFlags.gpuDirectRDMACapable = int(rdma)
        # The binding drops the union that holds the handle type, so the number is written where C has it.
        number = {"none": 0, "posix_fd": 1, "fabric": 8}[handle_type]
        ctypes.c_int.from_address(int(allocation) + _HANDLE_TYPE_OFFSET).value = number
        return allocation

    def access(self, index: int) -> Any:
        """What `hipMemSetAccess` is told: the device may read and write."""
        api = self.api
        access = api.hipMemAccessDesc()
        access.location.type = api.hipMemLocationType.hipMemLocationTypeDevice
        access.location.id = index
        access.flags = api.hipMemAccessFlags.hipMemAccessFlagsProtReadWrite
        return access

    def granularity(self, allocation: Any, where: str, *, recommended: bool = False) -> int:
        """The minimum or what is recommended, in bytes, for exactly this allocation (C1)."""
        flags = self.api.hipMemAllocationGranularity_flags
        kind = flags.hipMemAllocationGranularityRecommended if recommended else flags.hipMemAllocationGranularityMinimum
        query = self.api.hipMemGetAllocationGranularity
        return int(self._checked(where, "granularity", "the allocation granularity", query, allocation, kind))

    # The thread's state.

    def stream(self, index: int, where: str) -> int:
        """A non-blocking stream of the current device `index`, made once in a process and kept to its end."""
        with _streams_lock:
            if index not in _streams:
                flags = int(self.api.hipStreamNonBlocking)
                _streams[index] = int(
                    self._checked(where, "stream", "a stream", self.api.hipStreamCreateWithFlags, flags)
                )
            return _streams[index]

    # The two below leave nothing behind if signals are deferred, as they are in a scope.

    @contextmanager
    def current(self, index: int, where: str) -> Iterator[None]:
        """Makes the device current for the calling thread; where it is already, does nothing.

        Leaving it raises no error, see `restore`.
        """
        before = int(self._checked(where, "device", "the current one", self.api.hipGetDevice))
        if before == index:
            yield
            return
        self._checked(where, "device", "it to be current", self.api.hipSetDevice, index)
        try:
            yield
        finally:
            asked = f"device {before} to be current again"
            restore(where, asked, lambda: self._checked(where, "device", asked, self.api.hipSetDevice, before))

    @contextmanager
    def relaxed_capture(self, where: str) -> Iterator[None]:
        """Lets the thread make calls that a capture going on elsewhere in the process would forbid it.

        Leaving it raises no error, see `restore`.
        """
        before = self._swap_capture_mode(where, "the relaxed mode", _RELAXED)
        try:
            yield
        finally:
            asked = "the thread's capture mode before"
            restore(where, asked, lambda: self._swap_capture_mode(where, asked, before))

    def _swap_capture_mode(self, where: str, asked: str, mode: int) -> int:
        swapped = ctypes.c_int(mode)
        if status := self._exchange(ctypes.addressof(swapped)):
            raise self._failure(where, "capture_mode", status, asked)
        return swapped.value

    def capture_status(self, stream: int) -> tuple[int, int]:
        """(status, hipStreamCaptureStatus: 0 where the stream is not being captured)."""
        capture = ctypes.c_int(0)
        return self._is_capturing(stream, ctypes.addressof(capture)), capture.value


def _c_functions(api: Any) -> tuple[Callable[[int], int], Callable[[int, int], int]]:
    """`hipThreadExchangeStreamCaptureMode` and `hipStreamIsCapturing` as the binding's C layer has them.

    That layer is what it offers to other extensions. The Python functions are of no use: the first takes the mode for a
    mere result and hands an uninitialised one to the runtime, the second raises after a failure, on what the runtime
    did not write.
    """
    layer = _C_LAYERS.get(api.__name__)
    if layer is None:
        raise UnsupportedError("this version of hip-python is not known here: pip install 'hip-python>=6.4,<11'")
    try:
        return _from_table(importlib.import_module(layer).__pyx_capi__)
    except (ImportError, AttributeError, KeyError, ValueError) as error:
        raise broken(_PACKAGE, f"its C layer {layer} is not what it should be: {error!r}") from error


def _from_table(table: dict[str, Any]) -> tuple[Callable[[int], int], Callable[[int, int], int]]:
    pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )

    def function(name: str, parameters: bytes, *types: type) -> Callable[..., int]:
        # A capsule is named by the signature, so another one is an error here and no crash later.
        address = pointer_in(table[name], b"enum hipError_t (" + parameters + b")")
        return ctypes.PYFUNCTYPE(ctypes.c_int, *types)(address)

    pointer = ctypes.c_void_p
    return (
        function("hipThreadExchangeStreamCaptureMode", b"enum hipStreamCaptureMode *", pointer),
        function("hipStreamIsCapturing", b"hipStream_t, enum hipStreamCaptureStatus *", pointer, pointer),
    )


def version_text(number: int) -> str:
    return f"{number // 10_000_000}.{number // 100_000 % 100}.{number % 100_000}"


def _text(value: Any) -> str:
    return bytes(value).split(b"\0", 1)[0].decode(errors="replace")
