"""One operation at a time on a cache, from any thread, with no lock held while other people's code runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from vmm_kv.errors import StateError
from vmm_kv.interrupts import allowed, deferred, waiting

T = TypeVar("T")
_LOOK_S = 0.05


class Gate:
    """An operation waits for one that is running, but not for the callbacks of one: there it is refused.

    Waiting for a callback could wait for ever, since the callback may itself wait for the thread that asks.
    Signals are put off from before the lock is taken until after it is let go, callbacks and the wait excepted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calling_back: str | None = None

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Raises `StateError` while another operation runs its callbacks, its own thread's among them."""
        with deferred():
            while not self._lock.acquire(timeout=_LOOK_S):
                if waiting():
                    allowed(lambda: None)  # a Ctrl-C ends the wait
            try:
                if self._calling_back:
                    raise StateError(f"{name} while {self._calling_back} is in its callbacks: wait for it to return")
                try:
                    yield
                finally:
                    self._calling_back = None  # not in `callbacks`: a signal can come just as it has the lock again
            finally:
                self._lock.release()

    def callbacks(self, operation: str, call: Callable[[], T]) -> T:
        """Inside `operation(name)`: lets go of the lock for other people's code, and takes it again."""
        self._calling_back = operation
        self._lock.release()
        try:
            return allowed(call)
        finally:
            self._lock.acquire()
