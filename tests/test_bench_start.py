"""What each strategy does on a device with real memory: rows made in this process, on models of a few hundred KiB."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_small import LADDERS, MIB, measured, quick, row, scenario

from vmm_kv.bench import strategies
from vmm_kv.bench.row import Known
from vmm_kv.bench.worker import _shortage
from vmm_kv.budget import BudgetError
from vmm_kv.fingerprint import PinError


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    with quick():
        yield


@pytest.fixture(scope="module")
def known(quickly: None) -> dict[str, Known]:
    return {name: measured(scenario(name)) for name in LADDERS}


@pytest.mark.parametrize("ladder", LADDERS)
def test_reserve_then_map_serves_with_each_graph_captured_once_and_what_an_oracle_would_get(
    ladder: str, known: dict[str, Known]
) -> None:
    found = row(scenario(ladder), strategies.OURS, known[ladder])
    assert (found.outcome, found.where, found.error_text) == ("served", None, None)
    assert found.captures == found.graphs == known[ladder].graphs
    assert found.kept == known[ladder].kept
    assert found.blocks is not None and found.stranded is not None
    step = 2 * MIB  # all tensors lie side by side in a block, so one granule is a step
    assert found.blocks >= 0.995 * known[ladder].blocks or found.stranded <= step
    assert found.peak_used is not None and found.peak_used <= found.requested == found.total


@pytest.mark.parametrize("ladder", LADDERS)
def test_the_oracle_serves_and_leaves_less_than_a_block(ladder: str, known: dict[str, Known]) -> None:
    found = row(scenario(ladder), strategies.ORACLE, known[ladder])
    assert found.outcome == "served" and found.stranded == 0
    assert found.blocks == known[ladder].blocks
    one_more = replace(known[ladder], blocks=known[ladder].blocks + MIB // found.block_bytes)
    assert row(scenario(ladder), strategies.ORACLE, one_more).outcome == "out of memory"


@pytest.mark.parametrize("ladder", LADDERS)
def test_full_profile_captures_everything_twice_and_is_right(ladder: str, known: dict[str, Known]) -> None:
    found = row(scenario(ladder), strategies.FULL, known[ladder])
    assert found.outcome == "served"
    assert found.captures == 2 * found.graphs == 2 * known[ladder].graphs
    assert found.error == 0


def test_without_a_reserve_memory_really_runs_out_and_the_row_says_where(known: dict[str, Known]) -> None:
    found = row(scenario(), "NoReserve", known["decode"])
    assert found.outcome == "out of memory"
    assert found.where == "capture: size 1 of 3, full 4"
    assert found.error_text is not None and "host:0 is out of memory. Tried to allocate" in found.error_text
    assert found.stranded is not None and found.stranded < 0
    assert (found.kept, found.kept_here) == (known["decode"].kept, False)
    assert found.generated is None and found.tokens_per_second is None
    assert (found.graphs, found.captures, found.passes) == (0, 0, 3)
    assert {"load", "profile", "estimate", "allocate KV", "capture"} == set(found.phases)


def test_a_sample_is_negative_by_what_the_capture_flushed_and_positive_after_a_flush(known: dict[str, Known]) -> None:
    """The profile run of a large image fills the cache, which the first capture empties: vLLM #60673, cases.md C16."""
    plain = row(scenario("encoder"), "Sampled, floor 1 MiB", known["encoder"])
    assert plain.samples[0] < 0 and plain.estimate_raw is not None and plain.estimate_raw < 0 == plain.estimate
    flushed = row(scenario("encoder"), "Sampled, floor 1 MiB, flushed", known["encoder"])
    assert flushed.samples[0] > 0 and flushed.estimate_raw == flushed.estimate
    assert flushed.estimate is not None and flushed.estimate > 0
    assert plain.outcome == "out of memory" and flushed.outcome == "served"


def test_an_estimate_that_leaves_nothing_is_refused_by_name(known: dict[str, Known]) -> None:
    """cases.md C19: the message names the estimator."""
    found = row(scenario(), "Sampled, floor 16 MiB", known["decode"])
    assert (found.outcome, found.where) == ("no room", "estimate: a throw-away capture, full 2")
    assert found.error_text is not None and found.error_text.startswith("Sampled, floor 16 MiB sets 33.91 MiB")
    assert found.blocks is None and found.stranded is None


def test_a_plan_reuses_what_an_earlier_start_kept(known: dict[str, Known], tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    row(scenario(), strategies.OURS, known["decode"], save=str(saved))
    found = row(scenario(), strategies.PLAN, known["decode"], plan=str(saved))
    assert found.outcome == "served" and found.error == 0 and found.captures == found.graphs
    with pytest.raises(PinError, match="longest"):
        row(scenario(longest=16), strategies.PLAN, known["decode"], plan=str(saved))


def test_a_fixed_headroom_after_capture_leaves_just_that(known: dict[str, Known]) -> None:
    found = row(scenario(), "PostCaptureFixedHeadroom", known["decode"])
    assert found.outcome == "served" and found.estimate is None and found.error is None
    assert found.estimate_raw == 1536 * MIB * 16 // (20 << 10)
    assert found.captures == found.graphs


@pytest.mark.parametrize(("room", "where"), [(1 << 10, "load"), (MIB, "capture: size 1 of 3, full 4")])
def test_a_room_for_nothing_is_told_by_the_measuring_run(room: int, where: str) -> None:
    with pytest.raises(BudgetError, match=f"out of memory at {where} with the smallest KV cache in a room of .*more"):
        measured(scenario(room=room))


def test_weights_that_do_not_fit_the_room_are_refused(known: dict[str, Known]) -> None:
    found = row(scenario(room=256 * MIB), strategies.OURS, known["decode"])
    assert found.outcome == "no room" and found.where == "load"
    assert found.error_text is not None and "less than the room of 256.00 MiB" in found.error_text


def test_a_share_of_the_device_is_kept_to(known: dict[str, Known]) -> None:
    share = scenario(utilization=0.75)
    found = row(share, strategies.OURS, measured(share))
    assert found.outcome == "served" and found.requested == 96 * MIB
    assert found.peak_used is not None and found.peak_used <= found.requested


def test_flat_figures_follow_the_room() -> None:
    room = strategies.CARD_ROOM
    assert strategies.make("FlatPerGraph", room).name == strategies.make("FlatPerGraph", room).name
    assert strategies.make("PostCaptureFixedHeadroom", room).name.endswith("(1.50 GiB)")
    assert strategies.make("PostCaptureFixedHeadroom", room // 512).name.endswith("(3.00 MiB)")
    assert strategies.make("FlatPerGraph", 0).name.endswith("(1.00 MiB)")
    with pytest.raises(ValueError, match="'Guess' is no strategy: Oracle, ReserveThenMap"):
        strategies.make("Guess", room)


def test_a_shortage_is_seen_behind_the_error_that_closing_a_capture_raises() -> None:
    shortage = torch.OutOfMemoryError("none left")
    try:
        try:
            raise shortage
        finally:
            raise RuntimeError("the capture is invalid")
    except RuntimeError as error:
        assert _shortage(error) is shortage
    assert _shortage(RuntimeError("shapes differ")) is None


def test_a_start_up_alone_serves_nothing(known: dict[str, Known]) -> None:
    found = row(scenario(), strategies.OURS, known["decode"], serve=False)
    assert found.outcome == "served" and "serve" not in found.phases and found.generated is None
