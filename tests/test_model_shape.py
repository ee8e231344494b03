"""Bytes per token, block and request from a config.json (cases C03, C04, C40, C54, C58-C63)."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from vmm_kv import config_fields, layer_kinds, model_shape
from vmm_kv.config_fields import MissingKey, decoder_fields
from vmm_kv.kv_dtype import kv_dtype
from vmm_kv.model_shape import KvGroup, ModelShape, from_values, shape_of, stage_layers

GiB = 1 << 30
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
MLA: dict[str, Any] = {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

_LEFT_OUT = """
import json, sys
sys.modules["torch"] = None
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
key, found = sys.argv[1], {}
for name in json.loads(sys.argv[2]):
    if name not in CONFIG_MAPPING:
        continue
    given = CONFIG_MAPPING[name]().to_dict()
    for heads in ("num_attention_heads", "n_head", "n_heads"):  # so that no default fits by chance
        if heads in given and key != "layer_types":
            given[heads] *= 2
    given.pop(key, None)
    config = CONFIG_MAPPING[name].from_dict(given)
    kinds = {} if config.to_dict().get("layer_types") else {"layer_types": getattr(config, "layers_block_type", None)}
    found[name] = [given, {**config.to_dict(), **kinds}]
print(json.dumps(found, default=str))
"""


def shape(**changes: Any) -> ModelShape:
    """Llama 3 8B's with changes, a key that is `None` left out; nothing but the JSON asked."""
    values = {name: value for name, value in {**LLAMA, **changes}.items() if value is not None}
    return shape_of(decoder_fields(values))


def token_bytes(of: ModelShape, **options: Any) -> int:
    return sum(group.bytes_per_token for group in of.groups(**options))


def block_bytes(of: ModelShape, **options: Any) -> int:
    return sum(group.bytes_per_block(16) for group in of.groups(**options))


def test_dense_block_c03() -> None:
    assert block_bytes(shape()) == 2 * 32 * 8 * 128 * 2 * 16 == 2097152
    blocks = int(53.29 * GiB) // 2097152
    assert (blocks, blocks * 16) == (27284, 436544)
    assert block_bytes(shape(), tp=2) == 1 << 20


@pytest.mark.parametrize(
    ("layers", "heads", "kv_heads", "tp", "expected"),
    [(40, 32, 8, 1, 2621440), (80, 64, 8, 4, 1310720), (40, 40, 40, 2, 6553600)],
    ids=["C04", "C40 70B", "C40 13B"],
)
def test_blocks_of_known_models(layers: int, heads: int, kv_heads: int, tp: int, expected: int) -> None:
    of = shape(num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128)
    assert block_bytes(of, tp=tp) == expected
    if expected == 6553600:
        assert int(8.94 * GiB) // expected == 1464


def test_sliding_layers_are_not_forgotten_c54() -> None:
    of = shape(
        num_hidden_layers=36, num_attention_heads=64, head_dim=64, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 18,
    )  # fmt: skip
    window, full = of.groups()
    assert token_bytes(of) == 73728 and (window.bytes_per_token, full.bytes_per_token) == (36864, 36864)
    assert (78384 % 16, round(78384 * 73728 / GiB, 4)) == (0, 5.3822)
    assert (
        token_bytes(shape(num_hidden_layers=60, num_attention_heads=16, num_key_value_heads=16, head_dim=256)) == 983040
    )
    assert 26800 * 983040 == 26345472000


def test_a_request_has_a_fixed_and_a_growing_cost_c58() -> None:
    state = KvGroup("state", "state", (0,), bytes_per_request=3_200_000_000)
    full = KvGroup("full", "full", (1,), bytes_per_token=3300)
    assert [sum(g.request_bytes(n) for g in (state, full)) for n in (50_000, 500_000)] == [3_365_000_000, 4_850_000_000]


