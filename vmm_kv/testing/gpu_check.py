"""Checks of a real GPU: what its driver does where documents are silent, and whether the library's ways hold on it.

    python -m vmm_kv.testing.gpu_check [--device cuda:0] [--output FILE] [--quick] [--only NAME ...] [--limit SECONDS]

Takes at most three minutes, needs no network, and works with whatever torch and bindings are there; what they do not
suffice for is skipped. Exit status 0 when nothing failed, 1 when something did, 2 when no check ran: there is no GPU,
the file cannot be written, or the time was up before the first. No file is written then.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from vmm_kv import emulated, gpu_drivers
from vmm_kv.errors import VmmError
from vmm_kv.testing import gpu_report
from vmm_kv.testing.gpu_registry import Check, Result, all_checks
from vmm_kv.testing.gpu_worker import Worker

LIMIT = 170.0
"""Seconds for all checks together. Those that are not reached are reported as not run."""
_LEAST = 2.0
"""Seconds that must be left for a check to begin."""

_AHEAD = 3 if (os.cpu_count() or 1) >= 8 else 1
"""Workers that are made ready while another works."""

Tell = Callable[[Result], object]


def missing(device: str) -> str | None:
    """Why no check can run on `device` here, and what to do about it; None where they can."""
    kind, _, index = device.partition(":")
    if kind not in gpu_drivers.KINDS or not (index or "0").isdecimal():
        return f"{device!r} is no GPU: it is cuda:0, hip:0 or the like"
    try:
        mode = emulated.mode()
    except ValueError as error:
        return str(error)
    if mode:
        return f"{emulated.VARIABLE} is set, which stands for emulated drivers: unset it to check a real GPU"
    if importlib.util.find_spec("vmm_kv._native") is None:
        folder = Path(__file__).resolve().parents[2]
        return (
            f"the compiled part of vmm_kv is not where vmm_kv was found ({folder}). Run this from another folder than "
            "a checkout, or install it editable: pip install --no-build-isolation --no-deps --no-index -e ."
        )
    shown = gpu_drivers.visible(kind) or f"no {kind} GPU is visible"
    try:
        count = gpu_drivers.count(kind)
    except VmmError as error:
        return f"{shown}. {error}"
    if int(index or 0) >= count:
        return f"{shown}. The driver shows this process {count} devices, so there is no {device}"
    return None


def default_device() -> str:
    """`"hip:0"` where only that kind of GPU is visible, else `"cuda:0"`."""
    return "hip:0" if gpu_drivers.visible("hip") and not gpu_drivers.visible("cuda") else "cuda:0"


def run_checks(
    device: str,
    checks: Sequence[Check],
    *,
    quick: bool = False,
    limit: float = LIMIT,
    environment: Mapping[str, str] | None = None,
    tell: Tell = lambda result: None,
) -> list[Result]:
    """Runs the checks, each in a worker: first those that can share one, then those that want one of their own.

    limit: seconds for all together. environment: more variables for the workers. tell: hears each result.
    Returns the results in the order of `checks`.
    """
    run = _Run(device, quick, time.monotonic() + limit, dict(environment or {}))
    found: dict[str, Result] = {}
    shared = run.together([check for check in checks if not check.alone])
    for result in itertools.chain(shared, run.alone([check for check in checks if check.alone])):
        found[result.name] = result
        tell(result)
    return [found[check.name] for check in checks]


@dataclass(frozen=True)
class _Run:
    """Workers for checks on one device until a deadline (`time.monotonic`)."""

    device: str
    quick: bool
    deadline: float
    environment: dict[str, str]

    def together(self, checks: Sequence[Check]) -> Iterator[Result]:
        """In one worker, replaced after a failure: nobody knows what that has left behind."""
        worker: Worker | None = None
        for position, check in enumerate(checks, start=1):
            if not self._time_left():
                yield _not_run(check)
                continue
            worker = worker or self._worker(check)
            result = self._result(worker, check)
            if result.outcome == "failed" or position == len(checks) or not self._time_left():
                result, worker = _ended(result, worker.end()), None
            yield result

    def alone(self, checks: Sequence[Check]) -> Iterator[Result]:
        """Each in a worker of its own. While one runs others import torch, which takes longer than most checks."""
        to_come, waiting = deque(checks), deque[Worker]()
        try:
            for check in checks:
                if not self._time_left():
                    yield _not_run(check)
                    continue
                while to_come and len(waiting) <= _AHEAD:
                    waiting.append(self._worker(to_come.popleft()))
                worker = waiting.popleft()
                result = self._result(worker, check)
                yield _ended(result, worker.end())
        finally:
            for worker in waiting:
                worker.end()

    def _worker(self, check: Check) -> Worker:
        return Worker(self.device, quick=self.quick, environment={**self.environment, **check.environment})

    def _result(self, worker: Worker, check: Check) -> Result:
        worker.get_ready(self.deadline - time.monotonic())
        return worker.run(check, max(0.0, min(check.seconds, self.deadline - time.monotonic())))

    def _time_left(self) -> bool:
        return self.deadline - time.monotonic() >= _LEAST


def _not_run(check: Check) -> Result:
    return Result(check.name, check.rule, "not run", 0.0, "the time was up")


def _ended(result: Result, how: str | None) -> Result:
    """A process that ends badly after its check has made it fail."""
    if how is None or result.outcome == "failed":
        return result
    return replace(result, outcome="failed", facts=f"{how}; {result.facts}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    device = options.device or default_device()
    if reason := missing(device):
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    checks = [check for check in all_checks().values() if _wanted(check, options.only)]
    if not checks:
        print(f"gpu_check: no check is called {' or '.join(options.only)}", file=sys.stderr)
        return 2
    if options.output and (reason := _unwritable(options.output)):
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    start = time.monotonic()
    results = run_checks(device, checks, quick=options.quick, limit=options.limit, tell=_progress)
    machine = gpu_report.machine_facts(device.partition(":")[0])
    seconds = round(time.monotonic() - start, 1)
    report = gpu_report.Report(device, options.quick, seconds, machine, tuple(results))
    gpu_report.show(report)
    if not report.any_ran:
        print("gpu_check: no check ran, so there is nothing to write", file=sys.stderr)
        return 2
    if path := options.output or (None if options.only else gpu_report.default_path(report)):
        report.write(path)
        print(f"written to {path}")
    return 1 if report.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vmm_kv.testing.gpu_check", description="Checks of a real GPU.")
    parser.add_argument("--device", help="cuda:0, hip:0 or the like (default: the first GPU that is visible)")
    parser.add_argument(
        "--output", type=Path, help="JSON file (default: benchmarks/results/gpu_NAME.json of a checkout)"
    )
    parser.add_argument("--quick", action="store_true", help="measure times on less memory")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a check, or a pattern; repeatable")
    parser.add_argument("--limit", type=_seconds, default=LIMIT, help="seconds for all (default: %(default)s)")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not math.isfinite(seconds) or seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds: it must be above 0 and finite")
    return seconds


def _unwritable(path: Path) -> str | None:
    """Why a file cannot be written, known before minutes are spent on what goes into it. Leaves no file."""
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    if not there:
        path.unlink()
    return None


def _wanted(check: Check, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch(check.name, pattern) for pattern in patterns)


def _progress(result: Result) -> None:
    """On stderr at once: a run that is cut off has shown what it knew."""
    print(
        f"{result.outcome:9}{result.name:26}{result.seconds:7.1f} s  {result.facts[:200]}", file=sys.stderr, flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
