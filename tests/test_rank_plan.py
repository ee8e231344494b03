"""The plan of one or several ranks: formula, bounds, errors, properties. The public cases are in their own file."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmm_kv.budget import BudgetError
from vmm_kv.kv_groups import Group
from vmm_kv.rank_plan import RankBudgetError, RankedPlan, plan_ranks
from vmm_kv.rank_terms import Rank, Term, TermKind
from vmm_kv.request import Request

KV = Group("kv", 10, 16)
SHARE = Request(utilization=0.8)


def rank(total: int = 1000, *, free: int | None = None, groups: tuple[Group, ...] = (KV,), **sizes: int) -> Rank:
    """Weights of 200 and an activation peak of 50 bytes, unless said otherwise."""
    kinds: dict[str, Any] = {"activation": "transient", "margin": "margin", "loader": "startup", "other": "co-resident"}
    terms = {"weights": 200, "activation": 50} | sizes
    return Rank(
        total, tuple(Term(name, size, kinds.get(name, "permanent")) for name, size in terms.items()), groups, free
    )


def failing(ranks: list[Rank], request: Request = SHARE, **options: Any) -> RankBudgetError:
    with pytest.raises(RankBudgetError) as caught:
        plan_ranks(ranks, request, **options)
    return caught.value


# The formula


def test_share_binds() -> None:
    found = plan_ranks([rank(graphs=30)], SHARE)
    part = found.ranks[0]
    assert (part.requested, part.permanent, part.transient, part.share, part.room) == (800, 230, 50, 520, 720)
    assert (found.blocks, found.planned, found.tokens, found.nbytes) == (52, 52, 832, (520,))
    assert (found.status, found.bound_by, found.bound_rank, part.surplus) == ("ok", "request", "rank 0", 0)


def test_free_memory_binds() -> None:
    found = plan_ranks([rank(free=354)], SHARE)
    assert (found.blocks, found.planned, found.bound_by, found.ranks[0].short) == (10, 55, "free memory", 446)
    assert found.ranks[0].surplus == 4
    assert any("short of what the request asks for" in note for note in found.notes)


def test_margin_comes_off_what_is_free_and_not_off_the_share() -> None:
    found = plan_ranks([rank(margin=300)], SHARE)
    assert (found.ranks[0].share, found.ranks[0].room, found.bound_by) == (550, 450, "free memory")


def test_capacity_binds_only_where_one_more_block_would_fit() -> None:
    assert plan_ranks([rank()], SHARE, capacity=20).bound_by == "capacity"
    assert plan_ranks([rank()], SHARE, capacity=54).bound_by == "capacity"
    assert plan_ranks([rank()], SHARE, capacity=55).bound_by == "request"


def test_what_the_start_up_frees_is_not_charged() -> None:
    """C10: it counts towards the peak at its time."""
    found = plan_ranks([rank(loader=700)], SHARE)
    assert (found.blocks, found.ranks[0].startup_peak) == (55, 900)
    assert any("100 B above the requested share" in note for note in found.notes)


def test_start_up_that_does_not_fit() -> None:
    error = failing([rank(loader=700, free=850)])
    assert "the start-up takes 900 B (900 bytes)" in str(error) and "short by 50 B (50 bytes)" in str(error)
    assert error.ranked.status == "refused"


def test_negative_terms_are_kept_and_noted() -> None:
    found = plan_ranks([rank(graphs=-30)], SHARE)
    assert found.ranks[0].permanent == 200
    assert found.ranks[0].rank.terms[-1].nbytes == -30
    assert any("graphs came out at -30 B (-30 bytes), counted as 0" in note for note in found.notes)


def test_groups_are_shown() -> None:
    groups = (KV, Group("state", kind="state", bytes_per_request=7, requests=3), Group("draft", 6, 32, pool="draft"))
    shown = plan_ranks([rank(groups=groups)], Request(blocks=4), max_model_len=20).ranks[0].groups
    assert [(g.name, g.kind, g.blocks, g.nbytes, g.request_bytes) for g in shown] == [
        ("kv", "full", 4, 40, 20),
        ("state", "state", 0, 21, 7),
        ("draft", "full", 2, 12, 6),
    ]
    assert plan_ranks([rank()], SHARE).ranks[0].groups[0].request_bytes is None


# Several ranks


def test_the_least_rank_binds_and_the_others_say_so() -> None:
    found = plan_ranks([rank(), rank(weights=300), rank(weights=301)], SHARE)
    assert (found.blocks, found.bound_rank, found.bound_by) == (44, "rank 2", "request")
    assert [part.bound_by for part in found.ranks] == ["another rank", "another rank", "request"]
    assert [part.surplus for part in found.ranks] == [110, 10, 9]
    assert found.advice[0].startswith("rank 2: utilization binds")


def test_ranks_with_names() -> None:
    assert plan_ranks([replace(rank(), name="stage 1")], SHARE).bound_rank == "stage 1"


# What is asked for


@pytest.mark.parametrize("request_", [Request(kv_bytes=755), Request(blocks=76)])
def test_explicit_request_beyond_room(request_: Request) -> None:
    error = failing([rank(free=1000), rank(free=990)], request_)
    assert error.ranked.status == "refused"
    assert "rank 1: the explicit request needs" in str(error)
    assert ("rank 0" in str(error).partition("\n")[0]) is (request_.blocks is not None)


def test_explicit_bytes_are_an_upper_bound_and_include_what_is_held_from_the_start() -> None:
    groups = (KV, Group("state", kind="state", bytes_per_request=7, requests=3))
    found = plan_ranks([rank(groups=groups)], Request(kv_bytes=125))
    assert (found.blocks, found.nbytes, found.bound_by) == (10, (121,), "explicit bytes")
    assert "up to 750 B (750 bytes) would fit" in found.advice[0]


def test_explicit_blocks_are_exact_although_rounding_leaves_place() -> None:
    found = plan_ranks([replace(rank(), granule=64)], Request(blocks=3))
    assert (found.blocks, found.nbytes, found.bound_by) == (3, (64,), "explicit blocks")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"request": Request(blocks=9), "capacity": 8}, "9 blocks, there are addresses for 8"),
        ({"capacity": 0}, "capacity must be at least 1"),
        ({"floor": -1}, "got -1"),
        ({"request": Request(blocks=9), "floor": 1}, "goes with a utilization"),
        ({"floor": 9, "capacity": 8}, "the floor is 9 blocks"),
        ({"ranks": []}, "at least one rank"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], match: str) -> None:
    given_: dict[str, Any] = {"ranks": [rank()], "request": SHARE} | options
    with pytest.raises(ValueError, match=match):
        plan_ranks(**given_)


# Too little


def test_too_small_says_which_rank_lacks_what_and_what_to_change() -> None:
    error = failing([rank(), rank(weights=700)], max_model_len=200)
    head = str(error).partition("\n")[0]
    assert "cannot hold one request of 200 tokens; largest is 80, short by 120 tokens" in head
    assert "rank 1 has 50 B (50 bytes) for KV" in head and "weights 700 B" in head
    assert "short by 80 B (80 bytes)" in head and "rank 0 has" not in head
    assert "raise utilization to 0.8800; or lower max_model_len to 80" in head
    again = [rank(), rank(weights=700)]
    assert plan_ranks(again, Request(utilization=0.88), max_model_len=200).blocks == 13
    assert plan_ranks(again, SHARE, max_model_len=80).blocks == 5


def test_too_small_for_want_of_free_memory_or_addresses() -> None:
    assert "free 30 B (30 bytes) more on rank 0" in str(failing([rank(free=300)], min_blocks=8))
    assert "raise utilization" not in str(failing([rank(free=300)], min_blocks=8)).partition("\n")[0]
    assert "there are addresses for 5 blocks: reserve more" in str(failing([rank()], capacity=5, min_blocks=9))
    assert "no utilization suffices" in str(failing([rank()], min_blocks=80))
    assert "ask for at least 8 blocks, 80 B (80 bytes)" in str(failing([rank()], Request(kv_bytes=70), min_blocks=8))


def test_negative_is_shown_and_never_granted() -> None:
    error = failing([rank(weights=900)])
    assert (error.ranked.blocks, error.ranked.ranks[0].kv_bytes, error.ranked.nbytes) == (0, -150, (0,))
    assert "-150 B (-150 bytes)" in str(error)
    assert isinstance(error, BudgetError) and error.plan is None


def test_floor_is_a_loud_warning_or_an_error() -> None:
    """C09."""
    found = plan_ranks([rank(free=255)], SHARE, floor=16)
    assert (found.status, found.planned, found.blocks, found.ranks[0].surplus) == ("floored", 55, 16, -155)
    assert "granted 16 blocks although memory does not hold them: 55 were planned" in found.warnings[0]
    assert found.advice == ("free 155 B (155 bytes) more on rank 0",)
    assert failing([rank(free=255)], floor=16, strict=True).ranked.status == "floored"
    assert failing([rank(free=255)], floor=16, max_model_len=257).ranked.status == "too_small"
    assert plan_ranks([rank()], SHARE, floor=16, strict=True).status == "ok"


@pytest.mark.parametrize(("total", "free"), [(100, 101), (0, 0), (100, -1)])
def test_inconsistent_figures(total: int, free: int) -> None:
    error = failing([rank(), rank(total, free=free)])
    assert (error.ranked.status, error.ranked.blocks) == ("inconsistent", 0)
    assert f"rank 1: the memory figures are inconsistent, {free} B" in str(error)


# The neighbour who is away


def test_resume_beside_a_co_resident() -> None:
    assert plan_ranks([rank(other=200)], SHARE).warnings == ()
    assert "are 1 B (1 bytes) above the device's" in plan_ranks([rank(other=201)], SHARE).warnings[0]


# Words


def test_text_has_every_figure_and_is_the_same_twice() -> None:
    ranks = [rank(graphs=30, margin=7, loader=3), replace(rank(), notes=("from the second source",))]
    found = plan_ranks(ranks, SHARE, max_model_len=160)
    text = str(found)
    for wanted in ("graphs", "margin (margin)", "loader (startup)", "activation (transient)", "note: rank 1: from the"):
        assert wanted in text
    assert "52 blocks, 52 planned (ok, bound by request on rank 0)" in text
    assert "requests of 160              5 at once (5.20x)" in text
    assert text == str(plan_ranks(ranks, SHARE, max_model_len=160))


def test_terms_say_where_their_figure_is_from() -> None:
    given_ = Rank(100, (Term("graphs", 95, source="SampledExtrapolation"),), (KV,))
    assert "graphs (SampledExtrapolation)" in str(failing([given_]))


def test_no_torch() -> None:
    """Invariant 14."""
    code = "import sys, vmm_kv.rank_plan, vmm_kv.budget, vmm_kv.repeated; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# Properties

sizes = st.integers(0, 3000)


@st.composite
def any_rank(draw: st.DrawFn) -> Rank:
    kinds = st.sampled_from(get_args(TermKind))
    count = draw(st.integers(0, 4))
    terms = tuple(Term(f"t{i}", draw(st.integers(-500, 2000)), draw(kinds)) for i in range(count))
    groups = [Group("kv", 4 * draw(st.integers(1, 9)), 16, segments=draw(st.sampled_from([1, 2, 4])))]
    if draw(st.booleans()):
        groups.append(Group("draft", draw(st.integers(1, 9)), 16, pool="draft"))
    if draw(st.booleans()):
        groups.append(Group("state", kind="state", bytes_per_request=draw(st.integers(1, 60)), requests=3))
    total = draw(st.integers(1, 10**4))
    return Rank(total, terms, tuple(groups), draw(st.none() | st.integers(0, total)), granule=draw(st.integers(1, 64)))


some_ranks = st.lists(any_rank(), min_size=1, max_size=4)
shares = st.integers(1, 100).map(lambda percent: Request(utilization=percent / 100))
requests = shares | st.builds(Request, kv_bytes=st.integers(1, 9999)) | st.builds(Request, blocks=st.integers(1, 99))
options = st.fixed_dictionaries(
    {}, optional={"max_model_len": st.integers(1, 300), "min_blocks": sizes, "capacity": st.integers(1, 500)}
)


def outcome(ranks: list[Rank], request: Request, **given_: Any) -> RankedPlan:
    """The plan, from the error where it is one."""
    if request.blocks is not None and "capacity" in given_:
        given_ = given_ | {"capacity": max(request.blocks, given_["capacity"])}  # else it is a wrong argument
    try:
        return plan_ranks(ranks, request, **given_)
    except RankBudgetError as error:
        assert str(error).partition("\n")[0], "an error says something"
        assert ("short by" in str(error)) or error.ranked.status == "too_small"
        return error.ranked


@given(some_ranks, requests, options)
def test_same_inputs_same_bytes(ranks: list[Rank], request: Request, given_: dict[str, Any]) -> None:
    first, second = (outcome([replace(rank_) for rank_ in ranks], request, **given_) for _ in range(2))
    assert json.dumps(first.to_dict()) == json.dumps(second.to_dict())
    assert str(first) == str(second)


@given(some_ranks, requests, options)
def test_never_above_share_or_room_on_any_rank(ranks: list[Rank], request: Request, given_: dict[str, Any]) -> None:
    found = outcome(ranks, request, **given_)
    assert found.blocks <= found.planned and found.blocks >= 0
    assert found.capacity is None or found.blocks <= found.capacity
    for part, cache in zip(found.ranks, found.caches(), strict=True):
        assert (part.kv_bytes, part.nbytes) == (min(part.share, part.room), cache.cost(found.blocks))
        assert part.surplus == part.kv_bytes - part.nbytes
        if found.status == "ok":
            assert part.nbytes <= part.kv_bytes
            assert part.permanent + part.transient + part.margin + part.nbytes <= part.free
            if request.utilization is not None:
                assert part.permanent + part.transient + part.nbytes <= part.requested


@given(some_ranks, requests, options)
def test_no_whole_block_is_wasted(ranks: list[Rank], request: Request, given_: dict[str, Any]) -> None:
    found = outcome(ranks, request, **given_)
    if found.status == "ok" and found.blocks != found.capacity and request.blocks is None:
        caches = zip(found.ranks, found.caches(), strict=True)
        assert any(cache.cost(found.blocks + 1) > part.kv_bytes for part, cache in caches)
    bound = [part for part in found.ranks if part.bound_by != "another rank"]
    assert found.bound_rank in [part.name for part in bound]
    assert all(part.own_blocks == min(p.own_blocks for p in found.ranks) for part in bound)


@given(some_ranks, st.integers(1, 99), st.integers(1, 99), st.integers(0, 500))
def test_monotone_in_the_budget(ranks: list[Rank], low: int, high: int, more: int) -> None:
    low, high = sorted((low, high))
    less, most = (outcome(ranks, Request(utilization=percent / 100)) for percent in (low, high))
    assert less.planned <= most.planned and less.blocks <= most.blocks
    lighter = [replace(r, terms=tuple(replace(t, nbytes=t.nbytes - more) for t in r.terms)) for r in ranks]
    after = outcome(lighter, Request(utilization=low / 100))
    assert after.blocks >= less.blocks
    assert (after.tokens or 0) >= (less.tokens or 0)


@given(some_ranks, shares, any_rank())
def test_one_more_rank_never_gives_more_blocks(ranks: list[Rank], request: Request, another: Rank) -> None:
    assert outcome([*ranks, another], request).blocks <= outcome(ranks, request).blocks


@given(some_ranks, shares, st.integers(1, 200))
def test_what_the_plan_promises_fits(ranks: list[Rank], request: Request, length: int) -> None:
    found = outcome(ranks, request, max_model_len=length)
    if found.status == "ok":
        assert found.concurrent_requests == min(found.concurrent(length), found.concurrent_requests or 0)
        assert found.largest_request is None or found.largest_request >= length
        assert found.concurrent_requests >= 1


@pytest.mark.parametrize("names", [("x", "x"), ("rank 1", "")])
def test_two_ranks_of_one_name_are_refused(names: tuple[str, str]) -> None:
    ranks = [Rank(1 << 30, groups=(Group("full", 16),), name=name) for name in names]
    with pytest.raises(ValueError, match="two ranks have one name"):
        plan_ranks(ranks, Request(utilization=0.9))


def test_a_floor_that_holds_the_longest_request_does_not_advise_a_longer_one() -> None:
    rank = Rank(80 << 30, (Term("weights", 75 << 30),), (Group("full", 2 << 20, 16),))
    found = plan_ranks([rank], Request(utilization=0.9), max_model_len=4096, floor=300)
    assert found.status == "floored" and not any("max_model_len" in line for line in found.advice)


def test_what_is_no_request_is_told() -> None:
    with pytest.raises(TypeError, match=r"such as Request\(utilization=0\.9\); got 0\.9"):
        plan_ranks([Rank(80, groups=(Group("full", 1),))], 0.9)  # type: ignore[arg-type]


def test_tokens_of_windows_are_those_of_longest_requests() -> None:
    window = Group("window", 16, 16, kind="window", window=64)
    text = str(plan_ranks([Rank(1600, groups=(window,))], Request(utilization=1.0), max_model_len=640))
    assert "tokens, in requests of 640   12800\n" in text and "largest request              unbounded\n" in text
    assert "the whole device is asked for" in text


def test_a_shorter_request_is_no_way_out_where_the_least_count_binds() -> None:
    rank = Rank(800, groups=(Group("full", 16, 16),))
    with pytest.raises(RankBudgetError) as caught:
        plan_ranks([rank], Request(utilization=1.0), max_model_len=1000, min_blocks=60)
    assert "max_model_len" not in str(caught.value).partition("\n")[0].partition(";")[2]
