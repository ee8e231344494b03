"""Public fault reports as plans, by their number in `cases.md`: budgets, measuring, several ranks, and the arithmetic
of a budget wherever else it appears. Figures in GiB, as printed; each block count stands twice: without rounding, and
with every segment rounded up to granules of 2 MiB. Model shapes that a report does not print are the published ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from vmm_kv.budget import exactly, readable
from vmm_kv.driver import DeviceProperties
from vmm_kv.kv_groups import Group
from vmm_kv.memory_source import HostFigures, SecondSource, resolve
from vmm_kv.rank_plan import RankBudgetError, RankedPlan, plan_ranks
from vmm_kv.rank_terms import Rank, Term
from vmm_kv.request import Request

GIB, MIB = 1 << 30, 1 << 20
ONE_MIB = Group("kv", MIB, 16)
KINDS: dict[str, Any] = {"activation": "transient", "loader": "startup", "margin": "margin", "other": "co-resident"}


def gib(size: float) -> int:
    return round(size * GIB)


def terms(**sizes: float) -> tuple[Term, ...]:
    return tuple(Term(name, gib(size), KINDS.get(name, "permanent")) for name, size in sizes.items())


def rank(total: float, free: float | None = None, group: Group = ONE_MIB, **sizes: float) -> Rank:
    return Rank(gib(total), terms(**sizes), (group,), None if free is None else gib(free))


def kv(block_bytes: int, segments: int, block_size: int = 16) -> Group:
    return Group("kv", block_bytes, block_size, segments=segments)


def share(utilization: float) -> Request:
    return Request(utilization=utilization)


def pinned(size: float) -> Request:
    return Request(kv_bytes=gib(size))


def failing(ranks: list[Rank], request: Request, **options: Any) -> RankBudgetError:
    with pytest.raises(RankBudgetError) as caught:
        plan_ranks(ranks, request, **options)
    return caught.value


def kv_gib(found: RankedPlan) -> float:
    return found.ranks[0].kv_bytes / GIB


# Every case on one rank that comes to a KV size: that size, blocks, and blocks on granules of 2 MiB


class Row(NamedTuple):
    rank: Rank
    request: Request
    kv_gib: float
    blocks: int
    rounded: int


GEMMA = kv(2 * 34 * 4 * 256 * 2 * 16, 68)
QWEN = kv(2 * 28 * 8 * 128 * 2 * 128, 56, 128)
LLAMA8 = kv(2 * 32 * 8 * 128 * 2 * 16, 64)
LLAMA11 = kv(2 * 40 * 8 * 128 * 2 * 16, 80)
LLAMA70_TP4 = kv(2 * 80 * 2 * 128 * 2 * 16, 160)
LLAMA13_TP2 = kv(2 * 40 * 20 * 128 * 2 * 16, 80)
PAGE = Group("kv", 2289536, 16)

SIZED = {
    "C01": Row(
        rank(178.36, 177.66, GEMMA, weights=8.58, activation=9.96, non_torch=0.07, graphs=0.65, safety=150 / 1024),
        share(0.9), 141.12, 68002, 67968),
    "C01 whole card": Row(
        rank(177.66, None, GEMMA, weights=8.58, activation=9.96, non_torch=0.07, graphs=0.65, safety=150 / 1024),
        share(1.0), 158.25, 76259, 76224),
    "C02": Row(
        rank(61.27, 60.86, QWEN, weights=1.14, activation=0.22, non_torch=0.13, graphs=0.04, safety=0.15),
        share(0.9), 53.46, 3910, 3904),
    "C03": Row(
        rank(79.22, None, LLAMA8, weights=14.96, non_torch=1.79, activation=1.26), share(0.9), 53.29, 27283, 27264),
    "C03 as printed": Row(rank(79.22, None, LLAMA8), pinned(53.29), 53.29, 27284, 27264),
    "C04": Row(
        rank(79.22, None, LLAMA11, weights=19.86, non_torch=0.16, activation=36.63), share(0.9), 14.65, 5999, 5952),
    "C05 20k": Row(rank(23.577, None, LLAMA8, peak=17.056, non_torch=0.35), share(0.9), 3.81, 1952, 1920),
    "C05 29k": Row(rank(23.577, None, LLAMA8, peak=17.982, non_torch=0.35), share(0.9), 2.89, 1478, 1472),
    "C06 a": Row(rank(16, 12, ONE_MIB, weights=4), Request(blocks=5000), 5000 / 1024, 5000, 5000),
    "C07": Row(rank(122, None, kv(28 << 16, 56), weights=1.4), pinned(1), 1, 585, 576),
    "C08 before": Row(rank(80, None, PAGE), pinned(11.35), 11.35, 5322, 5322),
    "C10": Row(rank(32, None, kv(4 * MIB, 64, 32), weights=20, loader=4.2), Request(blocks=2048), 8, 2048, 2048),
    "C11 before the release": Row(rank(80, None, LLAMA8, weights=20, throwaway=4.736), share(0.9), 47.26, 24199, 24192),
    "C11 after it": Row(rank(80, None, LLAMA8, weights=20, loader=4.736), share(0.9), 52.0, 26624, 26624),
    "C12 unreserved": Row(rank(79.10, None, LLAMA8, weights=15.5, activation=1.9), share(0.99), 60.91, 31185, 31168),
    "C12": Row(
        rank(79.10, None, LLAMA8, weights=15.5, activation=1.9, encoder=322 / 1024), share(0.99), 60.59, 31024, 30976),
    "C13": Row(rank(121.69, 32.40, LLAMA8, weights=6, overhead=8, margin=3), pinned(8), 8, 4096, 4096),
    "C14": Row(rank(80, None, LLAMA8, weights=10), pinned(20), 20, 10240, 10240),
    "C16": Row(
        rank(178.35, 176.17, LLAMA8, weights=60.79, activation=13.33, non_torch=10.96, graphs=-9.96, safety=0.15),
        share(160.52 / 178.35), 75.29, 38548, 38528),
    "C19 with the guess": Row(rank(130, None, LLAMA8, graphs=118.65), share(1.0), 11.35, 5811, 5760),
    "C19 with what it was": Row(rank(130, None, LLAMA8, graphs=3, safety=1), share(1.0), 126, 64512, 64512),
    "C22": Row(rank(22.36, 3.40, LLAMA8, graphs=0.46, safety=0.10), share(1.0), 2.84, 1454, 1408),
    "C24 8192": Row(rank(31.4, None, LLAMA8, rest=16.58, activation=2.84, graphs=0.89), share(0.93), 8.89, 4552, 4544),
    "C24 4096": Row(rank(31.4, None, LLAMA8, rest=16.54, activation=2.42, graphs=0.52), share(0.93), 9.72, 4977, 4928),
    "C24 3072": Row(rank(31.4, None, LLAMA8, rest=16.54, activation=2.32, graphs=0.52), share(0.93), 9.82, 5028, 4992),
    "C24 2048": Row(rank(31.4, None, LLAMA8, rest=16.54, activation=2.21, graphs=0.52), share(0.93), 9.93, 5085, 5056),
    "C33": Row(rank(80, 66, LLAMA8, torch=2.1), share(0.8), 61.9, 31692, 31680),
    "C34": Row(rank(30.3, 30.3, LLAMA8), share(1.0), 30.3, 15513, 15488),
    "C35": Row(rank(40, 20, LLAMA8, weights=5, activation=1), share(0.4), 10, 5120, 5120),
    "C36": Row(rank(79.18, 78.66, LLAMA8, non_kv=1.05), share(0.825), 64.27, 32908, 32896),
    "C39": Row(
        rank(24564 / 1024, None, kv(MIB // 2, 64), eager=11395 / 1024, graphs=2464 / 1024),
        share(0.9), (22107.6 - 13859) / 1024, 16497, 16384),
    "C40 13B": Row(rank(24, 8.94, LLAMA13_TP2), share(1.0), 8.94, 1464, 1459),
    "C40 13B as counted": Row(rank(24, 112 * 6.25 / 1024, LLAMA13_TP2), share(1.0), 0.68, 112, 102),
    "C40 70B": Row(rank(80, 31615 * 1.25 / 1024, LLAMA70_TP4), share(1.0), 38.59, 31615, 31488),
    "C40 70B less 13.12 GiB": Row(
        rank(80, 31615 * 1.25 / 1024, LLAMA70_TP4, non_framework=10750 * 1.25 / 1024), share(1.0), 25.47, 20865, 20736),
    "C94": Row(rank(79.15, 79.15 - 59.36, LLAMA8, weights=8.65, activation=1.5), share(0.2), 5.68, 2908, 2880),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZED)
def test_size_and_blocks(case: str) -> None:
    row = SIZED[case]
    found = plan_ranks([row.rank], row.request)
    assert kv_gib(found) == pytest.approx(row.kv_gib, abs=0.0101)
    assert found.blocks == row.blocks
    block = row.rank.groups[0].bytes_per_block
    assert row.blocks * block <= found.ranks[0].kv_bytes, "floored, never rounded up"
    assert row.request.blocks or (row.blocks + 1) * block > found.ranks[0].kv_bytes
    assert found.tokens == row.blocks * row.rank.groups[0].block_size


def on_granules(given_: Rank) -> Rank:
    return Rank(given_.total, given_.terms, given_.groups, given_.free, granule=2 * MIB)


@pytest.mark.parametrize("case", SIZED)
def test_blocks_on_granules_of_2_mib(case: str) -> None:
    row = SIZED[case]
    found = plan_ranks([on_granules(row.rank)], row.request)
    group = row.rank.groups[0]
    assert (found.status, found.blocks) == ("ok", row.rounded)
    granules = -(-row.rounded * group.bytes_per_block // group.segments // (2 * MIB)) * group.segments
    assert found.nbytes == (granules * 2 * MIB,)
    assert row.request.blocks or found.nbytes[0] <= found.ranks[0].kv_bytes


# A1: what else the budget cases say


@pytest.mark.parametrize(
    ("group", "size"),
    [(LLAMA8, 2097152), (LLAMA11, 2621440), (LLAMA70_TP4, 1310720), (LLAMA13_TP2, 6553600)],
)
def test_block_bytes(group: Group, size: int) -> None:
    """C03, C04, C40."""
    assert group.bytes_per_block == size


def test_c01_both_figures_stand_in_one_plan() -> None:
    part = plan_ranks([SIZED["C01"].rank], share(0.9)).ranks[0]
    assert part.share / GIB == pytest.approx(141.12, abs=0.01)
    assert part.room / GIB == pytest.approx(158.25, abs=0.01)
    assert readable(151519866880) == "141.11 GiB"


def test_c02_printed_bytes() -> None:
    assert readable(57403864576) == "53.46 GiB"


def test_c03_tokens_and_two_ranks() -> None:
    assert plan_ranks([rank(79.22, None, LLAMA8)], pinned(53.29)).tokens == 436544
    half = kv(MIB, 64)
    assert plan_ranks([rank(79.22, None, half)] * 2, pinned(53.29)).blocks == 2 * 27284


def test_c04_blocks_within_what_two_decimals_leave_open() -> None:
    """C04: 6001 blocks were printed beside 14.65 GiB."""
    least, most = (plan_ranks([rank(79.22, None, LLAMA11)], pinned(size)).blocks for size in (14.645, 14.655))
    assert 5998 <= least <= 6001 <= most <= 6003


def test_c05_says_what_the_largest_request_is() -> None:
    assert plan_ranks([SIZED["C05 20k"].rank], share(0.9), max_model_len=20000).tokens == 31232
    error = failing([SIZED["C05 29k"].rank], share(0.9), max_model_len=29000)
    assert "cannot hold one request of 29000 tokens; largest is 23648, short by 5352 tokens" in str(error)
    assert error.ranked.largest_request == 23648


def test_c06_one_block_holds_no_request_of_128() -> None:
    error = failing([rank(16, 12, weights=4)], Request(blocks=1), max_model_len=2048)
    assert "cannot hold one request of 2048 tokens; largest is 16" in str(error)
    assert "ask for at least 128 blocks" in str(error)


def test_c06_an_override_above_what_fits_names_both() -> None:
    error = failing([rank(16, 12, weights=4)], Request(blocks=9000))
    assert "needs 8.79 GiB (9437184000 bytes), room is for 8.00 GiB (8589934592 bytes)" in str(error)


def test_c06_utilization_plays_no_part() -> None:
    """C06 a: 12 of 16 GiB are free, less than 0.9 of it, and 5000 blocks of 1 MiB fit."""
    found = plan_ranks([rank(16, 12, weights=4)], Request(blocks=5000))
    assert (found.blocks, found.bound_by, found.nbytes) == (5000, "explicit blocks", (5000 * MIB,))


@pytest.mark.parametrize(("pages", "size"), [(4950, 11333203200), (5654, 12945036544)])
def test_c08_page_minimum(pages: int, size: int) -> None:
    wanted = Request(kv_bytes=size)
    assert plan_ranks([rank(80, None, PAGE)], wanted, min_blocks=pages).nbytes == (size,)
    failing([rank(80, None, PAGE)], Request(kv_bytes=size - 1), min_blocks=pages)


def test_c08_shortage() -> None:
    assert plan_ranks([rank(80, None, PAGE)], pinned(11.35), min_blocks=4950).status == "ok"
    error = failing([rank(80, None, PAGE)], pinned(11.35), min_blocks=5654)
    short = 12945036544 - gib(11.35)
    assert short / GIB == pytest.approx(0.71, abs=0.01)
    assert f"short by {exactly(short)}" in str(error)


def test_c09_rescued_by_a_floor() -> None:
    given_ = rank(4, 1, weights=1)  # 3 GiB less 1 GiB asked for, and nothing free
    found = plan_ranks([given_], share(4090 / 4096), floor=16)
    assert (found.status, found.planned, found.blocks, found.bound_by) == ("floored", 3066, 16, "free memory")
    assert found.warnings and "3066 were planned" in found.warnings[0]
    assert failing([given_], share(4090 / 4096), floor=16, strict=True).ranked.status == "floored"


def test_c10_a_reserve_that_is_gone_again() -> None:
    """C10: 20 + 4.2 GiB at the start, 20 + 8 later. Charged for good, the 4.2 would not fit."""
    found = plan_ranks([SIZED["C10"].rank], Request(blocks=2048))
    assert found.ranks[0].startup_peak == gib(20) + gib(4.2)
    assert found.concurrent(4096) == 16
    failing([rank(32, None, kv(4 * MIB, 64, 32), weights=20, reserve=4.2)], Request(blocks=2048))


def test_c11_exact_bytes_of_two_throwaway_tensors() -> None:
    size = 248320 * 5120 * 2
    assert (size, readable(size)) == (2542796800, "2.37 GiB")

    def sized(kind: Any) -> int:
        extra = (Term("embedding", size, kind), Term("head", size, kind))
        return plan_ranks([Rank(80 * GIB, extra, (LLAMA8,))], share(0.9)).ranks[0].kv_bytes

    assert sized("startup") - sized("permanent") == 2 * size
    assert 2 * size / GIB == pytest.approx(4.736, abs=0.001)


def test_c12_an_encoder_is_one_more_term() -> None:
    without, within = (plan_ranks([SIZED[case].rank], share(0.99)) for case in ("C12 unreserved", "C12"))
    assert without.blocks - within.blocks >= 322 // 2
    assert readable(gib(322 / 1024) - round(249.88 * MIB)) == "72.12 MiB"


def test_c13_explicit_bytes_are_checked_against_what_is_usable() -> None:
    """C13: 22 of 29.40 GiB, although 32.40 free are far below 0.92 of the device."""
    found = plan_ranks([SIZED["C13"].rank], pinned(8))
    assert (found.status, found.ranks[0].short) == ("ok", 0)
    assert (found.ranks[0].permanent + found.nbytes[0]) / GIB == 22
    assert (found.ranks[0].room + found.ranks[0].permanent) / GIB == pytest.approx(29.40)


def test_c13_shortage_is_reported() -> None:
    """C13: 0.25 of 121.69 GiB against a reading of 29.83."""
    found = plan_ranks([rank(121.69, 29.83, weights=6)], share(0.25))
    assert found.ranks[0].short / GIB == pytest.approx(0.59, abs=0.01)
    assert (found.bound_by, "short of what the request asks for" in found.notes[0]) == ("free memory", True)


def test_c14_pinned_bytes_and_the_neighbour_at_resume() -> None:
    for total in (40, 80):  # whatever a utilization of it would be
        assert plan_ranks([rank(total, None, LLAMA8, weights=10)], pinned(20)).nbytes == (21474836480,)
    found = plan_ranks([rank(80, None, LLAMA8, weights=10, other=40)], pinned(35))
    assert found.status == "ok"
    assert "resume will not fit: 45.00 GiB" in found.warnings[0] and "5.00 GiB" in found.warnings[0]


@pytest.mark.parametrize(("free", "bound", "advised"), [(23.0, "request", 0.8352), (15.0, "free memory", None)])
def test_c15_advice_from_what_binds(free: float, bound: str, advised: float | None) -> None:
    found = plan_ranks([rank(23.68, free, weights=2, graphs=0.36)], share(0.82))
    assert (found.bound_by, found.advised_utilization) == (bound, advised)
    assert any("utilization" in line for line in found.advice) is (bound == "request")


# A2, where they are budgets


def test_c16_what_was_freed_during_capture_gives_nothing() -> None:
    found = plan_ranks([SIZED["C16"].rank], SIZED["C16"].request)
    part = found.ranks[0]
    assert part.share == part.requested - part.permanent - part.transient
    assert part.rank.terms[3].nbytes == gib(-9.96) and "counted as 0" in found.notes[0]


def test_c17_what_was_not_used_is_given_back() -> None:
    """C17: estimated 2.43 GiB, -0.19 measured: 2.43 GiB more, and both figures are kept."""
    guessed, actual = (plan_ranks([rank(121.69, graphs=size, weights=60)], share(0.86)) for size in (2.43, -0.19))
    assert actual.ranks[0].kv_bytes - guessed.ranks[0].kv_bytes == gib(2.43)
    assert round(100 * (855598 - 802083) / 802083, 2) == 6.67
    assert actual.ranks[0].rank.terms[0].nbytes == gib(-0.19)


def test_c19_a_guess_that_leaves_nothing_is_named() -> None:
    """C19: one request of 16384 tokens needs more than what 118.65 GiB of "graphs" leave."""
    sizes = {"guess": 118.65, "measured": 3.0}
    ranks = {
        name: Rank(gib(130), (Term("graphs", gib(size), source=f"{name} by sampling"),), (Group("kv", MIB),))
        for name, size in sizes.items()
    }
    error = failing([ranks["guess"]], share(1.0), max_model_len=16384)
    assert "graphs (guess by sampling) 118.65 GiB" in str(error).partition("\n")[0]
    assert kv_gib(plan_ranks([ranks["measured"]], share(1.0), max_model_len=16384)) == pytest.approx(127, abs=0.01)


def test_c23_a_smaller_reserve_in_tokens() -> None:
    """C23: 9.47 or 8.20 GiB reserved: 22.52 or 23.79 for KV, 152797 tokens apart at 8928 B."""
    group = Group("kv", 8928)
    few, many = (plan_ranks([rank(96, 22.52 + 9.47, group, graphs=size)], share(1.0)) for size in (9.47, 8.20))
    assert [kv_gib(found) for found in (few, many)] == pytest.approx([22.52, 23.79])
    assert few.tokens == pytest.approx(2708338, rel=1e-3) and many.tokens == pytest.approx(2861135, rel=1e-3)
    assert many.blocks - few.blocks == pytest.approx(152797, rel=1e-3)


def test_c24_headroom_lowers_kv_by_itself() -> None:
    given_ = SIZED["C24 2048"].rank
    more = Rank(given_.total, (*given_.terms, Term("headroom", gib(0.5), "transient")), given_.groups)
    apart = [plan_ranks([r], share(0.93)).ranks[0].kv_bytes for r in (given_, more)]
    assert apart[0] - apart[1] == gib(0.5)


@pytest.mark.parametrize("total", [80, 288])
def test_c31_declared_later_allocations(total: int) -> None:
    """C31: floor 1.5 GiB, and of target 0.9 and draft 0.4, which take turns, the larger; vision adds 8 on any card."""
    later = (
        Term("floor", gib(1.5)),
        Term("canary target", gib(0.9), "transient", turn="target"),
        Term("canary draft", gib(0.4), "transient", turn="draft"),
    )

    def left(*more: Term) -> int:
        return plan_ranks([Rank(gib(total), (*later, *more), (ONE_MIB,), gib(40))], share(1.0)).ranks[0].room

    assert left() == gib(40) - gib(1.5) - gib(0.9)
    assert left() - left(Term("vision", 8 * GIB)) == 8 * GIB


# A3, from the figures that `memory_source` gives


def device(total: float, *, integrated: bool = False) -> DeviceProperties:
    return DeviceProperties("a device", "uuid", "pci", total=gib(total), integrated=integrated, multi_instance=False)


def test_c38_what_lies_outside_the_framework() -> None:
    """C38: of 139.32 GiB the framework has 135.53 allocated and 265.53 MiB reserved; private pools are in these."""
    found = plan_ranks([rank(150, None, process=139.32 - 135.53 - 265.53 / 1024)], share(1.0))
    assert found.ranks[0].permanent / GIB == pytest.approx(3.53, abs=0.01)


def test_c39_graphs_come_out_of_the_kv() -> None:
    """C39: 21395 MiB in eager mode, 23859 with graphs; planned, all of it stays within 22107.6."""
    row = SIZED["C39"]
    for given_ in (row.rank, on_granules(row.rank)):
        found = plan_ranks([given_], row.request)
        assert found.ranks[0].permanent + found.nbytes[0] <= 22107.6 * MIB
    eager_kv = gib((21395 - 11395) / 1024)
    assert eager_kv - found.ranks[0].kv_bytes >= 1751 * MIB


def test_c41_shortage_with_its_source() -> None:
    """C41: 0.5 of 119.56 GiB against 56.3 available to the host, not the 26.5 that are unused."""
    memory = resolve(
        gib(26.5), gib(119.56), device(119.56, integrated=True), HostFigures(gib(119.56), gib(26.5), gib(56.3))
    )
    found = plan_ranks([Rank(memory.total, (), (ONE_MIB,), memory.free, notes=memory.notes)], share(0.5))
    assert found.ranks[0].short / GIB == pytest.approx(3.5, abs=0.05)
    assert any("MemAvailable" in note for note in found.notes)


def test_c42_more_free_than_there_is() -> None:
    free, total, other = 102891683840, 16631242752, 103079215104
    error = failing([Rank(total, (), (ONE_MIB,), free)], share(0.9))
    assert error.ranked.status == "inconsistent"
    assert "102891683840 bytes) free of 15.49 GiB (16631242752 bytes)" in str(error)
    memory = resolve(free, total, device(0), second=SecondSource("system files", other))
    found = plan_ranks([Rank(memory.total, (), (ONE_MIB,), memory.free)], share(0.9))
    assert found.ranks[0].requested / GIB == pytest.approx(86.4, abs=0.01)


@pytest.mark.parametrize(("total", "own", "requested"), [(192, 32, 28.8), (16, 16, 14.4)])
def test_c43_c44_requested_of_the_device_that_it_is(total: float, own: float, requested: float) -> None:
    """C43: linked cards of 32 GiB that tell of 192. C44: a slice of 16."""
    memory = resolve(gib(total), gib(total), device(own))
    found = plan_ranks([Rank(memory.total, (), (ONE_MIB,), memory.free, notes=memory.notes)], share(0.9))
    assert found.ranks[0].requested / GIB == pytest.approx(requested)
    assert bool(found.notes) is (total > own)


def test_c45_a_device_that_tells_of_no_memory() -> None:
    """C45: nothing dedicated, a shared pool of 128 GiB with 100 available."""
    memory = resolve(0, 0, device(0, integrated=True), HostFigures(gib(128), gib(90), gib(100)))
    part = plan_ranks([Rank(memory.total, (), (ONE_MIB,), memory.free)], share(0.9)).ranks[0]
    assert (part.rank.total, part.free, part.kv_bytes) == (gib(128), gib(100), gib(100))


# A4


def test_c47_cards_do_not_pool() -> None:
    """C47: 8.69 GiB on one rank alone would be 94917 tokens; 7.465 on the other make it 81536 on both."""
    group = Group("kv", 98304 * 16, 16)
    ranks = [rank(24, 8.69, group), rank(24, 7.465, group)]
    found = plan_ranks(ranks, share(0.98))
    assert (found.blocks, found.tokens, found.bound_rank) == (5096, 81536, "rank 1")
    assert [part.bound_by for part in found.ranks] == ["another rank", "free memory"]
    assert found.ranks[0].surplus / GIB == pytest.approx(1.22, abs=0.01)
    assert plan_ranks(ranks[:1], share(0.98)).tokens == pytest.approx(94917, abs=16)
    split = kv(98304 * 16, 96)
    rounded = plan_ranks([on_granules(rank(24, size, split)) for size in (8.69, 7.465)], share(0.98))
    assert rounded.blocks == 4992


def test_c48_heavy_ranks() -> None:
    """C48: 16384 blocks on both ranks, not the 51200 of the lighter one."""
    ranks = [rank(100, activation=40, non_framework=size) for size in (10, 44)]
    found = plan_ranks(ranks, share(1.0))
    assert (found.blocks, [part.own_blocks for part in found.ranks]) == (16384, [51200, 16384])


def test_c49_a_negative_rank_is_named() -> None:
    """C49: with its terms and the missing bytes; no rank gets anything."""
    ranks = [rank(24, weights=27.86), rank(24, weights=14.10)]
    error = failing(ranks, share(1.0), min_blocks=1)
    head = str(error).partition("\n")[0]
    assert "rank 0: the start-up takes 27.86 GiB" in head and "short by 3.86 GiB" in head
    assert error.ranked.ranks[0].kv_bytes == gib(24) - gib(27.86) and readable(gib(24) - gib(27.86)) == "-3.86 GiB"
    ranks = [rank(80, weights=27.86), rank(80, weights=14.10)]
    head = str(failing(ranks, share(0.3))).partition("\n")[0]
    assert "rank 0 has -3.86 GiB" in head and "weights 27.86 GiB" in head and "rank 1 has" not in head
    assert error.ranked.blocks == 0


@pytest.mark.parametrize(
    ("free", "flagged", "least"),
    [([70, 70, 40, 70], ("rank 2",), 40), ([70, 69, 70, 70], (), 69), ([15, 22], ("rank 0",), 15)],
)
def test_c50_imbalance_warns(free: list[float], flagged: tuple[str, ...], least: float) -> None:
    """C50: before capture, by a warning, and planned with the least."""
    found = plan_ranks([rank(80, size) for size in free], share(1.0))
    assert (found.imbalanced, found.blocks, len(found.warnings)) == (flagged, least * 1024, len(flagged))


def test_c51_stages_hold_all_blocks() -> None:
    """C51: two stages of 1650 blocks are 26400 tokens, not 13200."""
    stages = [rank(24, group=kv(size, 80)) for size in (2621440, 2621440 // 2)]
    found = plan_ranks(stages, Request(blocks=1650), max_model_len=24000)
    assert (found.tokens, found.largest_request, found.concurrent_requests) == (26400, 26400, 1)
    assert found.nbytes == (1650 * 2621440, 1650 * 2621440 // 2)


@pytest.mark.parametrize(("ranks", "logical"), [(8, 26462720), (1, 3307840)])
def test_c52_context_parallel_capacity(ranks: int, logical: int) -> None:
    """C52: both figures are printed."""
    group = Group("kv", 1 << 14, 16, context_parallel=ranks)
    found = plan_ranks([rank(80, group=group)] * ranks, Request(blocks=3307840 // 16))
    assert (found.tokens, found.tokens_per_rank) == (logical, 3307840)
    assert str(logical) in str(found) and str(3307840) in str(found)


def test_c53_draft_on_one_rank() -> None:
    """C53: rank 0 holds a draft of 15 GiB and half a MiB a block: 17066 blocks on all, not 40960."""
    draft = Group("draft", MIB // 2, 16, pool="draft")
    ranks = [
        Rank(gib(76), terms(target=36, draft=15), (ONE_MIB, draft)),
        *[rank(76, target=36) for _ in range(3)],
    ]
    found = plan_ranks(ranks, share(1.0))
    assert (found.blocks, [part.own_blocks for part in found.ranks]) == (17066, [17066, 40960, 40960, 40960])
    assert plan_ranks([on_granules(r) for r in ranks], share(1.0)).blocks == 17066
