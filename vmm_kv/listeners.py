"""Telling others that pages change behind addresses: the engine, transports, anything keyed by physical memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from vmm_kv.driver import Driver, Span
from vmm_kv.errors import DriverGone, FaultedError
from vmm_kv.gate import Gate
from vmm_kv.interrupts import allowed

log = logging.getLogger(__name__)


class RemapListener(Protocol):
    """What a listener offers. Spans are half-open intervals of absolute addresses, in order.

    It is called inside the operation, from the operating thread, with no lock of the library's held: it may read the
    cache, and an operation on the same cache raises `StateError`.
    """

    def before_unmap(self, spans: Sequence[Span], generation: int) -> None:
        """The pages behind `spans` are about to go: deregister. Raising stops the operation."""

    def after_map(self, spans: Sequence[Span], generation: int) -> None:
        """New pages lie behind `spans`: register. Errors are collected and logged; the operation stands."""


class Listeners:
    """Those who hear of one cache's remaps, in the order in which they were added (invariant 8)."""

    def __init__(self, driver: Driver, gate: Gate, quiesce: Callable[[], None] | None) -> None:
        self._driver = driver
        self._gate = gate
        self._quiesce = quiesce
        self._listeners: tuple[RemapListener, ...] = ()
        self.errors: tuple[Exception, ...] = ()
        """What was raised after the last map."""

    def add(self, listener: RemapListener) -> None:
        for method in ("before_unmap", "after_map"):
            if not callable(getattr(listener, method, None)):
                raise TypeError(f"{listener!r} is no remap listener: it has no method {method}")
        self._listeners = (*self._listeners, listener)

    @contextmanager
    def _foreign_code(self, operation: str) -> Iterator[None]:
        """The gate's callbacks, where there is anybody to call: else other threads simply wait."""
        if self._quiesce or self._listeners:
            with self._gate.callbacks(operation), allowed():
                yield
        else:
            yield

    @contextmanager
    def around_unmap(self, operation: str, spans: Sequence[Span], generation: Callable[[], int]) -> Iterator[None]:
        """Around a change that takes the pages behind `spans` away.

        The engine is quiet and the device idle before the first listener hears of it (invariant 7). If the change
        fails and is undone, listeners hear that the pages are there again.
        """
        if not spans:
            yield
            return
        listeners = self._listeners
        with self._foreign_code(operation):
            if self._quiesce:
                self._quiesce()
            self._driver.synchronize()
            _announce_unmap(listeners, spans, generation())
        try:
            yield
        except FaultedError:
            raise
        except BaseException:
            with self._foreign_code(operation):
                self.errors = _announce_map(listeners, spans, generation())
            raise

    def mapped(self, operation: str, spans: Sequence[Span], generation: int) -> None:
        """Tells of new pages. What listeners raise is left in `errors`."""
        self.errors = ()
        if spans:
            with self._foreign_code(operation):
                self.errors = _announce_map(self._listeners, spans, generation)

    def closing(self, spans: Sequence[Span], generation: int) -> list[Exception]:
        """The last words: quiesce, wait, tell everyone. Goes through all of it and returns what failed."""
        errors: list[Exception] = []
        if not spans:
            return errors
        calls: list[Callable[[], None]] = [self._quiesce] if self._quiesce else []
        calls.append(self._driver.synchronize)
        calls += [partial(listener.before_unmap, spans, generation) for listener in self._listeners]
        with self._foreign_code("close"):
            for call in calls:
                try:
                    call()
                except DriverGone:
                    pass  # nothing runs on a device without a driver
                except Exception as error:
                    errors.append(error)
        return errors


def _announce_unmap(listeners: Sequence[RemapListener], spans: Sequence[Span], generation: int) -> None:
    """Tells each in order. If one raises, those told before it hear that the pages are there after all."""
    for count, listener in enumerate(listeners):
        try:
            listener.before_unmap(spans, generation)
        except BaseException:
            _announce_map(listeners[:count], spans, generation)
            raise


def _announce_map(listeners: Sequence[RemapListener], spans: Sequence[Span], generation: int) -> tuple[Exception, ...]:
    errors: list[Exception] = []
    for listener in listeners:
        try:
            listener.after_map(spans, generation)
        except Exception as error:
            log.warning("a remap listener failed after a map: %r", error)
            errors.append(error)
    return tuple(errors)
