"""A model and an engine small enough to compute by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from vmm_kv.demo.config import ModelConfig
from vmm_kv.demo.engine import Engine, EngineConfig
from vmm_kv.demo.model import Decoder
from vmm_kv.device import Device, open_device

CONFIG = ModelConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    vocab_size=256,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    dtype=torch.float32,
)
ENGINE = EngineConfig(block_size=4, ladder=(1, 2, 4), longest=32)
BLOCKS = 40


def kv_tensors(blocks: int = BLOCKS, block_size: int = 4, config: ModelConfig = CONFIG) -> list[Tensor]:
    shape = (blocks, 2, block_size, config.num_key_value_heads, config.head_dim)
    return [torch.zeros(shape, dtype=config.dtype) for _ in range(config.num_hidden_layers)]


def engine(device: Device | None = None) -> Engine:
    device = device or open_device("host:64MiB")
    return Engine(Decoder(CONFIG, torch.device("cpu")), kv_tensors(), device, ENGINE)
