"""`vmm-kv plan`: bytes per token of ten architectures by hand, and plans made of them (cases C03, C51, C58, C64)."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from test_model_shape import LLAMA, needs_transformers

from vmm_kv.cli import main

# layers x (K and V) x KV heads x head size x 2 bytes, by hand from each class's defaults; then the part that grows
# beyond windows, and the fixed bytes of a request.
BY_HAND = {
    "llama": (32 * 2 * 32 * 128 * 2, 524288, 0),
    "qwen2": (32 * 2 * 32 * 128 * 2, 524288, 0),
    "qwen3": (32 * 2 * 32 * 128 * 2, 524288, 0),
    "mistral": (32 * 2 * 8 * 128 * 2, 0, 0),  # every layer has a window of 4096
    "gemma2": (26 * 2 * 4 * 256 * 2, 13 * 4096, 0),
    "gemma3_text": (26 * 2 * 4 * 256 * 2, 4 * 4096, 0),  # layers 5, 11, 17 and 23 are full
    "gemma3": (26 * 2 * 4 * 256 * 2, 4 * 4096, 0),
    "gpt_oss": (36 * 2 * 8 * 64 * 2, 36864, 0),  # the model of case C54
    "deepseek_v2": (32 * (512 + 64) * 2, 36864, 0),
    "deepseek_v3": (61 * (512 + 64) * 2, 70272, 0),
    # 36 layers keep 3 inputs of 2 x 16 x 128 + 32 x 128 columns and 32 matrices of 128 x 128
    "qwen3_next": (12 * 2 * 2 * 256 * 2, 24576, 36 * (8192 * 3 + 32 * 128 * 128) * 2),
    # 28 layers keep 3 inputs of 8192 columns and 16 numbers of each
    "jamba": (4 * 2 * 8 * 128 * 2, 16384, 28 * (8192 * 3 + 8192 * 16) * 2),
    # all 32 layers keep 3 inputs of 8192 + 2 x 256 columns and 128 heads of 64 x 256
    "bamba": (0, 0, 32 * ((8192 + 512) * 3 + 128 * 64 * 256) * 2),
    # 54 layers with a state, 9 of them with attention too
    "zamba2": (9 * 2 * 32 * 160 * 2, 184320, 54 * ((5120 + 128) * 3 + 5120 * 64) * 2),
}

_DEFAULTS = """
import json, sys
sys.modules["torch"] = None
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
print(json.dumps({name: CONFIG_MAPPING[name]().to_dict() for name in sys.argv[1:]}, default=str))
"""


@cache
def defaults() -> dict[str, dict[str, Any]]:
    """The default configuration of each model type, as its class in transformers has it."""
    answer = subprocess.run([sys.executable, "-c", _DEFAULTS, *BY_HAND], capture_output=True, text=True, check=True)
    found: dict[str, dict[str, Any]] = json.loads(answer.stdout.strip().splitlines()[-1])
    return found


def config(folder: Path, values: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return str(path)


def plan(capsys: pytest.CaptureFixture[str], path: str, *more: str, status: int = 0) -> dict[str, Any]:
    """What the command prints as JSON."""
    assert main(["plan", "--config", path, "--memory", "80GiB", *more, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@needs_transformers
@pytest.mark.parametrize("model_type", list(BY_HAND))
def test_default_configurations_by_hand(model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, defaults()[model_type])
    asked = ["--config", path, "--memory", "80GiB", "--utilization", "0.92"]
    assert main(["plan", *asked]) == 0
    printed = capsys.readouterr().out
    found = plan(capsys, path, "--utilization", "0.92")["model"]
    (rank,) = found["ranks"]
    by_hand, beyond, request = BY_HAND[model_type]
    assert f"bytes per token              {by_hand}\n" in printed
    assert (found["bytes_per_token"], rank["bytes_per_token_beyond_windows"]) == (by_hand, beyond)
    assert rank["bytes_per_request"] == request
    assert rank["bytes_per_block"] == 16 * by_hand


@needs_transformers
@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_next"])
def test_a_config_of_nothing_but_its_type_is_filled_in(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(capsys, config(tmp_path, {"model_type": model_type}))["model"]
    assert found["bytes_per_token"] == BY_HAND[model_type][0]


def test_the_plan_of_a_dense_model_c03(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, LLAMA)
    found = plan(capsys, path, "--memory", "79.22GiB", "--utilization", "0.9", "--weights", "14.96GiB",
                 "--term", "non-torch=1.79GiB", "--transient", "activation=1.26GiB")["plan"]  # fmt: skip
    # the log's figures have two decimals: three blocks of 2 MiB either way
    assert abs(found["blocks"] - 27284) <= 3 and found["tokens"] == found["blocks"] * 16
    assert found["bound_by"] == "request"


def test_explicit_bytes_and_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, LLAMA)
    assert plan(capsys, path, "--kv-bytes", "53.29GiB")["plan"]["blocks"] == 27284
    found = plan(capsys, path, "--blocks", "1000", "--granule", "2MiB")["plan"]
    assert (found["blocks"], found["ranks"][0]["nbytes"]) == (1000, 1000 << 21)


def test_every_pipeline_stage_holds_all_tokens_c51(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, {**LLAMA, "num_hidden_layers": 33, "max_position_embeddings": 24000})
    found = plan(capsys, path, "--pp", "2", "--tp", "2", "--blocks", "1650")
    assert [rank["name"] for rank in found["model"]["ranks"]] == ["ranks 0 to 1", "ranks 2 to 3"]
    assert [rank["bytes_per_token"] for rank in found["model"]["ranks"]] == [17 * 2048, 16 * 2048]
    assert found["plan"]["tokens"] == 26400
    assert [rank["nbytes"] for rank in found["plan"]["ranks"]] == [1650 * 16 * 17 * 2048, 1650 * 16 * 16 * 2048]


def test_windows_without_tokens_in_flight_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, {**LLAMA, "model_type": "mistral", "sliding_window": 4096})
    bare, told = plan(capsys, path), plan(capsys, path, "--step-tokens", "2048")
    assert any("--step-tokens" in note for note in bare["model"]["notes"]) and told["model"]["notes"] == []
    assert [found["plan"]["ranks"][0]["rank"]["groups"][0]["window"] for found in (bare, told)] == [4096, 6144]


def test_a_state_takes_whole_blocks_of_the_pool_c58(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mamba = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
    hybrid = {**LLAMA, **mamba, "attn_layer_period": 8, "attn_layer_offset": 4}
    found = plan(capsys, config(tmp_path, hybrid), "--kv-bytes", "1GiB", "--max-model-len", "1600")
    state, block = 28 * (8192 * 3 + 8192 * 16) * 2, 4 * 4096 * 16
    assert found["model"]["ranks"][0]["bytes_per_request"] == state
    assert found["plan"]["concurrent_requests"] == (1 << 30) // block // (-(-state // block) + 100)


def test_models_without_attention_are_planned_in_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "state_size": 16, "conv_kernel": 4, "expand": 2}
    mamba = {"model_type": "mamba", "dtype": "float32", **sizes}
    found = plan(capsys, config(tmp_path, mamba))
    state = 2 * (128 * 3 + 128 * 16) * 4
    assert (found["model"]["bytes_per_token"], found["model"]["ranks"][0]["bytes_per_request"]) == (0, state)
    assert found["plan"]["blocks"] == int(0.9 * (80 << 30)) // state and found["plan"]["tokens"] is None


def test_what_does_not_fit_says_what_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, LLAMA)
    asked = ["plan", "--config", path, "--memory", "24GiB", "--weights", "21.5GiB"]
    assert main(asked) == 1
    captured = capsys.readouterr()
    assert "bytes per token              131072" in captured.out
    assert "cannot hold one request of 8192 tokens; largest is 816" in captured.err
    assert main([*asked, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["status"] == "too_small" and found["error"] in captured.err


@pytest.mark.parametrize(
    ("values", "more", "message"),
    [
        ({"model_type": "x"}, [], "num_hidden_layers is missing"),
        (LLAMA, ["--tp", "5"], "5 does not divide the 32 attention heads"),
        (LLAMA, ["--pp", "33"], "only 32 layers"),
        (LLAMA, ["--tp", "0"], "--tp must be at least 1"),
        (LLAMA, ["--block-size", "0"], "--block-size must be at least 1"),
        (LLAMA, ["--step-tokens", "-1"], "--step-tokens must be at least 0"),
        (LLAMA, ["--term", "weights=1GiB", "--weights", "1GiB"], "two terms of one rank have one name"),
        ({**LLAMA, "num_key_value_heads": 7}, [], "7 key-value heads do not divide the 32 attention heads"),
        ({**LLAMA, "num_hidden_layers": 10_001}, [], "10001 layers, at most 10000"),
        (LLAMA, ["--kv-dtype", "fp7"], "is no KV dtype"),
        (LLAMA, ["--utilization", "1.5"], "utilization must be above 0"),
        ({**LLAMA, "hybrid_override_pattern": "*-", "num_hidden_layers": 2}, ["--pp", "2"], "stage 1 caches anything"),
    ],
    ids=str,
)
def test_wrong_options_and_configs(
    values: dict[str, Any], more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--config", config(tmp_path, values), "--memory", "80GiB", *more]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("vmm-kv plan: ") and message in told.err


@pytest.mark.parametrize("text", ["[]", "{", "", "1"])
def test_files_that_are_no_config(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(text)
    assert main(["plan", "--config", str(tmp_path), "--memory", "80GiB"]) == 2
    assert str(tmp_path / "config.json") in capsys.readouterr().err
    assert main(["plan", "--config", str(tmp_path / "none.json"), "--memory", "80GiB"]) == 2


@pytest.mark.parametrize("more", [["--memory", "80GB"], ["--term", "graphs"], ["--blocks", "1", "--kv-bytes", "1GiB"]])
def test_misuse(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--config", "config.json", "--memory", "80GiB", *more])
    assert stopped.value.code == 2


_LOADED = """
import sys
from vmm_kv.cli import main
status = main(["plan", "--config", sys.argv[1], "--memory", "80GiB", "--utilization", "0.92", "--json"])
heavy = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "numpy"})
sys.exit(f"loaded: {heavy}" if heavy else status)
"""


@pytest.mark.parametrize(
    "values", [LLAMA, pytest.param({"model_type": "gemma2"}, marks=needs_transformers)], ids=["plain", "filled in"]
)
def test_a_plan_imports_no_torch(values: dict[str, Any], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _LOADED, config(tmp_path, values)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["status"] == "ok"


def test_the_arithmetic_imports_no_torch() -> None:
    modules = "vmm_kv.budget, vmm_kv.estimate, vmm_kv.model_shape, vmm_kv.plan_command"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
