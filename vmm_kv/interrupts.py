"""Signals wait while the driver and the books could disagree.

Python runs a signal's handler in the main thread between any two instructions, so a Ctrl-C can come just after a driver
call and before the note that it was made. Inside `deferred()` handlers are put off; inside `allowed()`, around other
people's code, they are back. Other threads run no handlers, so there both do nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
_SIGNALS = tuple(int(number) for number in signal.valid_signals())


class _Deferral:
    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: list[int] = []

    def hold(self) -> None:
        """Puts a note-taker in the place of every handler that is Python code, even if one of them raises meanwhile."""
        complete = False
        try:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler) and handler != self._note:
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
            complete = True
        finally:
            if not complete:
                self.hold()

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
        """Calls the handlers, which are back, of the signals that came, in order; every one, even if one raises.

        The signals are not sent again: an event loop has seen them, by its wake-up descriptor, when they came.
        """
        try:
            while self._came:
                handler = signal.getsignal(number := self._came.pop(0))
                if callable(handler):
                    handler(number, sys._getframe())
        finally:
            if self._came:
                self.deliver()

    @property
    def waiting(self) -> bool:
        return bool(self._came)

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


def allowed(call: Callable[[], T]) -> T:
    """Runs other people's code inside `deferred()`: what came is delivered first, and what comes at once.

    A function, since a signal can come between the end of a `with` block and the first line of what ends it.
    """
    global _active
    deferral = _active
    if deferral is None or not _in_main_thread():
        return call()
    try:
        _active = None
        deferral.let()
        deferral.deliver()
        return call()
    finally:
        _active = deferral
        try:
            deferral.hold()
        finally:
            deferral.hold()  # a signal just before the first line of the other


def waiting() -> bool:
    """Whether a signal has come that `deferred()` holds back from this thread."""
    return _active is not None and _in_main_thread() and _active.waiting


def _let_in_a_forked_child() -> None:
    """Another thread forked while the main thread was in an operation, which nobody ends in the child."""
    global _active
    deferral, _active = _active, None
    if deferral is not None and threading.current_thread() is threading.main_thread():
        deferral.let()


os.register_at_fork(after_in_child=_let_in_a_forked_child)
