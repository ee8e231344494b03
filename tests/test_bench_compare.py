"""Rows come from fresh processes, whatever those do; JSON, Markdown and the picture show what they said."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_small import scenario

from vmm_kv.bench import compare as comparing
from vmm_kv.bench import picture, strategies
from vmm_kv.bench.compare import Comparison, Pair, compare, machine
from vmm_kv.bench.row import Known, Row
from vmm_kv.bench.scenario import Scenario
from vmm_kv.bench.table import markdown
from vmm_kv.errors import VmmError

MIB = 1 << 20
KNOWN = Known(
    kept=20 * MIB, weights=100 * MIB, transient=10 * MIB, capture_peak=25 * MIB, blocks=1000, graphs=3, granule=2 * MIB
)


def made(strategy: str = "Guess", **facts: object) -> Row:
    row = Row(strategy, "decode", outcome="served", kept=20 * MIB, kept_here=True, blocks=900, block_bytes=MIB // 10)
    row.oracle_blocks, row.requested, row.total, row.tokens = 1000, 128 * MIB, 128 * MIB, 3600
    row.phases = {"load": 1.0, "profile": 0.5, "estimate": 2.0, "capture": 2.5, "serve": 4.0}
    row.peak_used, row.estimate, row.estimate_raw, row.generated, row.captures = 64 * MIB, 30 * MIB, 30 * MIB, 100, 6
    return replace(row, **facts)  # type: ignore[arg-type]


FAILED = made(
    "NoReserve", outcome="out of memory", where="capture: size 1 of 3, full 4", error_text="host:0 is out of memory",
    kept_here=False, blocks=1300, estimate=0, estimate_raw=0, generated=None,
)  # fmt: skip
PAIRS = tuple(
    Pair({"profile": 1.0, "capture": ours, "commit": 0.1}, {"profile": 1.0, "estimate": 2.0, "capture": 2.0})
    for ours in (1.5, 1.9, 3.9)
)


def comparison(*rows: Row, **changes: object) -> Comparison:
    whole = Comparison(
        machine="2 cores", device="host:0 (host)", emulated=False, scenarios=(scenario(room=130 * MIB),),
        known={"decode": KNOWN}, rows=rows or (made(), FAILED), pairs=PAIRS, pair_ladder="decode", jobs=1,
    )  # fmt: skip
    return replace(whole, **changes)  # type: ignore[arg-type]


def test_the_figures_that_follow_from_a_row() -> None:
    row = made()
    assert row.start_seconds == 6.0 and row.tokens_per_second == 25.0
    assert row.error == 10 * MIB
    assert row.stranded == 100 * (MIB // 10) and row.stranded_part == pytest.approx(0.1)
    assert FAILED.error == -20 * MIB and FAILED.stranded == -300 * (MIB // 10)
    assert made(kept=-MIB).error == 30 * MIB  # what came out negative kept nothing
    assert made(blocks=None).stranded is None and made(estimate=None).error is None
    assert Row.from_dict(json.loads(json.dumps(made(samples=(1, -2), notes=("so",)).to_dict()))) == made(
        samples=(1, -2), notes=("so",)
    )


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    assert comparison().ratio == 0.5 and comparison().whole_ratio == pytest.approx(3.0 / 5.0)
    assert comparison(pairs=()).ratio is None and comparison(pairs=()).whole_ratio is None


def test_a_comparison_goes_through_json_unchanged() -> None:
    found = comparison()
    data = json.loads(json.dumps(found.to_dict()))
    assert Comparison.from_dict(data) == found
    assert data["paired"]["median_ratio"] == 0.5
    assert [row["outcome"] for row in data["rows"]] == ["served", "out of memory"]


def test_the_table_shows_every_row_and_why_one_ended() -> None:
    text = markdown(comparison())
    assert "| Guess | served | 6.00 | 2.50 | 2.00 | 0 | 6 | 30.0 | 20.0 | 10.0 | 900 | 3600 | 50.0% |" in text
    assert "| NoReserve | **out of memory** |" in text and "| (20.0) | -20.0 | 1300 |" in text
    assert "NoReserve: out of memory at capture: size 1 of 3, full 4. host:0 is out of memory" in text
    assert "**0.500**, median of 3 pairs" in text and "EMULATED" not in text
    assert "EMULATED driver: no GPU took part" in markdown(comparison(emulated=True))
    assert "None were run." in markdown(comparison(pairs=()))


def test_negative_samples_have_a_table_of_their_own() -> None:
    row = made("Sampled, floor 1 MiB", samples=(-35 * MIB, MIB, 0), estimate_raw=-26 * MIB, estimate=0)
    assert "| decode | Sampled, floor 1 MiB | -35.0, 1.0 | -26.0 | 20.0 |" in markdown(comparison(row))


def test_without_samples_there_is_no_table_of_them() -> None:
    text = markdown(comparison(made()))
    assert "come out negative" not in text and text.endswith("|\n")


def test_a_bar_goes_beyond_the_end_where_memory_ran_out() -> None:
    """30 MiB beside the weights of a device of 128, of which the engine's buffers take 2."""
    of = scenario(room=30 * MIB)
    known = replace(KNOWN, weights=100 * MIB, kept=4 * MIB, transient=3 * MIB, capture_peak=9 * MIB)
    fits = made(blocks=150, kept=4 * MIB)
    assert [round(length) for _, length, _, _ in picture.bar(fits, known, of)] == [2, 15, 4, 3, 6]
    assert [colour for _, _, colour, _ in picture.bar(fits, known, of)] == [
        picture.BUFFERS, picture.KV, picture.GRAPHS, picture.STEP, picture.STRANDED,
    ]  # fmt: skip
    beyond = picture.bar(replace(fits, blocks=240), known, of)
    assert sum(length for _, length, colour, _ in beyond if colour == picture.OVER) == pytest.approx(3, abs=0.1)
    # A cache that is there before the captures leaves their warm-ups the rest: 9 MiB are more than 4 + 3.
    before = picture.bar(replace(fits, phases={"allocate KV": 1.0}), known, of)
    assert [round(length) for _, length, _, _ in before] == [2, 15, 4, 3, 2, 4]
    assert picture.bar(made(outcome="no room"), known, of)[0][:2] == (0.0, 30.0)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture.draw(comparison(made(), FAILED, made("Other", outcome="no room", blocks=None)), tmp_path / "it.png")
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_the_machine_is_described_without_its_name() -> None:
    import platform

    assert "cores" in machine() and torch.__version__ in machine()
    assert platform.node() not in machine().split()


