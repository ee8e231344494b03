"""`vmm-kv bench startup`: what it takes and what it writes. What it runs is replaced: see test_bench_compare."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_bench_compare import FAILED, comparison, made

from vmm_kv import cli
from vmm_kv.bench import compare as comparing
from vmm_kv.bench.compare import Comparison
from vmm_kv.bench.ladder import LADDERS
from vmm_kv.bench.scenario import Scenario
from vmm_kv.bench.strategies import NAMES


class Runs:
    """Stands in for `compare`. Keeps what it was asked."""

    def __init__(self, found: Comparison) -> None:
        self.found = found
        self.scenarios: Sequence[Scenario] = ()
        self.names: Sequence[str] = ()
        self.rest: tuple[Any, ...] = ()

    def __call__(self, scenarios: Sequence[Scenario], names: Sequence[str], *rest: Any) -> Comparison:
        self.scenarios, self.names, self.rest = scenarios, names, rest
        return self.found


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    stand_in = Runs(comparison())
    monkeypatch.setattr(comparing, "compare", stand_in)
    return stand_in


def test_without_options_everything_is_run(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "startup", "--device", "host:2GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(runs.found.to_dict()))
    assert [scenario.ladder for scenario in runs.scenarios] == list(LADDERS)
    assert {scenario.device for scenario in runs.scenarios} == {"host:2GiB"}
    assert list(runs.names) == list(NAMES) and len(NAMES) >= 13
    assert len(set(NAMES)) == len(NAMES)


def test_what_is_asked_for_is_run(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--ladder", "quantised cache", "--strategy", "NoReserve", "--strategy", "Oracle", "--room", "96MiB"]
    assert cli.main(["bench", "startup", *asked, "--margin", "2MiB", "--jobs", "2", "--pairs", "0"]) == 0
    (scenario,) = runs.scenarios
    assert (scenario.ladder.name, scenario.room, scenario.margin) == ("quantised cache", 96 << 20, 2 << 20)
    assert list(runs.names) == ["Oracle", "NoReserve"]  # in the order of the table
    assert runs.rest[:2] == (0, 2)
    assert capsys.readouterr().out.startswith("# Start-up, every strategy side by side")


def test_the_results_are_written(runs: Runs, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["bench", "startup", "--device", "host:1GiB", "--output", str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "startup_host.json", "startup_host.md", "startup_host.png"
    ]  # fmt: skip
    assert Comparison.from_dict(json.loads((tmp_path / "new" / "startup_host.json").read_text())) == runs.found


def test_memory_that_ran_out_is_a_result_and_a_crash_is_none(runs: Runs) -> None:
    runs.found = comparison(made(), FAILED)
    assert cli.main(["bench", "startup"]) == 0
    runs.found = comparison(made(), made(outcome="failed"))
    assert cli.main(["bench", "startup"]) == 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--ladder", "rope"], "'rope' is no ladder: decode; decode + piecewise prefill"),
        (["--strategy", "hope"], "'hope' is no strategy: Oracle; ReserveThenMap"),
        (["--jobs", "0"], "jobs must be at least 1"),
        (["--pairs", "-1"], "pairs at least 0"),
        (["--room", "much"], "'much' is not a size"),
        (["--device", "abacus:0"], "device 'abacus:0': it is 'auto', 'host"),
        (["--device", "host:1KB"], "'1KB' is not a size"),
        (["--utilization", "1.5"], "utilization must be above 0 and at most 1, got 1.5"),
    ],
)
def test_what_there_is_not_is_one_line(
    asked: list[str], said: str, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "startup", *asked]) == 2
    assert said in capsys.readouterr().err and runs.scenarios == ()


def test_help_lists_what_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "startup", "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert {ladder.name for ladder in LADDERS} | set(NAMES) <= set(lines)


def test_the_script_is_the_command() -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "startup.py"
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--utilization" in done.stdout


def test_a_folder_that_cannot_be_is_seen_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(comparison())
    monkeypatch.setattr(comparing, "compare", runs)
    (tmp_path / "file").write_text("")
    assert cli.main(["bench", "startup", "--output", str(tmp_path / "file")]) == 2
    assert runs.scenarios == () and "file" in capsys.readouterr().err
