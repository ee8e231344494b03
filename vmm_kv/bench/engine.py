"""The engine that every strategy starts: the demo's model and blocks, with ladders of graphs, and preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from vmm_kv.bench.encoder import PATCH, Encoder
from vmm_kv.bench.graphs import Captured, Prefill, capture_whole
from vmm_kv.bench.scenario import Scenario
from vmm_kv.demo import paging
from vmm_kv.demo.blocks import BlockAllocator
from vmm_kv.demo.engine import batch_of, fill
from vmm_kv.demo.model import Batch, Decoder
from vmm_kv.demo.sampling import sample
from vmm_kv.device import Device
from vmm_kv.estimate import Descriptor, blocks_to_back
from vmm_kv.tensor_spec import TensorSpec


class Models:
    """The weights. They stay while caches come and go."""

    def __init__(self, scenario: Scenario, device: torch.device) -> None:
        shape, ladder = scenario.shape, scenario.ladder
        self.target = Decoder(shape.target(scenario.longest), device)
        self.draft = Decoder(shape.draft(scenario.longest), device, seed=1) if ladder.draft else None
        self.encoder = None
        if ladder.largest_image:
            self.encoder = Encoder(shape.encoder_width, shape.encoder_layers, shape.hidden, device)

    def specs(self, scenario: Scenario) -> list[TensorSpec]:
        """One tensor a layer, the draft model's last: both models share block ids and tables."""
        dtype = torch.uint8 if scenario.ladder.quantised else torch.float32
        specs = []
        for name, decoder in (("layers", self.target), ("draft", self.draft)):
            if decoder is None:
                continue
            page = (None, 2, scenario.block_size, decoder.config.num_key_value_heads, decoder.config.head_dim)
            specs += [TensorSpec(f"{name}.{i}.kv", page, dtype) for i in range(len(decoder.layers))]
        return specs


@dataclass
class Sequenced:
    """A request that waits or runs. `tokens`: its prompt and what came after it."""

    prompt: int
    length: int
    tokens: list[int]
    image: int
    generator: torch.Generator
    table: list[int] = field(default_factory=list)


@dataclass
class Served:
    """What serving a load did."""

    requests: int = 0
    generated: int = 0
    steps: int = 0
    """Decode steps."""
    preemptions: int = 0
    recomputed: int = 0
    """Tokens that were prefilled a second time, since a preemption had taken their blocks."""


