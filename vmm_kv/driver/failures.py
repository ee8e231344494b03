"""A status that is no success, as one of `vmm_kv.errors`: the same classes and the same words for every driver."""

from __future__ import annotations

import os

from vmm_kv.errors import DriverError, DriverGone, OutOfAddressSpace, OutOfPhysicalMemory, StateError

# CUDA's and HIP's numbers, which the host device uses as well.
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
DEINITIALIZED = 4
NOT_PERMITTED = 800
NOT_SUPPORTED = 801

# What "out of memory" means depends on the call that says it.
_SHORTAGES: dict[str, tuple[type[DriverError], str]] = {
    "create": (OutOfPhysicalMemory, "Ask for fewer blocks, lower the utilization, or free memory on the device"),
    "reserve": (OutOfAddressSpace, "Addresses ran out, not memory: reserve a smaller capacity or close other caches"),
}
_NO_KERNEL_MAPPINGS = (OutOfAddressSpace, "The kernel allows no more mappings (vm.max_map_count): use larger chunks")
_NO_DEVICE_MAPPINGS = (OutOfAddressSpace, "The driver has no memory for more mappings: use larger chunks")


def failure(where: str, call: str, status: int, status_name: str, asked: str, memory: str = "") -> DriverError:
    """The error to raise where `call` on the device `where` answered `status`.

    asked: what was asked for, with its numbers. memory: what is free, where that is known.
    """
    message = f"{call} on {where} failed: {status_name} ({status}); asked for {asked}"
    if memory:
        message += f"; {memory}"
    if status == DEINITIALIZED:
        return DriverGone(message, call=call, status=status)
    if status != OUT_OF_MEMORY:
        return DriverError(message, call=call, status=status)
    mappings = _NO_KERNEL_MAPPINGS if where.startswith("host:") else _NO_DEVICE_MAPPINGS
    kind, advice = _SHORTAGES.get(call, mappings)
    return kind(f"{message}. {advice}", call=call, status=status)


def refuse_forked_child(where: str, opened_in: int) -> None:
    """Raises `StateError` unless this is the process `opened_in`: no driver survives a fork (G4, C85)."""
    if os.getpid() != opened_in:
        raise StateError(
            f"{where} was opened in process {opened_in} and this is a forked child: open the device after the fork, or "
            "start the child with 'spawn'"
        )
