"""Strategies that capture nothing to find out: no reserve, a rule of thumb, a flat figure."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from vmm_kv.budget import readable
from vmm_kv.estimate.probe import Estimate, Probe, check_not_negative, to_capture


@dataclass(frozen=True)
class NoReserve:
    """Graphs are ignored: what they keep comes out of what the utilization leaves free.

    Source: vLLM before #30515 (2025-12), and since then wherever the graph estimate is switched off.
    """

    name = "NoReserve"
    after_capture = False

    def estimate(self, probe: Probe) -> Estimate:
        return Estimate(0, 0, notes=("graphs are ignored",))


@dataclass(frozen=True)
class ActivationRatio:
    """The peak activation of the profile run, scaled to the largest graph: peak x (largest / profiled tokens) x factor.

    Rounded up. Source: proposed in vLLM #19480. It takes graph memory for activations that a shared pool holds once, so
    what the driver keeps for each graph is in the factor or nowhere.
    """

    factor: float = 1.0
    after_capture = False

    def __post_init__(self) -> None:
        check_not_negative(factor=self.factor)

    @property
    def name(self) -> str:
        return f"ActivationRatio({self.factor:g})"

    def estimate(self, probe: Probe) -> Estimate:
        """Raises `ValueError` if the profile run had no tokens."""
        largest = max((graph.size for graph in to_capture(probe)), default=0)
        if not largest:
            return Estimate(0, 0, notes=("no graph will be captured",))
        if probe.profiled_tokens < 1:
            raise ValueError(
                f"{self.name}: the profile run had {probe.profiled_tokens} tokens, there is nothing to scale"
            )
        ratio = Fraction(repr(float(self.factor))) * largest / probe.profiled_tokens
        size = -(-probe.peak_activation * ratio.numerator // ratio.denominator)
        told = f"{readable(probe.peak_activation)} x {largest} / {probe.profiled_tokens} tokens x {self.factor:g}"
        return Estimate(size, size, notes=(told,))


@dataclass(frozen=True)
class FlatPerGraph:
    """So many bytes for each graph. A heuristic: compare it with what capture kept (`Comparison`).

    Source: TensorRT-LLM #3362 adds 60 MB a graph (C25). Measured values go from nothing to 1.4 GiB a graph.
    """

    per_graph: int = 60_000_000
    after_capture = False

    def __post_init__(self) -> None:
        check_not_negative(per_graph=self.per_graph)

    @property
    def name(self) -> str:
        return f"FlatPerGraph({readable(self.per_graph)})"

    def estimate(self, probe: Probe) -> Estimate:
        count = len(to_capture(probe))
        told = f"{count} graphs x {readable(self.per_graph)} each, a heuristic"
        return Estimate(count * self.per_graph, count * self.per_graph, notes=(told,))


@dataclass(frozen=True)
class FlatHeadroom:
    """So many bytes in all, whatever is captured; and a part of the weights on top, where that is given.

    Source: the margin before capture asked for in vLLM #57595, and 2.3 GiB a card, later plus 0.05 of its weights, in
    KAITO #2139 (C32).
    """

    headroom: int
    weights: int = 0
    """Bytes of weights on the device."""
    part: float = 0.0
    """Of the weights."""
    after_capture = False

    def __post_init__(self) -> None:
        check_not_negative(headroom=self.headroom, weights=self.weights, part=self.part)

    @property
    def name(self) -> str:
        of_weights = f" + {self.part:g} of {readable(self.weights)}" if self.weights else ""
        return f"FlatHeadroom({readable(self.headroom)}{of_weights})"

    def estimate(self, probe: Probe) -> Estimate:
        size = self.headroom + int(Fraction(repr(float(self.part))) * self.weights)
        return Estimate(size, size, notes=(f"{readable(size)} in all, a heuristic",))
