"""The decoder's shape, read from a Hugging Face config.json."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

BYTE_TOKENS = 256
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-style decoder. Sizes are numbers of elements; names are Hugging Face's."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: torch.dtype

    @classmethod
    def from_json(cls, path: str | Path | None = None) -> ModelConfig:
        """Reads a config.json, the bundled one if `path` is None.

        Raises `ValueError` that names the field if one is missing or makes no sense, `OSError` if there is no file.
        """
        source = files(__package__).joinpath("config.json") if path is None else Path(path)
        try:
            fields = json.loads(source.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{source}: no JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{source}: a JSON object is expected, not {type(fields).__name__}")
        try:
            return cls.from_fields(fields)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """The same from the decoded object. Fields that Hugging Face itself derives may be left out."""
        hidden = _count(fields, "hidden_size")
        heads = _count(fields, "num_attention_heads")
        kv_heads = _count(fields, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(f"num_key_value_heads: {kv_heads} does not divide num_attention_heads, {heads}")
        head_dim = _count(fields, "head_dim", hidden // heads)
        if head_dim % 2:
            raise ValueError(f"head_dim: rotary positions turn pairs, so it must be even, not {head_dim}")
        vocab = _count(fields, "vocab_size")
        if vocab < BYTE_TOKENS:
            raise ValueError(f"vocab_size: tokens are bytes, so at least {BYTE_TOKENS} are needed, not {vocab}")
        return cls(
            hidden_size=hidden,
            intermediate_size=_count(fields, "intermediate_size"),
            num_hidden_layers=_count(fields, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive(fields, "rms_norm_eps"),
            rope_theta=_rope_theta(fields),
            vocab_size=vocab,
            max_position_embeddings=_count(fields, "max_position_embeddings"),
            tie_word_embeddings=_flag(fields, "tie_word_embeddings"),
            dtype=_dtype(fields),
        )


def _count(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: a whole number of 1 or more is expected, not {value!r}")
    return value


def _positive(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if value is None:
        raise ValueError(f"{name} is missing")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"{name}: a positive number is expected, not {value!r}")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name}: true or false is expected, not {value!r}")
    return value


def _rope_theta(fields: Mapping[str, Any]) -> float:
    rope = fields.get("rope_parameters")
    if rope is not None and not isinstance(rope, dict):
        raise ValueError(f"rope_parameters: an object is expected, not {rope!r}")
    scaling = rope or fields.get("rope_scaling")
    if isinstance(scaling, dict):
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            logger.warning("rope type %r is not applied: with random weights plain rotary positions do", kind)
    return _positive(rope if rope and "rope_theta" in rope else fields, "rope_theta")


def _dtype(fields: Mapping[str, Any]) -> torch.dtype:
    # Hugging Face renamed torch_dtype to dtype.
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name)
    if value is None:
        raise ValueError("torch_dtype (or dtype) is missing")
    if value not in _DTYPES:
        raise ValueError(f"{name}: one of {', '.join(_DTYPES)} is expected, not {value!r}")
    return _DTYPES[value]