def test_latent_attention_is_one_vector_for_all_heads_c59() -> None:
    generic = shape(num_hidden_layers=43, num_attention_heads=8, num_key_value_heads=1, head_dim=512)
    assert token_bytes(generic) == 88064  # what sizing a latent as heads comes to
    packed = shape(**{**MLA, "num_hidden_layers": 43})
    assert token_bytes(packed, kv="584B") == 25112
    assert round(25112 * 1048576 / GiB, 2) == 24.52
    plain = shape(**{**MLA, "num_hidden_layers": 61})
    assert [token_bytes(plain, tp=tp) for tp in (1, 8, 32)] == [70272] * 3
    assert token_bytes(plain, kv="fp8") == 61 * 576
    assert token_bytes(plain, kv="fp8_ds_mla") == 61 * 656
    assert plain.groups()[0].name == "latent"


def test_a_sparse_indexer_keeps_keys_beside_the_latent() -> None:
    of = shape(**{**MLA, "index_head_dim": 128, "layer_types": ["deepseek_sparse_attention"] * 32})
    assert token_bytes(of) == 32 * (1152 + 128 + 4)
    with pytest.raises(ValueError, match="'indexed_attention' is no kind of layer whose cache is known"):
        shape(layer_types=["indexed_attention"] * 32)


def test_fp8_halves_the_bytes_of_a_token_c60() -> None:
    of = shape(num_hidden_layers=48, num_attention_heads=40, head_dim=128)
    assert (token_bytes(of, tp=2, kv="fp8"), token_bytes(of, tp=2)) == (49152, 98304)
    assert round(221008 * 49152 / GiB, 3) == 10.117
    assert int(5.59 * GiB) // 49152 == pytest.approx(122115, rel=1e-3)


def test_keys_alone_are_half_c61() -> None:
    of = shape(num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4, head_dim=128)
    (full,) = of.groups(tp=4)
    assert (full.key_bytes_per_token, full.bytes_per_token) == (24064, 48128)
    assert round(367404 * 24064 / GiB, 3) == 8.234 and round(178880 * 48128 / GiB, 3) == 8.018


def test_a_draft_shares_the_tokens_of_its_target_c62() -> None:
    target = shape(num_hidden_layers=48, num_attention_heads=40, head_dim=128)
    draft = shape(num_hidden_layers=4, num_attention_heads=40, head_dim=128)
    each = token_bytes(target, tp=2) + token_bytes(draft, tp=2)
    assert each == 98304 + 8192
    assert 24 * GiB // (each * 16) * 16 == 241968


def test_a_window_is_capped_by_the_request_c63() -> None:
    (window,) = shape(model_type="mistral", sliding_window=1024).groups()
    assert [window.tokens_kept(n) for n in (128, 1024, 5000)] == [128, 1024, 1024]
    assert window.request_bytes(128) * 1024 == window.request_bytes(1024) * 128
    assert abs(31.27 * 128 / 1024 - 3.91) < 0.05


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_more_ranks_than_kv_heads_keep_copies(tp: int, heads: int) -> None:
    assert token_bytes(shape(), tp=tp) == 32 * 2 * heads * 128 * 2


def test_what_tensor_parallel_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="3 does not divide the 32 attention heads"):
        shape().groups(tp=3)
    with pytest.raises(ValueError, match="4 and 6 KV heads"):
        shape(num_attention_heads=12, num_key_value_heads=6, head_dim=128).groups(tp=4)


def test_head_size_is_its_own_key_or_the_share_of_the_hidden_size() -> None:
    assert token_bytes(shape(head_dim=256)) == 2 * token_bytes(shape())
    with pytest.raises(MissingKey, match="head_dim"):
        shape(model_type="gemma2", sliding_window=4096)  # a default of its own: 256
    with pytest.raises(MissingKey, match="head_dim"):
        shape(hidden_size=4100)


