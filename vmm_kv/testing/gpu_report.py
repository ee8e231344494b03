"""What is kept of a run of the checks: a JSON file, and a short table for people."""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vmm_kv import gpu_drivers
from vmm_kv.doctor import torch_facts
from vmm_kv.errors import VmmError
from vmm_kv.testing.gpu_registry import Result

_COLOURS = {"ok": "green", "failed": "bold red", "surprise": "yellow", "skipped": "bright_black", "not run": "magenta"}
_LONGEST_FACTS = 240


@dataclass(frozen=True)
class Report:
    """Every result of one run on `device` (`"cuda:0"`), and what it ran on."""

    device: str
    quick: bool
    seconds: float
    machine: dict[str, Any]
    results: tuple[Result, ...]

    @property
    def device_name(self) -> str:
        """The vendor's name, `device` where that was not found out."""
        found = next((result.details.get("name") for result in self.results if result.name == "device"), None)
        return str(found or self.device)

    @property
    def file_name(self) -> str:
        return f"gpu_{re.sub(r'[^a-z0-9]+', '_', self.device_name.lower()).strip('_')}.json"

    @property
    def failed(self) -> bool:
        return any(result.outcome == "failed" for result in self.results)

    @property
    def any_ran(self) -> bool:
        return any(result.outcome not in ("skipped", "not run") for result in self.results)

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(result.outcome for result in self.results))

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "name": self.device_name,
            "machine": self.machine,
            "quick": self.quick,
            "seconds": self.seconds,
            "counts": self.counts,
            "checks": [result.to_dict() for result in self.results],
        }

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


def machine_facts(kind: str) -> dict[str, Any]:
    """What the checks run on. Imports no torch."""
    torch = torch_facts()
    try:
        driver = gpu_drivers.versions(kind)
    except VmmError as error:
        driver = {"error": str(error)}
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": {"version": torch.version, "cuda": torch.cuda, "hip": torch.hip},
        kind: driver,
    }


def show(report: Report, console: Console | None = None) -> None:
    """Prints the table. Does without colour."""
    console = console or Console()
    table = Table("check", "outcome", "s", "facts", box=None, pad_edge=False)
    for result in report.results:
        facts = result.facts if len(result.facts) <= _LONGEST_FACTS else f"{result.facts[:_LONGEST_FACTS]} ..."
        colour = _COLOURS[result.outcome]
        table.add_row(result.name, f"[{colour}]{result.outcome}[/]", f"{result.seconds:.1f}", escape(facts))
    versions = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    console.print(f"{report.device}: {escape(report.device_name)}; {escape(versions)}", highlight=False)
    console.print(table, highlight=False)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in report.counts.items())
    console.print(f"{counts} in {report.seconds:.0f} s", highlight=False)


def default_path(report: Report) -> Path | None:
    """`benchmarks/results/` of the checkout that this is, or that is the current folder; None outside of one."""
    for root in (Path.cwd(), Path(__file__).resolve().parents[2]):
        folder = root / "benchmarks" / "results"
        if folder.is_dir() and (root / "pyproject.toml").is_file():
            return folder / report.file_name
    return None