class BenchEngine:
    """Serves from one KV tensor a layer (see `paging`), its decode steps and more in graphs.

    `doing` says what it is at, for whoever has to tell where memory ran out. `passes` counts runs of a model that were
    no replay.
    """

    def __init__(self, models: Models, kv: Sequence[Tensor], device: Device, scenario: Scenario) -> None:
        ladder = scenario.ladder
        layers = len(models.target.layers)
        self.models, self.device, self.scenario = models, device, scenario
        self.doing = "making its buffers"
        self.passes = 0
        self.captured: dict[Descriptor, Captured] = {}
        self.blocks: BlockAllocator | None = None
        self.running: list[Sequenced] = []
        self._kv, self._draft_kv = list(kv[:layers]), list(kv[layers:])
        self._table_width = -(-scenario.longest // scenario.block_size)
        self._ahead = 1 if ladder.draft else 0
        self._rows = self._static_rows(1 + self._ahead)
        self._draft_rows = self._static_rows(2) if ladder.draft else self._rows[:0]
        self._prefill = None
        if ladder.prefill:
            self._prefill = Prefill(models.target, self._kv, ladder.prefill)
        self._image = torch.zeros(max(ladder.images, default=0), PATCH, device=device.torch_device)

    @property
    def profile_blocks(self) -> int:
        """Blocks that must be there before `open`: the null block and one for each sequence of the largest batch."""
        return profile_blocks(self.scenario)

    @property
    def graphs(self) -> int:
        return sum(len(captured.graphs) for captured in self.captured.values())

    # Start-up.

    def use_cache(self, kv: Sequence[Tensor]) -> None:
        """Another cache for the one it has, or none. Its buffers stay; graphs, which hold the old addresses, go."""
        layers = len(self.models.target.layers)
        self.captured.clear()
        self._kv[:], self._draft_kv[:] = kv[:layers], kv[layers:]

    def worst_step(self) -> None:
        """The largest that serving meets outside of graphs: as many of the longest prompts as run at once, one with the
        largest image, and sampling a full batch."""
        self.doing = "the longest prefills"
        ids = range(1, self.profile_blocks)
        table = list(islice(cycle(ids), self._table_width))
        tokens = [0] * (self.scenario.longest - 1)
        images = [self.scenario.ladder.largest_image, *[0] * (self.scenario.prefills - 1)]
        logits = self._prefilled([tokens] * self.scenario.prefills, [table] * self.scenario.prefills, images)
        self.doing = "sampling a full batch"
        batch = self.scenario.ladder.decode[-1]
        generators = [torch.Generator().manual_seed(row) for row in range(batch)]
        sample(logits[:1].cpu().expand(batch, -1), generators, 1.0)

    def capture(self) -> None:
        """Captures the whole ladder in one pool."""
        pool = self.device.graph_pool()
        ladder = self.scenario.ladder.descriptors()
        for place, descriptor in enumerate(ladder, 1):
            self.doing = f"size {place} of {len(ladder)}, {descriptor}"
            self.captured[descriptor] = self.capture_one(descriptor, pool)

    def capture_one(self, descriptor: Descriptor, pool: Any) -> Captured:
        """Warms up and captures, on inputs that stay within the profile blocks."""
        self.passes += 2
        size, mode = descriptor.size, descriptor.mode
        if mode == "piecewise":
            assert self._prefill is not None
            self._prefill.fill(_batched([[0]], [[0]], [[0]], [[0]], self.device.torch_device))
            return self._prefill.capture(size, self.device, pool)
        if mode == "encoder":
            return capture_whole(lambda: self._encoded(self._image[:size]), self.device, pool)
        rows = [self._row([0, 0, 0], 0, 1 + self._ahead, [1 + i], self._kv) for i in range(size)]
        if mode == "draft":
            rows = [self._row([0, 0, 0], 0, 2, [1 + i], self._draft_kv) for i in range(size)]
            fill(self._draft_rows, rows, size)
            return capture_whole(lambda: self._draft_step(size), self.device, pool)
        fill(self._rows, rows, size)
        return capture_whole(lambda: self._target_step(size), self.device, pool)

    # Serving.

    def open(self, blocks: int) -> None:
        """From now on the first `blocks` blocks are usable."""
        self.blocks = BlockAllocator(blocks)

    def serve(self) -> Served:
        """Serves the scenario's load to its end. A sequence that finds no block preempts the one admitted last."""
        if self.blocks is None:
            raise ValueError("open(blocks) comes before serve()")
        served = Served()
        waiting = deque(requests(self.scenario))
        served.requests = len(waiting)
        preempted = False
        while waiting or self.running:
            if not preempted:
                self._admit(waiting, served)
            preempted = self._make_room(waiting, served)
            self._decode(served)
        return served

    def _admit(self, waiting: deque[Sequenced], served: Served) -> None:
        """Prefills a few sequences at once, as far as there is room in the batch and blocks for them are free."""
        assert self.blocks is not None
        admitted: list[Sequenced] = []
        room = self.scenario.ladder.decode[-1] - len(self.running)
        while waiting and len(admitted) < min(self.scenario.prefills, room):
            need = self._blocks_for(len(waiting[0].tokens) + 1)
            if need > self.blocks.free:
                break
            sequence = waiting.popleft()
            sequence.table = self.blocks.take(need)
            served.recomputed += len(sequence.tokens) if len(sequence.tokens) > sequence.prompt else 0
            admitted.append(sequence)
        if not admitted:
            if waiting and not self.running:
                raise ValueError(f"a request needs {need} blocks, the cache has {self.blocks.free} to hand out")
            return
        self.doing = f"a prefill of {len(admitted)} sequences"
        logits = self._prefilled(
            [s.tokens for s in admitted], [s.table for s in admitted], [s.image for s in admitted]
        ).cpu()
        self.running += admitted
        for sequence, token in zip(admitted, sample(logits, [s.generator for s in admitted], 1.0), strict=True):
            self._append(sequence, token, served)

    def _make_room(self, waiting: deque[Sequenced], served: Served) -> bool:
        """A block for every token of the next step. Whether somebody was preempted for it."""
        assert self.blocks is not None
        before = served.preemptions
        for sequence in list(self.running):
            while sequence in self.running and self._short(sequence):
                if self.blocks.free:
                    sequence.table += self.blocks.take(1)
                    continue
                victim = self.running.pop()
                self.blocks.give_back(victim.table)
                victim.table = []
                waiting.appendleft(victim)
                served.preemptions += 1
        return served.preemptions > before

    def _decode(self, served: Served) -> None:
        """A step of every running sequence: one token, or two where the draft model guessed right."""
        count = len(self.running)
        if not count:
            return
        served.steps += 1
        self.doing = f"a decode step of {count} sequences"
        size = next(size for size in self.scenario.ladder.decode if size >= count)
        guesses = self._guessed(size) if self.models.draft else [[] for _ in self.running]
        rows = [
            self._row([*s.tokens, *guess], len(s.tokens) - 1, 1 + self._ahead, s.table, self._kv)
            for s, guess in zip(self.running, guesses, strict=True)
        ]
        fill(self._rows, rows, size)
        logits = self._replayed(Descriptor("full", size), self._target_step)[:count].cpu()
        running = list(self.running)
        generators = [sequence.generator for sequence in running]
        for place, token in enumerate(sample(logits[:, 0].contiguous(), generators, 1.0)):
            self._append(running[place], token, served)
            if guesses[place] == [token] and running[place] in self.running:
                second = sample(logits[place, 1:2], [running[place].generator], 1.0)[0]
                self._append(running[place], second, served)

    def _guessed(self, size: int) -> list[list[int]]:
        # Two tokens each time: the draft model has not seen the second last one if both were accepted.
        rows = [self._row(s.tokens, len(s.tokens) - 2, 2, s.table, self._draft_kv) for s in self.running]
        fill(self._draft_rows, rows, size)
        logits = self._replayed(Descriptor("draft", size), self._draft_step)
        return [[token] for token in logits[: len(rows)].argmax(-1).tolist()]

    def _append(self, sequence: Sequenced, token: int, served: Served) -> None:
        assert self.blocks is not None
        sequence.tokens.append(token)
        served.generated += 1
        if len(sequence.tokens) >= sequence.length:
            self.blocks.give_back(sequence.table)
            self.running.remove(sequence)

    # Steps.

    def _replayed(self, descriptor: Descriptor, run: Any) -> Tensor:
        """The output of the graph, or of the same eagerly where there is none."""
        captured = self.captured.get(descriptor)
        return captured.replay() if captured else run(descriptor.size)

    def _target_step(self, size: int) -> Tensor:
        """(size, tokens, vocabulary)."""
        return self.models.target(batch_of(self._rows[:size], 1 + self._ahead), self._kv, last=1 + self._ahead)

    def _draft_step(self, size: int) -> Tensor:
        assert self.models.draft is not None
        return self.models.draft(batch_of(self._draft_rows[:size], 2), self._draft_kv)

    def _encoded(self, patches: Tensor) -> Tensor:
        assert self.models.encoder is not None
        return self.models.encoder(patches)

    def _prefilled(self, tokens: list[list[int]], tables: list[list[int]], images: list[int]) -> Tensor:
        """Logits of each sequence's last token, (B, vocabulary)."""
        self.passes += 1
        condition = self._conditions(tokens, images) if any(images) else None
        if self.models.draft:
            self.models.draft(self._prompts(tokens, tables, self._draft_kv), self._draft_kv)
        batch = self._prompts(tokens, tables, self._kv)
        if self._prefill and batch.tokens.numel() <= self._prefill.sizes[-1]:
            size = self._prefill.fill(batch)
            x = self._replayed(Descriptor("piecewise", size), self._prefill.run)
            return self.models.target.logits(x[:, -1])
        return self.models.target(batch, self._kv, condition=condition)

    def _conditions(self, tokens: list[list[int]], images: list[int]) -> Tensor:
        """(B, 1, hidden): nothing is added where there is no image."""
        none = torch.zeros(self.scenario.shape.hidden, device=self.device.torch_device)
        made = [self._seen(prompt, image) if image else none for prompt, image in zip(tokens, images, strict=True)]
        return torch.stack(made).unsqueeze(1)

    def _seen(self, prompt: list[int], image: int) -> Tensor:
        """What the encoder makes of an image of that many patches; its pixels are the prompt's bytes."""
        pixels = torch.tensor(list(islice(cycle(prompt), PATCH)), dtype=torch.float32, device=self.device.torch_device)
        if image > len(self._image):
            return self._encoded((pixels / 256).expand(image, -1).contiguous())
        self._image[:image].copy_((pixels / 256).expand(image, -1))
        return self._replayed(Descriptor("encoder", image), lambda size: self._encoded(self._image[:size])).clone()

    def _prompts(self, tokens: list[list[int]], tables: list[list[int]], kv: Sequence[Tensor]) -> Batch:
        """Of one length: shorter ones are padded at their beginning with rows on the null block."""
        longest = max(map(len, tokens))
        before = [[0] * (longest - len(prompt)) for prompt in tokens]
        positions = [[*pad, *range(len(prompt))] for pad, prompt in zip(before, tokens, strict=True)]
        slots = [
            [*pad, *(self._slot(table, position, kv) for position in range(len(prompt)))]
            for pad, prompt, table in zip(before, tokens, tables, strict=True)
        ]
        wide = max(map(len, tables))
        padded = [[*table, *[0] * (wide - len(table))] for table in tables]
        inputs = [[*pad, *prompt] for pad, prompt in zip(before, tokens, strict=True)]
        return _batched(inputs, positions, slots, padded, self.device.torch_device)

    def _row(self, tokens: list[int], start: int, count: int, table: list[int], kv: Sequence[Tensor]) -> list[int]:
        """The input of `count` tokens from position `start` on."""
        positions = range(start, start + count)
        slots = [self._slot(table, position, kv) for position in positions]
        return [*tokens[start : start + count], *positions, *slots, *table, *[0] * (self._table_width - len(table))]

    def _slot(self, table: list[int], position: int, kv: Sequence[Tensor]) -> int:
        """0, in the null block, for what lies beyond the longest sequence: a guess that is never used."""
        if position // self.scenario.block_size >= len(table):
            return 0
        return paging.slot(table, position, self.scenario.block_size, paging.rows_per_block(kv[0]))

    def _short(self, sequence: Sequenced) -> bool:
        tokens = min(len(sequence.tokens) + self._ahead, sequence.length)
        return len(sequence.table) < self._blocks_for(tokens)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.scenario.block_size)

    def _static_rows(self, tokens: int) -> Tensor:
        """A row a sequence: tokens, positions, slots, block table. A row of zeros is padding, on the null block."""
        size = (self.scenario.ladder.decode[-1], 3 * tokens + self._table_width)
        return torch.zeros(size, dtype=torch.int64, device=self.device.torch_device)