def test_kv_heads_left_out_are_as_many_as_heads() -> None:
    assert token_bytes(shape(num_key_value_heads=None)) == 4 * token_bytes(shape())
    with pytest.raises(MissingKey, match="num_key_value_heads is missing"):
        shape(num_key_value_heads=None, model_type="qwen2")
    falcon = {"model_type": "falcon", "num_key_value_heads": None, "num_kv_heads": 8, "multi_query": True}
    assert token_bytes(shape(**falcon)) == 32 * 2 * 128 * 2
    assert token_bytes(shape(**falcon, new_decoder_architecture=True)) == 8 * 32 * 2 * 128 * 2
    assert token_bytes(shape(num_key_value_heads=[8, 4] * 16)) == 16 * 2 * (8 + 4) * 128 * 2
    blocks = [{"attention": {"n_heads_in_group": 8, "no_op": False}}, {"attention": {"no_op": True}}]
    assert (
        token_bytes(shape(model_type="deci", num_key_value_heads=None, block_configs=blocks * 16))
        == 16 * 2 * 4 * 128 * 2
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 64}, "FWFW"),
        ({"sliding_window": 64, "use_sliding_window": False}, "FFFF"),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, "FFFW"),
        ({"sliding_window": 64, "sliding_window_pattern": 4}, "WWWF"),
        ({"sliding_window": 64, "sliding_window_pattern": "LLG"}, "WWFW"),
        ({"sliding_window": 64, "model_type": "mistral"}, "WWWW"),
        ({"sliding_window": 64, "model_type": "gemma2"}, "WFWF"),
        ({"attn_layer_indices": [1, 3]}, "SFSF"),
        ({"full_attn_idxs": [0]}, "FSSS"),
        ({"full_attention_interval": 2}, "SFSF"),
        ({"attn_layer_period": 3, "attn_layer_offset": 1}, "SFSS"),
        ({"linear_attn_config": {"full_attn_layers": [4]}}, "SSSF"),
        ({"attn_type_list": [0, 1, 0, 1]}, "SFSF"),
        ({"hybrid_layer_pattern": [0, 1, 1, 0]}, "FWWF"),
        ({"block_types": ["recurrent", "recurrent", "attention"]}, "SSWS"),
        ({"hybrid_override_pattern": "M-*E"}, "S-F-"),
        ({"model_type": "falcon_mamba"}, "SSSS"),
        ({"model_type": "falcon_h1"}, "BBBB"),
    ],
    ids=str,
)
def test_which_layers_cache_what(changes: dict[str, Any], expected: str) -> None:
    letters = {"full": "F", "window": "W", "state": "S", "none": "-", "full + state": "B"}
    fields = decoder_fields({**LLAMA, "num_hidden_layers": 4, **changes})
    assert "".join(letters[kind] for kind in layer_kinds.layer_kinds(fields)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": True}, "hidden_size: a whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: a whole number"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers is 32"),
        ({"layer_types": ["compressed_sparse_attention"] * 32}, "'compressed_sparse_attention' is no kind of layer"),
        ({"layer_types": ["linear_attention"] * 32}, "mamba_d_state is missing"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({"sliding_window": 64}, "layer_types is missing"),
        ({"n_recurrent_loops": 3}, "run in loops and keep more than once"),
        ({"torch_dtype": "int4"}, "'int4'"),
        ({"is_encoder_decoder": True}, "'llama' is an encoder with a decoder: only decoders"),
        ({"model_type": "bert"}, "'bert' is an encoder, which keeps no KV cache"),
        ({"architectures": ["NewForMaskedLM"]}, "is an encoder, which keeps no KV cache"),
        ({"architectures": 1}, "architectures: a list is expected"),
        ({"num_key_value_heads": 12}, "12 key-value heads do not divide the 32 attention heads"),
        ({"num_key_value_heads": 64}, "64 key-value heads do not divide the 32 attention heads"),
        ({"num_hidden_layers": 10**6}, "1000000 layers, at most 10000 are planned"),
    ],
    ids=str,
)
def test_errors_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape(**changes)


