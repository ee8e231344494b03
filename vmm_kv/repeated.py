"""One figure measured several times: the least, the middle, and whether the noise is larger than the signal. Pure.

A device-wide reading also shows what others do (a display, a neighbour), so a difference of two is a noisy upper
estimate: it is reported with its spread, and nothing is ever refused because of it (`cases.md` C37).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Repeated:
    """Bytes. `raw` is signed, as measured; the rest counts what is negative as 0."""

    raw: tuple[int, ...]
    least: int
    median: int
    """The lower of the two in the middle where there are two."""
    spread: int
    """Most less least."""
    status: Literal["steady", "noisy"]
    """`"noisy"`: the readings differ by more than what they measure, their median."""


def repeated(readings: Iterable[int]) -> Repeated:
    """What readings of one and the same thing tell. `ValueError` for none."""
    raw = tuple(readings)
    if not raw:
        raise ValueError("at least one reading is needed")
    found = sorted(max(0, value) for value in raw)
    least, most, median = found[0], found[-1], found[(len(found) - 1) // 2]
    return Repeated(raw, least, median, most - least, "noisy" if most - least > median else "steady")
