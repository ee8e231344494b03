"""What a start-up did and found, as data, as JSON and as a table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from vmm_kv.budget import Plan, readable
from vmm_kv.measure import Footprint, MemoryReading


@dataclass(frozen=True)
class CommitTry:
    """One attempt to take the memory. `error` is None for the one that succeeded."""

    blocks: int
    error: str | None


@dataclass(frozen=True)
class StartupReport:
    """The result of `Startup.commit`. Bytes and seconds unless said otherwise; what is negative is shown so."""

    device: str
    backing: str
    """`"prefix"`, `"alias"`, or `"none"` for a cache committed from its bare reservation."""
    plan: Plan
    """Every term of the sizing of the last try."""
    planned_blocks: int
    """What the first sizing, before any retry, came to."""
    blocks: int
    """What was granted: the usable count."""
    capacity: int
    """Blocks that there are addresses for."""
    profile_blocks: int
    """Blocks backed while graphs were captured. With an alias every one is."""
    reserved_bytes: int
    mapped_bytes: int
    readings: tuple[MemoryReading, ...]
    footprints: tuple[Footprint, ...]
    """One for each `capture()` block."""
    captures: int
    """Graphs captured, counted."""
    tries: tuple[CommitTry, ...]
    phases: dict[str, float]
    """Seconds of each phase."""
    driver_calls: dict[str, int]
    """Calls of each driver primitive from the first reading to the end of the commit."""

    @property
    def footprint_raw(self) -> int:
        """Bytes that all captures kept, signed. In `plan.own` already."""
        return sum(footprint.raw for footprint in self.footprints)

    @property
    def footprint(self) -> int:
        """`footprint_raw`, counted as 0 where it is negative."""
        return max(0, self.footprint_raw)

    @property
    def headroom(self) -> int:
        """Bytes left free on purpose, all items."""
        return sum(size for _, size in self.plan.terms.headroom)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, the derived figures included."""
        derived = {"footprint": self.footprint, "footprint_raw": self.footprint_raw, "headroom": self.headroom}
        return {**asdict(self), **derived}

    def to_json(self) -> str:
        """`to_dict` as JSON text, indented."""
        return json.dumps(self.to_dict(), indent=2)

    def table(self) -> str:
        """For people: phases, every term of the sizing, and the counts, as plain text."""
        plan = self.plan
        phases = [f"  {name:<28} {seconds:9.3f} s" for name, seconds in self.phases.items()]
        terms = [f"  {name:<28} {readable(size):>14}" for name, size in plan.itemised()]
        tries = [f"  {t.blocks} blocks: {t.error or 'granted'}" for t in self.tries]
        step = "at capacity" if plan.next_step is None else f"the next block costs {readable(plan.next_step)}"
        lines = [
            f"start-up on {self.device}, {self.backing} backing",
            *phases,
            "memory",
            *terms,
            f"  {'captures kept (in own)':<28} {readable(self.footprint_raw):>14}",
            f"blocks: {self.profile_blocks} while capturing, {self.planned_blocks} planned, {self.blocks} granted, "
            f"{self.capacity} reserved",
            f"bytes: {readable(self.reserved_bytes)} reserved, {readable(self.mapped_bytes)} mapped",
            f"bound by {plan.bound_by} ({plan.status}); {readable(plan.leftover)} left over, {step}",
            f"{self.captures} graphs captured, {sum(self.driver_calls.values())} driver calls",
            *(tries if len(tries) > 1 else ()),
            *(f"note: {note}" for note in plan.notes),
            *(f"advice: {line}" for line in plan.advice),
        ]
        return "\n".join(lines)
