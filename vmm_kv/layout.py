"""What the engine wants (`TensorSpec`) -> where it lies (`Placement`, `Segment`) -> what n blocks take (`Layout`).

One algorithm serves every layout: `Layout.spans(n)` gives the bytes that the first n blocks occupy, as one hull a
segment, and everything else (what to map, what it costs, how many blocks fit) follows from it by interval arithmetic.
Offsets, strides and sizes are in bytes from the base of the reservation unless a name says blocks. All of it is pure.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

from vmm_kv.errors import LayoutError
from vmm_kv.spans import Span, Spans, length, round_outward, union
from vmm_kv.tensor_spec import TensorSpec as TensorSpec

ALIGNMENT = 16
"""Bytes; the widest load of a GPU thread, which attention kernels use on the start of a tensor and of a block."""

ADDRESS_SPACE = 2**47
"""Bytes that a 64-bit process can address at most (x86-64 and arm64 without their extensions)."""

MAX_CHUNK = 64 << 20


@dataclass(frozen=True)
class Segment:
    """A run of bytes of one tensor in which block 0, 1, 2, ... lie one after another."""

    tensor: str
    """The tensor's name."""
    index: int
    """Number of the segment in its tensor, in the logical order of the dimensions around the block's."""
    offset: int
    """Bytes from the base to block 0."""
    block_stride: int
    """Bytes from one block to the next."""
    block_bytes: int
    """Bytes from a block's first to its last, holes between its rows counted as its own."""

    def block(self, block: int) -> Span:
        """The bytes of one block."""
        start = self.offset + block * self.block_stride
        return start, start + self.block_bytes

    def span(self, blocks: int) -> Span:
        """The hull of the first `blocks` blocks; empty for none."""
        if blocks == 0:
            return self.offset, self.offset
        return self.offset, self.offset + (blocks - 1) * self.block_stride + self.block_bytes


@dataclass(frozen=True)
class Placement:
    """Where a tensor lies: `offset` bytes from the base, `strides` in bytes, one for each logical dimension.

    The constructors of `Layout` make these; an engine that has its own placement hands it in. Elements must lie on
    multiples of their size and apart from each other: LayoutError.
    """

    spec: TensorSpec
    offset: int
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        name, item = self.spec.name, self.spec.itemsize
        if len(self.strides) != len(self.spec.shape):
            raise LayoutError(f"{name}: {len(self.strides)} strides for {len(self.spec.shape)} dimensions")
        if self.offset < 0 or self.offset % item:
            raise LayoutError(f"{name}: offset {self.offset} is no multiple of an element's {item} bytes")
        if any(stride < 1 or stride % item for stride in self.strides):
            raise LayoutError(f"{name}: strides {self.strides} are not positive multiples of an element's {item} bytes")

    @property
    def block_stride(self) -> int:
        """Bytes from one block to the next."""
        return self.strides[self.spec.block_dim]

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """One segment for each index of the dimensions that lie around the block's: those whose stride is not below it.

        A dimension with a smaller stride lies inside the block, such as K and V of an attention tensor of shape
        `(2, None, ...)` that shares pages with recurrent state and so has strides `(page / 2, page, ...)`.
        """
        # shape_for(1): neither the block dimension nor one of size 1, whose stride means nothing, is ever stepped along
        dims = [(stride, size) for stride, size in zip(self.strides, self.spec.shape_for(1), strict=True) if size > 1]
        hull = self._block_hull([(stride, size) for stride, size in dims if stride < self.block_stride])
        around = (range(0, stride * size, stride) for stride, size in dims if stride >= self.block_stride)
        return tuple(
            Segment(self.spec.name, index, self.offset + sum(steps), self.block_stride, hull)
            for index, steps in enumerate(product(*around))
        )

    def _block_hull(self, inside: list[tuple[int, int]]) -> int:
        """Bytes from a block's first to its last, having checked that no two elements and no two blocks meet."""
        name, hull = self.spec.name, self.spec.itemsize
        for stride, size in sorted(inside):
            if stride < hull:
                raise LayoutError(f"{name}: elements overlap: {hull} bytes lie within a stride of {stride} bytes")
            hull += stride * (size - 1)
        if hull > self.block_stride:
            raise LayoutError(
                f"{name}: blocks overlap: one spans {hull} bytes, the next starts after {self.block_stride}"
            )
        return hull


