"""The books and switches of an emulated driver library, named as in `_native.DeviceModel` where they are alike."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

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


class EmulatedModel:
    """The devices behind an emulated driver library, seen from beside the driver. Nothing here is a driver call.

    There is one set of devices in a library: `reset` replaces it for everybody. Sizes are bytes.
    """

    library: Path

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        self.library = path
        self._calls = {}
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"vmm_emu_{name}")
            function.restype, function.argtypes = result, arguments
            self._calls[name] = function

    def reset(self, budgets: Sequence[int], granule: int = 2 << 20, recommended: int | None = None) -> None:
        """Fresh devices; faults, switches, counters and seal as after loading. What was reserved and mapped stays in
        the process, unknown to the new devices. ValueError for devices that cannot be."""
        array = (_u64 * len(budgets))(*budgets)
        status = self._calls["reset"](len(budgets), array, granule, granule if recommended is None else recommended)
        if status == 1:
            raise ValueError(
                f"{len(budgets)} devices with a granule of {granule} bytes: 1 to 32 devices are possible, and a "
                "granule is a power of two and a multiple of the host page"
            )
        if status:
            raise MemoryError("the pool file of the emulated devices cannot be made")
        self.devices = len(budgets)
        self.granule = granule

    # Memory that something other than a handle holds, against the same budget.

    def charge(self, device: int, size: int) -> int:
        """Takes bytes from the budget: 0, or 2 and nothing taken."""
        return int(self._calls["charge"](device, size))

    def credit(self, device: int, size: int) -> int:
        """Gives charged bytes back: 0, or 1 where fewer are charged and nothing given back."""
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
        ValueError for an unknown name, nth below 1 or status 0."""
        if self._calls["fail"](call.encode(), nth, status):
            raise ValueError(
                f"the {nth}. {call!r} answering {status}: no primitive is called so, the next call is 1, or status 0 "
                "is success and no fault"
            )

    def clear_faults(self) -> None:
        self._calls["clear_faults"]()

    def seal(self) -> None:
        """From now on any primitive prints its name to stderr and aborts the process: proof that nobody calls."""
        self._calls["seal"]()

    def set(self, switch: str, value: int) -> None:
        """Sets a switch, at any time, until the next reset. ValueError for an unknown one.

        0 or 1, 0 unless said: `poison`; `capturing` (a stream is being captured); `vmm_supported` (1); `rdma`;
        `ignore_hint` (a reservation never lies where it was wished for); `integrated`; `deinitialized` (every call
        answers 4); ROCm's bugs `quirk_access_from_first` (B1), `quirk_joint_unmap_busy` (B2),
        `quirk_memory_with_addresses` (B4), `quirk_4k_granularity` (B7).
        Numbers: `fabric` (0: there is none; 1: the attribute says yes and create answers 800, as without an IMEX
        channel; 2: works); `driver_version`; `runtime_version`; `minimum_granularity` and `recommended_granularity`
        (what the query says).
        """
        if self._calls["set"](switch.encode(), value):
            raise ValueError(f"no switch is called {switch!r}")

    def get(self, switch: str) -> int:
        value = int(self._calls["get"](switch.encode()))
        if value == _UNKNOWN_SWITCH:
            raise ValueError(f"no switch is called {switch!r}")
        return value

    def _known(self, device: int) -> None:
        if not 0 <= device < self.devices:
            raise ValueError(f"there is no device {device}; the model has {self.devices}")

    def _reading(self, name: str, device: int) -> int:
        self._known(device)
        return int(self._calls[name](device))

    def _count(self, what: str) -> int:
        return int(self._calls["count"](what.encode()))