def profile_blocks(scenario: Scenario) -> int:
    """Blocks that profiling and capture write."""
    full = [graph for graph in scenario.ladder.descriptors() if graph.mode == "full"]
    return blocks_to_back(full, scenario.ladder.decode[-1])


def requests(scenario: Scenario) -> list[Sequenced]:
    """The load, see `Load`. The first image is as large as may be."""
    load, ladder = scenario.load, scenario.ladder
    images = (ladder.largest_image, *reversed(ladder.images)) if ladder.largest_image else (0,)
    made = []
    for i in range(load.requests):
        prompt, answer = (_between(ends, i * step) for ends, step in ((load.prompt, 7), (load.answer, 11)))
        if i < scenario.prefills:
            prompt, answer = scenario.longest - 1, 1
        with_image = ladder.largest_image and i % load.image_every == 0
        image = images[(i // load.image_every) % len(images)] if with_image else 0
        tokens = [(17 * i + 31 * j) % 251 for j in range(prompt)]
        generator = torch.Generator().manual_seed(i)
        made.append(Sequenced(prompt, min(prompt + answer, scenario.longest), tokens, image, generator))
    return made


def _between(ends: tuple[int, int], number: int) -> int:
    low, high = ends
    return low + number % (high - low + 1)


def _batched(tokens: Any, positions: Any, slots: Any, tables: Any, device: torch.device) -> Batch:
    return Batch(*(torch.tensor(rows, device=device) for rows in (tokens, positions, slots, tables)))
