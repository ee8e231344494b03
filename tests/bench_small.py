"""A scenario small enough for a test, and rows of it made in the test's own process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from vmm_kv.bench.ladder import Ladder
from vmm_kv.bench.row import Known, Row
from vmm_kv.bench.scenario import Load, Scenario, Shape
from vmm_kv.bench.worker import MEASURE, run

MIB = 1 << 20
_SHAPE = Shape(
    hidden=32, intermediate=64, layers=4, heads=2, head_dim=16, vocab=256, draft_layers=1, encoder_width=256,
    encoder_layers=1,
)  # fmt: skip
_DECODE = (1, 2, 4)
LADDERS = {
    ladder.name: ladder
    for ladder in (
        Ladder("decode", _DECODE),
        Ladder("piecewise", _DECODE, prefill=(32, 64)),
        Ladder("encoder", _DECODE, images=(16, 32), largest_image=2048),
        Ladder("draft", _DECODE, draft=True),
        Ladder("quantised", _DECODE, quantised=True),
    )
}


def scenario(ladder: str = "decode", **changes: Any) -> Scenario:
    """Blocks of 4 tokens, at most 32 tokens a sequence, and 16 MiB beside the weights (more where images take more)."""
    made = Scenario(
        LADDERS[ladder],
        device="host:128MiB",
        room=(40 if ladder == "encoder" else 16) * MIB,
        block_size=4,
        longest=32,
        prefills=2,
        shape=_SHAPE,
        load=Load(requests=8, prompt=(12, 20), answer=(3, 8), image_every=3),
    )
    return replace(made, **changes)


@contextmanager
def quick() -> Iterator[None]:
    """One thread, since small operations crawl where threads wait for each other, and what is imported kept out of the
    collections that each flush makes: they would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(before)


def measured(of: Scenario) -> Known:
    return Known(**run({"scenario": of.to_dict(), "strategy": MEASURE})["known"])


def row(of: Scenario, strategy: str, known: Known | None = None, **extra: Any) -> Row:
    """What the worker says, in this process."""
    facts = known or measured(of)
    return Row.from_dict(run({"scenario": of.to_dict(), "strategy": strategy, "known": vars(facts), **extra}))
