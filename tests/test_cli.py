"""The command line: what each subcommand loads, and a source tree that was never installed."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import vmm_kv
from vmm_kv import cli
from vmm_kv.bench import command


def test_the_version_of_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"vmm-kv {version('vmm-kv')}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--version"], "vmm-kv 0+unknown"),
        (["plan", "--help"], "--utilization"),
    ],
)
def test_a_source_tree_on_the_path_works(arguments: list[str], expected: str, tmp_path: Path) -> None:
    """Without the package's metadata, without site-packages, and so without torch."""
    (tmp_path / "vmm_kv").symlink_to(Path(vmm_kv.__file__).parent)
    program = f"from vmm_kv.cli import main; main({arguments!r})"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "{demo,doctor,plan,bench}" in capsys.readouterr().out


def test_bench_hands_its_options_to_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("what")
        parser.add_argument("--device")

    def run(options: argparse.Namespace) -> int:
        seen.extend([options.what, options.device])
        return 3

    monkeypatch.setattr(command, "configure", configure)
    monkeypatch.setattr(command, "run", run)
    assert cli.main(["bench", "startup", "--device", "host:1GiB"]) == 3
    assert seen == ["startup", "host:1GiB"]


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["plan"]])
def test_misuse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: vmm-kv" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_reader_that_has_enough_is_no_error(command: str) -> None:
    config = Path(vmm_kv.__file__).parent / "demo" / "config.json"
    code = "import sys; from vmm_kv.cli import main; sys.exit(main(sys.argv[1:]))"
    asked = [command, *(["--config", str(config), "--memory", "1GiB"] if command == "plan" else [])]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code, *asked], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_closed_standard_output_is_no_error() -> None:
    config = Path(vmm_kv.__file__).parent / "demo" / "config.json"
    call = f"{sys.executable} -c 'import sys; from vmm_kv.cli import main; sys.exit(main(sys.argv[1:]))' "
    done = subprocess.run(
        f"{call} plan --config {config} --memory 1GiB >&-", shell=True, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
