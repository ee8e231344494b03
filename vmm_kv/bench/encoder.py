"""A small image encoder: patches in, one vector that conditions the prompt out. Random weights, real arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

PATCH = 48
"""Numbers in a patch: 4 x 4 pixels of three colours."""
_HEADS = 4


class Encoder:
    """Layers of full attention and a wide MLP over (patches, PATCH); their mean, (hidden,), is the result."""

    def __init__(self, width: int, layers: int, hidden: int, device: torch.device, seed: int = 1) -> None:
        self.width = width
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device
        self._inward = self._matrix(width, PATCH)
        self._layers = [
            (self._matrix(3 * width, width), self._matrix(width, width), self._matrix(4 * width, width),
             self._matrix(width, 4 * width))
            for _ in range(layers)
        ]  # fmt: skip
        self._outward = self._matrix(hidden, width)

    def __call__(self, patches: Tensor) -> Tensor:
        x = linear(patches, self._inward)
        for qkv, out, up, down in self._layers:
            heads = linear(layer_norm(x, (self.width,)), qkv).view(1, len(x), 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
            mixed = scaled_dot_product_attention(heads[0], heads[1], heads[2])
            x = x + linear(mixed[0].transpose(0, 1).reshape(len(x), -1), out)
            x = x + linear(gelu(linear(layer_norm(x, (self.width,)), up)), down)
        return linear(x.mean(0), self._outward)

    def _matrix(self, rows: int, columns: int) -> Tensor:
        weight = torch.randn(rows, columns, generator=self._generator, device=self._device)
        return weight.mul_(columns**-0.5)
