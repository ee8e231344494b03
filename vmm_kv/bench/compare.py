"""Runs the strategies, each start-up in a fresh process, and puts the rows and the paired runs together."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vmm_kv.bench import strategies
from vmm_kv.bench.row import Known, Row
from vmm_kv.bench.scenario import Scenario
from vmm_kv.bench.worker import MEASURE
from vmm_kv.errors import VmmError

Tell = Callable[[str], None]
_SECONDS = 600
# The C library keeps what is freed, as an accelerator's allocator does: giving large tensors back to the system and
# faulting them in again takes time that an accelerator would not need.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}


@dataclass(frozen=True)
class Pair:
    """The two start-ups that are compared in time, run one right after the other. Seconds."""

    ours: Mapping[str, float]
    full: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """(capture + map) of ReserveThenMap over (profiling capture + capture) of FullProfile."""
        return (self.ours["capture"] + self.ours["commit"]) / (self.full["estimate"] + self.full["capture"])

    @property
    def whole(self) -> float:
        """The same of the whole start-ups."""
        return _startup(self.ours) / _startup(self.full)


@dataclass(frozen=True)
class Comparison:
    """All that was run."""

    machine: str
    device: str
    emulated: bool
    """The driver was an emulation, so nothing is said about a GPU."""
    scenarios: tuple[Scenario, ...]
    known: Mapping[str, Known]
    """By ladder."""
    rows: tuple[Row, ...]
    pairs: tuple[Pair, ...]
    pair_ladder: str
    jobs: int
    """Ladders that ran at a time."""

    @property
    def ratio(self) -> float | None:
        """Median over the pairs."""
        return statistics.median(pair.ratio for pair in self.pairs) if self.pairs else None

    @property
    def whole_ratio(self) -> float | None:
        return statistics.median(pair.whole for pair in self.pairs) if self.pairs else None

    def of(self, ladder: str) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.ladder == ladder)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        pairs = [{**asdict(pair), "ratio": pair.ratio, "whole_ratio": pair.whole} for pair in self.pairs]
        return {
            "machine": self.machine,
            "jobs": self.jobs,
            "device": self.device,
            "emulated": self.emulated,
            "units": "bytes, seconds, counts",
            "scenarios": [scenario.to_dict() for scenario in self.scenarios],
            "measured": {ladder: asdict(known) for ladder, known in self.known.items()},
            "rows": [row.to_dict() for row in self.rows],
            "paired": {
                "ladder": self.pair_ladder,
                "numerator": "capture + map of ReserveThenMap",
                "denominator": "profiling capture + capture of FullProfile",
                "median_ratio": self.ratio,
                "median_ratio_whole_start": self.whole_ratio,
                "pairs": pairs,
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Comparison:
        """Of `to_dict`, also after it went through JSON."""
        return cls(
            machine=data["machine"],
            device=data["device"],
            emulated=data["emulated"],
            scenarios=tuple(Scenario.from_dict(scenario) for scenario in data["scenarios"]),
            known={ladder: Known(**known) for ladder, known in data["measured"].items()},
            rows=tuple(Row.from_dict(row) for row in data["rows"]),
            pairs=tuple(Pair(pair["ours"], pair["full"]) for pair in data["paired"]["pairs"]),
            pair_ladder=data["paired"]["ladder"],
            jobs=data["jobs"],
        )


class _Ended(Exception):
    """A worker that has nothing to say."""


def compare(
    scenarios: Sequence[Scenario], names: Sequence[str], pairs: int, jobs: int = 1, tell: Tell = lambda text: None
) -> Comparison:
    """Runs every strategy named on every scenario, `jobs` scenarios at a time, and then, alone, the pairs on the first.

    Raises `VmmError` where a measuring run or a pair does not come to its end; what happens to a row is in the row.
    """
    known: dict[str, Known] = {}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        for found, facts, done in pool.map(lambda scenario: _ladder(scenario, names, Path(folder), tell), scenarios):
            known[facts["ladder"]] = found
            rows += done
    paired = tuple(_pairs(scenarios[0], known[scenarios[0].ladder.name], pairs, tell))
    return Comparison(
        machine=machine(),
        device=facts["device"],
        emulated=facts["emulated"],
        scenarios=tuple(scenarios),
        known=known,
        rows=tuple(rows),
        pairs=paired,
        pair_ladder=scenarios[0].ladder.name,
        jobs=jobs,
    )


def machine() -> str:
    """What the times depend on, without a name that tells which machine it is."""
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, one thread a process"
    )


def _ladder(
    scenario: Scenario, names: Sequence[str], folder: Path, tell: Tell
) -> tuple[Known, dict[str, Any], list[Row]]:
    """All strategies on one ladder, one after the other."""
    tell(f"{scenario.ladder.name}: measuring run")
    try:
        facts = _process(scenario, MEASURE)
    except _Ended as error:
        raise VmmError(f"{scenario.ladder.name}: the measuring run: {error}") from None
    known = Known(**facts["known"])
    plan = folder / f"{scenario.ladder.name}.json"
    rows = []
    for name in names:
        tell(f"{scenario.ladder.name}: {name}")
        extra: dict[str, Any] = {"save": str(plan)} if name == strategies.OURS else {}
        if name == strategies.PLAN:
            if not plan.exists():
                _row(scenario, strategies.OURS, known, save=str(plan))
            extra = {"plan": str(plan)}
        rows.append(_row(scenario, name, known, **extra))
    return known, {**facts, "ladder": scenario.ladder.name}, rows


def _pairs(scenario: Scenario, known: Known, count: int, tell: Tell) -> Iterator[Pair]:
    """In turn, and who goes first in turn too."""
    for pair in range(count):
        tell(f"pair {pair + 1} of {count}")
        order = (strategies.OURS, strategies.FULL) if pair % 2 == 0 else (strategies.FULL, strategies.OURS)
        rows = {name: _row(scenario, name, known, serve=False) for name in order}
        for row in rows.values():
            if row.outcome != "served":
                raise VmmError(f"a paired run of {row.strategy} did not come to its end: {row.where}, {row.error_text}")
        yield Pair(rows[strategies.OURS].phases, rows[strategies.FULL].phases)


def _row(scenario: Scenario, name: str, known: Known, **extra: Any) -> Row:
    try:
        return Row.from_dict(_process(scenario, name, known, **extra))
    except _Ended as error:
        row = Row(name, scenario.ladder.name, kept=known.kept, oracle_blocks=known.blocks)
        row.where, row.error_text = "somewhere", str(error)
        return row


def _process(scenario: Scenario, name: str, known: Known | None = None, **extra: Any) -> dict[str, Any]:
    """What the worker says. Raises `_Ended` if it did not come to its end, whatever ended it."""
    task = {"scenario": scenario.to_dict(), "strategy": name, "known": known and asdict(known), **extra}
    command = [sys.executable, "-m", "vmm_kv.bench.worker"]
    environment = {**_ALLOCATOR, **os.environ}
    try:
        done = subprocess.run(
            command, input=json.dumps(task), capture_output=True, text=True, env=environment, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise _Ended(f"no end after {_SECONDS} s") from None
    except OSError as error:
        raise _Ended(f"it could not be started: {error}") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise _Ended(f"the process ended with status {done.returncode}: {last}")
    try:
        return dict(json.loads(lines[-1]))
    except (TypeError, ValueError):
        raise _Ended(f"the process ended well, but its last word is no row: {lines[-1][:80]!r}") from None


def _startup(phases: Mapping[str, float]) -> float:
    return sum(seconds for name, seconds in phases.items() if name != "serve")
