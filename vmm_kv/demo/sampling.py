"""Next tokens from logits, on the host, so that the choice is no part of a graph."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor


def sample(logits: Tensor, generators: Sequence[torch.Generator], temperature: float) -> list[int]:
    """One token for each row of logits, (B, vocab) float32 on the CPU.

    Every sequence draws from its own CPU generator, so its choice does not depend on who else is in the batch.
    """
    vocab = logits.shape[1]
    uniform = torch.stack([torch.rand(vocab, generator=generator) for generator in generators])
    # Adding Gumbel noise and taking the largest is sampling from the softmax.
    noise = -torch.log(-torch.log(uniform))
    tokens: list[int] = (logits / temperature + noise).argmax(dim=-1).tolist()
    return tokens


def checksum(logits: Tensor) -> str:
    """Of the exact bytes of a CPU tensor: two runs agree only if they agree in every bit."""
    logits = logits.contiguous()
    data = ctypes.string_at(logits.data_ptr(), logits.numel() * logits.element_size())
    return blake2b(data, digest_size=16).hexdigest()
