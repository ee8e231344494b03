"""Interval arithmetic on half-open byte intervals.

A `Span` is `(start, end)` in bytes, `end` excluded. `Spans` are normalised: sorted, none empty, and no two that overlap
or touch. Every function that takes `Spans` relies on that, and every one that returns `Spans` keeps it; `union` is the
way in for intervals in any order. All are linear in the number of spans (`union` sorts), and pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain

Span = tuple[int, int]
Spans = tuple[Span, ...]


def union(*sets: Iterable[Span]) -> Spans:
    """All bytes that lie in any of the spans, which may come in any order and overlap. Empty spans are dropped."""
    merged: list[Span] = []
    first, last = 0, 0  # the span being grown; (0, 0) is none yet
    for start, end in sorted(chain(*sets)):  # sorting costs next to nothing when the spans come sorted
        if start >= end:
            continue
        if start > last or first == last:
            if first < last:
                merged.append((first, last))
            first, last = start, end
        elif end > last:
            last = end
    if first < last:
        merged.append((first, last))
    return tuple(merged)


def intersection(a: Spans, b: Spans) -> Spans:
    """The bytes that lie in both."""
    common: list[Span] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def difference(a: Spans, b: Spans) -> Spans:
    """The bytes of `a` that do not lie in `b`."""
    left: list[Span] = []
    j = 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j  # b[j] may reach into the next span of a, so j itself stays
        while k < len(b) and b[k][0] < end:
            if start < b[k][0]:
                left.append((start, b[k][0]))
            start = b[k][1]
            k += 1
        if start < end:
            left.append((start, end))
        j = max(j, k - 1)
    return tuple(left)


def round_outward(spans: Spans, unit: int) -> Spans:
    """The spans widened to multiples of `unit` bytes: the granules that hold them, each counted once."""
    if unit < 1:
        raise ValueError(f"unit must be at least 1 byte, got {unit}")
    return union((start // unit * unit, -(-end // unit) * unit) for start, end in spans)


def length(spans: Spans) -> int:
    """The number of bytes."""
    return sum(end - start for start, end in spans)


def cut(spans: Spans, at: Sequence[int], size: int | None) -> tuple[Span, ...]:
    """The same bytes in pieces that cross none of the points `at` (sorted) and are at most `size` bytes long.

    Pieces of `size` bytes are counted from the start of a span or from a point, so only the last one before a point or
    an end may be short. `size` None cuts at the points only. The result is sorted, but not `Spans`: its pieces touch.
    """
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1 byte, got {size}")
    pieces: list[Span] = []
    for start, end in spans:
        for stop in (*at[bisect_right(at, start) : bisect_left(at, end)], end):
            step = size or max(stop - start, 1)
            pieces += [(s, min(s + step, stop)) for s in range(start, stop, step)]
            start = stop
    return tuple(pieces)


def touches(span: Span, spans: Spans) -> bool:
    """Whether the span and the spans have a byte in common. An empty span touches nothing."""
    start, end = span
    i = bisect_left(spans, (end, end)) - 1  # the last one that starts before our end
    return start < end and i >= 0 and spans[i][1] > start


def covers(a: Spans, b: Spans) -> bool:
    """Whether every byte of `b` lies in `a`."""
    return not difference(b, a)
