"""Whether graph capture is going on anywhere in this process, as far as the library knows."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vmm_kv.driver import Driver
from vmm_kv.errors import StateError

_lock = threading.Lock()
_captures = 0


@contextmanager
def capture_in_progress() -> Iterator[None]:
    """Declares that graphs are captured inside the block, on any thread of the process."""
    global _captures
    pid = os.getpid()
    with _lock:
        _captures += 1
    try:
        yield
    finally:
        if os.getpid() == pid:
            with _lock:
                _captures -= 1


def _none_in_a_forked_child() -> None:
    """The threads that were capturing are the parent's, and so is whoever held the lock."""
    global _captures, _lock
    _captures, _lock = 0, threading.Lock()


os.register_at_fork(after_in_child=_none_in_a_forked_child)


def capturing(driver: Driver) -> bool:
    """True inside `capture_in_progress()`, or where the calling thread's current stream is being captured."""
    return _captures > 0 or driver.capturing()


def refuse_while_capturing(driver: Driver, operation: str) -> None:
    """Raises `StateError` if a capture is known to be in progress. Invariant 7: before the driver is touched."""
    if capturing(driver):
        raise StateError(
            f"{operation} on {driver.name} while a graph is being captured: a mapping made or undone inside a capture "
            "can invalidate it. Do it before or after."
        )
