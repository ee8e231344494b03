"""A small decoder with grouped-query attention over a paged KV cache. Random weights, real arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from vmm_kv.demo import paging
from vmm_kv.demo.config import ModelConfig

_LOGIT_SPREAD = 2.0
"""Standard deviation of the logits: wide enough that what was read decides, flat enough that many tokens occur."""


@dataclass(frozen=True)
class Batch:
    """What one step reads: B sequences, T new tokens of each, N blocks in a table. All int64 on the model's device."""

    tokens: Tensor
    """(B, T)"""
    positions: Tensor
    """(B, T): a query sees the positions up to its own."""
    slots: Tensor
    """(B, T): where the new keys go, see `paging.slot`."""
    tables: Tensor
    """(B, N): a sequence's blocks in order; entries beyond its length may name any block."""


@dataclass(frozen=True)
class Layer:
    """Weights, each (out, in), norms (hidden,)."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Decoder:
    """Llama-style decoder. The same seed gives the same weights on the same kind of device."""

    def __init__(self, config: ModelConfig, device: torch.device, seed: int = 0) -> None:
        self.config = config
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        vocab, wide = config.vocab_size, config.intermediate_size
        self.layers = [
            Layer(
                attention_norm=self._ones(hidden),
                qkv=self._matrix((heads + 2 * kv_heads) * config.head_dim, hidden),
                out=self._matrix(hidden, heads * config.head_dim),
                mlp_norm=self._ones(hidden),
                gate_up=self._matrix(2 * wide, hidden),
                down=self._matrix(hidden, wide),
            )
            for _ in range(config.num_hidden_layers)
        ]
        self.norm = self._ones(hidden)
        self.head = self._matrix(vocab, hidden, _LOGIT_SPREAD)
        self.embedding = self.head if config.tie_word_embeddings else self._matrix(vocab, hidden)
        self.cos, self.sin = self._rotary_tables()

    def __call__(
        self, batch: Batch, kv: Sequence[Tensor], *, last: int | None = None, condition: Tensor | None = None
    ) -> Tensor:
        """One step: writes the new tokens' keys and values into `kv` (one tensor a layer, see `paging`).

        Returns the logits of each sequence's last token, (B, vocab_size) float32, or of its `last` tokens,
        (B, last, vocab_size). `condition`, (hidden_size,), is added to every token's embedding.
        """
        cos, sin = self.turns(batch)
        x = self.embedded(batch, condition)
        for layer, cache in zip(self.layers, kv, strict=True):
            x = self.after_attention(layer, x, self.attend(*self.before_attention(layer, x, cos, sin), batch, cache))
        return self.logits(x[:, -1] if last is None else x[:, -last:])

    # The parts of a step. What lies between two `attend` reads no cache, so it may be a graph of its own.

    def turns(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(B, T, 1, head_dim / 2): the same turn for every head."""
        cos, sin = (embedding(batch.positions, table).unsqueeze(2) for table in (self.cos, self.sin))
        return cos, sin

    def embedded(self, batch: Batch, condition: Tensor | None = None) -> Tensor:
        x = embedding(batch.tokens, self.embedding)
        return x if condition is None else x + condition

    def before_attention(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (B, T, heads, head_dim) each, the first two turned."""
        heads, kv_heads, dim = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim
        heads_of_all = linear(self._normed(x, layer.attention_norm), layer.qkv).view(*x.shape[:2], -1, dim)
        query, key, value = torch.split(heads_of_all, [heads, kv_heads, kv_heads], dim=2)
        return _turned(query, cos, sin), _turned(key, cos, sin), value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, batch: Batch, cache: Tensor) -> Tensor:
        """Writes keys and values, and returns what each query finds, (B, T, heads * head_dim)."""
        heads, kv_heads, dim = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim
        b, t = batch.tokens.shape
        paging.write(cache, batch.slots, key, value)
        keys, values = paging.read(cache, batch.tables, query.dtype)
        # The heads of a group share keys, so they and the tokens make one matrix: (B, kv_heads, T * group, dim).
        query = query.view(b, t, kv_heads, -1, dim).transpose(1, 2).flatten(2, 3)
        # With a table in order, the column is the position.
        seen = torch.arange(keys.shape[2], device=self.device) <= batch.positions.unsqueeze(-1)
        mask = seen.repeat_interleave(heads // kv_heads, dim=1).unsqueeze(1)
        mixed = scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return mixed.view(b, kv_heads, t, -1).transpose(1, 2).reshape(b, t, -1)

    def after_attention(self, layer: Layer, x: Tensor, mixed: Tensor) -> Tensor:
        """The rest of the layer."""
        x = x + linear(mixed, layer.out)
        gate, up = linear(self._normed(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return x + linear(silu(gate) * up, layer.down)

    def logits(self, x: Tensor) -> Tensor:
        """(..., vocab_size) float32 of the last layer's outputs, (..., hidden_size)."""
        return linear(self._normed(x, self.norm), self.head).float()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (wide * scale).to(x.dtype) * weight

    def _ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self.config.dtype, device=self.device)

    def _matrix(self, rows: int, columns: int, spread: float = 1.0) -> Tensor:
        """Outputs of about `spread` for inputs of about one."""
        weight = torch.randn(rows, columns, generator=self._generator, device=self.device, dtype=self.config.dtype)
        return weight.mul_(spread * columns**-0.5)

    def _rotary_tables(self) -> tuple[Tensor, Tensor]:
        dim, length = self.config.head_dim, self.config.max_position_embeddings
        pairs = torch.arange(0, dim, 2, device=self.device, dtype=torch.float32) / dim
        angles = torch.outer(torch.arange(length, device=self.device), self.config.rope_theta**-pairs)
        return angles.cos(), angles.sin()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on (B, T, heads, dim), the first half of a head paired with the second."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