@dataclass(frozen=True)
class Layout:
    """Where every tensor lies, for `capacity` blocks.

    The bytes of block b may never meet those of another block, in any tensor. Two tensors may share the bytes of the
    same block only where `aliasing` says that this is meant: groups of layers of which a block id serves one at a time,
    or views of one another. Names are unique. Otherwise LayoutError, naming both tensors; ValueError for a capacity
    below 1 and for more bytes than a process can address.
    """

    capacity: int
    placements: tuple[Placement, ...]
    aliasing: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "capacity", operator.index(self.capacity))  # a plain int, whatever came
        if self.capacity < 1:
            raise ValueError(f"capacity must be at least 1 block, got {self.capacity}")
        if not self.placements:
            raise LayoutError("a layout needs at least one tensor")
        name, count = Counter(p.spec.name for p in self.placements).most_common(1)[0]
        if count > 1:
            raise LayoutError(f"{count} tensors have the name {name}")
        if self.nbytes > ADDRESS_SPACE:
            raise ValueError(
                f"{self.capacity} blocks take {self.nbytes} bytes of addresses, a process has at most {ADDRESS_SPACE}; "
                "lower the capacity"
            )
        if self.aliasing:
            for placement in self.placements:  # a tensor must never meet itself
                _check_apart(_by_offset([placement]), self.capacity, aliasing=False)
        _check_apart(self.segments, self.capacity, self.aliasing)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of all tensors, by offset."""
        return _by_offset(self.placements)

    @cached_property
    def nbytes(self) -> int:
        """Bytes from the base to the end of the last block of all."""
        return max(segment.span(self.capacity)[1] for segment in self.segments)

    def spans(self, blocks: int) -> Spans:
        """The bytes that the first `blocks` blocks occupy. ValueError for a count outside [0, capacity]."""
        if not 0 <= blocks <= self.capacity:
            raise ValueError(f"{blocks} blocks asked for, the layout has addresses for 0 to {self.capacity}")
        return union(segment.span(blocks) for segment in self.segments)

    def granules(self, blocks: int, unit: int) -> Spans:
        """The granules of `unit` bytes that hold those bytes; one that two segments share appears once."""
        return round_outward(self.spans(blocks), unit)

    @classmethod
    def tensor_outermost(cls, specs: Sequence[TensorSpec], capacity: int, alignment: int = ALIGNMENT) -> Layout:
        """Tensor after tensor, each dense and starting at a multiple of `alignment` bytes (and of its element size)."""
        placements, end, capacity = [], 0, operator.index(capacity)
        for spec in specs:
            offset = _align(end, _unit(alignment, [spec]))
            placements.append(Placement(spec, offset, spec.strides(capacity)))
            end = offset + spec.block_bytes * capacity
        return cls(capacity, tuple(placements))

    @classmethod
    def block_outermost(cls, specs: Sequence[TensorSpec], capacity: int, alignment: int = ALIGNMENT) -> Layout:
        """Block b of every tensor side by side, then block b + 1: one block stride for all, the sum of their blocks.

        Each tensor's block starts at a multiple of `alignment` bytes. A spec with a dimension physically around the
        block's cannot lie so: LayoutError.
        """
        return cls(capacity, tuple(_pack([specs], 0, operator.index(capacity), alignment)))

    @classmethod
    def overlay(
        cls,
        groups: Sequence[Sequence[TensorSpec]],
        capacity: int,
        alignment: int = ALIGNMENT,
        outermost: Literal["tensor", "block"] = "tensor",
    ) -> Layout:
        """Groups of tensors on the same bytes: a block id belongs to one group at a time.

        `"tensor"`: slot after slot, slot i holding tensor i of every group, with the largest of their blocks as the
        block stride. `"block"`: the tensors of a group side by side in a block as in `block_outermost`, with the
        largest group as the block stride. Either way a block dimension physically inside another is a LayoutError.
        """
        capacity = operator.index(capacity)
        if outermost == "block":
            return cls(capacity, tuple(_pack(groups, 0, capacity, alignment)), aliasing=True)
        placements: list[Placement] = []
        for i in range(max(map(len, groups), default=0)):
            end = placements[-1].offset + placements[-1].block_stride * capacity if placements else 0
            placements += _pack([group[i : i + 1] for group in groups], end, capacity, alignment)
        return cls(capacity, tuple(placements), aliasing=True)


def cost(layout: Layout, blocks: int, unit: int, mapped: Spans = ()) -> int:
    """Bytes mapped once `blocks` blocks are: their granules of `unit` bytes and what is `mapped` anyway, each once."""
    return length(union(layout.granules(blocks, unit), mapped))


def blocks_within(layout: Layout, budget: int, unit: int, mapped: Spans = ()) -> int:
    """The most blocks whose cost is at most `budget` bytes, up to the capacity; 0 if not even one fits."""
    return most_blocks(lambda blocks: cost(layout, blocks, unit, mapped), budget, layout.capacity)


def most_blocks(cost: Callable[[int], int], budget: int, capacity: int) -> int:
    """The most blocks, 0 to `capacity`, with `cost(blocks) <= budget`; 0 if there are none.

    Exact, by bisection: `granules(n)` is contained in `granules(n + 1)`, so a cost never falls as blocks are added.
    """
    return bisect_right(range(1, capacity + 1), budget, key=cost)


def cut_points(layout: Layout, unit: int) -> list[int]:
    """The offsets, sorted, of the granules of `unit` bytes in which segments start.

    No chunk may cross one, or a segment's tail would share its chunk with the next one's head, which a shrink keeps.
    """
    return sorted({segment.offset // unit * unit for segment in layout.segments})


def default_chunk(layout: Layout, unit: int) -> int:
    """Bytes of a chunk, a multiple of `unit`: coarse enough to map fast, at least 16 to the longest segment.

    The lesser of 64 MiB and the power of two at or below a sixteenth of that segment, but at least one unit.
    """
    longest = max(end - start for start, end in (segment.span(layout.capacity) for segment in layout.segments))
    sixteenth = max(longest // 16, 1)
    return max(min(MAX_CHUNK, 1 << sixteenth.bit_length() - 1) // unit, 1) * unit


def _align(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit


def _unit(alignment: int, specs: Sequence[TensorSpec]) -> int:
    """The least alignment that also suits every element: strides must be multiples of its size."""
    if alignment < 1:
        raise ValueError(f"alignment must be at least 1 byte, got {alignment}")
    return math.lcm(alignment, *(spec.itemsize for spec in specs))


def _pack(groups: Sequence[Sequence[TensorSpec]], base: int, capacity: int, alignment: int) -> Iterator[Placement]:
    """Each group's tensors side by side within a block, the groups on top of one another, all with one block stride."""
    unit = _unit(alignment, [spec for group in groups for spec in group])
    stride = max((sum(_align(spec.block_bytes, unit) for spec in group) for group in groups), default=0)
    for group in groups:
        offset = _align(base, unit)
        for spec in group:
            if not spec.block_outermost:
                raise LayoutError(
                    f"{spec.name}: shape {spec.shape} in order {spec.order} has dimensions around the block's; "
                    "blocks side by side need it outermost"
                )
            yield Placement(spec, offset, spec.strides(capacity, stride))
            offset += _align(spec.block_bytes, unit)


