"""The framework's caching allocator, acted out: torch operations charge a byte budget, and freed bytes stay cached.

What is counted is live storage, as an operation's output. Scratch inside a kernel is not seen, nor are sparse tensors,
storages that grow by `resize_`, and those that come from elsewhere (files, numpy, DLPack). The cache is a figure: its
bytes serve a request of any size, so nothing is lost to fragmentation, where a GPU loses some.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from vmm_kv.host.operations import OperationMode, may_allocate, new_storages, tensors

if TYPE_CHECKING:
    from vmm_kv.host.pool import GraphPool

GRAIN = 512
"""Bytes; every allocation is rounded up to it, as in CUDA's caching allocator."""

_T = TypeVar("_T")


def round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def drain(queue: deque[_T]) -> Iterator[_T]:
    """Takes items off the left until none is left, while others append."""
    while True:
        try:
            item = queue.popleft()
        except IndexError:
            return
        yield item


def when_dead(owner: object, act: Callable[[Any], None], note: object) -> Callable[[], object]:
    """Calls `act(note)` once, when `owner` dies or when told to; never at interpreter exit.

    It may run anywhere, in the middle of a locked region too, so `act` may be no more than a deque's `append`.
    """
    end = weakref.finalize(owner, act, note)
    end.atexit = False
    return end


class Budget(Protocol):
    """The byte budgets of devices by number, as a device model keeps them. Bytes; a status of 0 is success."""

    def charge(self, device: int, size: int, /) -> int: ...

    def credit(self, device: int, size: int, /) -> int: ...

    def used(self, device: int, /) -> int: ...

    def budget(self, device: int, /) -> int: ...


