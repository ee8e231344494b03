"""What a cache is and what it holds, for reading from any thread: nothing here waits for an operation that runs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from vmm_kv import layout as layouts
from vmm_kv import pages
from vmm_kv.backing import Backing
from vmm_kv.errors import StateError
from vmm_kv.holdings import Holdings
from vmm_kv.layout import Layout
from vmm_kv.listeners import Listeners
from vmm_kv.segments import SegmentRow, segment_rows
from vmm_kv.spans import length, touches
from vmm_kv.state import State

if TYPE_CHECKING:
    import torch


class Figures:
    """The readable half of `KVCache`, which fills the fields in."""

    layout: Layout
    _backing: Backing
    _blocks: int
    _holdings: Holdings
    _listeners: Listeners
    _state: State
    _tensors: dict[str, torch.Tensor]

    @property
    def state(self) -> State:
        return self._state

    @property
    def base(self) -> int:
        """Address of the reservation."""
        return self._backing.base

    @property
    def reserved_bytes(self) -> int:
        """Bytes of addresses, which are no memory. 0 once they are given back."""
        return self._backing.size if self._holdings.reservation else 0

    @property
    def capacity(self) -> int:
        """Blocks that the reservation has addresses for."""
        return self.layout.capacity

    @property
    def blocks(self) -> int:
        """Blocks the engine may hand out: 0 before the commit."""
        return self._blocks

    @property
    def backed(self) -> int:
        """Blocks whose every byte is mapped now; with an alias backing all of them."""
        if self._backing.alias is not None:
            return self.capacity
        mapped = self._backing.mapped
        return layouts.blocks_within(self.layout, length(mapped), self.unit, mapped)

    @property
    def unit(self) -> int:
        """Bytes that mapped memory is rounded outward to."""
        return self._backing.chunking.unit

    @property
    def physical_bytes(self) -> int:
        """Bytes of the device's memory held, prepared, spare and unreleased ones among them; an alias chunk once."""
        return self._holdings.physical_bytes

    @property
    def unreleased_bytes(self) -> int:
        """Bytes that could not be given back. The next operation and close try again."""
        return self._holdings.unreleased_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes of unmapped chunks that growth maps first. 0 without the quirk `memory_with_addresses`."""
        return self._holdings.spare_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped that a commit leaves where they are: a prefix backing, or what is committed. 0 for an alias."""
        return length(self._backing.mapped)

    @property
    def generation(self) -> int:
        """Rises each time pages behind mapped addresses change. Growth into unmapped addresses does not raise it."""
        return self._backing.generation

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Every tensor at its full capacity shape. Touching a block that is not backed is a fault of the device."""
        tensors = self._tensors  # before the question: a close on another thread empties the field after its answer
        if self._state is State.CLOSED:
            raise StateError("the tensors of a closed cache: nothing is mapped behind them any more")
        if self._holdings.addresses_lost:
            raise StateError("the tensors of a cache whose addresses were lost: they may be anybody's now")
        self._refuse_moved()
        return MappingProxyType(tensors)

    def _refuse_moved(self) -> None:
        """Raises `StateError` where the tensors are not at the reservation's addresses (invariant 1)."""
        for tensor in self._tensors.values():
            if tensor.untyped_storage().data_ptr() != self.base:
                raise StateError(
                    "torch has moved the cache's tensors to memory of its own (share_memory_(), or a tensor handed to "
                    "another process): graphs still use the old addresses. Close the cache and make a new one"
                )
            break  # all share one storage

    def view(self, name: str) -> torch.Tensor:
        """The tensor over exactly the usable blocks: the spec's shape with `blocks` in the block dimension."""
        tensors = self.tensors
        if name not in tensors:
            raise KeyError(f"no tensor is called {name!r}: there are {', '.join(tensors)}")
        tensor = tensors[name]
        spec = next(p.spec for p in self.layout.placements if p.spec.name == name)
        return tensor.narrow(spec.block_dim, 0, self._blocks)

    def cost(self, blocks: int) -> int:
        """Bytes mapped after a commit of `blocks`, what stays mapped anyway included."""
        return layouts.cost(self.layout, blocks, self.unit, self._backing.mapped)

    def blocks_within(self, budget: int) -> int:
        """The most blocks whose `cost` is at most `budget` bytes; 0 if there are none."""
        return layouts.blocks_within(self.layout, budget, self.unit, self._backing.mapped)

    def mapped_after_shrink(self, blocks: int) -> int:
        """Bytes that stay mapped after a shrink to `blocks`: at least their `cost`, since whole chunks stay."""
        gone = sum(mapping.chunk.size for mapping in self._beyond(blocks))
        return sum(mapping.chunk.size for mapping in self._backing.mappings()) - gone

    def _beyond(self, blocks: int) -> list[pages.Mapping]:
        """The mappings that hold nothing of the first `blocks` blocks."""
        keep = self.layout.granules(blocks, self.unit)
        return [m for m in self._backing.mappings() if not touches(self._backing.span(m), keep)]

    def segment_table(self) -> tuple[SegmentRow, ...]:
        """One row for each segment, in the order of the layout."""
        whole = ((0, self.reserved_bytes),)
        return segment_rows(self.layout, self.base, self._backing.mapped if self._backing.alias is None else whole)

    def chunk_table(self) -> tuple[tuple[int, int, int], ...]:
        """(address, bytes, driver handle) of every mapping, in order of address."""
        return tuple((m.address, m.chunk.size, m.chunk.handle) for m in self._backing.mappings())

    @property
    def listener_errors(self) -> tuple[Exception, ...]:
        """What listeners raised after the last map. Such an error does not stop the operation."""
        return self._listeners.errors
