"""The benchmark's engine: graphs compute what eager steps do, preemption loses nothing, a worst step is the worst."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from bench_small import LADDERS, quick, scenario

from vmm_kv.bench.engine import BenchEngine, Models, requests
from vmm_kv.bench.probe import EngineProbe
from vmm_kv.bench.start import ordinary_cache
from vmm_kv.budget import transient
from vmm_kv.device import Device, open_device
from vmm_kv.estimate import Descriptor
from vmm_kv.measure import flush, step_peak


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    with quick():
        yield


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def engine(ladder: str, device: Device | None = None, blocks: int = 64) -> BenchEngine:
    made = scenario(ladder)
    device = device or open_device(made.device)
    models = Models(made, device.torch_device)
    return BenchEngine(models, ordinary_cache(models.specs(made), blocks, device), device, made)


def tokens_of(made: BenchEngine, blocks: int = 64) -> list[list[int]]:
    """What every request was answered, in the order of their ends."""
    ended: list[list[int]] = []
    append = made._append

    def watch(sequence, token, served) -> None:  # type: ignore[no-untyped-def]
        append(sequence, token, served)
        if len(sequence.tokens) >= sequence.length:
            ended.append(sequence.tokens)

    made._append = watch  # type: ignore[method-assign]
    made.open(blocks)
    made.served = made.serve()  # type: ignore[attr-defined]
    return sorted(ended)


@pytest.mark.parametrize("ladder", LADDERS)
def test_each_descriptor_is_captured_once_and_replays_what_an_eager_step_computes(ladder: str) -> None:
    made = engine(ladder)
    device = made.device
    with device.active():
        made.capture()
        assert set(made.captured) == set(made.scenario.ladder.descriptors())
        assert device.captures == made.graphs
        logits = made._replayed(Descriptor("full", 4), made._target_step)
        torch.testing.assert_close(logits, made._target_step(4), atol=1e-5, rtol=1e-5)


def test_a_prefill_in_pieces_is_the_same_prefill() -> None:
    pieces, whole = engine("piecewise"), engine("decode")
    assert pieces.device is not whole.device
    prompts, tables = [[5, 6, 7], [9, 8, 7, 6, 5]], [[3], [7, 9]]
    with pieces.device.active(), whole.device.active():
        pieces.capture()
        found = pieces._prefilled(prompts, tables, [0, 0])
        torch.testing.assert_close(found, whole._prefilled(prompts, tables, [0, 0]), atol=1e-4, rtol=1e-4)
        alone = torch.cat([whole._prefilled([p], [t], [0]) for p, t in zip(prompts, tables, strict=True)])
        torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-4)


def test_an_image_changes_what_is_answered() -> None:
    made = engine("encoder")
    with made.device.active():
        made.capture()
        without, with_graph, eager = (made._prefilled([[5, 6, 7]], [[3]], [image]) for image in (0, 16, 2048))
    assert not torch.allclose(without, with_graph) and not torch.allclose(with_graph, eager)


def test_a_draft_model_changes_no_token() -> None:
    """Nor does one that guesses right: the large model itself, over a cache of its own."""
    plain, drafted, sure = engine("decode"), engine("draft"), engine("draft")
    sure.models.draft = sure.models.target
    sure._draft_kv = [torch.zeros_like(layer) for layer in sure._kv]
    with plain.device.active(), drafted.device.active(), sure.device.active():
        expected = tokens_of(plain)
        assert tokens_of(drafted) == expected
        assert tokens_of(sure) == expected
    assert sure.served.steps < plain.served.steps  # type: ignore[attr-defined]


def test_a_quantised_cache_takes_a_quarter_and_answers_nearly_the_same() -> None:
    plain, small = engine("decode"), engine("quantised")
    assert 4 * small._kv[0].nbytes == plain._kv[0].nbytes
    with plain.device.active(), small.device.active():
        exact, rounded = (made._prefilled([[5, 6, 7, 8]], [[3]], [0]) for made in (plain, small))
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded, atol=0.5, rtol=0.2)


def test_too_few_blocks_preempt_and_lose_no_token() -> None:
    few, many = engine("decode"), engine("decode")
    with few.device.active(), many.device.active():
        assert tokens_of(few, blocks=14) == tokens_of(many)
    assert few.served.preemptions > 0 == many.served.preemptions  # type: ignore[attr-defined]
    assert few.served.recomputed > 0 and few.served.generated == many.served.generated  # type: ignore[attr-defined]
    assert few.served.steps > many.served.steps  # type: ignore[attr-defined]


def test_what_can_never_be_served_is_refused() -> None:
    made = engine("decode")
    with pytest.raises(ValueError, match=r"open\(blocks\) comes before"):
        made.serve()
    made.open(6)
    with pytest.raises(ValueError, match="a request needs 8 blocks, the cache has 5"):
        made.serve()


@pytest.mark.parametrize("ladder", LADDERS)
def test_serving_never_takes_more_than_the_worst_step(ladder: str) -> None:
    """What is measured after capture is what `ReserveThenMap` leaves free, to the byte."""
    made = engine(ladder)
    memory = made.device.memory
    with made.device.active():
        made.capture()
        with step_peak(memory) as worst:
            made.worst_step()
        flush(memory)
        step = transient(worst.reserved, memory.reserved())
        made.open(64)
        before = memory.reserved()
        with step_peak(memory) as peak:
            made.serve()
    assert 0 < peak.reserved - before <= step


def test_the_worst_step_is_in_the_load() -> None:
    made = scenario("encoder")
    load = requests(made)
    assert [len(request.tokens) for request in load[: made.prefills]] == [made.longest - 1] * made.prefills
    assert load[0].image == made.ladder.largest_image
    assert len(load) == made.load.requests and all(request.length <= made.longest for request in load)


def test_the_probe_gives_back_what_was_tried_out() -> None:
    made = engine("decode")
    with made.device.active():
        probe = EngineProbe(made, 1, 2)
        before = probe.read(flush=True)
        with probe.throwaway_pool() as pool:
            probe.capture(Descriptor("full", 4), pool)
            assert probe.read(flush=True) < before
        assert probe.read(flush=True) == before
        with pytest.raises(RuntimeError, match="in the middle"), probe.throwaway_pool() as pool:
            probe.capture(Descriptor("full", 2), pool)
            raise RuntimeError("in the middle")
        assert probe.read(flush=True) == before
    assert not made.captured and made.device.captures == 2
