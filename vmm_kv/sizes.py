"""Sizes and counts as people give them. Plain: no torch."""

from __future__ import annotations

import operator
import re

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_MOST = 1 << 47
"""What a process can address."""


def parse_bytes(text: str) -> int:
    """`"2GiB"`, `"14.99GiB"`, `"1073741824"` as a number of bytes, rounded down. Binary units only.

    `ValueError` for what is no size, and for one below a byte or above what a process can address.
    """
    match = re.fullmatch(r"\s*(\d{1,20})(?:\.(\d{1,20}))?\s*([A-Za-z]*)\s*", text)
    if not match or match[3] not in _UNITS:
        raise ValueError(f"{text[:50]!r} is not a size: a number with B, KiB, MiB, GiB or TiB, for example 80GiB")
    digits = match[2] or ""
    size: int = int(match[1] + digits) * _UNITS[match[3]] // 10 ** len(digits)
    if not 1 <= size <= _MOST:
        raise ValueError(f"{text[:50]!r} is not a size: it must be at least one byte and at most {_MOST >> 40}TiB")
    return size


def whole(name: str, number: object) -> int:
    """The number as a plain int, whatever integer type it came in. `TypeError` that names it for anything else."""
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {number!r}") from None
