from __future__ import annotations

import json
import multiprocessing
import signal
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vmm_kv import cli
from vmm_kv.budget import BudgetError
from vmm_kv.demo import run
from vmm_kv.demo.engine import Engine
from vmm_kv.demo.run import DemoOptions, DemoResult, requests_for, run_demo, serve, serve_ordinary, start


@pytest.mark.parametrize(("backing", "device"), [("prefix", "host:2GiB"), ("alias", "host:512MiB")])
def test_the_demo_proves_itself(backing: str, device: str) -> None:
    result = run_demo(DemoOptions(device=device, backing=backing)).result
    assert result.backing == backing
    assert result.tokens_match and result.logits_match and result.addresses_stable
    assert result.captures == result.graphs >= 16
    assert result.distinct_blocks_written >= 10 * result.profile_blocks
    assert result.profile_blocks < result.highest_block_used < result.final_blocks <= result.capacity_blocks
    assert result.distinct_tokens >= 50
    assert result.leftover_bytes >= 0
    if result.bound_by == "request":
        assert result.leftover_bytes < result.next_step_bytes
    assert result.used_bytes <= result.peak_used_bytes <= result.requested_bytes


def result(**changes: Any) -> DemoResult:
    """Of a run in which everything went well, but for the changes."""
    good = DemoResult(
        device="host:0", device_name="host", emulated=False, backing="prefix", capacity_blocks=100, profile_blocks=9,
        final_blocks=90, distinct_blocks_written=80, highest_block_used=89, graphs=3, captures=3, footprint_bytes=1,
        footprint_raw_bytes=1, requested_bytes=1000, used_bytes=900, peak_used_bytes=1000, headroom_bytes=1,
        leftover_bytes=0, next_step_bytes=1, bound_by="request", addresses_stable=True, tokens_match=True,
        logits_match=True, logits_checksum="0" * 32, distinct_tokens=9, tokens_generated=99, seconds=1.0,
    )  # fmt: skip
    return replace(good, **changes)


def test_a_run_in_which_everything_went_well_is_proved() -> None:
    assert result().proved and result().too_small is None


@pytest.mark.parametrize(
    "changes",
    [
        {"captures": 4},
        {"distinct_blocks_written": 9},
        {"addresses_stable": False},
        {"tokens_match": False},
        {"logits_match": False},
        {"peak_used_bytes": 1001},
    ],
)
def test_any_line_that_says_no_fails_the_command(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = result(**changes)
    assert [good for good, _ in found.proof()].count(False) == 1
    monkeypatch.setattr(run, "run_demo", lambda options: SimpleNamespace(result=found))
    assert cli.main(["demo", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["proved"] is False


def test_a_device_that_cannot_hold_the_proof_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--device", "host:60MiB"]) == 1
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "NO 63 blocks written" in text
    assert "host:0 is too small for the proof: 64 blocks were granted" in text
    assert result(final_blocks=10).too_small and not result(final_blocks=11).too_small


@pytest.mark.parametrize(
    ("device", "status", "said"),
    [
        ("host:10MiB", 1, "the model's weights take 15.13 MiB"),
        ("host:34MiB", 1, "host:34MiB is too small for the demo: host:0 is out of memory"),
        ("host:45MiB", 1, "host:45MiB is too small for the demo: host:0 is out of memory"),
        ("host:99999999TiB", 2, "'99999999TiB' is not a size"),
    ],
)
def test_a_device_that_cannot_run_it_is_one_line(
    device: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--device", device]) == status
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("vmm-kv demo: ")]
    assert said in line


def test_a_machine_that_cannot_run_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes\nmore")

    monkeypatch.setattr(run, "_run", short)
    with pytest.raises(
        BudgetError, match=r"this machine has too little memory .* allocate 9 bytes. Take a smaller one$"
    ):
        run_demo(DemoOptions())


def test_another_error_of_torchs_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(run, "_run", wrong)
    with pytest.raises(RuntimeError, match="shapes differ"):
        run_demo(DemoOptions())


def test_the_least_positions_there_may_be_are_served(tmp_path: Path) -> None:
    bundled = json.loads(resources.files("vmm_kv.demo").joinpath("config.json").read_text())
    config = tmp_path / "config.json"
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config.write_text(json.dumps({**bundled, **small, "num_key_value_heads": 2, "max_position_embeddings": 16}))
    assert run_demo(DemoOptions(device="host:128MiB", config=config)).result.tokens_match


def test_an_overwritten_block_is_noticed() -> None:
    options = DemoOptions(device="host:512MiB")
    spoiled: list[int] = []

    def spoil(engine: Engine) -> None:
        if engine.running and not spoiled:
            spoiled.append(engine.running[0].table[0])
            engine.kv[0][spoiled[0]] = 1.0

    started = start(options)
    with started.cache:
        started.startup.commit()
        requests = requests_for(started, options)[:3]
        served = serve(started, started.cache.blocks, requests, on_step=spoil)
        ordinary = serve_ordinary(started, started.cache.blocks, requests)
        assert spoiled
        assert served.checksums != ordinary.checksums
        # The same without the damage agrees, so it was the damage.
        assert serve(started, started.cache.blocks, requests).checksums == ordinary.checksums


def _serve_without_a_commit() -> None:
    torch.set_num_threads(1)
    options = DemoOptions(device="host:512MiB")
    started = start(options)
    serve(started, started.cache.capacity, requests_for(started, options)[:3])


def test_without_the_commit_the_first_block_beyond_is_a_fault() -> None:
    # A process of its own: spawn, since a driver does not survive a fork.
    child = multiprocessing.get_context("spawn").Process(target=_serve_without_a_commit)
    child.start()
    child.join(100)
    assert child.exitcode == -signal.SIGSEGV
