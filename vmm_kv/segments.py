"""The table of segments that transports and kernels read."""

from __future__ import annotations

from dataclasses import dataclass

from vmm_kv.layout import Layout
from vmm_kv.spans import Spans, intersection, length


@dataclass(frozen=True)
class SegmentRow:
    """Where one segment lies. Block b of the tensor's segment starts at `address + b * block_stride`. Sizes in bytes.

    `mapped_bytes` is what is mapped of the segment now, `capacity_bytes` what addresses are reserved for.
    """

    tensor: str
    index: int
    address: int
    block_stride: int
    block_bytes: int
    mapped_bytes: int
    capacity_bytes: int


def segment_rows(layout: Layout, base: int, mapped: Spans) -> tuple[SegmentRow, ...]:
    """One row for each segment, in the order of the layout. `mapped` is in bytes from `base`."""
    rows = []
    for segment in layout.segments:
        whole = (segment.span(layout.capacity),)
        rows.append(
            SegmentRow(
                tensor=segment.tensor,
                index=segment.index,
                address=base + segment.offset,
                block_stride=segment.block_stride,
                block_bytes=segment.block_bytes,
                mapped_bytes=length(intersection(whole, mapped)),
                capacity_bytes=length(whole),
            )
        )
    return tuple(rows)
