"""What a check works with: one open device, what it made there, and what it found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from vmm_kv import emulated, gpu_drivers
from vmm_kv._native import Lease
from vmm_kv.device import Device, open_device
from vmm_kv.driver import Driver
from vmm_kv.errors import DriverError, StateError, VmmError
from vmm_kv.testing.gpu_registry import SPOILED, Check, Failed, Findings, Result, Skipped

if TYPE_CHECKING:
    from torch import Tensor

MIB, GIB = 1 << 20, 1 << 30
_PART_OF_FREE = 8


class Rig:
    """One device through its driver, and through torch where `device` is not None.

    What is made here is undone when the check ends; what a check does
    behind the rig's back it undoes itself.
    """

    def __init__(self, name: str, driver: Driver, device: Device | None, *, quick: bool = False) -> None:
        self.name = name
        self.driver = driver
        self.granule = driver.granule
        self.quick = quick
        self.findings = Findings()
        self.scopes = True
        """Whether primitives are made inside `driver.scope()`."""
        self._device = device
        self._mappings: dict[int, int] = {}
        self._handles: set[int] = set()
        self._reservations: dict[int, int] = {}

    @property
    def device(self) -> Device:
        assert self._device is not None, "the check is registered as one that needs no torch"
        return self._device

    @property
    def real(self) -> bool:
        """Whether it is a GPU."""
        return self._device is None or not self._device.emulated

    # Primitives.

    def reserve(self, size: int, alignment: int = 0, hint: int = 0) -> int:
        with self._scope():
            base = self.driver.reserve(size, alignment, hint)
        self._reservations[base] = size
        return base

    def free_address(self, base: int, size: int | None = None) -> None:
        with self._scope():
            self.driver.free_address(base, self._reservations[base] if size is None else size)
        self._reservations.pop(base, None)

    def create(self, size: int) -> int:
        with self._scope():
            handle = self.driver.create(size)
        self._handles.add(handle)
        return handle

    def release(self, handle: int) -> None:
        with self._scope():
            self.driver.release(handle)
        self._handles.discard(handle)

    def map(self, address: int, size: int, handle: int) -> None:
        with self._scope():
            self.driver.map(address, size, handle)
        self._mappings[address] = size

    def unmap(self, address: int, size: int) -> None:
        with self._scope():
            self.driver.unmap(address, size)
        self._mappings = {a: s for a, s in self._mappings.items() if not address <= a < address + size}

    def set_access(self, address: int, size: int) -> None:
        with self._scope():
            self.driver.set_access(address, size)

    def get_access(self, address: int) -> int:
        with self._scope():
            return self.driver.get_access(address)

    def chunk(self, address: int, size: int) -> int:
        """Creates, maps and grants; returns the handle."""
        handle = self.create(size)
        self.map(address, size, handle)
        self.set_access(address, size)
        return handle

    def forget(self, base: int) -> None:
        """A reservation that cannot be freed any more is left to the end of the process."""
        self._reservations.pop(base, None)

    def free(self) -> int:
        """Bytes of the device that are free, as the driver tells."""
        with self._scope():
            return self.driver.mem_info()[0]

    def size(self, wanted: int) -> int:
        """Whole granules, at most `wanted` bytes and no large part of what is free."""
        return max(self.granule, min(wanted, self.free() // _PART_OF_FREE) // self.granule * self.granule)

    def _scope(self) -> AbstractContextManager[None]:
        return self.driver.scope() if self.scopes else nullcontext()

    # Tensors.

    def bytes_at(self, address: int, size: int) -> Tensor:
        """A uint8 tensor over raw addresses. Touches no memory, and keeps nothing reserved."""
        where = self.device.torch_device
        kind = 1 if where.type == "cpu" else 10 if torch.version.hip else 2  # kDLCPU, kDLROCM, kDLCUDA
        tensor: Tensor = torch.utils.dlpack.from_dlpack(Lease().capsule(address, size, kind, where.index or 0))
        return tensor

    def settle(self) -> None:
        """Returns when the device has finished."""
        with self.driver.scope():
            self.driver.synchronize()

    # Findings.

    def say(self, fact: str) -> None:
        self.findings.say(fact)

    def expect(self, what: str, found: object, expected: object) -> None:
        """A surprise unless they are equal."""
        self.findings.expect(what, found, expected)

    def expect_status(self, what: str, expected: int, action: Callable[[], object]) -> int:
        """Does it, notes the driver's status, and is surprised by another than `expected`."""
        status = status_of(action)
        self.findings.details.setdefault("statuses", {})[what] = status
        self.say(f"{what} {status}")
        self.expect(what, status, expected)
        return status

    def require(self, holds: bool, otherwise: str) -> None:
        """Raises `Failed` unless it holds."""
        if not holds:
            raise Failed(otherwise)

    # The end.

    def spoil(self) -> None:
        """The check wrecks the device's context on purpose: nothing can be undone then, nor need it be."""
        self.findings.details[SPOILED] = True

    def undo(self) -> list[str]:
        """Undoes what is left, in the contract's order. Returns what failed."""
        if self.findings.details.get(SPOILED):
            return []
        errors: list[str] = []
        steps: list[Callable[[], None]] = []
        for address, size in self._mappings.items():
            steps.append(partial(self.driver.unmap, address, size))
        steps += [partial(self.driver.release, handle) for handle in self._handles]
        for base, size in self._reservations.items():
            steps.append(partial(self.driver.free_address, base, size))
        if not steps:
            return errors
        with self.driver.scope():
            for step in steps:
                try:
                    step()
                except VmmError as error:
                    errors.append(str(error))
        return errors


