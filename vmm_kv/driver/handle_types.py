"""Which kind of handle memory is made with: the first of those asked for that a real create accepts.

A driver may advertise a kind and refuse it all the same (fabric handles without an IMEX channel): only a create tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vmm_kv.driver.failures import INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED
from vmm_kv.errors import DriverError, OutOfPhysicalMemory, UnsupportedError

HANDLE_TYPES = ("none", "posix_fd", "fabric")

_REFUSALS = frozenset((INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED))


def choose(order: Sequence[str], attempt: Callable[[str], None]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Returns the first type that `attempt` can make, and (type, reason) of each refused before it.

    order: names out of `HANDLE_TYPES`, the most wanted first. attempt: creates memory of that type and gives it back.

    Raises `ValueError` for an unknown name, `UnsupportedError` where every type is refused. Any failure that is no
    refusal is raised as it is, running out of memory above all: taken for a refusal it would silently choose a type
    that was not wanted.
    """
    if not order or not set(order) <= set(HANDLE_TYPES):
        raise ValueError(f"handle types {list(order)}: one or more of {', '.join(map(repr, HANDLE_TYPES))}")
    refusals: list[tuple[str, str]] = []
    for name in order:
        try:
            attempt(name)
        except OutOfPhysicalMemory:
            raise
        except (UnsupportedError, DriverError) as error:
            if isinstance(error, DriverError) and error.status not in _REFUSALS:
                raise
            refusals.append((name, str(error)))
        else:
            return name, tuple(refusals)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals)
    advice = "" if "none" in order else ". Add 'none' to the list"
    raise UnsupportedError(f"none of the handle types asked for can be had here: {reasons}{advice}")
