"""One line of the comparison: what a strategy did on a ladder, in bytes, seconds and counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vmm_kv.estimate import Comparison, Estimate

Outcome = Literal["served", "out of memory", "no room", "failed"]
"""`no room`: it refused to start, since what it set aside leaves too little for a KV cache. `failed`: anything else."""


@dataclass
class Row:
    """Filled in as the start-up goes on; None is what it did not get to. Bytes unless said otherwise."""

    strategy: str
    ladder: str
    outcome: Outcome = "failed"
    where: str | None = None
    """The phase, and what it was at, where it did not come to its end."""
    error_text: str | None = None
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each, in order. `serve` is no part of the start-up."""
    passes: int = 0
    """Runs of a model during the start-up that were no replay, warm-ups and captures each counted."""
    graphs: int = 0
    """Graphs that the engine serves with."""
    captures: int = 0
    """Graphs captured, those that were thrown away included."""
    estimate: int | None = None
    """What the strategy sets aside for graphs. None for one that does not guess."""
    estimate_raw: int | None = None
    """The same as it came out, signed; of a fixed headroom, all of it."""
    samples: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    kept: int | None = None
    """What capture really kept, raw and signed."""
    kept_here: bool = False
    """Measured in this start, and not taken from the measuring run."""
    blocks: int | None = None
    block_bytes: int = 0
    tokens: int | None = None
    """That the KV cache holds."""
    total: int = 0
    requested: int = 0
    peak_used: int | None = None
    """The most of the device that was in use, serving included."""
    transient: int | None = None
    """What a worst step takes on top."""
    oracle_blocks: int | None = None
    generated: int | None = None
    """Tokens."""
    steps: int | None = None
    """Decode steps that serving took."""
    preemptions: int | None = None
    recomputed: int | None = None
    """Tokens."""

    @property
    def start_seconds(self) -> float:
        return sum(seconds for name, seconds in self.phases.items() if name != "serve")

    @property
    def error(self) -> int | None:
        """Estimate minus kept: above 0 for too much, below for too little."""
        if self.estimate is None or self.kept is None:
            return None
        return Comparison(self.strategy, Estimate(self.estimate, self.estimate), self.kept).error

    @property
    def stranded(self) -> int | None:
        """KV bytes that the oracle has and this does not; below 0: taken, and needed elsewhere."""
        if self.blocks is None or self.oracle_blocks is None:
            return None
        return (self.oracle_blocks - self.blocks) * self.block_bytes

    @property
    def stranded_part(self) -> float | None:
        """Of the oracle's KV cache."""
        if self.stranded is None or not self.oracle_blocks:
            return None
        return self.stranded / (self.oracle_blocks * self.block_bytes)

    @property
    def tokens_per_second(self) -> float | None:
        if self.generated is None or not self.phases.get("serve"):
            return None
        return self.generated / self.phases["serve"]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, the derived figures included."""
        derived = ("start_seconds", "error", "stranded", "stranded_part", "tokens_per_second")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Row:
        """Of `to_dict`, also after it went through JSON, which has lists for tuples."""
        own: dict[str, Any] = {name: value for name, value in data.items() if name in cls.__dataclass_fields__}
        return cls(**{**own, "samples": tuple(own["samples"]), "notes": tuple(own["notes"])})


@dataclass(frozen=True)
class Known:
    """What the measuring run of a ladder found: a whole start-up with the smallest cache. Bytes."""

    kept: int
    """By capture, raw."""
    weights: int
    """What the process holds before capture, and after a flush."""
    transient: int
    """The peak of one worst step above what stays, after capture."""
    capture_peak: int
    """The most that capture took: its warm-up runs beside the graphs there already."""
    blocks: int
    """The most that fit beside all that in an engine that makes its cache before it captures, with no margin."""
    graphs: int
    """That the ladder comes to."""
    granule: int
    """What the device maps memory in: no reserve-then-map comes closer to the last byte."""
