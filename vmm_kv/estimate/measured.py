"""Strategies that know: from an earlier start, or because the cache gets its size after capture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vmm_kv.budget import Items, exactly, readable
from vmm_kv.estimate.probe import Estimate, Probe, check_not_negative
from vmm_kv.fingerprint import Fingerprint, PinError
from vmm_kv.report import StartupReport


@dataclass(frozen=True)
class StartupPlan:
    """What captures kept in an earlier start, read from its saved report.

    Source: vLLM's start-up plan (`VLLM_ENABLE_STARTUP_PLAN`), which keeps its estimate by a hash of versions,
    configuration and device. Here what was kept is measured, and `Startup(pinned=report)` takes the whole size over.
    """

    report: StartupReport
    fingerprint: Fingerprint
    """Of this start."""
    name = "StartupPlan"
    after_capture = False

    @classmethod
    def load(cls, path: str | Path, fingerprint: Fingerprint) -> StartupPlan:
        """From `StartupReport.save`. Raises `OSError`, `ValueError` for what is no such file."""
        return cls(StartupReport.load(path), fingerprint)

    @property
    def blocks(self) -> int:
        """Blocks that were granted."""
        return self.report.blocks

    def estimate(self, probe: Probe) -> Estimate:
        """Raises `PinError` with the differences if the earlier start was another one's."""
        if differences := self.report.fingerprint.differences(self.fingerprint):
            raise PinError("the saved start-up is another one's", differences)
        told = f"{self.report.captures} graphs kept {exactly(self.report.footprint_raw)} in an earlier start"
        return Estimate(self.report.footprint, self.report.footprint_raw, notes=(told,))


@dataclass(frozen=True)
class PostCaptureFixedHeadroom:
    """Sizes after capture, and leaves a fixed reserve for what comes later: the floor, and what is declared.

    floor: bytes, or `slack` for parallelism if that is more. later: (name, bytes) of what is allocated later; of those
    that run one after another under one name the largest counts.

    Source: SGLang #30157; its floor went from 512 to 1536 MiB in #34996, debug workspaces came in #38596, and 8 GiB for
    vision in #37681 (C31).
    """

    floor: int = 1536 << 20
    slack: int = 0
    later: Items = ()
    after_capture = True

    def __post_init__(self) -> None:
        check_not_negative(floor=self.floor, slack=self.slack)
        for name, size in self.later:  # a name may be there twice
            check_not_negative(**{name: size})

    @property
    def name(self) -> str:
        return f"PostCaptureFixedHeadroom({readable(self.headroom)})"

    @property
    def headroom(self) -> int:
        """Bytes left free after the rest is mapped."""
        largest: dict[str, int] = {}
        for name, size in self.later:
            largest[name] = max(size, largest.get(name, 0))
        return max(self.floor, self.slack) + sum(largest.values())

    def estimate(self, probe: Probe) -> Estimate:
        return Estimate(self.headroom, self.headroom, notes=("fixed, left free after capture",))


@dataclass(frozen=True)
class ReserveThenMap:
    """Sizes after capture, and leaves free what one eager worst-case step was measured to take: `vmm_kv.Startup`.

    Nothing is guessed, so there is no estimate. Source: this project; the idea is vLLM #26300 and #19480.
    """

    name = "ReserveThenMap"
    after_capture = True

    def estimate(self, probe: Probe) -> Estimate:
        return Estimate(0, 0, notes=("nothing is guessed: measured after capture",))
