"""Opens devices on the emulated driver libraries, where the environment asks for that: `VMM_KV_TESTING`.

    1         `open_device("cuda:0")` and `open_device("hip:0")` open an emulated driver, with tensors on the CPU; a hip
              device has the one bug that no release of ROCm is known without (B13)
    quirks    the same; fresh memory is filled with garbage, and a hip device has every ROCm bug that is known

Nothing else in the library looks for the emulation, and its loaders refuse beside a real driver or a GPU build of
torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn

from vmm_kv.driver import Driver, Quirks
from vmm_kv.driver.failures import DEINITIALIZED
from vmm_kv.errors import DriverGone
from vmm_kv.gpu_drivers import open_driver
from vmm_kv.holdings import empty_graveyard
from vmm_kv.host import HostFramework

VARIABLE = "VMM_KV_TESTING"
BUDGET = 2 << 30
"""Bytes of an emulated device whose name gives none."""

_ROCM_BUGS = (
    "quirk_access_from_first", "quirk_joint_unmap_busy", "quirk_memory_with_addresses", "quirk_4k_granularity",
)  # fmt: skip
_ROCM_QUIRKS = Quirks(uniform_chunks=True, memory_with_addresses=True, single_unmap=True, single_memset=True)

_opened: dict[str, Driver] = {}
"""By kind, the driver that has the emulation of that kind."""


def mode() -> str:
    """`""` (none), `"1"` or `"quirks"`. Raises `ValueError` for any other value of the variable."""
    value = os.environ.get(VARIABLE, "").strip()
    if value not in ("", "0", "1", "quirks"):
        raise ValueError(f"{VARIABLE}={value!r}: it is 1 or quirks")
    return "" if value == "0" else value


def open_emulated(
    kind: str, index: int, budget: int, handle_types: Sequence[str] = ("none",)
) -> tuple[Driver, HostFramework]:
    """The driver of a fresh emulated device of `budget` bytes, and the framework that shares its budget.

    The emulation is one for a process. A device of that kind that was opened before is replaced: its driver raises
    `DriverGone` from now on, and what its caches hold is forgotten.
    """
    from vmm_kv import testing  # never looked at unless asked for

    if index >= testing.MOST_DEVICES:
        raise ValueError(f"device {kind}:{index}: an emulated machine has at most {testing.MOST_DEVICES} devices")
    empty_graveyard()  # on the devices that end here; fresh ones would not know what was dropped
    load = testing.load_cuda if kind == "cuda" else testing.load_hip
    model = load(devices=index + 1, budget=budget)
    if kind in _opened:
        retire(_opened.pop(kind), f"{kind}:{index}")
    options: dict[str, Any] = {}
    if kind == "hip":
        model.set("quirk_single_memset", 1)  # B13: no release is known without it
    if mode() == "quirks":
        model.poison = True
        if kind == "hip":
            options["quirks"] = _ROCM_QUIRKS
            for switch in _ROCM_BUGS:
                model.set(switch, 1)
    driver = open_driver(kind, index, handle_types=handle_types, **options)
    _opened[kind] = driver
    framework = HostFramework(
        model, index, name=driver.name, tell_capturing=lambda capturing: model.set("capturing", int(capturing))
    )
    return driver, framework


def retire(driver: Driver, successor: str) -> None:
    """The driver of an emulated device that another has replaced raises `DriverGone` from now on."""

    def scope() -> NoReturn:
        text = f"{driver.name} is gone: this emulated device was replaced when {successor} was opened"
        raise DriverGone(text, call="context", status=DEINITIALIZED)

    driver.scope = scope  # type: ignore[method-assign]
