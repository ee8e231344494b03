"""Interval arithmetic against its plain meaning: sets of bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmm_kv.spans import (
    Span,
    Spans,
    covers,
    cut,
    difference,
    intersection,
    length,
    round_outward,
    touches,
    union,
)

any_span = st.tuples(st.integers(0, 40), st.integers(-2, 12)).map(lambda t: (t[0], t[0] + t[1]))
any_spans = st.lists(any_span, max_size=8)
normal = any_spans.map(union)


def bytes_of(spans: Iterable[Span]) -> set[int]:
    return {byte for start, end in spans for byte in range(start, end)}


def is_normalised(spans: Spans) -> bool:
    return all(start < end for start, end in spans) and all(a[1] < b[0] for a, b in pairwise(spans))


@given(any_spans, any_spans)
def test_union_is_the_union_of_bytes(a: list[Span], b: list[Span]) -> None:
    result = union(a, iter(b))
    assert bytes_of(result) == bytes_of(a) | bytes_of(b)
    assert is_normalised(result)


@given(normal, normal)
def test_difference_and_intersection_are_those_of_bytes(a: Spans, b: Spans) -> None:
    minus, common = difference(a, b), intersection(a, b)
    assert bytes_of(minus) == bytes_of(a) - bytes_of(b)
    assert bytes_of(common) == bytes_of(a) & bytes_of(b)
    assert is_normalised(minus)
    assert is_normalised(common)


@given(normal, st.integers(1, 9))
def test_round_outward_gives_the_granules_that_hold_the_bytes(spans: Spans, unit: int) -> None:
    result = round_outward(spans, unit)
    granules = {byte // unit for byte in bytes_of(spans)}
    assert bytes_of(result) == {granule * unit + i for granule in granules for i in range(unit)}
    assert is_normalised(result)


@given(normal)
def test_length_counts_bytes(spans: Spans) -> None:
    assert length(spans) == len(bytes_of(spans))


@given(normal, normal, any_span)
def test_touches_and_covers(a: Spans, b: Spans, span: Span) -> None:
    assert touches(span, a) == bool(bytes_of([span]) & bytes_of(a))
    assert covers(a, b) == (bytes_of(b) <= bytes_of(a))
    assert covers(union(a, b), b)


@given(normal, st.lists(st.integers(-3, 60)).map(sorted), st.none() | st.integers(1, 9))
def test_cut_keeps_the_bytes_and_cuts_where_it_must(spans: Spans, at: list[int], size: int | None) -> None:
    pieces = cut(spans, at, size)
    assert union(pieces) == spans
    assert length(pieces) == length(spans)
    assert list(pieces) == sorted(pieces)
    starts = {start for start, _ in spans} | set(at)
    ends = {end for _, end in spans} | set(at)
    for start, end in pieces:
        assert start < end
        assert not any(start < point < end for point in at)
        if size is None:
            assert start in starts
            assert end in ends
        else:
            assert end - start == size or (end - start < size and end in ends)


def test_cut_counts_from_the_span_and_from_each_point() -> None:
    assert cut(((0, 10), (20, 25)), [4, 20, 22], 3) == ((0, 3), (3, 4), (4, 7), (7, 10), (20, 22), (22, 25))
    assert cut(((0, 10), (20, 25)), [4], None) == ((0, 4), (4, 10), (20, 25))
    assert cut((), [4], 3) == ()


def test_adjacent_spans_merge_and_empty_ones_go() -> None:
    assert union([(5, 9), (3, 3)], [(0, 5)], [(12, 10)], ()) == ((0, 9),)
    assert union([(0, 0)]) == union() == ()
    assert not touches((3, 3), ((0, 9),))
    assert not touches((9, 12), ((0, 9),))


def test_a_unit_or_size_below_one_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="unit must be at least 1 byte, got 0"):
        round_outward(((0, 4),), 0)
    with pytest.raises(ValueError, match="size must be at least 1 byte, got -2"):
        cut(((0, 4),), [], -2)


def test_thousands_of_spans_take_linear_time() -> None:
    """With a quadratic merge 30 000 spans would take minutes."""
    a = tuple((i * 10, i * 10 + 6) for i in range(30_000))
    b = tuple((i * 10 + 4, i * 10 + 8) for i in range(30_000))
    start = time.perf_counter()
    assert length(union(a, b)) == 240_000
    assert length(difference(a, b)) == 120_000
    assert length(intersection(a, b)) == 60_000
    assert length(difference(((0, 300_000),), a)) == length(difference(((-5, 300_000),), a)) - 5 == 120_000
    assert len(cut(((0, 300_000),), [s for s, _ in a], 8)) == 60_000
    assert all(touches(span, b) for span in a)
    assert time.perf_counter() - start < 5
