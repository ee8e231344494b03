"""The three ways to start: size and then capture, capture and then size, and the run that measures for the oracle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from vmm_kv.bench import strategies
from vmm_kv.bench.engine import BenchEngine, Models, profile_blocks
from vmm_kv.bench.probe import EngineProbe
from vmm_kv.bench.row import Known, Row
from vmm_kv.bench.scenario import Scenario
from vmm_kv.budget import BudgetError, exactly, requested_bytes, transient
from vmm_kv.device import Device
from vmm_kv.estimate import Estimate, PostCaptureFixedHeadroom, StartupPlan, Strategy, kv_before_capture
from vmm_kv.fingerprint import Fingerprint
from vmm_kv.layout import most_blocks
from vmm_kv.measure import Footprint, MemoryReading, flush, plan_from_readings, step_peak
from vmm_kv.request import Request
from vmm_kv.startup import Startup
from vmm_kv.tensor_spec import TensorSpec

_SEGMENT = 2 << 20
"""Bytes; torch's allocator takes large tensors from a GPU in multiples of it."""
_GRAIN = 512


class Start:
    """One start-up of the engine on a device of its own, with what it did written into `row`."""

    def __init__(self, scenario: Scenario, device: Device, row: Row, *, serve: bool = True) -> None:
        self.scenario, self.device, self.row = scenario, device, row
        self._serves = serve
        self.phase = "open"
        self.engine: BenchEngine | None = None
        self.request = Request(utilization=scenario.utilization)
        self.readings = [device.reading("start")]
        self._captures = device.captures
        row.total = device.total_bytes

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        self.phase = phase
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.row.phases[phase] = self.row.phases.get(phase, 0.0) + time.perf_counter() - begin

    def where(self) -> str:
        return f"{self.phase}: {self.engine.doing}" if self.engine else self.phase

    def read(self, label: str) -> MemoryReading:
        """After a flush."""
        flush(self.device.memory)
        self.readings.append(self.device.reading(label))
        return self.readings[-1]

    # What all starts have in common.

    def load(self) -> Models:
        """The weights, and the block that stands for the rest of a larger model's."""
        models = Models(self.scenario, self.device.torch_device)
        flush(self.device.memory)
        now = self.device.reading("weights")
        spare = now.free - (now.total - self._requested()) - self.scenario.room
        if spare < 0:
            raise BudgetError(
                f"{exactly(now.free)} are free beside the weights, less than the room of {exactly(self.scenario.room)}"
            )
        self._rest_of_weights = torch.empty(spare, dtype=torch.uint8, device=self.device.torch_device)
        return models

    def profiled(self, engine: BenchEngine) -> int:
        """One worst step, eagerly. Returns the bytes that it takes above what stays, and leaves the caches filled."""
        memory = self.device.memory
        flush(memory)
        before = memory.reserved()
        with step_peak(memory) as peak:
            engine.worst_step()
        return transient(peak.reserved, before)

    def counted(self) -> None:
        """Notes what was run and captured up to now."""
        if self.engine:
            self.row.graphs, self.row.passes = self.engine.graphs, self.engine.passes
        self.row.captures = self.device.captures - self._captures

    def sized(self, blocks: int, specs: list[TensorSpec]) -> None:
        self.row.blocks, self.row.tokens = blocks, blocks * self.scenario.block_size
        self.row.block_bytes = sum(spec.block_bytes for spec in specs)

    def serve(self, engine: BenchEngine, blocks: int) -> None:
        self.row.outcome = "served"
        if not self._serves:
            return
        self.row.outcome = "failed"
        engine.open(blocks)
        with self.timed("serve"):
            served = engine.serve()
        self.row.generated, self.row.preemptions = served.generated, served.preemptions
        self.row.recomputed, self.row.steps = served.recomputed, served.steps
        self.row.outcome = "served"

    # The ways to start.

    def guess(self, name: str, plan: Path | None, known: Known) -> None:
        """Sizes the cache with an estimate, or as the oracle says, and then captures."""
        with self.timed("load"):
            models = self.load()
        specs = models.specs(self.scenario)
        self.engine = engine = BenchEngine(
            models, small_cache(specs, self.scenario, self.device), self.device, self.scenario
        )
        if name == strategies.ORACLE:
            blocks = known.blocks
            self.row.requested = self._requested()
        else:
            blocks = self._guessed_blocks(engine, specs, name, plan)
        self.sized(blocks, specs)
        engine.use_cache(())
        engine.doing = "making the cache"
        with self.timed("allocate KV"):
            engine.use_cache(ordinary_cache(specs, blocks, self.device))
        before = self.read("before capture")
        with self.timed("capture"):
            engine.capture()
        self.row.kept, self.row.kept_here = Footprint(before, self.read("captured")).raw, True
        self.counted()
        self.serve(engine, blocks)

    def _guessed_blocks(self, engine: BenchEngine, specs: list[TensorSpec], name: str, plan: Path | None) -> int:
        self.read("loaded")
        with self.timed("profile"):
            step = self.profiled(engine)
        strategy = self._strategy(name, plan)
        with self.timed("estimate"):
            found = strategy.estimate(EngineProbe(engine, step, self.scenario.prefills * (self.scenario.longest - 1)))
        self._note(found)
        engine.use_cache(())
        return self._fitting(specs, name, found, step)

    def _fitting(self, specs: list[TensorSpec], name: str, found: Estimate, step: int) -> int:
        now = self.read("profiled")
        grain = _SEGMENT if self.device.torch_device.type == "cuda" else _GRAIN
        smallest = min_blocks(self.scenario)

        def cost(blocks: int) -> int:
            return sum(-(-spec.block_bytes * blocks // grain) * grain for spec in specs)

        capacity = now.total // sum(spec.block_bytes for spec in specs)

        def within(size: int) -> int:
            return most_blocks(cost, size, capacity)

        sizing = plan_from_readings(
            self.readings,
            request=self.request,
            capacity=capacity,
            cost=cost,
            blocks_within=within,
            peak_of_step=now.reserved + step,
            headroom={"margin": self.scenario.margin},
            context=self.device.context_bytes,
        )
        self.row.requested, self.row.transient = sizing.requested, step
        return within(kv_before_capture(name, found, sizing.kv_bytes, least=cost(smallest)))

    def reserve_then_map(self, name: str, save: Path | None) -> None:
        """Captures over a small mapping, and sizes then: by a measured worst step, or with a fixed headroom."""
        strategy = strategies.make(name, self.scenario.room)
        fixed = strategy.headroom if isinstance(strategy, PostCaptureFixedHeadroom) else None
        headroom = {"margin": self.scenario.margin} if fixed is None else {"fixed": fixed}
        startup = Startup(
            self.device,
            utilization=self.scenario.utilization,
            headroom=headroom,
            min_blocks=min_blocks(self.scenario),
            first=self.readings[0],
            fingerprint=self.fingerprint(),
        )
        self.row.phases = startup.phases
        self.phase = "load"
        with startup.load():
            models = self.load()
        specs = models.specs(self.scenario)
        self.phase = "reserve"
        cache = startup.reserve(specs, outermost="block", zero=False)
        startup.back(profile_blocks(self.scenario))
        kv = [cache.tensors[spec.name] for spec in specs]
        self.engine = engine = BenchEngine(models, kv, self.device, self.scenario)
        self.phase = "profile"
        with startup.profile():
            engine.worst_step()
        self.phase = "capture"
        with startup.capture():
            engine.capture()
        self.row.kept, self.row.kept_here = startup.footprints[-1].raw, True
        if fixed is None:
            self.phase = "worst step"
            with startup.worst_step():
                engine.worst_step()
        else:
            self.row.estimate_raw = fixed
        self.counted()
        self.phase = "commit"
        report = startup.commit()
        if save:
            report.save(save)
        self.row.requested = report.plan.requested
        self.row.transient = dict(report.plan.terms.headroom).get("transient")
        self.sized(report.blocks, specs)
        self.serve(engine, report.blocks)

    def measure(self) -> Known:
        """A whole start-up with the smallest cache: what the oracle is told."""
        with self.timed("load"):
            models = self.load()
        specs = models.specs(self.scenario)
        kv = small_cache(specs, self.scenario, self.device)
        self.engine = engine = BenchEngine(models, kv, self.device, self.scenario)
        self.profiled(engine)
        before = self.read("before capture")
        with self.timed("capture"), step_peak(self.device.memory) as capture:
            engine.capture()
        after = self.read("captured")
        step = self.profiled(engine)
        self.read("measured")
        kept = Footprint(before, after).raw
        small = sum(tensor.numel() * tensor.element_size() for tensor in kv)
        weights = before.total - before.free - small
        # A capture needs room for its warm-up beside the graphs that are there already.
        most = max(capture.reserved - before.reserved, kept + step)
        block_bytes = sum(spec.block_bytes for spec in specs)
        return Known(
            kept=kept,
            weights=weights,
            transient=step,
            capture_peak=capture.reserved - before.reserved,
            blocks=(self._requested() - weights - most) // block_bytes,
            graphs=engine.graphs,
            granule=self.device.driver.granule,
        )

    def fingerprint(self) -> Fingerprint:
        ladder = self.scenario.ladder.descriptors()
        model = {name: value for name, value in self.scenario.to_dict().items() if name != "load"}
        return Fingerprint.of(self.device, model=model, ladder=ladder)

    def _strategy(self, name: str, plan: Path | None) -> Strategy:
        if name != strategies.PLAN:
            return strategies.make(name, self.scenario.room)
        if plan is None:
            raise ValueError("a start-up plan needs the report of an earlier start")
        return StartupPlan.load(plan, self.fingerprint())

    def _note(self, found: Estimate) -> None:
        self.row.estimate, self.row.estimate_raw = found.bytes, found.raw
        self.row.samples, self.row.notes = found.samples, found.notes

    def _requested(self) -> int:
        return requested_bytes(self.device.total_bytes, self.scenario.utilization)


def ordinary_cache(specs: list[TensorSpec], blocks: int, device: Device) -> list[Tensor]:
    """As an engine makes it without reserved addresses: a tensor of zeros for each layer."""
    return [
        torch.zeros(
            [blocks if size is None else size for size in spec.shape], dtype=spec.dtype, device=device.torch_device
        )
        for spec in specs
    ]


def small_cache(specs: list[TensorSpec], scenario: Scenario, device: Device) -> list[Tensor]:
    """What profiling and capture need."""
    return ordinary_cache(specs, profile_blocks(scenario), device)


def min_blocks(scenario: Scenario) -> int:
    """What one longest request needs, and the null block; and no less than capture writes."""
    return max(1 + -(-scenario.longest // scenario.block_size), profile_blocks(scenario))
