"""What is run: the model, the ladder of graphs, the load that is served afterwards, and how large the device is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from vmm_kv.bench.ladder import Ladder
from vmm_kv.demo.config import ModelConfig

MIB = 1 << 20


@dataclass(frozen=True)
class Shape:
    """Sizes of the models. The draft model has `draft_layers` layers of half the width."""

    hidden: int = 128
    intermediate: int = 384
    layers: int = 12
    heads: int = 4
    head_dim: int = 64
    vocab: int = 8192
    draft_layers: int = 2
    encoder_width: int = 256
    encoder_layers: int = 2

    def target(self, longest: int) -> ModelConfig:
        return ModelConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            head_dim=self.head_dim,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            vocab_size=self.vocab,
            max_position_embeddings=longest,
            tie_word_embeddings=False,
            dtype=torch.float32,
        )

    def draft(self, longest: int) -> ModelConfig:
        full = self.target(longest)
        half = max(1, self.heads // 2)
        return replace(
            full,
            hidden_size=self.hidden // 2,
            intermediate_size=self.intermediate // 2,
            num_hidden_layers=self.draft_layers,
            num_attention_heads=half,
            num_key_value_heads=half,
        )


@dataclass(frozen=True)
class Load:
    """Requests that are served after the start-up. Tokens; lengths go round between the two ends.

    As many as are prefilled at once come first with the longest prompt there may be: the worst step is among them.
    """

    requests: int = 42
    prompt: tuple[int, int] = (188, 228)
    answer: tuple[int, int] = (6, 18)
    image_every: int = 4
    """Of the requests, where there is an encoder."""


@dataclass(frozen=True)
class Scenario:
    """Everything that all strategies have in common on one ladder. Bytes unless said otherwise."""

    ladder: Ladder
    device: str = "host:2GiB"
    room: int = 192 * MIB
    """What the weights leave of the requested share, a block included that stands for the rest of a larger model's."""
    utilization: float = 1.0
    margin: int = 0
    """Left free by every strategy but the oracle and the fixed headroom."""
    block_size: int = 16
    longest: int = 256
    prefills: int = 8
    """Sequences that are prefilled at once, at most."""
    shape: Shape = field(default_factory=Shape)
    load: Load = field(default_factory=Load)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scenario:
        """Of `to_dict`, also after it went through JSON."""
        nested = {"ladder": Ladder, "shape": Shape, "load": Load}
        return cls(**{name: _build(nested[name], value) if name in nested else value for name, value in data.items()})


def _build(kind: type[Any], data: Mapping[str, Any]) -> Any:
    """JSON has lists where the fields are tuples."""
    return kind(**{f.name: tuple(v) if isinstance(v := data[f.name], list) else v for f in fields(kind)})
