"""The decoder's shape, read from a Hugging Face config.json."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from reprlib import repr
from typing import Any

import torch

from vmm_kv.config_fields import read_config
from vmm_kv.demo.requests import LEAST_LONGEST

logger = logging.getLogger(__name__)

BYTE_TOKENS = 256
_ROTARY_ITEM = 4
_MOST = {
    "hidden_size": 1 << 17, "intermediate_size": 1 << 20, "num_hidden_layers": 1 << 12, "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12, "head_dim": 1 << 12, "vocab_size": 1 << 22, "max_position_embeddings": 1 << 24,
}  # fmt: skip
"""Well above any decoder there is. More is a slip, and would be noticed only when memory has run out."""
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
        source = Path(str(files(__package__).joinpath("config.json"))) if path is None else Path(path)
        fields = read_config(source)
        try:
            return cls.from_fields(fields)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights and of the rotary tables."""
        heads = self.num_attention_heads + self.num_key_value_heads
        layer = self.hidden_size * (2 * heads * self.head_dim + 3 * self.intermediate_size + 2)
        vocabularies = (1 if self.tie_word_embeddings else 2) * self.vocab_size
        elements = self.num_hidden_layers * layer + self.hidden_size * (vocabularies + 1)
        return elements * self.dtype.itemsize + self.max_position_embeddings * self.head_dim * _ROTARY_ITEM

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
        positions = _count(fields, "max_position_embeddings")
        if positions < LEAST_LONGEST:
            raise ValueError(
                f"max_position_embeddings: requests take at least {LEAST_LONGEST} tokens, so not {positions}"
            )
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
            max_position_embeddings=positions,
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
        raise ValueError(f"{name}: a whole number of 1 or more is expected, not {repr(value)}")
    if value > _MOST[name]:
        raise ValueError(f"{name}: at most {_MOST[name]} is expected, not {repr(value)}")
    return value


def _positive(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if value is None:
        raise ValueError(f"{name} is missing")
    # Compared as it came: a whole number may be too large for a float.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name}: a positive number is expected, not {repr(value)}")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name}: true or false is expected, not {repr(value)}")
    return value


def _rope_theta(fields: Mapping[str, Any]) -> float:
    rope = fields.get("rope_parameters")
    if rope is not None and not isinstance(rope, dict):
        raise ValueError(f"rope_parameters: an object is expected, not {repr(rope)}")
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
    if not isinstance(value, str) or value not in _DTYPES:
        raise ValueError(f"{name}: one of {', '.join(_DTYPES)} is expected, not {repr(value)}")
    return _DTYPES[value]
