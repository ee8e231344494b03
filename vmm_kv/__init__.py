"""Reserve-then-map KV cache memory: capture graphs first, measure, then map the rest at the same addresses.

Importing this imports no torch and no driver binding: names are looked up when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vmm_kv.budget import BudgetError, Plan
    from vmm_kv.cache import KVCache
    from vmm_kv.device import Device, open_device
    from vmm_kv.errors import (
        DriverError,
        DriverGone,
        FaultedError,
        LayoutError,
        OutOfAddressSpace,
        OutOfPhysicalMemory,
        StateError,
        UnsupportedError,
        VmmError,
    )
    from vmm_kv.fingerprint import Fingerprint, PinError
    from vmm_kv.kv_groups import Group
    from vmm_kv.layout import Layout, Placement, TensorSpec
    from vmm_kv.listeners import RemapListener
    from vmm_kv.measure import MemoryReading
    from vmm_kv.prepared import PreparedCommit
    from vmm_kv.rank_plan import RankBudgetError, RankedPlan, plan_ranks
    from vmm_kv.rank_terms import Rank, Term
    from vmm_kv.report import StartupReport
    from vmm_kv.request import Request
    from vmm_kv.sizes import parse_bytes
    from vmm_kv.startup import Startup
    from vmm_kv.state import State

    __version__: str

_HOMES = {
    "KVCache": "cache",
    "State": "state",
    "Device": "device",
    "open_device": "device",
    "parse_bytes": "sizes",
    "Layout": "layout",
    "Placement": "layout",
    "TensorSpec": "layout",
    "Startup": "startup",
    "StartupReport": "report",
    "BudgetError": "budget",
    "Plan": "budget",
    "Request": "request",
    "plan_ranks": "rank_plan",
    "RankedPlan": "rank_plan",
    "RankBudgetError": "rank_plan",
    "Fingerprint": "fingerprint",
    "PinError": "fingerprint",
    "Rank": "rank_terms",
    "Term": "rank_terms",
    "Group": "kv_groups",
    "MemoryReading": "measure",
    "PreparedCommit": "prepared",
    "RemapListener": "listeners",
    "DriverError": "errors",
    "DriverGone": "errors",
    "FaultedError": "errors",
    "LayoutError": "errors",
    "OutOfAddressSpace": "errors",
    "OutOfPhysicalMemory": "errors",
    "StateError": "errors",
    "UnsupportedError": "errors",
    "VmmError": "errors",
}

__all__ = [
    "BudgetError",
    "Device",
    "DriverError",
    "DriverGone",
    "FaultedError",
    "Fingerprint",
    "Group",
    "KVCache",
    "Layout",
    "LayoutError",
    "MemoryReading",
    "OutOfAddressSpace",
    "OutOfPhysicalMemory",
    "PinError",
    "Placement",
    "Plan",
    "PreparedCommit",
    "Rank",
    "RankBudgetError",
    "RankedPlan",
    "RemapListener",
    "Request",
    "Startup",
    "StartupReport",
    "State",
    "StateError",
    "TensorSpec",
    "Term",
    "UnsupportedError",
    "VmmError",
    "open_device",
    "parse_bytes",
    "plan_ranks",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from vmm_kv.installed import installed

        return installed("vmm-kv") or "0+unknown"  # a source tree on the path
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
