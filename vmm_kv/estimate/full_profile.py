"""The strategy that captures everything once to find out, and again to keep it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from vmm_kv.budget import exactly, readable
from vmm_kv.estimate.probe import Estimate, Probe, to_capture

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FullProfile:
    """Every graph of every mode captured once, in one span, in a pool that is thrown away.

    The span begins before the pool is set up and ends while everything is alive, the caches flushed at both ends, so
    set-up and scratch that stays are in it. A negative result counts as 0. With `enabled` off nothing is captured here,
    and a warning says that nothing is set aside; there is none where no graph will be captured anyway.

    Source: vLLM #51590, which raised the estimate for one model from 1.3 to between 4.7 and 16.9 GiB (C21). It costs a
    second capture of everything, and the pool is measured beside a small cache, not the final one (C22).
    """

    enabled: bool = True
    after_capture = False

    @property
    def name(self) -> str:
        return "FullProfile" if self.enabled else "FullProfile(off)"

    def estimate(self, probe: Probe) -> Estimate:
        graphs = to_capture(probe)
        if not graphs:
            return Estimate(0, 0, notes=("no graph will be captured",))
        if not self.enabled:
            told = f"{len(graphs)} graphs will be captured and no memory is set aside for them"
            log.warning("%s: %s", self.name, told)
            return Estimate(0, 0, notes=(told,))
        before = probe.read(flush=True)
        with probe.throwaway_pool() as pool:
            for graph in graphs:
                probe.capture(graph, pool)
            raw = before - probe.read(flush=True)
        kept = max(0, before - probe.read(flush=True))
        size = max(0, raw, kept)
        notes = [f"{len(graphs)} graphs captured in one span, {readable(kept)} of it retained"]
        if raw < 0:
            notes.append(f"free memory rose by {exactly(-raw)} meanwhile: counted as 0")
            log.warning("%s: %s", self.name, notes[-1])
        return Estimate(size, raw, len(graphs), (raw,), kept, tuple(notes))
