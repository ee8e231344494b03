from __future__ import annotations

import pytest
from small_engine import BLOCKS, engine

from vmm_kv.demo.engine import Engine, EngineConfig, Served
from vmm_kv.demo.requests import Request, requests_from
from vmm_kv.device import open_device

REQUESTS = requests_from(b"Between the promise and the place lies a table.", 32, 300)


def served(blocks: int = BLOCKS, capture: bool = True) -> tuple[Engine, Served]:
    device = open_device("host:64MiB")
    made = engine(device)
    with device.active():
        if capture:
            made.capture()
        made.open(blocks)
        return made, made.serve(REQUESTS)


def test_replay_equals_eager_in_every_bit() -> None:
    eager, captured = served(capture=False)[1], served()[1]
    assert eager.tokens == captured.tokens
    assert eager.checksums == captured.checksums
    assert not eager.replays and set(captured.replays) == {1, 2, 4}


def test_every_request_gets_its_tokens() -> None:
    made, result = served()
    assert [len(tokens) for tokens in result.tokens] == [request.new_tokens for request in REQUESTS]
    assert made.done == len(REQUESTS) and not made.running
    assert made.blocks is not None and made.blocks.free == BLOCKS - 1


def test_each_size_is_captured_once() -> None:
    device = open_device("host:64MiB")
    made = engine(device)
    with device.active():
        made.capture()
    assert made.graphs == device.captures == len(made.config.ladder)


def test_the_default_ladder() -> None:
    assert len(EngineConfig().ladder) >= 16
    assert EngineConfig().profile_blocks == 1 + max(EngineConfig().ladder)


def test_before_open_only_the_backed_blocks_are_written() -> None:
    device = open_device("host:64MiB")
    made = engine(device)
    with device.active():
        made.profile()
        made.capture()
        made.worst_step()
    for tensor in made.kv:
        assert not tensor[made.config.profile_blocks :].any()


def test_few_blocks_make_requests_wait_and_change_no_token() -> None:
    sizes: list[int] = []
    made = engine()
    made.open(10)  # nine to hand out, eight for the longest request: one at a time
    result = made.serve(REQUESTS[:4], lambda engine: sizes.append(len(engine.running)))
    assert max(sizes) == 1
    assert [len(tokens) for tokens in result.tokens] == [request.new_tokens for request in REQUESTS[:4]]


def test_what_can_never_be_served_is_refused() -> None:
    made = engine()
    with pytest.raises(ValueError, match="open"):
        made.serve(REQUESTS)
    made.open(4)
    with pytest.raises(ValueError, match="request 0 needs 8 blocks, the cache has 3"):
        made.serve([Request(tuple(range(28)), 4, seed=0)])
    with pytest.raises(ValueError, match="33 tokens, the longest is 32"):
        made.serve([Request(tuple(range(30)), 3, seed=0)])


def test_a_table_beyond_the_usable_blocks_is_refused() -> None:
    """cases.md C79: what lies beyond has addresses and no memory."""
    made = engine()
    made.open(30)
    requests = [Request(tuple(range(3)), 8, seed=0)]

    def misplace(engine: Engine) -> None:
        for sequence in engine.running:
            sequence.table[:] = [30] * len(sequence.table)

    with pytest.raises(ValueError, match="block 30 is not usable"):
        made.serve(requests, misplace)
