"""What an engine puts into graphs: a whole step at one size, or a prefill cut into pieces at its attentions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vmm_kv.demo.engine import Graph, Graphs
from vmm_kv.demo.model import Batch, Decoder


@dataclass(frozen=True)
class Captured:
    """The graphs of one descriptor. `replay` runs them and returns their output."""

    graphs: tuple[Any, ...]
    replay: Callable[[], Tensor]

    def drop(self) -> None:
        """Lets go of the graphs and their memory."""
        for graph in self.graphs:
            graph.reset()


def capture_whole(run: Callable[[], Tensor], device: Graphs, pool: Any) -> Captured:
    """One graph of `run`, which runs once before: libraries set themselves up on the first run of a shape."""
    run()
    graph = device.new_graph()
    with device.capture(graph, pool):
        output = run()

    def replay() -> Tensor:
        graph.replay()
        return output

    return Captured((graph,), replay)


class Prefill:
    """Prefills of a few sequences at once, padded to one of some sizes: graphs, the attention run eagerly between them.

    In the graphs all tokens lie in one row, whosever they are; only the attention sees sequences. Pieces hand their
    results on in buffers that all sizes and layers share, so a graph keeps none of its own.
    """

    def __init__(self, model: Decoder, kv: Sequence[Tensor], sizes: Sequence[int]) -> None:
        config, most = model.config, max(sizes)
        self.sizes = tuple(sizes)
        self._model, self._kv = model, kv
        self._tokens, self._positions = torch.zeros(2, 1, most, dtype=torch.int64, device=model.device)
        self._batch: Batch | None = None
        heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(1, most, *shape, dtype=config.dtype, device=model.device)

        self._x = buffer(config.hidden_size)
        self._qkv = [buffer(count, config.head_dim) for count in heads]
        self._mixed = buffer(heads[0] * config.head_dim)

    def fill(self, batch: Batch) -> int:
        """Sets the inputs. Returns the size that takes them; what lies beyond them is computed and never used."""
        count = batch.tokens.numel()
        self._tokens[0, :count].copy_(batch.tokens.flatten())
        self._positions[0, :count].copy_(batch.positions.flatten())
        self._batch = batch
        return next(size for size in self.sizes if size >= count)

    def run(self, size: int) -> Tensor:
        """Eagerly. Returns the last layer's outputs of the batch, (B, T, hidden_size), valid until the next run."""
        for stage in self._stages(size):
            stage()
        return self._output()

    def capture(self, size: int, device: Graphs, pool: Any) -> Captured:
        """A graph for each piece."""
        self.run(size)
        graphs: list[Graph] = []
        steps: list[Callable[[], object]] = []
        for place, stage in enumerate(self._stages(size)):
            if place % 2:
                steps.append(stage)  # an attention
                continue
            graph = device.new_graph()
            with device.capture(graph, pool):
                stage()
            graphs.append(graph)
            steps.append(graph.replay)

        def replay() -> Tensor:
            for step in steps:
                step()
            return self._output()

        return Captured(tuple(graphs), replay)

    def _output(self) -> Tensor:
        assert self._batch is not None
        return self._x[0, : self._batch.tokens.numel()].view(*self._batch.tokens.shape, -1)

    def _stages(self, size: int) -> list[Callable[[], None]]:
        """A piece, an attention, a piece, ..., a piece."""
        layers = range(len(self._model.layers))
        stages: list[Callable[[], None]] = []
        for place in layers:
            stages += [partial(self._piece, place, size), partial(self._attention, place)]
        return [*stages, partial(self._piece, len(layers), size)]

    def _piece(self, place: int, size: int) -> None:
        """The end of the layer before, and the beginning of layer `place`."""
        model, x, mixed = self._model, self._x[:, :size], self._mixed[:, :size]
        # The graph reads the static inputs; the cache's are for the attention alone.
        inputs = Batch(
            self._tokens[:, :size], self._positions[:, :size], self._positions[:, :0], self._positions[:, :0]
        )
        x.copy_(model.after_attention(model.layers[place - 1], x, mixed) if place else model.embedded(inputs))
        if place < len(model.layers):
            parts = model.before_attention(model.layers[place], x, *model.turns(inputs))
            for home, part in zip(self._qkv, parts, strict=True):
                home[:, :size].copy_(part)

    def _attention(self, place: int) -> None:
        batch = self._batch
        assert batch is not None
        count = batch.tokens.numel()
        query, key, value = (part[0, :count].view(*batch.tokens.shape, *part.shape[2:]) for part in self._qkv)
        mixed = self._model.attend(query, key, value, batch, self._kv[place])
        self._mixed[0, :count].copy_(mixed.flatten(0, 1))
