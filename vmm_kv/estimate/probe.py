"""What a strategy is given (`Probe`), what it answers (`Estimate`), and what it is (`Strategy`). Bytes throughout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Mode = Literal["full", "piecewise", "encoder", "draft"]


@dataclass(frozen=True)
class Descriptor:
    """One graph to capture. `size` is its batch or its tokens."""

    mode: Mode
    size: int

    def __str__(self) -> str:
        return f"{self.mode} {self.size}"


class Probe(Protocol):
    """What an engine lets a strategy do before its KV cache has its size."""

    @property
    def ladder(self) -> Sequence[Descriptor]:
        """In the order of capture: the largest first within a mode."""

    @property
    def capture_enabled(self) -> bool:
        """Whether the engine will capture any of it."""

    @property
    def quantised(self) -> bool:
        """Whether the KV cache is quantised."""

    @property
    def peak_activation(self) -> int:
        """Bytes that the ordinary profile run took at its peak, above what stays."""

    @property
    def profiled_tokens(self) -> int:
        """Tokens of that run."""

    def read(self, *, flush: bool) -> int:
        """Free bytes of the device. `flush`: the framework's caches are emptied first."""

    def throwaway_pool(self) -> AbstractContextManager[Any]:
        """A pool whose graphs and memory go at the end. The engine's own pool and state are back then, also if the
        block raises."""

    def capture(self, descriptor: Descriptor, pool: Any) -> None:
        """Captures one graph that is thrown away, its warm-up first."""


@dataclass(frozen=True)
class Estimate:
    """What a strategy says that graphs will keep."""

    bytes: int
    """What to set aside. Never negative, unless the strategy is known for it."""
    raw: int
    """The same before it was counted as 0, signed."""
    captures: int = 0
    """Throw-away captures made for it."""
    samples: tuple[int, ...] = ()
    """Signed differences of readings, in the order in which they were taken."""
    retained: int = 0
    """The part of `bytes` that stays taken when the throw-away captures are gone. Readings from then on show it."""
    notes: tuple[str, ...] = ()
    """How it came about: method, value per graph, count."""

    @property
    def to_come(self) -> int:
        """`bytes` less `retained`: what a sizing from readings after the estimate has still to set aside."""
        return self.bytes - self.retained


class Strategy(Protocol):
    """One way to size around graphs."""

    @property
    def name(self) -> str:
        """The class and its parameters, as a table shows it."""

    @property
    def after_capture(self) -> bool:
        """Whether the cache gets its size after capture. `estimate` is then what is left free for what comes later."""

    def estimate(self, probe: Probe) -> Estimate:
        """Bytes to set aside. Makes captures only through the probe; what it raises leaves the engine as it was."""


def check_not_negative(**given: float | None) -> None:
    """`ValueError` that names a parameter that is below 0, not a number or without bound; None is not given."""
    for name, number in given.items():
        if number is not None and not 0 <= number < math.inf:
            raise ValueError(f"{name} must be a number of 0 or more, got {number}")


def to_capture(probe: Probe) -> tuple[Descriptor, ...]:
    """The graphs that the engine will really capture, in order; none where capture is off."""
    return tuple(probe.ladder) if probe.capture_enabled else ()


def by_mode(graphs: Sequence[Descriptor]) -> dict[Mode, list[Descriptor]]:
    """Each mode's graphs, the largest first whatever order they came in, the modes in the order of capture.

    Largest first is what the first two are good for as samples: the largest sets the size of the shared pool (C27).
    """
    modes: dict[Mode, list[Descriptor]] = {}
    for graph in graphs:
        modes.setdefault(graph.mode, []).append(graph)
    return {mode: sorted(own, key=lambda graph: -graph.size) for mode, own in modes.items()}
