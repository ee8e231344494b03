"""An estimate beside what happened, and the size it leads to. Bytes."""

from __future__ import annotations

from dataclasses import dataclass

from vmm_kv.budget import BudgetError, exactly, readable
from vmm_kv.estimate.probe import Estimate


@dataclass(frozen=True)
class Comparison:
    """What a strategy said and what capture kept, both as they came."""

    name: str
    estimate: Estimate
    measured_raw: int
    """What capture kept, signed."""

    @property
    def measured(self) -> int:
        """`measured_raw`, counted as 0 where it is negative."""
        return max(0, self.measured_raw)

    @property
    def error(self) -> int:
        """Above 0: set aside and never used, so the KV cache lacks it. Below: used and not set aside."""
        return self.estimate.bytes - self.measured

    @property
    def error_ratio(self) -> float | None:
        """`error` as a part of what was kept; None where nothing was."""
        return self.error / self.measured if self.measured else None

    def __str__(self) -> str:
        ratio = "" if self.error_ratio is None else f", {self.error_ratio:+.0%}"
        raw = "" if self.measured_raw >= 0 else f" (came out at {readable(self.measured_raw)})"
        head = f"{self.name}: {readable(self.estimate.bytes)} estimated, {readable(self.measured)} kept{raw}{ratio}"
        return "; ".join([head, *self.estimate.notes])


def kv_before_capture(name: str, estimate: Estimate, remaining: int, *, safety: int = 0, least: int = 1) -> int:
    """The KV cache of an engine that sizes before capture: what remains, less the estimate and a safety margin.

    For strategies whose `after_capture` is False: what the others answer is no estimate of graphs.

    `least` is what one longest request takes. Raises `BudgetError` that names the strategy where less is left.
    """
    size = remaining - estimate.to_come - safety
    if size < least:
        raise BudgetError(
            f"{name} sets {exactly(estimate.to_come)} aside for graphs, of {exactly(remaining)} that remain: "
            f"{exactly(size)} are left for a KV cache that needs {exactly(least)}, "
            f"short by {exactly(least - size)}. Capture fewer graphs, or size the cache after capture"
        )
    return size
