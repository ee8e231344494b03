"""Configs in the shape in which models were published, and what they keep by hand arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from test_model_shape import needs_transformers

from vmm_kv import config_fields
from vmm_kv.model_shape import from_values

LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
QWEN2 = {"hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4}
NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
KDA = {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}

CONFIGS: dict[str, tuple[dict[str, Any], int, int]] = {
    # bytes a token, bytes a request
    "Falcon Mamba: the inner size is a key of its own": (
        {"model_type": "falcon_mamba", "conv_kernel": 4, "expand": 16, "hidden_size": 4096, "intermediate_size": 8192,
         "num_hidden_layers": 64, "state_size": 16, "torch_dtype": "bfloat16"},
        0, 64 * 8192 * (3 + 16) * 2,
    ),
    "Kimi Linear: the recurrent state is float32": (
        {"model_type": "kimi_linear", "head_dim": 72, "hidden_size": 2304, **LATENT, "linear_attn_config": KDA,
         "num_attention_heads": 32, "num_hidden_layers": 27, "num_key_value_heads": 32, "dtype": "bfloat16"},
        7 * 576 * 2, 20 * (3 * 4096 * 3 * 2 + 32 * 128 * 128 * 4),
    ),
    "Nemotron H: heads times their size, not the expanded hidden size": (
        {"model_type": "nemotron_h", "attention_head_dim": 128, "conv_kernel": 4, "expand": 2, "hidden_size": 3072,
         "hybrid_override_pattern": NEMOTRON, "mamba_head_dim": 64, "mamba_num_heads": 112, "n_groups": 8,
         "num_attention_heads": 32, "num_hidden_layers": 52, "num_key_value_heads": 8, "ssm_state_size": 128,
         "torch_dtype": "bfloat16"},
        4 * 2 * 8 * 128 * 2, 24 * ((7168 + 2 * 8 * 128) * 3 + 7168 * 128) * 2,
    ),
    "DeepSeek OCR: latent attention switched off": (
        {"model_type": "deepseek_v2", "hidden_size": 1280, "kv_lora_rank": None, "num_attention_heads": 10,
         "num_hidden_layers": 12, "num_key_value_heads": 10, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0,
         "torch_dtype": "bfloat16", "use_mla": False, "v_head_dim": 0},
        12 * 2 * 10 * 128 * 2, 0,
    ),
    "Mllama: cross attention keeps no tokens": (
        {"model_type": "mllama", "torch_dtype": "bfloat16", "text_config": {
            "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38], "hidden_size": 4096, "head_dim": 128,
            "model_type": "mllama_text_model", "num_attention_heads": 32, "num_hidden_layers": 40,
            "num_key_value_heads": 8}},
        32 * 2 * 8 * 128 * 2, 0,
    ),
    "Hunyuan: every second layer reads what the one before it keeps": (
        {"model_type": "hunyuan", "hidden_size": 6400, "num_attention_heads": 80, "num_hidden_layers": 64,
         "num_key_value_heads": 8, "attention_head_dim": 128, "use_cla": True, "cla_share_factor": 2,
         "torch_dtype": "bfloat16"},
        32 * 2 * 8 * 128 * 2, 0,
    ),
    "PaliGemma: the outer dtype is what it is loaded in": (
        {"model_type": "paligemma", "torch_dtype": "bfloat16", "text_config": {
            "hidden_size": 2048, "model_type": "gemma", "num_attention_heads": 8, "num_hidden_layers": 18,
            "num_key_value_heads": 1, "head_dim": 256, "torch_dtype": "float32"}},
        18 * 2 * 256 * 2, 0,
    ),
    "Qwen2 in another model: its window is off unless it is said to be on": (
        {"model_type": "llava_onevision", "torch_dtype": "float16", "text_config": {
            **QWEN2, "model_type": "qwen2", "max_window_layers": 21, "sliding_window": 32768}},
        28 * 2 * 4 * 128 * 2, 0,
    ),
    "Falcon: one KV head unless it is said otherwise": (
        {"model_type": "falcon", "hidden_size": 4544, "new_decoder_architecture": False, "num_attention_heads": 71,
         "num_hidden_layers": 32, "torch_dtype": "bfloat16"},
        32 * 2 * 64 * 2, 0,
    ),
    "ChatGLM": (
        {"model_type": "chatglm", "hidden_size": 4096, "kv_channels": 128, "multi_query_attention": True,
         "multi_query_group_num": 2, "num_attention_heads": 32, "num_layers": 28, "seq_length": 8192,
         "torch_dtype": "float16"},
        28 * 2 * 2 * 128 * 2, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_published_config(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without transformers: what the JSON says is enough."""
    monkeypatch.setattr(config_fields, "find_spec", lambda name: None)
    values, token, request = CONFIGS[name]
    found = from_values(values).groups()
    assert sum(group.bytes_per_token for group in found) == token
    assert sum(group.bytes_per_request for group in found) == request
    assert not any(group.window for group in found)


def test_the_longest_request_is_read_from_its_older_names() -> None:
    assert from_values(CONFIGS["ChatGLM"][0]).max_tokens == 8192


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "hymba", "sliding_window": 1024, "mamba_d_state": 16, **QWEN2}, "layer_types is missing"),
        ({"model_type": "xlstm", **QWEN2}, "'xlstm' keeps states of a size that is not known here"),
        ({"model_type": "clip", "text_config": {"model_type": "clip_text_model", **QWEN2}}, "is an encoder"),
        ({"model_type": "deepseek_v3", **QWEN2}, "kv_lora_rank is missing"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_nothing_is_planned_where_nobody_knows(
    values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_fields, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        from_values(values)


@needs_transformers
def test_a_known_decoder_in_an_unknown_model_is_filled_in() -> None:
    text = {"model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    inside = {
        "model_type": "internvl_chat",
        "torch_dtype": "bfloat16",
        "llm_config": {**text, "hidden_size": 4096 // 2},
    }
    (group,) = from_values(inside).groups()
    assert group.bytes_per_token == 36 * 2 * 8 * 128 * 2  # not hidden size over heads, 64
    latent = {"model_type": "deepseek_vl_v2", "language_config": {
        "model_type": "deepseek_v2", "hidden_size": 2560, "num_attention_heads": 32, "num_hidden_layers": 30,
        "torch_dtype": "bfloat16"}}  # fmt: skip
    (group,) = from_values(latent).groups()
    assert (group.name, group.bytes_per_token) == ("latent", 30 * 576 * 2)


@needs_transformers
@pytest.mark.parametrize(("given", "window"), [({}, 4096), ({"sliding_window": None}, None)], ids=["left out", "null"])
def test_a_window_that_is_left_out_is_the_class_s_and_null_is_none(given: dict[str, Any], window: int | None) -> None:
    text = {"model_type": "mistral", "num_hidden_layers": 32, **given}  # the rest is the class's
    found = from_values({"model_type": "unheard_of", "torch_dtype": "bfloat16", "text_config": text})
    (group,) = found.groups()
    assert (group.bytes_per_token, group.window) == (32 * 2 * 8 * 128 * 2, window)
    assert not any("sliding_window" in note for note in found.notes)  # nothing is assumed of it
