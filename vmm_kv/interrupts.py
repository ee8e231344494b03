"""Signals wait while the driver and the books could disagree.

Python runs a signal's handler in the main thread between any two instructions, so a Ctrl-C can come just after a driver
call and before the note that it was made. Inside `deferred()` handlers are put off; inside `allowed()`, around other
people's code, they are back. Other threads run no handlers, so there both do nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Deferral:
    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: list[int] = []

    def hold(self) -> None:
        """Puts a note-taker in the place of every handler that is Python code."""
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def let(self) -> None:
        """Puts every handler back, even if one that is back already raises meanwhile."""
        try:
            for number, handler in list(self._handlers.items()):
                signal.signal(number, handler)
                self._handlers.pop(number)  # only now: a handler that is back may raise at any point here
        finally:
            if self._handlers:
                self.let()

    def deliver(self) -> None:
        """Raises the signals that came, in order, for the handlers that are back."""
        came, self._came = self._came, []
        for number in came:
            signal.raise_signal(number)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._came.append(number)


_active: _Deferral | None = None
"""That of the main thread."""


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def deferred() -> Iterator[None]:
    """Signals that come inside are delivered at the end, an error's end too. Inside another one it does nothing."""
    global _active
    if _active is not None or not _in_main_thread():
        yield
        return
    deferral = _Deferral()
    try:
        deferral.hold()
        _active = deferral
        yield
    finally:
        _active = None
        try:
            deferral.let()
        finally:
            deferral.deliver()


@contextmanager
def allowed() -> Iterator[None]:
    """Inside `deferred()`: what came is delivered now, and what comes at once, as an error of the code inside."""
    global _active
    deferral = _active
    if deferral is None or not _in_main_thread():
        yield
        return
    _active = None
    try:
        deferral.let()
        deferral.deliver()
        yield
    finally:
        _active = deferral
        deferral.hold()
