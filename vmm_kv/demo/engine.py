"""A small inference engine: continuous batching, eager prefill, decode by graph replay over a paged KV cache."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, Protocol

import torch
from torch import Tensor

from vmm_kv.demo import paging
from vmm_kv.demo.blocks import BlockAllocator
from vmm_kv.demo.model import Batch, Decoder
from vmm_kv.demo.requests import Request
from vmm_kv.demo.sampling import checksum, sample

logger = logging.getLogger(__name__)

_PREFILLS_PER_STEP = 2
"""Few, so that the sequences that are decoding do not wait long."""


class Graph(Protocol):
    def replay(self) -> None: ...


class Graphs(Protocol):
    """What captures graphs. `vmm_kv.device.Device` does."""

    def graph_pool(self) -> Any: ...
    def new_graph(self) -> Any: ...
    def capture(self, graph: Any, pool: Any) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True)
class EngineConfig:
    """`ladder`: batch sizes to capture, rising. `longest`: tokens of the longest sequence."""

    block_size: int = 16
    ladder: tuple[int, ...] = (1, *range(2, 33, 2))
    longest: int = 256
    temperature: float = 1.0
    seed: int = 0

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.longest // self.block_size)

    @property
    def profile_blocks(self) -> int:
        """Blocks that must be backed before `open`: the null block and one for each sequence of the largest batch."""
        return 1 + self.ladder[-1]


@dataclass
class Running:
    """A request between its prefill and its last token. `tokens`: the prompt and what came after it."""

    index: int
    request: Request
    tokens: list[int]
    table: list[int]
    generator: torch.Generator

    @property
    def finished(self) -> bool:
        return len(self.tokens) == self.request.length


@dataclass
class Served:
    """`tokens`: what each request generated, in order of the requests. `checksums`: of every step's logits, in order.

    `replays`: by batch size, how often its graph ran.
    """

    tokens: list[list[int]]
    checksums: list[str] = field(default_factory=list)
    replays: dict[int, int] = field(default_factory=dict)


class Engine:
    """Serves requests from one KV tensor a layer, (blocks, 2, block_size, kv_heads, head_dim).

    `running`: the requests being served; `done`: the number of those that are complete. Until `open`, only the blocks
    below `config.profile_blocks` are used; from then on those below the given count. Before `capture` decode runs
    eagerly, on the same inputs and paddings.
    """

    def __init__(self, model: Decoder, kv: Sequence[Tensor], graphs: Graphs, config: EngineConfig) -> None:
        self.model = model
        self.kv = list(kv)
        self.config = config
        self.running: list[Running] = []
        self.done = 0
        self.blocks: BlockAllocator | None = None
        self._device_graphs = graphs
        self._graphs: dict[int, Graph] = {}
        # The outputs lie in the graphs' pool, where the bytes of what is dropped are used again.
        self._outputs: dict[int, Tensor] = {}
        # A row a sequence: token, position, slot, block table. One copy fills it; a row of zeros is padding, which
        # reads and writes the null block.
        size = (config.ladder[-1], 3 + config.table_width)
        self._rows = torch.zeros(size, dtype=torch.int64, device=model.device)
        self._batches = {size: batch_of(self._rows[:size]) for size in config.ladder}

    @property
    def graphs(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs)

    def profile(self) -> None:
        """Runs the longest prefill and the largest decode batch eagerly."""
        self.worst_step()
        fill(self._rows, self._profile_rows(self.config.ladder[-1]), self.config.ladder[-1])
        self.model(self._batches[self.config.ladder[-1]], self.kv)

    def capture(self) -> None:
        """Captures one graph for each batch size, the largest first, all in one pool: its memory serves the others."""
        pool = self._device_graphs.graph_pool()
        for size in reversed(self.config.ladder):
            fill(self._rows, self._profile_rows(size), size)
            self.model(self._batches[size], self.kv)  # libraries set themselves up on the first run of a shape
            graph = self._device_graphs.new_graph()
            with self._device_graphs.capture(graph, pool):
                self._outputs[size] = self.model(self._batches[size], self.kv)
            self._graphs[size] = graph
        logger.info("captured %d graphs", len(self._graphs))

    def worst_step(self) -> None:
        """The largest that serving can meet outside of graphs: the longest prefill, the sampling of a full batch."""
        length = self.config.longest - 1
        ids = range(paging.NULL_BLOCK + 1, self.config.profile_blocks)
        logits = self._prefill([0] * length, list(islice(cycle(ids), self.config.table_width)))
        batch = self.config.ladder[-1]
        generators = [torch.Generator().manual_seed(row) for row in range(batch)]
        sample(logits.cpu().expand(batch, -1), generators, self.config.temperature)

    def open(self, blocks: int) -> BlockAllocator:
        """From now on `blocks` blocks are usable, ids 0 to blocks - 1. Returns who hands them out."""
        self.blocks = BlockAllocator(blocks, self.config.seed)
        return self.blocks

    def serve(self, requests: Iterable[Request], on_step: Callable[[Engine], None] | None = None) -> Served:
        """Runs the requests to their ends. `on_step` is called after each decode step.

        Raises `ValueError` if a request is longer than `config.longest` or can never have the blocks it needs.
        """
        blocks = self.blocks
        if blocks is None:
            raise ValueError("open(blocks) comes before serve()")
        waiting = deque(enumerate(requests))
        served = Served(tokens=[[] for _ in waiting])
        while waiting or self.running:
            self._admit(waiting, blocks, served)
            self._step(blocks, served)
            if on_step is not None:
                on_step(self)
        return served

    def _admit(self, waiting: deque[tuple[int, Request]], blocks: BlockAllocator, served: Served) -> None:
        """Prefills a few requests, if there is room in the batch and every block that they will ever need is free."""
        for _ in range(min(_PREFILLS_PER_STEP, len(waiting), self.config.ladder[-1] - len(self.running))):
            index, request = waiting[0]
            if request.length > self.config.longest:
                raise ValueError(f"request {index}: {request.length} tokens, the longest is {self.config.longest}")
            need = -(-request.length // self.config.block_size)
            if need > blocks.free:
                if not self.running:
                    raise ValueError(f"request {index} needs {need} blocks, the cache has {blocks.free} to hand out")
                return
            waiting.popleft()
            table = blocks.take(need)
            tokens = list(request.prompt)
            blocks.wrote(table[: -(-len(tokens) // self.config.block_size)])
            generator = torch.Generator().manual_seed(request.seed)
            self.running.append(Running(index, request, tokens, table, generator))
            self._extend(self.running[-1:], self._prefill(tokens, table), blocks, served)

    def _step(self, blocks: BlockAllocator, served: Served) -> None:
        """Decodes one token for every running sequence."""
        count = len(self.running)
        if not count:
            return
        size = next(size for size in self.config.ladder if size >= count)
        rows = [self._row(sequence.tokens, sequence.table) for sequence in self.running]
        blocks.wrote(s.table[(len(s.tokens) - 1) // self.config.block_size] for s in self.running)
        fill(self._rows, rows, size)
        if size in self._graphs:
            self._graphs[size].replay()
            logits = self._outputs[size]
            served.replays[size] = served.replays.get(size, 0) + 1
        else:
            logits = self.model(self._batches[size], self.kv)
        self._extend(list(self.running), logits[:count], blocks, served)

    def _extend(self, sequences: list[Running], logits: Tensor, blocks: BlockAllocator, served: Served) -> None:
        """Samples each sequence's next token, and retires those that are complete."""
        logits = logits.cpu()
        served.checksums.append(checksum(logits))
        tokens = sample(logits, [sequence.generator for sequence in sequences], self.config.temperature)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.tokens.append(token)
            if sequence.finished:
                served.tokens[sequence.index] = sequence.tokens[len(sequence.request.prompt) :]
                blocks.give_back(sequence.table)
                self.running.remove(sequence)
                self.done += 1

    def _prefill(self, tokens: list[int], table: list[int]) -> Tensor:
        """Logits of the last token, (1, vocab_size)."""
        positions = list(range(len(tokens)))
        slots = [paging.slot(table, position, self.config.block_size) for position in positions]
        inputs = (torch.tensor([row], device=self.model.device) for row in (tokens, positions, slots, table))
        return self.model(Batch(*inputs), self.kv)

    def _row(self, tokens: list[int], table: list[int]) -> list[int]:
        position = len(tokens) - 1
        rest = [paging.NULL_BLOCK] * (self.config.table_width - len(table))
        return [tokens[-1], position, paging.slot(table, position, self.config.block_size), *table, *rest]

    def _profile_rows(self, size: int) -> list[list[int]]:
        """One-token sequences, each in a block of its own."""
        return [self._row([0], [paging.NULL_BLOCK + 1 + i]) for i in range(size)]


def fill(home: Tensor, rows: list[list[int]], size: int) -> None:
    """Writes the rows to the static input and pads them to `size` with rows of zeros."""
    padding = [[0] * home.shape[1]] * (size - len(rows))
    home[:size].copy_(torch.tensor(rows + padding))


def batch_of(rows: Tensor, tokens: int = 1) -> Batch:
    """The views of the static input that a graph of this batch size reads, `tokens` new ones in each sequence."""
    return Batch(
        rows[:, :tokens], rows[:, tokens : 2 * tokens], rows[:, 2 * tokens : 3 * tokens], rows[:, 3 * tokens :]
    )
