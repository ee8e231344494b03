"""The KV cache: reserved addresses, what is mapped behind them, and how many blocks the engine may use.

    RESERVED -> BACKED (prefix | alias) -> COMMITTED       any -> CLOSED; a failed undo -> FAULTED

Every operation has a half that can be undone and, once the result is published, a half that cannot fail (the releases).
The rules are numbered in DESIGN.md; comments cite them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NoReturn

from vmm_kv.backing import Backing
from vmm_kv.capture import refuse_while_capturing
from vmm_kv.chunking import Chunking, ChunkSize
from vmm_kv.errors import DriverGone, FaultedError, StateError, VmmError
from vmm_kv.figures import Figures
from vmm_kv.gate import Gate
from vmm_kv.holdings import Holdings, bury, empty_graveyard
from vmm_kv.interrupts import deferred
from vmm_kv.layout import Layout, TensorSpec
from vmm_kv.listeners import Listeners, RemapListener
from vmm_kv.pages import Chunk, Reservation
from vmm_kv.prefix import map_prefix
from vmm_kv.prepared import PreparedCommit
from vmm_kv.returned import ReturnedMemory
from vmm_kv.sizes import whole
from vmm_kv.spans import Spans, difference, union
from vmm_kv.state import State
from vmm_kv.tensors import byte_tensor, placed_view
from vmm_kv.zeroing import zeroed_layout

if TYPE_CHECKING:
    from vmm_kv.device import Device


class KVCache(Figures):
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
        with deferred(), self._on_device("reserve"):
            # Whole alias chunks, so that an alias backing can cover every address.
            reservation = Reservation(driver, -(-layout.nbytes // chunking.alias) * chunking.alias)
            # At once, so that whatever fails from here on leaves the addresses to the graveyard.
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
        if isinstance(specs, TensorSpec):
            raise TypeError(f"specs is a sequence of them, such as [spec]; got {specs!r}")
        if outermost == "tensor":
            layout = Layout.tensor_outermost(specs, capacity, alignment=device.driver.granule)
        elif outermost == "block":
            layout = Layout.block_outermost(specs, capacity)
        else:
            raise ValueError(f"outermost={outermost!r}: it is 'tensor' or 'block'")
        return cls(device, layout, chunk=chunk, zero=zero, quiesce=quiesce)

    def add_listener(self, listener: RemapListener) -> None:
        """Tells `listener` of every later change of pages, after those added before it."""
        self._listeners.add(listener)

    def remove_listener(self, listener: RemapListener) -> None:
        """Tells `listener` no more: one whose `before_unmap` always raises stops every shrink. `ValueError` for one
        that was not added.
        """
        self._listeners.remove(listener)

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
        step = None
        try:
            with self._operation("prepare", State.RESERVED, State.BACKED, State.COMMITTED):
                step = self._take(blocks)
            return step
        except BaseException:  # a signal that waited: nobody gets the step
            if step:
                step.discard()
            raise

    def commit(self, blocks: int) -> int:
        """Maps memory behind the first `blocks` blocks, zeroes what becomes usable, and returns the usable count.

        From RESERVED, from either backing, or to grow. If anything fails the cache is as it was before, and the same
        call succeeds once the cause is gone; if undoing it fails too: `FaultedError`.
        """
        blocks = _count("commit", blocks, 1, self.capacity)
        if self._state is State.COMMITTED and blocks == self._blocks:
            return self._blocks
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
        """Takes away the blocks from `blocks` on and returns the bytes of memory that are free again.

        Nobody may use those blocks any more. A chunk that holds a byte of a block that stays is kept whole.

        The bytes are measured: free memory afterwards minus free memory before, at least 0 and at most what was
        released. They are what was released, by the books, if the second reading fails; a first one that fails stops
        the operation before anything changes. Where memory returns only with its addresses (the quirk
        `memory_with_addresses`), a shrink to more than 0 blocks returns 0 and keeps the chunks as spares for growth;
        one to 0 frees the addresses and reserves them again, and raises `FaultedError` if they do not come back.
        """
        with self._operation("shrink", State.COMMITTED):
            before = self._blocks
            blocks = _count("shrink", blocks, 0, before)
            if blocks == before:
                return 0
            doomed = self._beyond(blocks)
            returned = ReturnedMemory(self.device.driver, self._holdings)
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
            self._holdings.give_back(m.chunk for m in doomed)
            return returned.bytes()

    def close(self) -> None:
        """Gives everything back. Addresses under a live tensor follow with the last tensor.

        Goes through everything and raises once at the end; a second call does what is left, or nothing.
        In a forked child it calls nothing: the memory is the parent's. Silent where the driver has shut down.
        """
        if self._holdings.pid != os.getpid() or self._holdings.empty:
            self._state, self._blocks = State.CLOSED, 0
            self._backing.forget()
            return
        with self._gate.operation("close"):
            errors: list[Exception] = []
            try:
                with self._on_device("close"):
                    errors = self._undo()
            except DriverGone:
                self._holdings.forget()
                self._backing.forget()
                self._state, self._blocks = State.CLOSED, 0
            if errors:
                done = self._how_far_closed()
                what = "; ".join(str(error) or repr(error) for error in errors)
                raise VmmError(f"close on {self.device.driver.name} {done} {what}") from errors[0]

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<KVCache {self._state.value} on {self.device.driver.name}: {self._blocks} of {self.capacity} blocks>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a KV cache owns memory of its device: it can be neither copied nor pickled")

    # How an operation runs.

    @contextmanager
    def _operation(self, name: str, *states: State) -> Iterator[None]:
        if self._holdings.pid != os.getpid():  # before the gate: whoever held it may not be in this process
            raise StateError(f"{name} in a forked child: the cache is of process {self._holdings.pid}")
        with self._gate.operation(name):
            if self._state not in states:
                wanted = " or ".join(state.value for state in states)
                raise StateError(f"{name} on a cache that is {self._state.value}: it must be {wanted}")
            if State.CLOSED not in states:
                self._refuse_moved()
            with self._on_device(name):
                try:
                    self._holdings.retry_unreleased()
                    yield
                except FaultedError:
                    self._state, self._blocks = State.FAULTED, 0
                    raise

    @contextmanager
    def _on_device(self, name: str) -> Iterator[None]:
        driver = self.device.driver
        refuse_while_capturing(driver, name)
        with driver.scope():
            empty_graveyard(driver.name)
            yield

    def _undo(self) -> list[Exception]:
        """The whole of `close` on the device. Returns what failed."""
        before, self._blocks = self._blocks, 0
        errors: list[Exception] = []
        if self._state is not State.CLOSED:
            mapped = union(map(self._backing.span, self._backing.mappings()))
            try:
                errors += self._listeners.closing(self._backing.absolute(mapped), self.generation)
            except BaseException:  # no Exception: somebody wants out, and nothing has been undone yet
                self._blocks = before
                raise
        self._state = State.CLOSED
        self._tensors = {}
        self._version += 1
        errors += self._holdings.undo()
        if not self._holdings.mappings:
            self._backing.forget()
        if not self._holdings.mappings and not self._holdings.chunks and self._finalizer.detach():
            bury(self._holdings)  # at most the addresses are left, under somebody's tensor
        return errors

    def _how_far_closed(self) -> str:
        left = self._holdings
        if left.empty:
            return "is complete, but"
        waiting = left.mappings or left.chunks or left.stranded_bytes
        if waiting or not (left.reservation and left.reservation.in_use):
            return "is not complete, close again:"
        return "gave all memory back (the addresses follow with the last tensor), but"

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
            if step.done:
                raise StateError(f"this prepared commit of {step.blocks} blocks was published or discarded before")
            if step.version != self._version:
                raise StateError(
                    f"this prepared commit of {step.blocks} blocks is stale: the cache has changed since. Discard it"
                )
            self._put(step, "publish")
            return self._blocks

    def _discard(self, step: PreparedCommit) -> None:
        if self._state in (State.FAULTED, State.CLOSED):
            step.done = True  # close() goes through every chunk
            return
        with self._operation("discard", *State):
            done, step.done = step.done, True
            if not done and self._state not in (State.FAULTED, State.CLOSED):  # a close was quicker
                self._holdings.release(chunk for _, chunk in step.pieces)


def _count(operation: str, blocks: int, least: int, most: int) -> int:
    """The number as a plain int, or a `ValueError` that names the bounds. Nothing is clamped (invariant 10)."""
    number = whole(f"{operation}: the number of blocks", blocks)
    if not least <= number <= most:
        raise ValueError(f"{operation} of {number} blocks: it must be {least} to {most}")
    return number
