"""The KV cache: reserved addresses, what is mapped behind them, and how many blocks the engine may use.

    RESERVED -> BACKED (prefix | alias) -> COMMITTED       any -> CLOSED; a failed undo -> FAULTED

Every operation has a half that can be undone and, once the result is published, a half that cannot fail (the releases).
The rules are numbered in DESIGN.md; comments cite them.
"""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Mapping as MappingABC
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from vmm_kv import layout as layouts
from vmm_kv.backing import Backing, Pieces
from vmm_kv.capture import refuse_while_capturing
from vmm_kv.chunking import Chunking, ChunkSize
from vmm_kv.errors import FaultedError, StateError, VmmError
from vmm_kv.gate import Gate
from vmm_kv.holdings import Holdings, bury, empty_graveyard
from vmm_kv.layout import Layout, TensorSpec
from vmm_kv.listeners import Listeners, RemapListener
from vmm_kv.pages import Chunk, Reservation
from vmm_kv.prefix import map_prefix
from vmm_kv.prepared import PreparedCommit
from vmm_kv.segments import SegmentRow, segment_rows
from vmm_kv.spans import Spans, difference, length, touches, union
from vmm_kv.state import State
from vmm_kv.tensors import byte_tensor, placed_view
from vmm_kv.zeroing import zeroed_layout

if TYPE_CHECKING:
    import torch

    from vmm_kv.device import Device


