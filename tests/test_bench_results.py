"""The results that are committed say what the project says of them, and are what today's code reads and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vmm_kv.bench import strategies
from vmm_kv.bench.compare import Comparison
from vmm_kv.bench.ladder import LADDERS
from vmm_kv.bench.table import markdown

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "startup_host"
STEP = 2 << 20
"""Bytes: one granule, since all tensors lie side by side in a block."""


@pytest.fixture(scope="module")
def found() -> Comparison:
    return Comparison.from_dict(json.loads(RESULTS.with_suffix(".json").read_text()))


def test_every_strategy_ran_on_every_ladder(found: Comparison) -> None:
    for ladder in LADDERS:
        assert [row.strategy for row in found.of(ladder.name)] == list(strategies.NAMES)
    assert not found.emulated and {scenario.device for scenario in found.scenarios} == {"host:2GiB"}
    assert "failed" not in {row.outcome for row in found.rows}
    assert markdown(found) == RESULTS.with_suffix(".md").read_text()


def test_reserve_then_map_never_ran_out_and_got_what_an_oracle_gets(found: Comparison) -> None:
    for row in (row for row in found.rows if row.strategy == strategies.OURS):
        assert row.outcome == "served" and row.captures == row.graphs == found.known[row.ladder].graphs
        assert row.stranded is not None and row.stranded_part is not None
        assert row.stranded_part <= 0.005 or row.stranded <= STEP == found.known[row.ladder].granule


def test_guessing_runs_out_or_strands_and_a_full_profile_captures_twice(found: Comparison) -> None:
    decode = {row.strategy: row for row in found.of("decode")}
    assert decode["NoReserve"].outcome == "out of memory" and decode["NoReserve"].where
    assert (decode["Sampled, floor 1 MiB, flushed"].stranded_part or 0) > 0.05
    assert decode[strategies.FULL].captures == 2 * decode[strategies.FULL].graphs


def test_what_is_exact_runs_out_only_where_warm_ups_need_more_than_what_stays(found: Comparison) -> None:
    for row in (row for row in found.rows if row.strategy in (strategies.FULL, strategies.PLAN)):
        assert row.error == 0 and row.blocks is not None and row.oracle_blocks is not None
        known = found.known[row.ladder]
        assert (row.outcome == "out of memory") == (known.capture_peak > known.kept + known.transient)


def test_half_the_captures_take_about_half_the_time(found: Comparison) -> None:
    assert found.pair_ladder == "decode" and len(found.pairs) >= 5
    assert found.ratio is not None and found.ratio <= 0.6


def test_an_estimate_is_negative_and_the_flush_turns_it_positive(found: Comparison) -> None:
    encoder = {row.strategy: row for row in found.of("with an encoder")}
    plain, flushed = encoder["Sampled, floor 1 MiB"], encoder["Sampled, floor 1 MiB, flushed"]
    assert plain.estimate_raw is not None and plain.estimate_raw < 0 and plain.samples[0] < 0
    assert flushed.estimate_raw is not None and flushed.estimate_raw > 0 and flushed.samples[0] > 0
