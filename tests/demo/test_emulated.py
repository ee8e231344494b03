"""The demo on emulated drivers, as the command runs it: the whole start-up, and the word that no GPU took part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from vmm_kv import cli

pytestmark = pytest.mark.emulated

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
"""Of the bundled model: the same number of steps, less work in each."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    bundled = json.loads(resources.files("vmm_kv.demo").joinpath("config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**bundled, **SMALL, "num_key_value_heads": 2}))
    return path


@pytest.mark.parametrize("backing", ["prefix", "alias"])
@pytest.mark.parametrize(("name", "mode"), [("cuda:0", "1"), ("hip:0", "1"), ("hip:0", "quirks")])
def test_the_demo_proves_itself_on_an_emulated_driver(
    name: str,
    mode: str,
    backing: str,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VMM_KV_TESTING", mode)
    command = ["demo", "--device", f"{name}:256MiB", "--backing", backing, "--config", str(config), "--json"]
    assert cli.main(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["device"], result["emulated"], result["backing"]) == (name, True, backing)
    assert "emulated" in result["device_name"]
    assert result["tokens_match"] and result["logits_match"] and result["addresses_stable"]
    assert result["captures"] == result["graphs"] >= 16
    assert result["distinct_blocks_written"] >= 10 * result["profile_blocks"]
    assert result["profile_blocks"] < result["highest_block_used"] < result["final_blocks"]
    assert result["used_bytes"] <= result["requested_bytes"] < 256 << 20


SCRIPT = "import sys; from vmm_kv.cli import main; sys.exit(main(['demo', '--device', 'cuda:0:512MiB']))"


def test_people_are_told_that_the_driver_is_emulated() -> None:
    """In a process of its own and with the bundled model, as a person starts it."""
    environment = {**os.environ, "VMM_KV_TESTING": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "The driver is EMULATED, tensors are on the CPU: no GPU took part." in done.stdout
    assert "vmm-kv demo on cuda:0 (vmm_kv emulated device), prefix backing" in done.stdout
    assert "opened cuda:0:512MiB on an EMULATED driver" in done.stderr
