"""Which part of a layout is zeroed before it becomes usable."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from vmm_kv.layout import Layout


def zeroed_layout(layout: Layout, zero: bool | Collection[str]) -> Layout | None:
    """The part of the layout that is zeroed before use."""
    if isinstance(zero, bool):
        return layout if zero else None
    names = set(zero)
    unknown = names - {placement.spec.name for placement in layout.placements}
    if unknown:
        raise ValueError(f"zero names tensors that the layout does not have: {sorted(unknown)}")
    chosen = tuple(placement for placement in layout.placements if placement.spec.name in names)
    return replace(layout, placements=chosen) if chosen else None
