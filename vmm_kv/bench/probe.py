"""What a strategy may do on this engine before its KV cache has its size: `vmm_kv.estimate.Probe`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vmm_kv.bench.engine import BenchEngine
from vmm_kv.bench.graphs import Captured
from vmm_kv.estimate import Descriptor
from vmm_kv.measure import flush as flush_caches


class EngineProbe:
    """`peak_activation`: bytes, of a profile run of `profiled_tokens` tokens."""

    capture_enabled = True

    def __init__(self, engine: BenchEngine, peak_activation: int, profiled_tokens: int) -> None:
        self.ladder: Sequence[Descriptor] = engine.scenario.ladder.descriptors()
        self.quantised = engine.scenario.ladder.quantised
        self.peak_activation = peak_activation
        self.profiled_tokens = profiled_tokens
        self._engine = engine
        self._thrown: list[Captured] = []

    def read(self, *, flush: bool) -> int:
        device = self._engine.device
        if flush:
            flush_caches(device.memory)
        return device.reading("estimate").free

    @contextmanager
    def throwaway_pool(self) -> Iterator[Any]:
        try:
            yield self._engine.device.graph_pool()
        finally:
            for captured in self._thrown:
                captured.drop()
            self._thrown.clear()

    def capture(self, descriptor: Descriptor, pool: Any) -> None:
        self._engine.doing = f"a throw-away capture, {descriptor}"
        self._thrown.append(self._engine.capture_one(descriptor, pool))
