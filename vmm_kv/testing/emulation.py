"""The books and switches of an emulated driver library, named as in `_native.DeviceModel` where they are alike."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from vmm_kv.errors import StateError

MOST_DEVICES = 32

_PRIMITIVES = (
    "reserve",
    "free_address",
    "create",
    "release",
    "map",
    "unmap",
    "set_access",
    "get_access",
    "mem_info",
    "zero",
)
_OTHER_CALLS = ("init", "device", "context", "stream", "capture_mode")
_LIVE = ("handles", "mappings", "reservations")
_MOST = 2**63 - 1
_UNKNOWN_SWITCH = -(2**63)

_u64, _i64, _int, _text = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int, ctypes.c_char_p
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "reset": (_int, (_int, ctypes.POINTER(_u64), _u64, _u64)),
    "set": (_int, (_text, _i64)),
    "get": (_i64, (_text,)),
    "fail": (_int, (_text, _i64, _int)),
    "clear_faults": (None, ()),
    "seal": (None, ()),
    "count": (_i64, (_text,)),
    "mapped": (ctypes.c_size_t, (ctypes.POINTER(_u64), ctypes.c_size_t)),
    "charge": (_int, (_int, _u64)),
    "credit": (_int, (_int, _u64)),
    "used": (_u64, (_int,)),
    "budget": (_u64, (_int,)),
    "peak_used": (_u64, (_int,)),
    "reset_peak": (None, (_int,)),
}


def check_number(name: str, number: int, least: int, most: int = _MOST) -> None:
    """Raises ValueError unless it is a whole number from `least` to `most`: C would take it modulo 2**64."""
    if not isinstance(number, int) or not least <= number <= most:
        raise ValueError(f"{name} is {number!r}: it must be a whole number from {least} to {most}")


def check_granularities(granule: int, recommended: int | None) -> None:
    """Raises ValueError unless a device can have them: see `EmulatedModel.reset`."""
    page = os.sysconf("SC_PAGESIZE")
    check_number("granule", granule, page)
    if granule & (granule - 1):
        raise ValueError(f"granule is {granule}: it must be a power of two and a multiple of the page, {page} bytes")
    if recommended is None:
        return
    check_number("recommended", recommended, granule)
    if recommended % granule:
        raise ValueError(f"recommended is {recommended}: it must be a multiple of the granule, {granule} bytes")


class EmulatedModel:
    """The devices behind an emulated driver library, seen from beside the driver. Nothing here is a driver call.

    There is one set of devices in a library: `reset` replaces it for everybody. A model of devices that another has
    replaced still reads the books, which are those of the new devices; it takes nothing from them and sets nothing on
    them (StateError), and what it gives back was never theirs. Sizes are bytes.
    """

    library: Path
    _latest: ClassVar[dict[Path, EmulatedModel]] = {}

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        self.library = path
        self._calls = {}
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"vmm_emu_{name}")
            function.restype, function.argtypes = result, arguments
            self._calls[name] = function

    def reset(self, budgets: Sequence[int], granule: int = 2 << 20, recommended: int | None = None) -> None:
        """Fresh devices; faults, switches, counters and seal as after loading. What was reserved and mapped stays in
        the process, unknown to the new devices.

        budgets: bytes of each device, 1 to 32 of them. granule: bytes, a power of two and a multiple of the host page.
        recommended: the granularity that is recommended, a multiple of the granule; None: the granule.
        ValueError for devices that cannot be: nothing has changed then."""
        check_number("the number of budgets", len(budgets), 1, MOST_DEVICES)
        for device, budget in enumerate(budgets):
            check_number(f"budgets[{device}]", budget, 1)
        check_granularities(granule, recommended)
        array = (_u64 * len(budgets))(*budgets)
        status = self._calls["reset"](len(budgets), array, granule, granule if recommended is None else recommended)
        if status:
            raise MemoryError("the pool file of the emulated devices cannot be made")
        self._latest[self.library] = self
        self.devices = len(budgets)
        self.granule = granule

    # Memory that something other than a handle holds, against the same budget.

    def charge(self, device: int, size: int) -> int:
        """Takes bytes from the budget: 0, or 2 and nothing taken."""
        check_number("size", size, 0)
        self._refuse_if_replaced()
        return int(self._calls["charge"](device, size))

    def credit(self, device: int, size: int) -> int:
        """Gives charged bytes back: 0, or 1 where fewer are charged and nothing given back."""
        check_number("size", size, 0)
        if self._replaced:
            return 0
        return int(self._calls["credit"](device, size))

    # Readings.

    def used(self, device: int) -> int:
        return self._reading("used", device)

    def budget(self, device: int) -> int:
        return self._reading("budget", device)

    def peak_used(self, device: int) -> int:
        return self._reading("peak_used", device)

    def reset_peak(self, device: int) -> None:
        self._known(device)
        self._calls["reset_peak"](device)

    def live(self) -> dict[str, int]:
        """Counts of live `handles` (references that have to be released), `mappings`, `reservations`."""
        return {name: self._count(f"live.{name}") for name in _LIVE}

    def calls(self) -> dict[str, int]:
        """How often each primitive was called since the reset, failed calls included, by name."""
        return {name: self._count(f"calls.{name}") for name in _PRIMITIVES}

    def other_calls(self) -> dict[str, int]:
        """The same for the calls that are no primitives: of the device, contexts, streams, the capture mode."""
        return {name: self._count(f"calls.{name}") for name in _OTHER_CALLS}

    def calls_on(self, device: int) -> int:
        """How many primitives were called while the device was current."""
        self._known(device)
        return self._count(f"calls_on.{device}")

    def mapped(self) -> list[tuple[int, int]]:
        """(address, size) of every live mapping, in order of address."""
        room = 0
        while True:
            pairs = (_u64 * (2 * room))()
            count = int(self._calls["mapped"](pairs, room))
            if count <= room:
                return [(pairs[2 * i], pairs[2 * i + 1]) for i in range(count)]
            room = count

    # Faults and switches.

    @property
    def poison(self) -> bool:
        """Fill fresh memory with 0xff, so that nobody relies on zeros."""
        return bool(self.get("poison"))

    @poison.setter
    def poison(self, on: bool) -> None:
        self.set("poison", on)

    def fail(self, call: str, nth: int, status: int) -> None:
        """Arms one fault: the nth call from now (1 is the next) of `call`, or of any primitive with `"any"`, answers
        `status` and does nothing. The calls of `other_calls` can be made to fail by name.
        ValueError for an unknown name, nth below 1 or status 0, which is success."""
        check_number("nth", nth, 1)
        check_number("status", status, 1, 2**31 - 1)
        self._refuse_if_replaced()
        if self._calls["fail"](call.encode(), nth, status):
            raise ValueError(f"no call is named {call!r}")

    def clear_faults(self) -> None:
        self._calls["clear_faults"]()

    def seal(self) -> None:
        """From now on any primitive prints its name to stderr and aborts the process: proof that nobody calls."""
        self._calls["seal"]()

    def set(self, switch: str, value: int) -> None:
        """Sets a switch, at any time, until the next reset. ValueError for an unknown one.

        0 or 1, 0 unless said: `poison`; `capturing` (a stream is being captured); `vmm_supported` (1); `rdma`;
        `ignore_hint` (a reservation never lies where it was wished for); `ignore_alignment` (one that lies elsewhere
        than at its hint is a page off the alignment, where the granule is larger than a page); `integrated`;
        `deinitialized` (every call answers 4); ROCm's bugs `quirk_access_from_first` (B1), `quirk_joint_unmap_busy`
        (B2), `quirk_memory_with_addresses` (B4), `quirk_4k_granularity` (B7), `quirk_single_memset` (B13).
        Numbers: `fabric` (0: there is none; 1: the attribute says yes and create answers 800, as without an IMEX
        channel; 2: works); `driver_version`; `runtime_version`; `minimum_granularity` and `recommended_granularity`
        (what the query says).
        """
        check_number("value", value, -_MOST)
        self._refuse_if_replaced()
        if self._calls["set"](switch.encode(), value):
            raise ValueError(f"no switch is called {switch!r}")

    def get(self, switch: str) -> int:
        value = int(self._calls["get"](switch.encode()))
        if value == _UNKNOWN_SWITCH:
            raise ValueError(f"no switch is called {switch!r}")
        return value

    @property
    def _replaced(self) -> bool:
        return self._latest[self.library] is not self

    def _refuse_if_replaced(self) -> None:
        if self._replaced:
            raise StateError(f"these emulated devices of {self.library.name} were replaced by others")

    def _known(self, device: int) -> None:
        if not 0 <= device < self.devices:
            raise ValueError(f"there is no device {device}; the model has {self.devices}")

    def _reading(self, name: str, device: int) -> int:
        self._known(device)
        return int(self._calls[name](device))

    def _count(self, what: str) -> int:
        return int(self._calls["count"](what.encode()))
