"""A prefix backing: memory behind the first blocks, for profiling and capture."""

from __future__ import annotations

from vmm_kv import layout as layouts
from vmm_kv.backing import Backing
from vmm_kv.errors import FaultedError
from vmm_kv.layout import Layout
from vmm_kv.spans import Spans, difference, length, union


def map_prefix(backing: Backing, layout: Layout, blocks: int) -> Spans:
    """Maps and zeroes a prefix, and returns what is new. Granules may hold more blocks than were asked for."""
    unit = backing.chunking.unit
    before = layouts.blocks_within(layout, length(backing.mapped), unit, backing.mapped)
    pieces = backing.create(layout.granules(blocks, unit))
    new = union((offset, offset + chunk.size) for offset, chunk in pieces)
    mapped = union(backing.mapped, new)
    after = layouts.blocks_within(layout, length(mapped), unit, mapped)
    try:
        backing.map(pieces, difference(layout.spans(after), layout.spans(before)))
    except FaultedError:
        raise
    except BaseException:
        backing.holdings.release(chunk for _, chunk in pieces)
        raise
    return new
