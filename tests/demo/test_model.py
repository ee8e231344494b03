from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_engine import CONFIG, kv_tensors
from torch import Tensor

from vmm_kv.demo import paging
from vmm_kv.demo.model import Batch, Decoder

TOKENS = [72, 101, 108, 108, 111, 44, 32, 112, 97, 103, 101]


def dense_logits(model: Decoder, tokens: list[int]) -> Tensor:
    """Logits after every token, (T, vocab), from plain attention over the whole sequence: no cache, no batch."""
    config, count = model.config, len(tokens)
    group = config.num_attention_heads // config.num_key_value_heads

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * weight

    def turned(x: Tensor) -> Tensor:
        """(T, heads, dim), pairs (i, i + dim / 2) as complex numbers."""
        half = config.head_dim // 2
        rates = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turn = torch.polar(torch.ones(count, half).double(), torch.outer(torch.arange(count).double(), rates))
        z = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn[:, None]
        return torch.cat((z.real, z.imag), -1).to(x.dtype)

    x = model.embedding[tokens]
    for layer in model.layers:
        projected = (normed(x, layer.attention_norm) @ layer.qkv.T).view(count, -1, config.head_dim)
        queries = turned(projected[:, : config.num_attention_heads])
        keys = turned(projected[:, config.num_attention_heads : -config.num_key_value_heads])
        values = projected[:, -config.num_key_value_heads :]
        heads = []
        for head in range(config.num_attention_heads):
            scores = queries[:, head] @ keys[:, head // group].T / config.head_dim**0.5
            scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
            heads.append(scores.softmax(-1) @ values[:, head // group])
        x = x + torch.cat(heads, -1) @ layer.out.T
        gate, up = (normed(x, layer.mlp_norm) @ layer.gate_up.T).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ layer.down.T
    return normed(x, model.norm) @ model.head.T


def step(model: Decoder, kv: list[Tensor], tokens: list[int], start: int, table: list[int]) -> Tensor:
    positions = list(range(start, start + len(tokens)))
    slots = [paging.slot(table, position, kv[0].shape[2]) for position in positions]
    return model(Batch(*(torch.tensor([row]) for row in (tokens, positions, slots, table))), kv)[0]


@pytest.mark.parametrize("tied", [False, True])
def test_prefill_and_decode_equal_dense_attention(tied: bool) -> None:
    model = Decoder(replace(CONFIG, tie_word_embeddings=tied), torch.device("cpu"))
    expected, kv, table = dense_logits(model, TOKENS), kv_tensors(), [7, 3, 29]
    torch.testing.assert_close(step(model, kv, TOKENS[:5], 0, table), expected[4], atol=1e-4, rtol=1e-4)
    for position in range(5, len(TOKENS)):
        logits = step(model, kv, TOKENS[position : position + 1], position, table)
        torch.testing.assert_close(logits, expected[position], atol=1e-4, rtol=1e-4)


def test_paged_equals_contiguous_in_every_bit() -> None:
    model = Decoder(CONFIG, torch.device("cpu"))
    scattered, in_order = kv_tensors(), kv_tensors()
    for start, end in ((0, 6), (6, 7), (7, 11)):
        paged = step(model, scattered, TOKENS[start:end], start, [31, 2, 17])
        contiguous = step(model, in_order, TOKENS[start:end], start, [1, 2, 3])
        assert torch.equal(paged, contiguous)


def test_only_the_slots_of_a_sequence_are_written() -> None:
    model, kv = Decoder(CONFIG, torch.device("cpu")), kv_tensors()
    step(model, kv, TOKENS[:5], 0, [7, 3])
    for tensor in kv:
        written = tensor.abs().sum(dim=(3, 4)).nonzero().tolist()
        assert written == [[3, 0, 0], [3, 1, 0], *([7, half, offset] for half in (0, 1) for offset in range(4))]


def test_what_lies_beyond_a_sequence_does_not_matter() -> None:
    model, clean, dirty = Decoder(CONFIG, torch.device("cpu")), kv_tensors(), kv_tensors()
    for tensor in dirty:
        tensor.fill_(3.0)
    assert torch.equal(step(model, clean, TOKENS, 0, [7, 3, 29]), step(model, dirty, TOKENS, 0, [7, 3, 29]))


def test_bfloat16() -> None:
    config = replace(CONFIG, dtype=torch.bfloat16)
    logits = step(Decoder(config, torch.device("cpu")), kv_tensors(config=config), TOKENS, 0, [7, 3, 29])
    assert logits.dtype is torch.float32
    assert logits.isfinite().all()


def test_one_seed_one_model() -> None:
    first, again, other = (Decoder(CONFIG, torch.device("cpu"), seed) for seed in (5, 5, 6))
    assert torch.equal(first.layers[1].down, again.layers[1].down)
    assert not torch.equal(first.layers[1].down, other.layers[1].down)