def test_strategies_run_in_processes_of_their_own_and_one_that_crashes_is_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    names = (strategies.OURS, strategies.PLAN, "There is none")
    found = compare([scenario()], names, pairs=0, tell=said.append)
    assert [row.outcome for row in found.rows] == ["served", "served", "failed"]
    assert found.rows[1].error == 0
    assert found.rows[2].error_text is not None and "'There is none' is no strategy" in found.rows[2].error_text
    assert (found.device, found.emulated, found.pair_ladder) == ("host:0 (host)", False, "decode")
    assert said == ["decode: measuring run", *(f"decode: {name}" for name in names)]


@pytest.mark.parametrize("word", ["not json", "5", "[1, 2]"])
def test_a_last_word_that_is_no_row_is_a_failed_row(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=f"{word}\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    found = comparing._row(scenario(), "NoReserve", KNOWN)
    assert found.outcome == "failed" and found.error_text is not None and "is no row" in found.error_text


def test_a_process_that_cannot_be_started_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "run", refuse)
    found = comparing._row(scenario(), "NoReserve", KNOWN)
    assert found.outcome == "failed" and "could not be started" in (found.error_text or "")


def test_a_measuring_run_that_fails_ends_the_comparison() -> None:
    with pytest.raises(
        VmmError, match=r"the measuring run: the process ended with status 1: ValueError: device .abacus:0."
    ):
        compare([scenario(device="abacus:0")], (), pairs=0)


def test_pairs_take_turns_in_who_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def row(of: Scenario, name: str, known: Known, *, serve: bool) -> Row:
        assert not serve
        order.append(name)
        return made(name, phases={name: 1.0})

    monkeypatch.setattr(comparing, "_row", row)
    ours, full = strategies.OURS, strategies.FULL
    assert list(comparing._pairs(scenario(), KNOWN, 3, lambda text: None)) == [Pair({ours: 1.0}, {full: 1.0})] * 3
    assert order == [ours, full, full, ours, ours, full]


def test_a_pair_that_fails_ends_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_row", lambda *_, **__: FAILED)
    with pytest.raises(VmmError, match="a paired run of NoReserve did not come to its end: capture: size 1 of 3"):
        list(comparing._pairs(scenario(), KNOWN, 1, lambda text: None))


@pytest.mark.emulated
def test_the_same_runs_on_an_emulated_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMM_KV_TESTING", "1")
    found = compare([scenario(device="cuda:0:128MiB")], (strategies.OURS, "NoReserve"), pairs=0)
    ours, optimistic = found.rows
    assert found.emulated and found.device.startswith("cuda:0 (")
    assert ours.outcome == "served" and ours.captures == ours.graphs == 3
    assert optimistic.outcome == "out of memory" and str(optimistic.error_text).startswith("cuda:0 is out of memory")