def test_the_decoder_of_a_multimodal_config_with_the_outer_dtype() -> None:
    inner = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    values = {
        "model_type": "llava",
        "torch_dtype": "float32",
        "text_config": inner,
        "vision_config": {"hidden_size": 1},
    }
    assert token_bytes(from_values(values)) == 2 * 131072
    deeper = {"model_type": "omni", "thinker_config": {"text_config": inner}}
    assert from_values(deeper).notes == ("dtype is not in the config: bfloat16 assumed",)
    assert from_values(deeper).model_type == "llama"


@pytest.mark.parametrize(
    ("name", "key_bytes"),
    [("float32", 512), ("half", 256), ("fp8_e4m3", 128), ("int8_per_token_head", 132), ("int4_per_token_head", 68),
     ("nvfp4", 64 + 8)],
)  # fmt: skip
def test_scales_lie_beside_the_numbers(name: str, key_bytes: int) -> None:
    assert kv_dtype(name).vector_bytes(128) == key_bytes
    assert token_bytes(shape(), kv=name) == 32 * 2 * 8 * key_bytes


def test_wrong_kv_dtypes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'fp7' is no KV dtype: one of float32"):
        shape().groups(kv="fp7")
    with pytest.raises(ValueError, match="fp8_ds_mla packs latent attention"):
        shape().groups(kv="fp8_ds_mla")
    with pytest.raises(ValueError, match="at least 1 byte"):
        kv_dtype("0B")


MAMBA2 = {"mamba_n_heads": 64, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 128, "mamba_d_conv": 4}


