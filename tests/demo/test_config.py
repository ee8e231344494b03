from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vmm_kv.demo.config import _MOST, ModelConfig
from vmm_kv.demo.model import Decoder

GOOD: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}


def test_the_bundled_config_is_valid() -> None:
    config = ModelConfig.from_json()
    assert config.vocab_size >= 256
    assert config.num_attention_heads % config.num_key_value_heads == 0


def test_what_hugging_face_derives_may_be_left_out() -> None:
    config = ModelConfig.from_fields({k: v for k, v in GOOD.items() if k != "num_key_value_heads"})
    assert config.num_key_value_heads == 4
    assert config.head_dim == 16
    assert config.tie_word_embeddings is False
    assert config.dtype is torch.bfloat16


def test_new_names_of_hugging_face() -> None:
    fields = {k: v for k, v in GOOD.items() if k not in ("torch_dtype", "rope_theta")}
    config = ModelConfig.from_fields(
        {**fields, "dtype": "float32", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    )
    assert config.dtype is torch.float32
    assert config.rope_theta == 5e5


@pytest.mark.parametrize("name", sorted(GOOD.keys() - {"num_key_value_heads"}))
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ModelConfig.from_fields({k: v for k, v in GOOD.items() if k != name})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", "64"),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 2.5),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("inf")),
        ("rope_theta", -1),
        ("rope_parameters", 3),
        ("vocab_size", 255),
        ("tie_word_embeddings", "yes"),
        ("torch_dtype", "float16"),
        ("torch_dtype", ["bfloat16"]),
        ("torch_dtype", {}),
        ("rope_theta", 10**400),
        ("rms_norm_eps", 10**400),
        ("max_position_embeddings", 1),
        ("max_position_embeddings", 15),
    ],
)
def test_a_nonsensical_field_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        ModelConfig.from_fields({**GOOD, name: value})


@pytest.mark.parametrize(("text", "said"), [("{", "no JSON"), ("[1]", "JSON object"), (json.dumps({}), "hidden_size")])
def test_a_bad_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        ModelConfig.from_json(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", sorted(_MOST))
@pytest.mark.parametrize("more", [1, 10**4000])
def test_a_size_that_no_decoder_has_is_named(name: str, more: int) -> None:
    with pytest.raises(ValueError, match=f"^{name}: at most") as caught:
        ModelConfig.from_fields({**GOOD, name: _MOST[name] + more})
    assert len(str(caught.value)) < 200


def test_what_is_nested_too_deeply_is_a_bad_file(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ValueError, match="nested too deeply") as caught:
        ModelConfig.from_json(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_are_those_of_the_decoder(tied: bool) -> None:
    config = ModelConfig.from_fields({**GOOD, "tie_word_embeddings": tied})
    model = Decoder(config, torch.device("cpu"))
    tensors = [model.norm, model.head, model.embedding, model.cos, model.sin]
    tensors += [tensor for layer in model.layers for tensor in vars(layer).values()]
    assert config.weight_bytes == sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
