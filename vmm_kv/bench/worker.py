"""One start-up in a process of its own: a task as JSON on standard input, a row as JSON on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vmm_kv.bench import strategies
from vmm_kv.bench.row import Known, Row
from vmm_kv.bench.scenario import Scenario
from vmm_kv.bench.start import Start
from vmm_kv.budget import BudgetError, exactly
from vmm_kv.device import open_device
from vmm_kv.errors import OutOfPhysicalMemory

MEASURE = "measure"


def run(task: Mapping[str, Any]) -> dict[str, Any]:
    """`task`: `scenario`, `strategy`, and where they are needed `known` (see `Known`), `plan` and `save` (paths), and
    `serve` where it is False.

    Memory that runs out is a row like any other. So is whatever else goes wrong.
    """
    scenario = Scenario.from_dict(task["scenario"])
    name = task["strategy"]
    device = open_device(scenario.device)
    row = Row(name, scenario.ladder.name)
    with device.active(), torch.no_grad():
        start = Start(scenario, device, row, serve=task.get("serve", True))
        device.driver.peak_used(reset=True)
        if name == MEASURE:
            found = asdict(_measured(start))
            return {"known": found, "device": f"{device.name} ({device.properties.name})", "emulated": device.emulated}
        known = Known(**task["known"])
        row.oracle_blocks = known.blocks
        try:
            _start(start, name, task, known)
        except BudgetError as error:
            row.outcome = "no room"
            row.where, row.error_text = start.where(), str(error).splitlines()[0]
        except (RuntimeError, OutOfPhysicalMemory) as error:
            shortage = _shortage(error)
            if shortage is None:
                raise
            row.outcome = "out of memory"
            row.where, row.error_text = start.where(), str(shortage).splitlines()[0]
        if not row.graphs:
            start.counted()
        if row.kept is None:
            row.kept = known.kept
        row.peak_used = device.driver.peak_used()
    return row.to_dict()


def _start(start: Start, name: str, task: Mapping[str, Any], known: Known) -> None:
    if name in (strategies.ORACLE, strategies.PLAN) or not strategies.make(name, start.scenario.room).after_capture:
        start.guess(name, Path(task["plan"]) if task.get("plan") else None, known)
    else:
        start.reserve_then_map(name, Path(task["save"]) if task.get("save") else None)


def _measured(start: Start) -> Known:
    try:
        return start.measure()
    except (RuntimeError, OutOfPhysicalMemory) as error:
        if (shortage := _shortage(error)) is None:
            raise
        room = exactly(start.scenario.room)
        told = f"out of memory at {start.where()} with the smallest KV cache in a room of {room}: give it more"
        raise BudgetError(f"{told}. {str(shortage).splitlines()[0]}") from error


def _shortage(error: BaseException | None) -> BaseException | None:
    """What says that memory ran out. A capture that it ends on a GPU raises once more when it is closed."""
    while error is not None and not isinstance(error, (torch.OutOfMemoryError, OutOfPhysicalMemory)):
        error = error.__cause__ or error.__context__
    return error


def main() -> int:
    torch.set_num_threads(1)
    print(json.dumps(run(json.load(sys.stdin))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