def status_of(action: Callable[[], object]) -> int:
    """The driver's status of what the action does: 0 where it succeeds."""
    try:
        action()
    except DriverError as error:
        return error.status
    return 0


@contextmanager
def open_rig(name: str, check: Check, *, quick: bool = False) -> Iterator[Rig]:
    """Opens the device `name`, `"cuda:0"` or `"hip:0"`, for the check.

    Raises `Skipped` where the check needs a torch that has the GPU and there is none. With `VMM_KV_TESTING` the device
    is emulated (`open_device`), on which some checks say nothing.
    """
    kind, _, rest = name.partition(":")
    if emulated.mode():
        if not check.emulated:
            raise Skipped("it needs a real GPU, the driver is emulated")
        device: Device | None = open_device(name)
        assert device is not None
        driver = device.driver
    elif check.needs == "driver":
        device, driver = None, gpu_drivers.open_driver(kind, int(rest or 0))
    else:
        lacking = gpu_drivers.torch_shortfall(kind, torch.__version__, torch.version.cuda, torch.version.hip)
        if lacking:
            raise Skipped(": ".join(lacking))
        device = open_device(name)
        driver = device.driver
    yield Rig(name, driver, device, quick=quick)


def perform(check: Check, name: str, *, quick: bool = False) -> Result:
    """Runs the check on the device `name` in this process. Raises nothing that the check did."""
    start = time.perf_counter()
    findings = Findings()
    try:
        with open_rig(name, check, quick=quick) as rig:
            findings = rig.findings
            try:
                check.function(rig)
            finally:
                findings.surprises += [f"undoing: {error}" for error in _undo(rig)]
    except Skipped as reason:
        return _result(check, "skipped", start, str(reason), findings)
    except Exception as error:
        text = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
        return _result(check, "failed", start, "; ".join(filter(None, [_first_line(text), findings.line()])), findings)
    return _result(check, "surprise" if findings.surprises else "ok", start, findings.line(), findings)


def _undo(rig: Rig) -> list[str]:
    try:
        return rig.undo()
    except (VmmError, StateError) as error:  # the scope itself: the context is gone
        return [str(error)]


def _result(check: Check, outcome: str, start: float, facts: str, findings: Findings) -> Result:
    seconds = round(time.perf_counter() - start, 3)
    return Result(check.name, check.rule, outcome, seconds, facts, findings.details)  # type: ignore[arg-type]


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"