class KVCache:
    """KV tensors at addresses that never change, with memory behind as many blocks as were committed.

    Operations may come from any thread; one runs at a time. Reading an attribute never waits.
    """

    def __init__(
        self,
        device: Device,
        layout: Layout,
        *,
        chunk: ChunkSize = "auto",
        zero: bool | Collection[str] = True,
        quiesce: Callable[[], None] | None = None,
    ) -> None:
        """Use `reserve`, or this with a `Layout` of your own.

        zero: whether blocks are zeroed before they become usable, or the names of the tensors for which they are.
        quiesce: called before pages are taken from behind addresses. When it returns nothing may be running on the
            cache, and nothing may be launched on it until the operation returns. Without a hook the caller promises
            just that for `commit` from an alias backing, `shrink` and `close`.
        """
        driver = device.driver
        chunking = Chunking.choose(layout, driver, device.total_bytes, chunk)
        self.device = device
        self.layout = layout
        self._zeroed = zeroed_layout(layout, zero)
        self._gate = Gate()
        self._listeners = Listeners(driver, self._gate, quiesce)
        self._state = State.RESERVED
        self._blocks = 0
        self._version = 0
        refuse_while_capturing(driver, "reserve")
        with driver.scope():
            empty_graveyard(driver.name)
            # Whole alias chunks, so that an alias backing can cover every address.
            reservation = Reservation(driver, -(-layout.nbytes // chunking.alias) * chunking.alias)
        self._holdings = Holdings(driver, reservation)
        self._finalizer = weakref.finalize(self, bury, self._holdings)
        self._finalizer.atexit = False
        self._backing = Backing(driver, self._holdings, chunking, reservation.base, reservation.size)
        whole = byte_tensor(reservation, device.torch_device)
        self._tensors = {p.spec.name: placed_view(whole, p, layout.capacity) for p in layout.placements}

    @classmethod
    def reserve(
        cls,
        device: Device,
        specs: Sequence[TensorSpec],
        capacity: int,
        *,
        outermost: str = "tensor",
        chunk: ChunkSize = "auto",
        zero: bool | Collection[str] = True,
        quiesce: Callable[[], None] | None = None,
    ) -> KVCache:
        """Reserves addresses for `capacity` blocks of every tensor. Takes no memory.

        outermost: `"tensor"` lays tensor after tensor, each from a granule of its own (addresses are free); `"block"`
        lays block after block, with the bytes of all tensors side by side in each.
        Raises `LayoutError`, `ValueError`, `OutOfAddressSpace`.
        """
        if outermost == "tensor":
            layout = Layout.tensor_outermost(specs, capacity, alignment=device.driver.granule)
        elif outermost == "block":
            layout = Layout.block_outermost(specs, capacity)
        else:
            raise ValueError(f"outermost={outermost!r}: it is 'tensor' or 'block'")
        return cls(device, layout, chunk=chunk, zero=zero, quiesce=quiesce)

    # What there is. None of this waits for an operation that is running.

    @property
    def state(self) -> State:
        return self._state

    @property
    def base(self) -> int:
        """Address of the reservation."""
        return self._backing.base

    @property
    def reserved_bytes(self) -> int:
        """Bytes of addresses, which are no memory."""
        return self._backing.size

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
        """Bytes of the device's memory held, chunks prepared or not yet released among them; an alias chunk once."""
        return self._holdings.physical_bytes

    @property
    def unreleased_bytes(self) -> int:
        """Bytes whose release failed. The next operation and close try again."""
        return sum(chunk.size for chunk in self._holdings.unreleased)

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped that a commit leaves where they are: a prefix backing, or what is committed. 0 for an alias."""
        return length(self._backing.mapped)

    @property
    def generation(self) -> int:
        """Rises each time pages behind mapped addresses change. Growth into unmapped addresses does not raise it."""
        return self._backing.generation

    @property
    def tensors(self) -> MappingABC[str, torch.Tensor]:
        """Every tensor at its full capacity shape. Touching a block that is not backed is a fault of the device."""
        if self._state is State.CLOSED:
            raise StateError("the tensors of a closed cache: nothing is mapped behind them any more")
        return MappingProxyType(self._tensors)

    def view(self, name: str) -> torch.Tensor:
        """The tensor over exactly the usable blocks: the spec's shape with `blocks` in the block dimension."""
        tensor = self.tensors[name]
        spec = next(p.spec for p in self.layout.placements if p.spec.name == name)
        return tensor.narrow(spec.block_dim, 0, self._blocks)

    def cost(self, blocks: int) -> int:
        """Bytes mapped after a commit of `blocks`, what stays mapped anyway included."""
        return layouts.cost(self.layout, blocks, self.unit, self._backing.mapped)

    def blocks_within(self, budget: int) -> int:
        """The most blocks whose `cost` is at most `budget` bytes; 0 if there are none."""
        return layouts.blocks_within(self.layout, budget, self.unit, self._backing.mapped)

    def segment_table(self) -> tuple[SegmentRow, ...]:
        """One row for each segment, in the order of the layout."""
        whole = ((0, self.reserved_bytes),)
        return segment_rows(self.layout, self.base, self._backing.mapped if self._backing.alias is None else whole)

    def chunk_table(self) -> tuple[tuple[int, int, int], ...]:
        """(address, bytes, driver handle) of every mapping, in order of address."""
        return tuple((m.address, m.chunk.size, m.chunk.handle) for m in self._backing.mappings())

    def add_listener(self, listener: RemapListener) -> None:
        """Tells `listener` of every later change of pages, after those added before it."""
        self._listeners.add(listener)

    @property
    def listener_errors(self) -> tuple[Exception, ...]:
        """What listeners raised after the last map. Such an error does not stop the operation."""
        return self._listeners.errors

    # Operations.

    def back(self, blocks: int | None = None, *, alias: bool = False) -> None:
        """Puts a small mapping behind the addresses, zeroed, for profiling and graph capture.

        blocks: a prefix backing of the first blocks of every segment; may be called again with more.
        alias: one chunk mapped again and again over every address: any block id is valid, contents are undefined.
        Raises `OutOfPhysicalMemory` and leaves everything as it was.
        """
        if alias == (blocks is not None):
            raise ValueError("back() takes a number of blocks, or alias=True")
        if blocks is not None:
            blocks = _count("back", blocks, 1, self.capacity)
        with self._operation("back", State.RESERVED, *(() if alias else (State.BACKED,))):
            if self._backing.alias is not None:
                raise StateError("back on a cache that has an alias backing: it reaches every block already")
            if blocks is None:
                self._backing.map_alias()
                mapped: Spans = ((0, self.reserved_bytes),)
            else:
                mapped = map_prefix(self._backing, self.layout, blocks)
            self._state = State.BACKED
            self._version += 1
            self._listeners.mapped("back", self._backing.absolute(mapped), self.generation)

    def prepare(self, blocks: int) -> PreparedCommit:
        """Takes the memory that a commit of `blocks` needs, and changes nothing else.

        The part that may run out of memory or take time. Publish or discard the result; one that was overtaken by
        another operation can only be discarded.
        """
        blocks = _count("commit", blocks, 1, self.capacity)
        with self._operation("prepare", State.RESERVED, State.BACKED, State.COMMITTED):
            return self._take(blocks)

    def commit(self, blocks: int) -> int:
        """Maps memory behind the first `blocks` blocks, zeroes what becomes usable, and returns the usable count.

        From RESERVED, from either backing, or to grow. If anything fails the cache is as it was before, and the same
        call succeeds once the cause is gone; if undoing it fails too: `FaultedError`.
        """
        if self._state is State.COMMITTED and blocks == self._blocks:
            return self._blocks
        blocks = _count("commit", blocks, 1, self.capacity)
        with self._operation("commit", State.RESERVED, State.BACKED, State.COMMITTED):
            step = self._take(blocks)
            try:
                self._put(step, "commit")
            except FaultedError:
                raise
            except BaseException:
                if not step.done:
                    self._holdings.release(chunk for _, chunk in step.pieces)
                raise
            return self._blocks

    def shrink(self, blocks: int) -> int:
        """Takes away the blocks from `blocks` on and returns the bytes of memory that this gave back.

        Nobody may use those blocks any more. A chunk that holds a byte of a block that stays is kept whole.
        """
        with self._operation("shrink", State.COMMITTED):
            before = self._blocks
            blocks = _count("shrink", blocks, 0, before)
            if blocks == before:
                return 0
            keep = self.layout.granules(blocks, self.unit)
            doomed = [m for m in self._backing.mappings() if not touches(self._backing.span(m), keep)]
            self._blocks = blocks  # invariant 4: lowered first
            try:
                with self._around_unmap("shrink", union(map(self._backing.span, doomed))):
                    self._backing.unmap(doomed)
            except FaultedError:
                raise
            except BaseException:
                self._blocks = before
                raise
            self._version += 1
            held = self.physical_bytes
            self._holdings.release(m.chunk for m in doomed)
            return held - self.physical_bytes

    def close(self) -> None:
        """Gives everything back. Addresses under a live tensor follow with the last tensor.

        Goes through everything and raises once at the end; a second call does what is left, or nothing.
        In a forked child it calls nothing: the memory is the parent's.
        """
        if self._holdings.pid != os.getpid() or self._holdings.empty:
            self._state, self._blocks = State.CLOSED, 0
            return
        with self._operation("close", *State):
            self._blocks = 0
            errors: list[Exception] = []
            if self._state is not State.CLOSED:
                mapped = union(map(self._backing.span, self._backing.mappings()))
                errors += self._listeners.closing(self._backing.absolute(mapped), self.generation)
            self._state = State.CLOSED
            self._tensors = {}
            self._version += 1
            errors += self._holdings.undo()
            if not self._holdings.mappings and not self._holdings.chunks and self._finalizer.detach():
                bury(self._holdings)  # at most the addresses are left, under somebody's tensor
        if errors:
            done = "is complete, but" if self._holdings.empty else "is not complete, close again:"
            raise VmmError(
                f"close on {self.device.driver.name} {done} " + "; ".join(str(error) or repr(error) for error in errors)
            ) from errors[0]

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<KVCache {self._state.value} on {self.device.driver.name}: {self._blocks} of {self.capacity} blocks>"

    # How an operation runs.

    @contextmanager
    def _operation(self, name: str, *states: State) -> Iterator[None]:
        driver = self.device.driver
        with self._gate.operation(name):
            if self._state not in states:
                wanted = ", ".join(state.value for state in states)
                raise StateError(f"{name} on a cache that is {self._state.value}: it must be {wanted}")
            refuse_while_capturing(driver, name)
            with driver.scope():
                empty_graveyard(driver.name)
                self._holdings.retry_unreleased()
                try:
                    yield
                except FaultedError:
                    self._state, self._blocks = State.FAULTED, 0
                    raise

    def _around_unmap(self, operation: str, going: Spans) -> AbstractContextManager[None]:
        return self._listeners.around_unmap(operation, self._backing.absolute(going), lambda: self.generation)

    def _take(self, blocks: int) -> PreparedCommit:
        if blocks < self._blocks:
            raise ValueError(f"commit of {blocks} blocks where {self._blocks} are usable: shrink() takes blocks away")
        pieces = self._backing.create(self.layout.granules(blocks, self.unit))
        return PreparedCommit(self, blocks, pieces, self._version)

    def _put(self, step: PreparedCommit, operation: str) -> None:
        backing = self._backing
        zero = difference(self._zeroed.spans(step.blocks) if self._zeroed else (), self.layout.spans(self._blocks))
        spare: list[Chunk] = []
        if backing.alias is None:
            backing.map(step.pieces, zero)
        else:
            with self._around_unmap(operation, ((0, self.reserved_bytes),)):
                spare = [backing.replace_alias(step.pieces, zero)]
        step.done = True  # whatever a listener raises now, the chunks are in use
        self._state = State.COMMITTED
        self._version += 1
        try:
            new = union((offset, offset + chunk.size) for offset, chunk in step.pieces)
            self._listeners.mapped(operation, backing.absolute(new), self.generation)
        finally:
            self._blocks = step.blocks  # invariant 4: raised last
            self._holdings.release(spare)

    def _publish(self, step: PreparedCommit) -> int:
        with self._operation("publish", State.RESERVED, State.BACKED, State.COMMITTED):
            if step.version != self._version:
                raise StateError(
                    f"this prepared commit of {step.blocks} blocks is stale: the cache has changed since. Discard it"
                )
            self._put(step, "publish")
            return self._blocks

    def _discard(self, pieces: Pieces) -> None:
        if self._state in (State.FAULTED, State.CLOSED):
            return  # close() goes through every chunk
        with self._operation("discard", State.RESERVED, State.BACKED, State.COMMITTED):
            self._holdings.release(chunk for _, chunk in pieces)


def _count(operation: str, blocks: int, least: int, most: int) -> int:
    """The number as a plain int, or a `ValueError` that names the bounds. Nothing is clamped (invariant 10)."""
    number = operator.index(blocks)
    if not least <= number <= most:
        raise ValueError(f"{operation} of {number} blocks: it must be {least} to {most}")
    return number
