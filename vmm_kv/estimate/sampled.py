"""Strategies that capture the first two graphs of a mode and extrapolate to the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vmm_kv.budget import readable
from vmm_kv.estimate.probe import Descriptor, Estimate, Probe, by_mode, check_not_negative, to_capture

MIB = 1 << 20
_SAMPLES = 2


@dataclass(frozen=True)
class SampledExtrapolation:
    """The first full graph, plus the second one's sample, at least the floor, for each of the rest.

    A sample is what free memory fell by during one capture, signed: the first is negative where the capture flushed a
    cache that earlier work had filled, since the reading before it counted those bytes as used. Graphs of other modes
    are all captured and measured. `floor`: bytes a graph; if none is given 1 MiB, and 16 MiB where the KV cache is
    quantised (proposed in vLLM #60673). `flush`: the allocator's caches are emptied before each reading, the fix
    proposed there.

    Source: vLLM's V2 runner, #53306: max(0, measured - sampled + first + (n - 1) x max(second, floor)).
    """

    floor: int | None = None
    flush: bool = False
    after_capture = False

    def __post_init__(self) -> None:
        check_not_negative(floor=self.floor)

    @property
    def name(self) -> str:
        return _name(self)

    def estimate(self, probe: Probe) -> Estimate:
        floor = self._floor(probe)
        modes = by_mode(to_capture(probe))
        full = modes.pop("full", [])
        rest = [graph for own in modes.values() for graph in own]
        if not full and not rest:
            return Estimate(0, 0, notes=("no graph will be captured",))
        with probe.throwaway_pool() as pool:
            samples = _sample(probe, pool, full[:_SAMPLES], flush=self.flush)
            others = _sample(probe, pool, rest, flush=self.flush)
        raw = sum(others) + _extrapolated(samples, len(full), floor)
        notes = [_told(samples, len(full), floor)] if full else []
        notes += [f"{len(rest)} graphs of other modes measured: {readable(sum(others))}"] if rest else []
        captures = len(samples) + len(others)
        return Estimate(max(0, raw), raw, captures, (*samples, *others), notes=tuple(notes))

    def _floor(self, probe: Probe) -> int:
        if self.floor is not None:
            return self.floor
        return 16 * MIB if probe.quantised else MIB


@dataclass(frozen=True)
class SampledPerMode:
    """The same two samples in every mode: the largest first sample, plus each mode's marginals added up.

    Marginals of graphs that share one pool are added as if each had memory of its own, over modes too, so it may be far
    above what is kept (C18: 3.1 times less KV). Nothing is clamped: with negative samples the estimate is negative, and
    the KV cache then gets more than if no graph were captured (vLLM #44745).

    Source: vLLM's V1 runner, #30515, formula quoted in #45178.
    """

    floor: int = MIB
    flush: bool = False
    after_capture = False

    def __post_init__(self) -> None:
        check_not_negative(floor=self.floor)

    @property
    def name(self) -> str:
        return _name(self)

    def estimate(self, probe: Probe) -> Estimate:
        modes = by_mode(to_capture(probe))
        if not modes:
            return Estimate(0, 0, notes=("no graph will be captured",))
        with probe.throwaway_pool() as pool:
            taken = {mode: _sample(probe, pool, own[:_SAMPLES], flush=self.flush) for mode, own in modes.items()}
        shared = max(samples[0] for samples in taken.values())
        raw = shared + sum(_marginals(taken[mode], len(own), self.floor) for mode, own in modes.items())
        every = tuple(sample for samples in taken.values() for sample in samples)
        notes = tuple(f"{mode}: {_told(taken[mode], len(own), self.floor)}" for mode, own in modes.items())
        return Estimate(raw, raw, len(every), every, notes=notes)


def _name(strategy: SampledExtrapolation | SampledPerMode) -> str:
    floor = "floor by cache" if strategy.floor is None else readable(strategy.floor)
    return f"{type(strategy).__name__}({floor}{', flushed' if strategy.flush else ''})"


def _sample(probe: Probe, pool: Any, graphs: Sequence[Descriptor], *, flush: bool) -> list[int]:
    """What free memory fell by during the capture of each."""
    samples = []
    for graph in graphs:
        before = probe.read(flush=flush)
        probe.capture(graph, pool)
        samples.append(before - probe.read(flush=flush))
    return samples


def _extrapolated(samples: Sequence[int], count: int, floor: int) -> int:
    return (samples[0] if samples else 0) + _marginals(samples, count, floor)


def _marginals(samples: Sequence[int], count: int, floor: int) -> int:
    """What all graphs of a mode but the first come to."""
    return max(samples[1], floor) * (count - 1) if len(samples) > 1 else 0


def _told(samples: Sequence[int], count: int, floor: int) -> str:
    if len(samples) < 2:
        return f"one graph, measured: {readable(samples[0])}"
    each = max(samples[1], floor)
    return (
        f"{count} graphs, the largest first: {readable(samples[0])} + {count - 1} x {readable(each)} "
        f"(second sample {readable(samples[1])}, floor {readable(floor)})"
    )