@pytest.mark.parametrize(
    ("keys", "numbers"),
    [
        ({**MAMBA2, "mamba_expand": 1}, (4096 + 2 * 2 * 128) * 3 + 4096 * 128),
        ({"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}, 8192 * 3 + 8192 * 16),
        ({"conv_L_cache": 3}, 4096 * 2),
        (
            {"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
             "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4},
            (2 * 16 * 128 + 32 * 64) * 3 + 32 * 128 * 64,
        ),
        (
            {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4},
            3 * 4096 * 3 + 2 * 32 * 128 * 128,  # the state in float32
        ),
        ({"attn_type_list": [0] * 32}, 32 * 128 * 128),
    ],
    ids=["Mamba 2", "Mamba 1", "short convolution", "gated delta", "delta attention", "lightning"],
)  # fmt: skip
def test_states_take_a_fixed_size_a_request(keys: dict[str, Any], numbers: int) -> None:
    of = shape(layer_types=["mamba", "full_attention"] * 16, **keys)
    state, full = of.groups()
    assert (state.kind, state.bytes_per_token, state.bytes_per_request) == ("state", 0, 16 * 2 * numbers)
    assert full.bytes_per_token == 16 * 2 * 8 * 128 * 2
    (half, _) = of.groups(tp=2)
    assert half.bytes_per_request * 2 == state.bytes_per_request


def test_a_state_keeps_its_own_dtype_and_copies_of_few_groups() -> None:
    of = shape(layer_types=["mamba"] * 32, **MAMBA2, mamba_expand=1, mamba_ssm_cache_dtype="float32")
    (state,) = of.groups()
    conv, recurrent = (4096 + 512) * 3, 4096 * 128
    assert state.bytes_per_request == 32 * (2 * conv + 4 * recurrent)
    assert of.groups(recurrent="bfloat16")[0].bytes_per_request == 32 * 2 * (conv + recurrent)
    (eighth,) = of.groups(tp=8)
    assert eighth.bytes_per_request == 32 * (2 * (512 + 256) * 3 + 4 * recurrent // 8)
    lru = shape(model_type="recurrent_gemma", block_types=["recurrent"], lru_width=2560, conv1d_width=4)
    assert lru.groups()[0].bytes_per_request == 32 * (2560 * 3 * 2 + 2560 * 4)


def test_layers_that_share_kv_have_none_of_their_own() -> None:
    assert token_bytes(shape(num_kv_shared_layers=12)) == 20 * 2 * 8 * 128 * 2


def test_kinds_of_layers_may_differ_in_their_heads() -> None:
    kinds = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 128}
    own_window = shape(**kinds, head_dim=192, v_head_dim=128, swa_num_key_value_heads=4, swa_v_head_dim=64)
    assert [g.bytes_per_token for g in own_window.groups()] == [8 * (192 + 128) * 2, 4 * (192 + 64) * 2]
    own_full = shape(**kinds, head_dim=256, global_head_dim=512, num_global_key_value_heads=2, attention_k_eq_v=True)
    assert [g.bytes_per_token for g in own_full.groups()] == [2 * 2 * 512 * 2, 2 * 8 * 256 * 2]


@pytest.mark.parametrize(
    ("layers", "stages", "counts"), [(32, 1, [32]), (32, 4, [8] * 4), (61, 2, [31, 30]), (61, 4, [15, 15, 16, 15])]
)
def test_pipeline_stages_split_the_layers(layers: int, stages: int, counts: list[int]) -> None:
    found = stage_layers(layers, stages)
    assert [len(stage) for stage in found] == counts
    assert [layer for stage in found for layer in stage] == list(range(layers))
    of = shape(num_hidden_layers=layers)
    assert sum(token_bytes(of, layers=stage) for stage in found) == token_bytes(of)
    with pytest.raises(ValueError, match="only 32 layers"):
        stage_layers(32, 33)


def test_what_nobody_knows_is_assumed_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_fields, "find_spec", lambda name: None)
    found = from_values({**LLAMA, "model_type": "unheard_of"})
    assert token_bytes(found) == 131072
    assert [note.split(" is ")[0] for note in found.notes[:2]] == ["layer_types", "head_dim"]
    assert "not installed" in found.notes[-1]
    with pytest.raises(ValueError, match=r"num_hidden_layers is missing.*transformers.*not installed"):
        from_values({"model_type": "gemma2"})


@needs_transformers
def test_transformers_fills_what_a_sparse_config_leaves_out() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    found = from_values({"model_type": "gemma3", "torch_dtype": "float16", "text_config": text})
    assert [(g.name, len(g.layers), g.bytes_per_token) for g in found.groups()] == [
        ("window 1024", 29, 29 * 2 * 4 * 256 * 2), ("full", 5, 5 * 2 * 4 * 256 * 2)
    ]  # fmt: skip
    assert (found.dtype, found.notes) == ("float16", ())
    with pytest.raises(ValueError, match="transformers does not know model type 'unheard_of'"):
        from_values({"model_type": "unheard_of"})


TABLES = {
    "head_dim": model_shape._HIDDEN_OVER_HEADS,
    "num_key_value_heads": model_shape._AS_MANY_KV_HEADS,
    "layer_types": layer_kinds._ALL_FULL | frozenset(layer_kinds._PERIODS),
}


@needs_transformers
@pytest.mark.parametrize("key", list(TABLES))
def test_what_is_implied_of_a_model_type_is_what_its_class_does(key: str) -> None:
    """Left out of a configuration, a key that we hold implied comes out as the class of transformers has it."""
    call = [sys.executable, "-c", _LEFT_OUT, key, json.dumps(sorted(TABLES[key]))]
    answer = subprocess.run(call, capture_output=True, text=True, check=True)
    found = json.loads(answer.stdout.strip().splitlines()[-1])
    assert len(found) > 15
    wrong = []
    for name, (given, expected) in found.items():
        try:
            implied = shape_of(decoder_fields({**given, "model_type": name})).groups()
        except MissingKey as missing:  # another key, for which the class is asked: nothing is guessed
            if missing.key == key:
                wrong.append(name)
            continue
        of_class = decoder_fields({**expected, "model_type": name})
        of_class.assume = True
        if implied != shape_of(of_class).groups():
            wrong.append(name)
    assert not wrong


def test_what_a_layer_is_said_to_have_is_an_object() -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    with pytest.raises(ValueError, match="per_layer_config of layer 0 must be an object, got 5"):
        from_values({"model_type": "llama", **sizes, "per_layer_config": {"0": 5}})


def test_keys_that_are_given_are_never_replaced_by_those_of_a_nested_class() -> None:
    pytest.importorskip("transformers")
    given = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    with pytest.raises(ValueError, match="layer_types names 26 layers, num_hidden_layers is 32"):
        from_values({"model_type": "gemma3", **given, "head_dim": 128})


def test_an_encoder_that_is_said_to_be_a_decoder_is_planned() -> None:
    assert token_bytes(shape(model_type="bert", is_decoder=True, layer_types=["full_attention"] * 32, head_dim=128))


def test_full_attention_is_never_assumed_where_layers_keep_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_fields, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"layer_types is missing.*'unheard_of'.*not installed"):
        from_values({**LLAMA, "model_type": "unheard_of", "mamba_d_state": 128})


@needs_transformers
def test_a_config_that_its_class_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer_types is missing.*transformers does not accept.*\(54\)"):
        from_values({**LLAMA, "model_type": "zamba2"})  # whose kinds of layers are for 54


def test_numbers_that_json_has_no_word_for_are_read(tmp_path: Path) -> None:
    values = {**LLAMA, "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert config_fields.read_config(tmp_path)["time_step_limit"] == [0.0, float("inf")]


@needs_transformers
def test_what_transformers_saved_is_filled_in() -> None:
    """Bamba's own class saves its limits in that way, and refuses them as it saved them."""
    values = {**LLAMA, "model_type": "bamba", "time_step_limit": (0.0, float("inf")), "attn_layer_indices": [3, 7]}
    assert {group.kind for group in from_values(values).groups()} == {"state", "full"}


def test_a_float_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"limit": {"__float__": null}}')
    with pytest.raises(ValueError, match="__float__: the name of a number is expected, not None"):
        config_fields.read_config(tmp_path)


def test_keys_of_states_that_are_null_mean_nothing() -> None:
    of_class = decoder_fields({**LLAMA, "model_type": "new", "mamba_d_state": None, "head_dim": 128})
    of_class.assume = True
    assert [group.kind for group in shape_of(of_class).groups()] == ["full"]


def test_latent_layers_may_have_a_window_and_a_rank_of_their_own() -> None:
    """Layers by their number, padded with zeros as transformers saves them: dots3's kind of model."""
    of = shape(
        **{**MLA, "num_hidden_layers": 11, "sliding_window": 512, "index_head_dim": 128},
        layer_types=["indexed_attention"] + ["sliding_attention"] * 10,
        per_layer_config={f"{i:02}": {"kv_lora_rank": 1024} for i in range(1, 11)},
    )
    full, window = of.groups()
    assert (full.name, full.bytes_per_token, full.window) == ("latent", 576 * 2 + 128 + 4, None)
    assert (window.name, window.bytes_per_token, window.window) == ("latent window 512", 10 * 1088 * 2, 512)


def test_latent_attention_without_a_rotary_part() -> None:
    assert token_bytes(shape(**{**MLA, "qk_rope_head_dim": 0})) == 32 * 512 * 2


@needs_transformers
@pytest.mark.parametrize(
    ("model_type", "window", "full"),
    [
        ("gemma4_text", 25 * 4 * 256 * 2 * 2, 5 * 4 * 512 * 2 * 2),  # sizes by layer, in `per_layer_config`
        ("mimo_v2_flash", 39 * 8 * (192 + 128) * 2, 9 * 4 * (192 + 128) * 2),  # twice the KV heads under a window
    ],
)
def test_what_a_class_says_layer_by_layer(model_type: str, window: int, full: int) -> None:
    found = from_values({"model_type": model_type, "torch_dtype": "bfloat16"}).groups()
    assert {group.kind: group.bytes_per_token for group in found} == {"window": window, "full": full}
