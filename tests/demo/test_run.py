from __future__ import annotations

import multiprocessing
import signal

import pytest
import torch

from vmm_kv.demo.engine import Engine
from vmm_kv.demo.run import DemoOptions, requests_for, run_demo, serve, serve_ordinary, start


@pytest.mark.parametrize(("backing", "device"), [("prefix", "host:2GiB"), ("alias", "host:512MiB")])
def test_the_demo_proves_itself(backing: str, device: str) -> None:
    result = run_demo(DemoOptions(device=device, backing=backing)).result
    assert result.backing == backing
    assert result.tokens_match and result.logits_match and result.addresses_stable
    assert result.captures == result.graphs >= 16
    assert result.distinct_blocks_written >= 10 * result.profile_blocks
    assert result.profile_blocks < result.highest_block_used < result.final_blocks <= result.capacity_blocks
    assert result.distinct_tokens >= 50
    assert result.leftover_bytes >= 0
    if result.bound_by == "request":
        assert result.leftover_bytes < result.next_step_bytes
    assert result.used_bytes <= result.peak_used_bytes <= result.requested_bytes


def test_an_overwritten_block_is_noticed() -> None:
    options = DemoOptions(device="host:512MiB")
    spoiled: list[int] = []

    def spoil(engine: Engine) -> None:
        if engine.running and not spoiled:
            spoiled.append(engine.running[0].table[0])
            engine.kv[0][spoiled[0]] = 1.0

    started = start(options)
    with started.cache:
        started.startup.commit()
        requests = requests_for(started, options)[:3]
        served = serve(started, started.cache.blocks, requests, on_step=spoil)
        ordinary = serve_ordinary(started, started.cache.blocks, requests)
        assert spoiled
        assert served.checksums != ordinary.checksums
        # The same without the damage agrees, so it was the damage.
        assert serve(started, started.cache.blocks, requests).checksums == ordinary.checksums


def _serve_without_a_commit() -> None:
    torch.set_num_threads(1)
    options = DemoOptions(device="host:512MiB")
    started = start(options)
    serve(started, started.cache.capacity, requests_for(started, options)[:3])


def test_without_the_commit_the_first_block_beyond_is_a_fault() -> None:
    # A process of its own: spawn, since a driver does not survive a fork.
    child = multiprocessing.get_context("spawn").Process(target=_serve_without_a_commit)
    child.start()
    child.join(100)
    assert child.exitcode == -signal.SIGSEGV
