"""One operation at a time on a cache, from any thread, with no lock held while other people's code runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vmm_kv.errors import StateError


class Gate:
    """An operation waits for one that is running, but not for the callbacks of one: there it is refused.

    Waiting for a callback could wait for ever, since the callback may itself wait for the thread that asks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calling_back: str | None = None

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Raises `StateError` while another operation runs its callbacks, its own thread's among them."""
        with self._lock:
            if self._calling_back:
                raise StateError(f"{name} while {self._calling_back} is in its callbacks: wait for it to return")
            yield

    @contextmanager
    def callbacks(self, operation: str) -> Iterator[None]:
        """Inside `operation(name)`: lets go of the lock for other people's code, and takes it again."""
        self._calling_back = operation
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self._calling_back = None