class HostMemory:
    """The caching allocator of one device, on the budget that the driver's chunks come out of as well.

    Figures are bytes. `reserved` is what the framework holds of the device: live storages, cached bytes, and the
    segments of graph pools. `name` stands in error texts, `"host:0"` by default. Safe from any thread.
    """

    def __init__(self, budget: Budget, device: int, name: str | None = None) -> None:
        self._budget = budget
        self._device = device
        self._name = name or f"host:{device}"
        self._lock = threading.RLock()  # reentrant: a garbage collection inside may run code that comes back here
        self._busy = False
        self._thread = _Thread()
        self._live: dict[int, int] = {}  # charged storage -> bytes
        self._dead: deque[int] = deque()  # charged storages that died and are not settled
        self._pools: set[GraphPool] = set()  # those that hold segments
        self._allocated = self._cached = self._pooled = 0
        self._peak_allocated = self._peak_reserved = 0

    def allocated(self) -> int:
        """Bytes of live storages that were charged. Graph pools are not in it."""
        with self.settled():
            return self._allocated

    def pooled(self) -> int:
        """Bytes of segments that graph pools hold, used or free."""
        with self.settled():
            return self._pooled

    def reserved(self) -> int:
        """Bytes held of the device: allocated, cached and pooled."""
        with self.settled():
            return self._reserved

    def peak_allocated(self) -> int:
        """The highest `allocated` since the last `reset_peak`."""
        with self.settled():
            return self._peak_allocated

    def peak_reserved(self) -> int:
        """The highest `reserved` since the last `reset_peak`."""
        with self.settled():
            return self._peak_reserved

    def reset_peak(self) -> None:
        """Both peaks start again from the present figures."""
        with self.settled():
            self._peak_allocated, self._peak_reserved = self._allocated, self._reserved

    def empty_cache(self) -> None:
        """Gives the cached bytes back to the device. Segments of a pool that a graph uses stay."""
        with self.settled():
            self._flush()

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back here; books the storages that died since the last call."""
        with self.settled():
            pass

    @contextmanager
    def charging(self) -> Iterator[None]:
        """Charges what torch operations of this thread allocate while it is entered; entering again changes nothing.

        An operation for which the budget does not suffice raises `torch.OutOfMemoryError`. It has run by then: one that
        also writes in place has written.
        """
        if self._thread.charging:
            yield
            return
        self._thread.charging = True
        try:
            with _Charge(self):
                yield
        finally:
            self._thread.charging = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Charges nothing on this thread meanwhile, `charging` or not."""
        before, self._thread.paused = self._thread.paused, True
        try:
            yield
        finally:
            self._thread.paused = before

    def charge(self, result: object, inputs: object) -> None:
        """Charges the storages of `result` that are new, all or none, until they die. Raises OutOfMemoryError."""
        if self._thread.paused:
            return
        storages = new_storages(_strided(result), _strided(inputs))
        with self.settled():
            sizes = {key: round_up(s.nbytes(), GRAIN) for key, s in storages.items() if key not in self._live}
            if not sizes:
                return
            self._allocate(sum(sizes.values()))
            self._live.update(sizes)
        for key in sizes:
            when_dead(storages[key], self._dead.append, key)

    def take_segment(self, pool: GraphPool, nbytes: int) -> None:
        """Charges a segment of a graph pool: from the device, never from cached bytes. Raises OutOfMemoryError."""
        with self.settled():
            self._charge(nbytes, nbytes)
            self._pooled += nbytes
            self._pools.add(pool)
            self._raise_peaks()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Holds the lock with the books up to date. Entered again from inside, it leaves them as they are."""
        with self._lock:
            nested, self._busy = self._busy, True
            try:
                if not nested:
                    self._settle()
                yield
            finally:
                self._busy = nested

    def _settle(self) -> None:
        for key in drain(self._dead):
            nbytes = self._live.pop(key)
            self._allocated -= nbytes
            self._cached += nbytes
        for pool in list(self._pools):
            freed = pool.settle()
            self._pooled -= freed
            self._cached += freed
            if not pool.segments:
                self._pools.discard(pool)

    @property
    def _reserved(self) -> int:
        return self._allocated + self._cached + self._pooled

    def _raise_peaks(self) -> None:
        self._peak_allocated = max(self._peak_allocated, self._allocated)
        self._peak_reserved = max(self._peak_reserved, self._reserved)

    def _allocate(self, nbytes: int) -> None:
        hit = min(nbytes, self._cached)
        self._cached -= hit
        try:
            self._charge(nbytes - hit, nbytes)
        except torch.OutOfMemoryError:
            self._budget.credit(self._device, hit)  # a failed request leaves the cache empty
            raise
        self._allocated += nbytes
        self._raise_peaks()

    def _charge(self, nbytes: int, asked: int) -> None:
        if nbytes and self._budget.charge(self._device, nbytes):
            cached = self._cached
            self._flush()
            if self._budget.charge(self._device, nbytes):
                raise torch.OutOfMemoryError(self._shortage(asked, cached))

    def _flush(self) -> None:
        self._budget.credit(self._device, self._cached)
        self._cached = 0

    def _shortage(self, asked: int, flushed: int) -> str:
        total = self._budget.budget(self._device)
        free = total - self._budget.used(self._device)
        return (
            f"{self._name} is out of memory. Tried to allocate {_text(asked)}. The device has {_text(total)} in "
            f"total, of which {_text(free)} are free. Tensors hold {_text(self._allocated)}, graph pools "
            f"{_text(self._pooled)}; {_text(flushed)} of cached memory were flushed first."
        )


class _Thread(threading.local):
    charging = False
    paused = False


class _Charge(OperationMode):  # type: ignore[no-untyped-call]
    def __init__(self, memory: HostMemory) -> None:
        super().__init__()
        self._memory = memory

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            self._memory.charge(result, ())  # torch.tensor(...): its output is its input, and new to us
        elif may_allocate(func):
            self._memory.charge(result, (args, kwargs))
        return result


def _strided(tree: object) -> list[torch.Tensor]:
    return [t for t in tensors(tree) if t.layout is torch.strided]


def _text(nbytes: int) -> str:
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.2f} GiB"
    return f"{nbytes / (1 << 20):.2f} MiB" if nbytes >= 1 << 20 else f"{nbytes} bytes"