def _by_offset(placements: Sequence[Placement]) -> tuple[Segment, ...]:
    return tuple(sorted((s for p in placements for s in p.segments), key=lambda segment: segment.offset))


def _check_apart(segments: Sequence[Segment], capacity: int, aliasing: bool) -> None:
    """Refuses segments (by offset) that share bytes they must not. Linear for disjoint hulls and for packed blocks.

    Hulls that intersect must have one block stride, or which blocks meet would change from block to block.
    """
    cluster: list[Segment] = []
    last, last_end = segments[0], 0
    for segment in segments:
        if cluster and segment.offset >= last_end:
            _check_cluster(cluster, capacity, aliasing)
            cluster = []
        elif cluster and segment.block_stride != last.block_stride:
            raise LayoutError(
                f"{_label(last)} ends at byte {last_end}, {_label(segment)} starts at {segment.offset}, "
                f"and their blocks are {last.block_stride} and {segment.block_stride} bytes apart"
            )
        cluster.append(segment)
        end = segment.span(capacity)[1]
        if end > last_end:
            last, last_end = segment, end
    _check_cluster(cluster, capacity, aliasing)


def _check_cluster(cluster: Sequence[Segment], capacity: int, aliasing: bool) -> None:
    """The same for segments (by offset) of one block stride whose hulls form one run."""
    first, stride, last = cluster[0], cluster[0].block_stride, cluster[0]
    for segment in cluster[1:]:
        if not aliasing and segment.offset < last.block(0)[1]:
            raise LayoutError(_meet(last, 0, segment, 0))
        if segment.block(0)[1] > last.block(0)[1]:
            last = segment
    if last.block(0)[1] <= first.offset + stride:
        return  # every block lies within its own stride: none meets another
    for i, a in enumerate(cluster):
        for b in cluster[i + 1 :]:
            if b.offset >= a.span(capacity)[1]:
                break
            # block k of a is the first, after block 0, that ends behind the start of block 0 of b
            k = max(1, (b.offset - a.block_bytes - a.offset) // stride + 1)
            if k < capacity and a.block(k)[0] < b.block(0)[1]:
                raise LayoutError(_meet(a, k, b, 0))


def _label(segment: Segment) -> str:
    return f"segment {segment.index} of {segment.tensor}"


def _meet(a: Segment, block_a: int, b: Segment, block_b: int) -> str:
    (a0, a1), (b0, b1) = a.block(block_a), b.block(block_b)
    return (
        f"block {block_a} of {_label(a)} at {a0}..{a1} and block {block_b} of {_label(b)} at {b0}..{b1} overlap (bytes)"
    )
