"""Which kind of handle memory is made with: the first of those asked for that a real create accepts.

A driver may advertise a kind and refuse it all the same (fabric handles without an IMEX channel): only a create tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vmm_kv.driver.failures import INVALID_VALUE, NOT_INITIALIZED, NOT_PERMITTED, NOT_SUPPORTED
from vmm_kv.errors import DriverError, DriverGone, OutOfPhysicalMemory, UnsupportedError

HANDLE_TYPES = ("none", "posix_fd", "fabric")

_REFUSALS = frozenset((INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED))


def checked(order: Sequence[str]) -> tuple[str, ...]:
    """The order, if it is one: `TypeError` where it is no sequence of names, `ValueError` for a name that is none."""
    known = ", ".join(map(repr, HANDLE_TYPES))
    if isinstance(order, str):
        raise TypeError(f"handle types are a sequence of names, ({order!r},) and not {order!r}")
    order = tuple(order)
    if not order or any(name not in HANDLE_TYPES for name in order):
        raise ValueError(f"handle types {list(order)}: one or more of {known}")
    return order


def choose(order: Sequence[str], attempt: Callable[[str], None]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Returns the first type that `attempt` can make, and (type, reason) of each refused before it.

    order: names out of `HANDLE_TYPES`, the most wanted first. attempt: creates memory of that type and gives it back.

    What a driver says to a type that it does not have is nowhere written down, so while there is a next type every
    status is a refusal; of the last one only those that mean it are. Running out of memory never is, since a type
    would be chosen that was not wanted, nor is a driver that is gone.

    Raises as `checked`, `UnsupportedError` where every type is refused, and any other failure as it is.
    """
    order = checked(order)
    refusals: list[tuple[str, str]] = []
    for number, name in enumerate(order, 1):
        try:
            attempt(name)
        except (OutOfPhysicalMemory, DriverGone):
            raise
        except (UnsupportedError, DriverError) as error:
            if isinstance(error, DriverError) and not _refused(error, last=number == len(order)):
                raise
            refusals.append((name, str(error)))
        else:
            return name, tuple(refusals)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals)
    advice = "" if "none" in order else ". Add 'none' to the list"
    raise UnsupportedError(f"none of the handle types asked for can be had here: {reasons}{advice}")


def _refused(error: DriverError, *, last: bool) -> bool:
    if error.call == "release":  # memory could be made, and now it is lost
        return False
    return error.status in _REFUSALS if last else error.status != NOT_INITIALIZED
