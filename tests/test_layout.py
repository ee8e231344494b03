"""Layouts against the engine's own indexing (torch views), brute force, and the numbers of public reports."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vmm_kv.errors import LayoutError
from vmm_kv.layout import Layout, Placement, Segment, TensorSpec, blocks_within, cost, cut_points, default_chunk
from vmm_kv.spans import Span, Spans, length, union

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
GRANULE = 2 * MiB

KV_SPLIT = (2, None, 4, 2, 4)
BLOCK_FIRST = (None, 2, 4, 2, 4)


def spec(
    name: str, shape: tuple[int | None, ...], dtype: torch.dtype = torch.int16, order: tuple[int, ...] | None = None
) -> TensorSpec:
    return TensorSpec(name, shape, dtype, order)


def layers(count: int, shape: tuple[int | None, ...], dtype: torch.dtype = torch.int8) -> list[TensorSpec]:
    return [TensorSpec(f"l{i}.kv", shape, dtype) for i in range(count)]


def packed_by_engine(capacity: int) -> Layout:
    """Three layers in one backing allocation: offset = layer * layer bytes, one block stride handed in."""
    specs = layers(3, BLOCK_FIRST, torch.int16)
    page = specs[0].block_bytes
    return Layout(capacity, tuple(Placement(s, i * page, s.strides(capacity, 3 * page)) for i, s in enumerate(specs)))


def restrided(capacity: int) -> Layout:
    """Attention whose K and V share a page with recurrent state: strides (page / 2, page, ...) on (2, None, ...)."""
    attention, state = spec("attention", KV_SPLIT), spec("state", (None, 20), torch.int32)
    page = attention.block_bytes
    kv = Placement(attention, 0, (page // 2, page, 16, 8, 2))
    return Layout(capacity, (kv, Placement(state, 0, (page, 4))), aliasing=True)


ATTENTION = [spec("a0", BLOCK_FIRST), spec("a1", BLOCK_FIRST)]
STATE = [spec("m0", (None, 50), torch.int32), spec("m1", (None, 3, 5), torch.int8), spec("m2", (None, 7), torch.int64)]

LAYOUTS: dict[str, Callable[[int], Layout]] = {
    "kv_split": lambda n: Layout.tensor_outermost(layers(3, KV_SPLIT, torch.int16), n),
    "block_first": lambda n: Layout.tensor_outermost(layers(3, BLOCK_FIRST, torch.int16), n, alignment=64),
    "block_first_logical_kv_first_physical": lambda n: Layout.tensor_outermost(
        [spec("l0", BLOCK_FIRST, order=(1, 0, 2, 3, 4)), spec("l1", BLOCK_FIRST)], n
    ),
    "heads_before_tokens": lambda n: Layout.tensor_outermost([spec("l0", BLOCK_FIRST, order=(0, 1, 3, 2, 4))], n),
    "heads_before_blocks": lambda n: Layout.tensor_outermost(
        [spec("l0", (3, None, 2, 4, 5), order=(0, 2, 1, 3, 4))], n
    ),
    "latent": lambda n: Layout.tensor_outermost(layers(2, (None, 4, 9), torch.int16), n, alignment=1),
    "layer_outermost": lambda n: Layout.tensor_outermost([spec("kv", (3, None, 2, 4, 5))], n),
    "cross_layer": lambda n: Layout.tensor_outermost([spec("kv", (None, 3, 2, 4, 5))], n),
    "cross_layer_by_order": lambda n: Layout.tensor_outermost([spec("kv", (3, None, 4, 5), order=(1, 0, 2, 3))], n),
    "packed_by_engine": packed_by_engine,
    "block_outermost": lambda n: Layout.block_outermost([*layers(2, BLOCK_FIRST), *STATE], n),
    "block_outermost_size_one_around": lambda n: Layout.block_outermost([spec("l0", (1, None, 3)), *STATE], n),
    "overlay_by_tensor": lambda n: Layout.overlay([ATTENTION, STATE], n),
    "overlay_by_block": lambda n: Layout.overlay([ATTENTION, STATE], n, outermost="block"),
    "restrided": restrided,
}
DENSE = {
    "kv_split",
    "block_first",
    "heads_before_blocks",
    "latent",
    "layer_outermost",
    "cross_layer",
    "packed_by_engine",
}


@pytest.fixture(params=LAYOUTS)
def build(request: pytest.FixtureRequest) -> Callable[[int], Layout]:
    return LAYOUTS[request.param]


def bytes_of(spans: Sequence[Span]) -> set[int]:
    return {byte for start, end in spans for byte in range(start, end)}


def view(memory: torch.Tensor, placement: Placement, capacity: int) -> torch.Tensor:
    """The engine's tensor over the memory, block dimension first."""
    item = placement.spec.itemsize
    strides = [stride // item for stride in placement.strides]
    tensor = torch.empty(0, dtype=placement.spec.dtype)
    tensor.set_(memory.untyped_storage(), placement.offset // item, placement.spec.shape_for(capacity), strides)
    return tensor.movedim(placement.spec.block_dim, 0)


def written(layout: Layout, first: int, last: int, tensor: int | None = None) -> set[int]:
    """The bytes that change when the engine fills blocks first..last of one tensor, or of all, by its own indexing."""
    memory = torch.zeros(layout.nbytes, dtype=torch.int8)
    for i, placement in enumerate(layout.placements):
        if tensor is None or tensor == i:
            view(memory, placement, layout.capacity)[first:last].fill_(-1)
    return set(memory.nonzero().flatten().tolist())


# --- where blocks lie -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_what_the_engine_writes_to_n_blocks_lies_in_spans_n(build: Callable[[int], Layout], capacity: int) -> None:
    layout = build(capacity)
    for n in range(capacity + 1):
        assert written(layout, 0, n) <= bytes_of(layout.spans(n))


@pytest.mark.parametrize("name", sorted(DENSE))
def test_dense_layouts_take_no_byte_more_than_the_engine_writes(name: str) -> None:
    layout = LAYOUTS[name](5)
    for n in range(6):
        assert bytes_of(layout.spans(n)) == written(layout, 0, n)


def test_each_block_of_each_tensor_is_the_union_of_its_segments_blocks(build: Callable[[int], Layout]) -> None:
    """So that zeroing, poisoning and moving by segment do exactly what the engine's indexing would."""
    layout = build(4)
    for i, placement in enumerate(layout.placements):
        for block in range(4):
            ours = bytes_of([segment.block(block) for segment in placement.segments])
            theirs = written(layout, block, block + 1, i)
            assert theirs <= ours
            assert len(theirs) == placement.spec.block_bytes
            assert min(ours) == min(theirs)
            assert max(ours) == max(theirs)


def test_first_and_last_byte_of_every_block_are_inside_for_blocks_around_a_granule() -> None:
    """Large shapes by address arithmetic: blocks of 16 KiB, 1.5 MiB and 3 MiB against a granule of 2 MiB."""
    for tokens in (16, 16 * 96, 16 * 192):
        for shape in [(2, None, tokens, 4, 64), (None, 2, tokens, 4, 64)]:
            layout = Layout.tensor_outermost(layers(3, shape, torch.int16), 100)
            for n in (1, 37, 100):
                inside = layout.granules(n, GRANULE)
                for placement in layout.placements:
                    for address in corners(placement, n):
                        assert any(start <= address and address + 1 < end for start, end in inside)


def corners(placement: Placement, blocks: int) -> list[int]:
    """Byte addresses of the elements at the corners of the first and the last block."""
    ends = [(0, (blocks if size is None else size) - 1) for size in placement.spec.shape]
    steps = [[i * stride for i in end] for end, stride in zip(ends, placement.strides, strict=True)]
    return [placement.offset + sum(corner) for corner in product(*steps)]


@pytest.mark.parametrize(
    ("shape", "order", "segments"),
    [
        (KV_SPLIT, None, 2),
        (BLOCK_FIRST, None, 1),
        (BLOCK_FIRST, (1, 0, 2, 3, 4), 2),
        (BLOCK_FIRST, (0, 1, 3, 2, 4), 1),
        ((None, 16, 576), None, 1),
        ((1, None, 16, 576), None, 1),
        ((7, None, 3, 16, 8), None, 7),  # L B H N C
        ((7, None, 3, 16, 8), (0, 1, 3, 2, 4), 7),  # L B N H C
        ((7, None, 3, 16, 8), (0, 2, 1, 3, 4), 21),  # L H B N C
        ((7, None, 3, 16, 8), (1, 0, 2, 3, 4), 1),  # B L H N C
        ((7, None, 3, 16, 8), (1, 2, 0, 3, 4), 1),  # B H L N C
    ],
)
@pytest.mark.parametrize("capacity", [1, 6])
def test_number_of_segments(
    shape: tuple[int | None, ...], order: tuple[int, ...] | None, segments: int, capacity: int
) -> None:
    layout = Layout.tensor_outermost([spec("kv", shape, order=order)], capacity)
    assert len(layout.segments) == segments
    assert [segment.index for segment in layout.segments] == list(range(segments))
    assert layout.nbytes == layout.placements[0].spec.block_bytes * capacity


def test_kv_split_segments_in_numbers() -> None:
    (placement,) = Layout.tensor_outermost([TensorSpec("l0.kv", (2, None, 16, 8, 128), torch.bfloat16)], 10).placements
    assert placement.strides == (327680, 32768, 2048, 256, 2)
    assert placement.segments == (Segment("l0.kv", 0, 0, 32768, 32768), Segment("l0.kv", 1, 327680, 32768, 32768))
    assert placement.segments[1].block(2) == (393216, 425984)
    assert placement.segments[1].span(3) == (327680, 425984)
    assert placement.segments[1].span(0) == (327680, 327680)


def test_restrided_attention_has_k_and_v_inside_one_block() -> None:
    layout = restrided(10)
    assert [segment.block_bytes for segment in layout.segments] == [128, 80]
    assert [segment.block_stride for segment in layout.segments] == [128, 128]
    assert layout.spans(3) == ((0, 3 * 128),)


def test_tensors_start_at_the_alignment_and_at_their_element_size() -> None:
    specs = [spec("a", (None, 3), torch.int8), spec("b", (None, 5), torch.int64)]
    assert [p.offset for p in Layout.tensor_outermost(specs, 3, alignment=1).placements] == [0, 16]
    assert [p.offset for p in Layout.tensor_outermost(specs, 3, alignment=GRANULE).placements] == [0, GRANULE]
    assert [p.offset for p in Layout.block_outermost(specs, 3, alignment=1).placements] == [0, 8]
    assert [p.block_stride for p in Layout.block_outermost(specs, 3, alignment=64).placements] == [128, 128]


def test_overlay_in_numbers() -> None:
    """Attention blocks are 128 bytes, state blocks 200, 15 and 56; each slot or block holds the larger."""
    by_tensor = Layout.overlay([ATTENTION, STATE], 10)
    assert {(p.spec.name, p.offset, p.block_stride) for p in by_tensor.placements} == {
        ("a0", 0, 208),
        ("m0", 0, 208),
        ("a1", 2080, 128),
        ("m1", 2080, 128),
        ("m2", 3360, 64),
    }
    by_block = Layout.overlay([ATTENTION, STATE], 10, outermost="block")
    assert {(p.spec.name, p.offset, p.block_stride) for p in by_block.placements} == {
        ("a0", 0, 288),
        ("a1", 128, 288),
        ("m0", 0, 288),
        ("m1", 208, 288),
        ("m2", 224, 288),
    }


# --- what blocks cost -------------------------------------------------------------------------------------------------


@st.composite
def random_layout(draw: st.DrawFn) -> Layout:
    build = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]
    return build(draw(st.integers(1, 12)))


def aligned(unit: int) -> st.SearchStrategy[Spans]:
    """Mappings that stay: whole granules anywhere."""
    return st.sets(st.integers(0, 30)).map(lambda granules: union((i * unit, (i + 1) * unit) for i in granules))


@settings(max_examples=150, deadline=None)
@given(random_layout(), st.sampled_from([1, 7, 64, 100, 512, 5000]), st.data())
def test_blocks_within_is_the_linear_search(layout: Layout, unit: int, data: st.DataObject) -> None:
    mapped = data.draw(aligned(unit))
    granules_of = [{byte // unit for byte in bytes_of(layout.spans(n))} for n in range(layout.capacity + 1)]
    kept = {start // unit + i for start, end in mapped for i in range((end - start) // unit)}
    costs = [len(granules | kept) * unit for granules in granules_of]
    assert [cost(layout, n, unit, mapped) for n in range(layout.capacity + 1)] == costs
    budget = data.draw(st.integers(-1, costs[-1] + 1) | st.sampled_from(costs))
    expected = max((n for n, price in enumerate(costs) if price <= budget), default=0)
    assert blocks_within(layout, budget, unit, mapped) == expected


def test_c65_one_block_of_a_split_layout_costs_a_granule_for_each_segment() -> None:
    """C65: 48 layers, K and V apart, 16 KiB a block in each: 192 MiB for one block, and 128 are backed by that."""
    split = Layout.tensor_outermost(layers(48, (2, None, 16, 8, 64), torch.bfloat16), 8192)
    assert len(split.segments) == 96
    assert cost(split, 1, GRANULE) == 201326592
    assert length(split.granules(1, GRANULE)) == 192 * MiB
    assert blocks_within(split, 201326592, GRANULE) == 128
    packed = Layout.block_outermost(layers(48, (None, 2, 16, 8, 64), torch.bfloat16), 8192)
    assert packed.nbytes == split.nbytes
    assert cost(packed, 1, GRANULE) == 2097152
    assert packed.spans(1) == ((0, 1536 * KiB),)


def test_c68_blocks_that_do_not_divide_the_granule() -> None:
    """C68: blocks of 1.5 MiB on granules of 2 MiB: 1, 2, 3 granules hold 1, 2, 4 blocks."""
    layout = Layout.tensor_outermost([spec("kv", (None, 1536 * KiB), torch.int8)], 100)
    assert [blocks_within(layout, k * GRANULE, GRANULE) for k in range(4)] == [0, 1, 2, 4]
    assert cost(layout, 4, GRANULE) == 3 * GRANULE
    assert blocks_within(layout, 10 * MiB, 16 * MiB) == 0


def test_c77_windowed_layers_make_blocks_cheaper() -> None:
    """C77: 16 layers full cost 64 MiB, with half of them windowed to a sixteenth of the tokens 34 MiB.

    Once with a pool for each kind, once with both kinds on the same bytes and a block id for each.
    """
    block, window = (None, 64 * KiB), 64 // 16
    full = Layout.tensor_outermost(layers(16, block), 64)
    half = Layout.tensor_outermost(layers(8, block), 64)
    assert cost(full, 64, GRANULE) == 64 * MiB
    windowed = Layout.block_outermost(layers(8, block), 64)
    assert cost(half, 64, GRANULE) + cost(windowed, window, GRANULE) == 34 * MiB

    group = [spec(f"w{i}", block, torch.int8) for i in range(8)]
    shared = Layout.overlay([layers(8, block), group], 128, outermost="block")
    assert cost(shared, 64 + window, GRANULE) == 34 * MiB


def test_a_granule_that_two_segments_share_is_counted_once() -> None:
    layout = Layout.tensor_outermost(layers(4, (2, None, 100)), 10, alignment=1)
    assert layout.nbytes == 8000
    assert cost(layout, 10, 4096) == 8192
    assert cost(layout, 1, 4096) == 8192
    assert layout.granules(1, 1024) == ((0, 7168),)  # the last segment starts at 7000
    assert layout.spans(10) == ((0, 8000),)
    assert layout.spans(1)[1] == (1000, 1100)


def test_what_stays_mapped_is_counted_and_free_for_blocks() -> None:
    layout = Layout.tensor_outermost([spec("kv", (None, 1000), torch.int8)], 10)
    assert cost(layout, 0, 1000, ((2000, 5000),)) == 3000
    assert cost(layout, 5, 1000, ((2000, 5000),)) == 5000
    assert blocks_within(layout, 5000, 1000, ((2000, 5000),)) == 5
    assert blocks_within(layout, 5000, 1000, ((20000, 23000),)) == 2
    assert blocks_within(layout, 2999, 1000, ((2000, 5000),)) == 0
    assert blocks_within(layout, 10**9, 1000) == 10
    assert blocks_within(layout, -1, 1000) == 0


# --- chunks -----------------------------------------------------------------------------------------------------------


def test_cut_points_are_the_granules_in_which_segments_start() -> None:
    layout = Layout.tensor_outermost(layers(4, (2, None, 100)), 10, alignment=1)
    assert cut_points(layout, 100) == [0, 1000, 2000, 3000, 4000, 5000, 6000, 7000]
    assert cut_points(layout, 1500) == [0, 1500, 3000, 4500, 6000]
    assert cut_points(LAYOUTS["overlay_by_tensor"](10), 512) == [0, 2048, 3072]


@pytest.mark.parametrize(
    ("segment", "unit", "chunk"),
    [
        (64 * GiB, GRANULE, 64 * MiB),
        (GiB, GRANULE, 64 * MiB),
        (GiB - 1, GRANULE, 32 * MiB),
        (100 * MiB, GRANULE, 4 * MiB),
        (MiB, GRANULE, GRANULE),
        (1, GRANULE, GRANULE),
        (GiB, 3 * MiB, 63 * MiB),
        (GiB, 128 * MiB, 128 * MiB),
    ],
)
def test_default_chunk(segment: int, unit: int, chunk: int) -> None:
    specs = [spec("long", (None, segment), torch.int8), spec("short", (None, 1), torch.int8)]
    assert default_chunk(Layout.tensor_outermost(specs, 1), unit) == chunk


def test_default_chunk_looks_at_the_span_of_all_blocks() -> None:
    assert default_chunk(Layout.tensor_outermost([spec("kv", (2, None, MiB), torch.int8)], 64), GRANULE) == 4 * MiB


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "order", "error", "message"),
    [
        ((2, 16), None, LayoutError, r"kv: shape \(2, 16\) has 0 block dimensions"),
        ((None, 2, None), None, LayoutError, r"has 2 block dimensions"),
        ((None, 0), None, ValueError, r"shape \(None, 0\) has a dimension below 1"),
        ((None, -3), None, ValueError, r"shape \(None, -3\) has a dimension below 1"),
        ((None, 2), (0, 0), LayoutError, r"order \(0, 0\) is no permutation of 2"),
        ((None, 2), (0,), LayoutError, r"order \(0,\) is no permutation of 2"),
        ((None, 2), (), LayoutError, r"order \(\) is no permutation of 2"),
        ((None, 2), (1, 2), LayoutError, r"order \(1, 2\) is no permutation of 2"),
    ],
)
def test_specs_that_make_no_sense(
    shape: tuple[int | None, ...], order: tuple[int, ...] | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        spec("kv", shape, order=order)


@pytest.mark.parametrize(
    ("offset", "strides", "message"),
    [
        (0, (4,), r"kv: 1 strides for 2 dimensions"),
        (1, (8, 2), r"offset 1 is no multiple of an element's 2 bytes"),
        (-2, (8, 2), r"offset -2"),
        (0, (7, 2), r"strides \(7, 2\) are not positive multiples of an element's 2 bytes"),
        (0, (0, 2), r"strides \(0, 2\)"),
        (0, (-8, 2), r"strides \(-8, 2\)"),
    ],
)
def test_placements_that_make_no_sense(offset: int, strides: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Placement(spec("kv", (None, 4)), offset, strides)


def test_blocks_and_elements_that_overlap_in_one_tensor() -> None:
    with pytest.raises(LayoutError, match="kv: blocks overlap: one spans 8 bytes, the next starts after 6"):
        Layout(2, (Placement(spec("kv", (None, 4)), 0, (6, 2)),))
    with pytest.raises(LayoutError, match="kv: elements overlap: 8 bytes lie within a stride of 6 bytes"):
        Layout(2, (Placement(spec("kv", (None, 3, 4)), 0, (32, 6, 2)),))
    for aliasing in (False, True):
        with pytest.raises(LayoutError, match=r"block 1 of segment 0 of kv at 8\.\.16 and block 0 of segment 1 of kv"):
            Layout(2, (Placement(spec("kv", (2, None, 4)), 0, (8, 8, 2)),), aliasing)
    assert len(Layout(1, (Placement(spec("kv", (2, None, 4)), 0, (8, 8, 2)),)).segments) == 2


def test_tensors_that_share_bytes_must_say_so() -> None:
    a, b = Placement(spec("a", (None, 4)), 0, (16, 2)), Placement(spec("b", (None, 4)), 6, (16, 2))
    with pytest.raises(
        LayoutError, match=r"block 0 of segment 0 of a at 0\.\.8 and block 0 of segment 0 of b at 6\.\.14"
    ):
        Layout(4, (a, b))
    assert Layout(4, (b, a), aliasing=True).spans(2) == ((0, 30),)


def test_a_block_may_never_meet_another_block() -> None:
    a, b = Placement(spec("a", (None, 4)), 0, (16, 2)), Placement(spec("b", (None, 4)), 10, (16, 2))
    for aliasing in (False, True):
        with pytest.raises(LayoutError, match=r"block 1 of segment 0 of a at 16\.\.24 and block 0 of .* b at 10\.\.18"):
            Layout(4, (a, b), aliasing)
    assert len(Layout(1, (a, b)).segments) == 2  # there is no block 1


def test_a_tensor_may_never_meet_itself() -> None:
    """Not even where aliasing is meant: indices (0, 1) and (1, 0) of this one are the same bytes."""
    twice = Placement(spec("kv", (2, 2, None, 4)), 0, (16, 16, 8, 2))
    for aliasing in (False, True):
        with pytest.raises(
            LayoutError, match=r"segment 1 of kv at 16\.\.24 and block 0 of segment 2 of kv at 16\.\.24"
        ):
            Layout(1, (twice,), aliasing)


def test_a_short_tensor_behind_a_long_one_hides_no_overlap() -> None:
    sizes = {"a": (0, 1), "long": (2, 8), "short": (4, 1)}
    placements = tuple(Placement(spec(name, (None, n), torch.int8), at, (8, 1)) for name, (at, n) in sizes.items())
    with pytest.raises(LayoutError, match=r"block 1 of segment 0 of a at 8\.\.9 and block 0 of .* long at 2\.\.10"):
        Layout(2, placements, aliasing=True)


def test_hulls_that_meet_need_one_block_stride() -> None:
    a, b = Placement(spec("a", (None, 4)), 0, (16, 2)), Placement(spec("b", (None, 4)), 8, (32, 2))
    for aliasing in (False, True):
        with pytest.raises(
            LayoutError, match=r"of a ends at byte 56, .* of b starts at 8, .* are 16 and 32 bytes apart"
        ):
            Layout(4, (a, b), aliasing)


@st.composite
def random_placements(draw: st.DrawFn) -> tuple[int, bool, list[tuple[int, int]]]:
    count = draw(st.integers(2, 4))
    return (
        draw(st.integers(1, 4)),
        draw(st.booleans()),
        [(draw(st.integers(0, 40)), draw(st.integers(1, 8))) for _ in range(count)],
    )


@settings(max_examples=400, deadline=None)
@given(random_placements())
def test_overlaps_are_found_exactly(case: tuple[int, bool, list[tuple[int, int]]]) -> None:
    """Against all pairs of all blocks, for tensors of one stride of 8 bytes."""
    capacity, aliasing, tensors = case
    placements = [Placement(spec(f"t{i}", (None, n), torch.int8), at, (8, 1)) for i, (at, n) in enumerate(tensors)]
    blocks = [
        (i, b, set(range(at + 8 * b, at + 8 * b + n))) for i, (at, n) in enumerate(tensors) for b in range(capacity)
    ]
    bad = any(i < j and x & y and not (aliasing and b == c) for i, b, x in blocks for j, c, y in blocks)
    if bad:
        with pytest.raises(LayoutError, match="overlap"):
            Layout(capacity, tuple(placements), aliasing)
    else:
        assert Layout(capacity, tuple(placements), aliasing).capacity == capacity


def test_side_by_side_needs_the_block_dimension_outermost() -> None:
    split = spec("kv", KV_SPLIT)
    with pytest.raises(LayoutError, match=r"kv: shape \(2, None, 4, 2, 4\) in order None has dimensions around"):
        Layout.block_outermost([split], 4)
    with pytest.raises(LayoutError, match=r"in order \(1, 0, 2, 3, 4\)"):
        Layout.overlay([[spec("l0", BLOCK_FIRST, order=(1, 0, 2, 3, 4))]], 4, outermost="block")
    with pytest.raises(LayoutError, match="blocks side by side need it outermost"):
        Layout.overlay([STATE, [split]], 4)


def test_layouts_that_make_no_sense() -> None:
    one = spec("kv", (None, 4))
    with pytest.raises(LayoutError, match="2 tensors have the name kv"):
        Layout.tensor_outermost([one, one], 4)
    for build in (Layout.tensor_outermost, Layout.block_outermost):
        with pytest.raises(LayoutError, match="at least one tensor"):
            build([], 4)
        with pytest.raises(ValueError, match="capacity must be at least 1 block, got 0"):
            build([one], 0)
        with pytest.raises(ValueError, match="alignment must be at least 1 byte, got 0"):
            build([one], 4, 0)
    with pytest.raises(LayoutError, match="at least one tensor"):
        Layout.overlay([], 4)
    with pytest.raises(ValueError, match="capacity must be at least 1 block, got -1"):
        Layout(-1, (Placement(one, 0, (8, 2)),))


def test_counts_outside_the_capacity() -> None:
    layout = Layout.tensor_outermost([spec("kv", (None, 4))], 10)
    for call in (layout.spans, lambda n: layout.granules(n, 64), lambda n: cost(layout, n, 64)):
        with pytest.raises(ValueError, match="11 blocks asked for, the layout has addresses for 0 to 10"):
            call(11)
        with pytest.raises(ValueError, match="-1 blocks asked for, the layout has addresses for 0 to 10"):
            call(-1)
    with pytest.raises(ValueError, match="unit must be at least 1 byte, got 0"):
        blocks_within(layout, 100, 0)


def test_sizes_are_exact_up_to_the_end_of_the_address_space() -> None:
    page = spec("kv", (None, 64 * KiB), torch.int8)
    layout = Layout.tensor_outermost([page], 2**31)
    assert layout.nbytes == 2**47
    assert blocks_within(layout, 2**46 + GRANULE - 1, GRANULE) == 2**30
    with pytest.raises(ValueError, match=r"take 140737488420864 bytes of addresses, .* at most 140737488355328"):
        Layout.tensor_outermost([page], 2**31 + 1)


# --- speed and imports ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [Layout.tensor_outermost, Layout.block_outermost])
def test_thousands_of_segments_are_checked_and_sized_quickly(
    build: Callable[[Sequence[TensorSpec], int], Layout],
) -> None:
    """With a check of all pairs 5 000 segments would take tens of seconds."""
    start = time.perf_counter()
    layout = build(layers(5000, (None, 16 * KiB)), 100_000)
    assert 0 < blocks_within(layout, 100 * GiB, GRANULE) < 100_000
    assert time.perf_counter() - start < 3


def test_importing_the_layout_imports_no_torch() -> None:
    program = "import sys, vmm_kv.layout; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("dtype", ["bfloat16", None, float, 2])
def test_a_dtype_that_is_none_of_torchs_is_refused_at_once(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"kv: dtype .* is no torch.dtype"):
        TensorSpec("kv", (None, 4), dtype)


@pytest.mark.parametrize("size", [4.0, "4", 4.5, (4,)])
def test_a_dimension_that_is_no_whole_number_is_refused_at_once(size: Any) -> None:
    with pytest.raises(TypeError, match=r"kv: .* in shape is no whole number"):
        TensorSpec("kv", (None, size), torch.int8)
    with pytest.raises(TypeError, match=r"kv: .* in order is no whole number"):
        TensorSpec("kv", (None, 4), torch.int8, order=(0, size))


def test_a_shape_becomes_plain() -> None:
    spec = TensorSpec("kv", [None, np.int64(4)], torch.int8, order=[1, np.int32(0)])  # type: ignore[arg-type]
    assert (spec.shape, spec.order) == ((None, 4), (1, 0))
    assert {type(number) for number in (*spec.shape, *(spec.order or ()))} == {type(None), int}
