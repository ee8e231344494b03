"""Telling others that pages change behind addresses: the engine, transports, anything keyed by physical memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from vmm_kv.driver import Driver, Span
from vmm_kv.errors import DriverGone, FaultedError
from vmm_kv.gate import Gate

log = logging.getLogger(__name__)
T = TypeVar("T")


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
        if isinstance(listener, type):
            raise TypeError(f"{listener!r} is a class: a remap listener is an instance of it")
        for method in ("before_unmap", "after_map"):
            if not callable(getattr(listener, method, None)):
                raise TypeError(f"{listener!r} is no remap listener: it has no method {method}")
        self._listeners = (*self._listeners, listener)

    def remove(self, listener: RemapListener) -> None:
        left = tuple(other for other in self._listeners if other is not listener)
        if len(left) == len(self._listeners):
            raise ValueError(f"{listener!r} is no listener of this cache")
        self._listeners = left

    def _foreign_code(self, operation: str, call: Callable[[], T]) -> T:
        """The gate's callbacks, where there is anybody to call: else other threads simply wait."""
        if self._quiesce or self._listeners:
            return self._gate.callbacks(operation, call)
        return call()

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

        def announce() -> None:
            if self._quiesce:
                self._quiesce()
            self._driver.synchronize()
            _announce_unmap(listeners, spans, generation())

        self._foreign_code(operation, announce)
        try:
            yield
        except FaultedError:
            raise
        except BaseException:
            self.errors = self._foreign_code(operation, lambda: _announce_map(listeners, spans, generation()))
            raise

    def mapped(self, operation: str, spans: Sequence[Span], generation: int) -> None:
        """Tells of new pages. What listeners raise is left in `errors`."""
        self.errors = ()
        if spans:
            self.errors = self._foreign_code(operation, lambda: _announce_map(self._listeners, spans, generation))

    def closing(self, spans: Sequence[Span], generation: int) -> list[Exception]:
        """The last words: quiesce, wait, tell everyone. Goes through all of it and returns what failed.

        What is no `Exception` (a Ctrl-C) stops it: those told before hear that the pages are there after all.
        """
        errors: list[Exception] = []
        if not spans:
            return errors
        listeners, told = self._listeners, 0

        def tell() -> None:
            nonlocal told
            if self._quiesce:
                with _collecting(errors):
                    self._quiesce()
            with _collecting(errors):
                self._driver.synchronize()
            for listener in listeners:
                with _collecting(errors):
                    listener.before_unmap(spans, generation)
                told += 1

        try:
            self._foreign_code("close", tell)
        except BaseException:
            self._foreign_code("close", lambda: _announce_map(listeners[:told], spans, generation))
            raise
        return errors


@contextmanager
def _collecting(errors: list[Exception]) -> Iterator[None]:
    try:
        yield
    except DriverGone:
        pass  # nothing runs on a device without a driver
    except Exception as error:
        errors.append(error)


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
