"""The errors of vmm_kv.

A message names the call, the device, the bytes asked for and the bytes there are, the driver's name for the status, and
what the user can change. Wrong arguments are `ValueError` with the numbers, never one of these.
"""

from __future__ import annotations


class VmmError(Exception):
    """Base of every error that the library raises for a reason other than a wrong argument."""


class DriverError(VmmError):
    """A driver call failed.

    `call` is the primitive's name (`"map"`), `status` the driver's number for what went wrong.
    """

    def __init__(self, message: str, *, call: str, status: int) -> None:
        super().__init__(message)
        self.call = call
        self.status = status


class DriverGone(DriverError):
    """The driver has shut down, as it does late in the end of a process, and took all memory and mappings with it.

    What undoes something counts as done then: `close` is silent.
    """


class OutOfPhysicalMemory(DriverError):
    """The device has no memory left for a chunk. Nothing was changed; a smaller request may succeed."""


class OutOfAddressSpace(DriverError):
    """No range of addresses of that size is left. Addresses are not memory: reserve less, or free reservations."""


class StateError(VmmError):
    """The call does not fit the state of the cache, or the moment (a capture is in progress)."""


class FaultedError(VmmError):
    """An operation failed and undoing it failed too. The cache can only be closed.

    `failure` is what went wrong first, `undo_failure` what went wrong while undoing it; None where nothing undoes it:
    addresses that were given back for a moment and are somebody else's now.
    """

    def __init__(self, message: str, *, failure: BaseException, undo_failure: BaseException | None) -> None:
        super().__init__(message)
        self.failure = failure
        self.undo_failure = undo_failure


class LayoutError(VmmError):
    """The tensors as described cannot be laid out: they overlap, are misaligned, or have no block dimension."""


class UnsupportedError(VmmError):
    """This machine or this driver cannot do it. The message names what is missing and what to install."""


class RankError(VmmError):
    """The ranks did not come to one block count."""
