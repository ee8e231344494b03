"""The arithmetic of sizing, on plain ints."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmm_kv import budget
from vmm_kv.budget import BudgetError, Plan, Terms, capacity_bound, plan, readable, requested_bytes, transient
from vmm_kv.request import Request

GIB = 1 << 30
BLOCK = 10


def terms(**changed: Any) -> Terms:
    """1000 bytes, of which 900 were free; the process then took 200 in its allocator and 50 outside."""
    given_: dict[str, Any] = {"total": 1000, "free_0": 900, "free": 650, "reserved": 200, "kv": 0}
    return Terms(**(given_ | {"others": (("R0", 0), ("R1", 50))} | changed))


def size(given_: Terms, request: Request, *, capacity: int = 10**6, min_blocks: int = 1, block: int = BLOCK) -> Plan:
    return plan(
        given_,
        request,
        capacity=capacity,
        cost=lambda n: n * block,
        blocks_within=lambda room: room // block,
        min_blocks=min_blocks,
    )


# Words and numbers


@pytest.mark.parametrize(
    ("size_", "text"),
    [
        (0, "0 B"),
        (-1023, "-1023 B"),
        (1024, "1.00 KiB"),
        (1 << 30, "1.00 GiB"),
        (2542796800, "2.37 GiB"),
        (-2542796800, "-2.37 GiB"),
        ((1 << 30) - 1, "1.00 GiB"),
        (150 << 20, "150.00 MiB"),
        (5 << 50, "5120.00 TiB"),
    ],
)
def test_readable(size_: int, text: str) -> None:
    """C11 among them: 248320 x 5120 x 2 bytes are 2.37 GiB, not the 2.54 of decimal units."""
    assert readable(size_) == text


@pytest.mark.parametrize(
    ("total", "utilization", "requested"), [(10, 0.1, 1), (10, 0.7, 7), (1000, 0.9, 900), (3, 0.5, 2), (7, 1.0, 7)]
)
def test_requested_is_exact(total: int, utilization: float, requested: int) -> None:
    assert requested_bytes(total, utilization) == requested


@given(st.integers(1, 1000), st.integers(1, 10**9))
def test_requested_has_no_float_fuzz(thousandths: int, thousand: int) -> None:
    assert requested_bytes(1000 * thousand, thousandths / 1000) == thousandths * thousand


def test_transient_is_never_negative() -> None:
    assert (transient(300, 200), transient(100, 200)) == (100, 0)


# Wrong arguments


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"utilization": 0.9, "blocks": 1},
        {"utilization": 0.0},
        {"utilization": 1.01},
        {"utilization": float("nan")},
        {"kv_bytes": 0},
        {"blocks": -1},
    ],
)
def test_request_is_exactly_one_valid_thing(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"exactly one|must be above 0"):
        Request(**wrong)


@pytest.mark.parametrize("wrong", [{"kv_bytes": "1GiB"}, {"blocks": 2.5}, {"utilization": "most"}])
def test_a_request_of_the_wrong_kind_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(TypeError, match=f"{name} must be a"):
        Request(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"reserved": -1}, {"context": -1}, {"headroom": (("safety", -1),)}, {"in_place": 1}, {"backed": -1}],
)
def test_terms_that_contradict_themselves(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"-1|only 0 bytes"):
        terms(**wrong)


# The formula


def test_share_binds() -> None:
    found = size(terms(headroom=(("transient", 30), ("safety", 20))), Request(utilization=0.8))
    assert (found.requested, found.own, found.share, found.room) == (800, 250, 500, 600)
    assert (found.kv_bytes, found.blocks, found.cost, found.leftover, found.next_step) == (500, 50, 500, 0, BLOCK)
    assert (found.status, found.bound_by, found.planned) == ("ok", "request", 50)


def test_free_memory_binds() -> None:
    found = size(terms(free=104), Request(utilization=0.8))
    assert (found.share, found.room, found.kv_bytes, found.blocks, found.leftover) == (550, 104, 104, 10, 4)
    assert (found.bound_by, found.planned) == ("free memory", 55)


def test_capacity_binds() -> None:
    found = size(terms(), Request(utilization=0.8), capacity=20)
    assert (found.bound_by, found.blocks, found.planned, found.next_step) == ("capacity", 20, 20, None)
    assert found.leftover == 350


def test_capacity_that_the_request_fills_does_not_bind() -> None:
    assert size(terms(), Request(kv_bytes=205), capacity=20).bound_by == "explicit bytes"
    assert size(terms(), Request(kv_bytes=210), capacity=20).bound_by == "capacity"


def test_prefix_counts_as_room_and_is_not_paid_twice() -> None:
    """A prefix of 100 bytes is mapped: what is free is less by it, the result is the same."""
    without = size(terms(free=104), Request(utilization=0.8))
    within = size(terms(free=4, kv=100, in_place=100, backed=10), Request(utilization=0.8))
    assert (within.blocks, within.room) == (without.blocks, without.room)


def test_context_is_charged_where_known() -> None:
    found = size(terms(context=100), Request(utilization=0.8))
    assert found.own == 350
    assert "context not charged: not known" not in found.notes
    assert "context not charged: not known" in size(terms(), Request(utilization=0.8)).notes


def test_per_process_figure_replaces_device_wide_growth() -> None:
    found = size(terms(process_used=330, kv=100), Request(utilization=0.8))
    assert found.own == 230
    assert found.own_parts == (("allocator", 200), ("outside the allocator", 30))


def test_per_process_figure_below_the_allocators_is_noted() -> None:
    found = size(terms(process_used=150), Request(utilization=0.8))
    assert found.own == 200
    assert any("these are charged" in note for note in found.notes)


# Explicit requests


def test_explicit_bytes_are_an_upper_bound_with_nothing_taken_off() -> None:
    """C07."""
    found = size(terms(headroom=(("safety", 100),)), Request(kv_bytes=333))
    assert (found.share, found.blocks, found.cost, found.bound_by) == (333, 33, 330, "explicit bytes")


def test_explicit_blocks_replace_the_utilization() -> None:
    """C06 a."""
    found = size(terms(free=100, free_0=100), Request(blocks=7))
    assert (found.blocks, found.cost, found.bound_by) == (7, 70, "explicit blocks")


@pytest.mark.parametrize("request_", [Request(kv_bytes=700), Request(blocks=70)])
def test_explicit_request_beyond_room_is_refused_with_both_figures(request_: Request) -> None:
    """C06: never cut down in silence."""
    with pytest.raises(BudgetError, match=r"needs 700 B \(700 bytes\), room is for 650 B \(650 bytes\)") as caught:
        size(terms(), request_)
    assert caught.value.plan is not None
    assert caught.value.plan.status == "refused"


def test_explicit_blocks_beyond_capacity() -> None:
    """Invariant 10: both numbers."""
    with pytest.raises(ValueError, match=r"70 blocks.*for 60"):
        size(terms(), Request(blocks=70), capacity=60)


def test_explicit_blocks_below_one_request() -> None:
    """C06 b: one block cannot hold a request of 128."""
    with pytest.raises(BudgetError, match="ask for at least 128 blocks"):
        size(terms(free=2000, total=3000, free_0=2500), Request(blocks=1), min_blocks=128)


# Too little, too much


def test_too_small_says_where_the_memory_went_and_what_to_change() -> None:
    with pytest.raises(BudgetError) as caught:
        size(terms(headroom=(("encoder", 100),)), Request(utilization=0.4), min_blocks=8)
    text = str(caught.value)
    assert "comes to 5 blocks, one longest request needs 8: short by 30 B (30 bytes)" in text
    assert "raise utilization to 0.4300" in text
    found = caught.value.plan
    assert found is not None
    assert found.status == "too_small"
    for name, size_ in found.itemised():
        assert name in text
        assert f"({size_} bytes)" in text
    assert size(terms(headroom=(("encoder", 100),)), Request(utilization=0.43), min_blocks=8).blocks == 8


def test_negative_share_is_shown() -> None:
    with pytest.raises(BudgetError, match=r"share +-150 B \(-150 bytes\)") as caught:
        size(terms(), Request(utilization=0.1))
    assert caught.value.plan is not None
    assert (caught.value.plan.share, caught.value.plan.blocks) == (-150, 0)


def test_too_small_for_want_of_free_memory() -> None:
    with pytest.raises(BudgetError, match=r"free 70 B \(70 bytes\) on the device") as caught:
        size(terms(free=30), Request(utilization=0.8), min_blocks=10)
    assert "raise utilization" not in str(caught.value)


def test_too_small_for_want_of_addresses() -> None:
    with pytest.raises(BudgetError, match="there are addresses for 5: reserve more"):
        size(terms(), Request(utilization=0.8), capacity=5, min_blocks=10)


def test_no_utilization_suffices() -> None:
    with pytest.raises(BudgetError, match="no utilization suffices"):
        size(terms(), Request(utilization=1.0), min_blocks=90)


def test_over_budget_grows_nothing_and_shrinks_nothing() -> None:
    given_ = terms(free=50, kv=600, in_place=600, backed=60, graph_pool=15)
    found = size(given_, Request(utilization=0.8))
    assert (found.status, found.blocks, found.kv_bytes, found.excess) == ("over_budget", 60, 550, 50)
    assert found.excess_items == (("graph pool", 15), ("unexplained", 35))
    assert found.itemised()[-3:] == (("excess", 50), ("  graph pool", 15), ("  unexplained", 35))
    assert "shrink the cache" in found.advice[0]


@pytest.mark.parametrize("request_", [Request(kv_bytes=50), Request(blocks=5)])
def test_explicit_request_below_what_is_backed_is_no_shrink(request_: Request) -> None:
    found = size(terms(free=550, kv=100, in_place=100, backed=10), request_)
    assert (found.status, found.blocks, found.excess) == ("over_budget", 10, 50)


# Advice


def advice_case(free: float) -> Plan:
    total, graphs = round(23.68 * GIB), round(0.36 * GIB)
    given_ = Terms(
        total=total,
        free_0=round(free * GIB),
        free=round((free - 2.36) * GIB),
        reserved=round(2.36 * GIB),
        kv=0,
        footprint=graphs,
        graph_pool=graphs,
    )
    return size(given_, Request(utilization=0.82), capacity=10**6, block=1 << 20)


def test_c15_utilization_binds() -> None:
    """C15: of 23.68 GiB captures keep 0.36: utilization 0.8352 instead of 0.82 keeps the KV size."""
    found = advice_case(free=23.0)
    assert found.bound_by == "request"
    assert found.advised_utilization == 0.8352


def test_c15_free_memory_binds() -> None:
    """C15: with 15 GiB free no utilization helps, and none is advised."""
    found = advice_case(free=15.0)
    assert found.bound_by == "free memory"
    assert found.advised_utilization is None
    assert not any("utilization" in text for text in found.advice)


def test_c15_no_advice_that_memory_cannot_follow() -> None:
    """C15: utilization binds now, but free memory would before captures are made up for."""
    found = advice_case(free=19.6)
    assert found.bound_by == "request"
    assert found.advised_utilization is None
    assert "above 0.8277 free memory would" in found.advice[0]


def test_no_utilization_above_one_is_spoken_of() -> None:
    found = advice_case(free=24.0)
    assert found.bound_by == "request"
    assert found.advice[0] == "utilization binds: a higher one gives more blocks"


# The bound for the reservation


def test_capacity_bound() -> None:
    assert capacity_bound(Request(utilization=0.8), total=1000, free=700, own=200) == 600
    assert capacity_bound(Request(utilization=0.8), total=1000, free=500, own=200) == 500
    assert capacity_bound(Request(kv_bytes=333), total=1000, free=100, own=200) == 333
    with pytest.raises(BudgetError, match=r"requested 800 B.*holds 900 B"):
        capacity_bound(Request(utilization=0.8), total=1000, free=100, own=900)
    with pytest.raises(ValueError, match="5 blocks"):
        capacity_bound(Request(blocks=5), total=1000, free=100, own=0)


# Properties

sizes = st.integers(0, 10**5)
signed = st.integers(-(10**5), 10**5)


@st.composite
def any_terms(draw: st.DrawFn) -> Terms:
    """Anything that readings can give, a neighbour's coming and going included."""
    backed = draw(st.integers(0, 50))
    return Terms(
        total=10**5,
        free_0=draw(sizes),
        free=draw(sizes),
        reserved=draw(sizes) // 4,
        kv=backed * BLOCK,
        others=tuple((f"t{i}", value) for i, value in enumerate(draw(st.lists(signed, max_size=4)))),
        context=draw(st.none() | st.integers(0, 1000)),
        process_used=draw(st.none() | sizes),
        headroom=tuple(draw(st.dictionaries(st.sampled_from(["transient", "safety"]), st.integers(0, 9999))).items()),
        in_place=backed * BLOCK,
        backed=backed,
        footprint=draw(st.none() | signed),
    )


shares = st.integers(1, 100).map(lambda percent: Request(utilization=percent / 100))
any_request = (
    shares | st.builds(Request, kv_bytes=st.integers(1, 10**5)) | st.builds(Request, blocks=st.integers(1, 99))
)


def outcome(given_: Terms, request: Request) -> Plan:
    """The plan, from the error where it is one."""
    try:
        return size(given_, request)
    except BudgetError as error:
        assert error.plan is not None
        return error.plan


@given(any_terms(), any_request)
def test_same_inputs_same_json(given_: Terms, request: Request) -> None:
    first, second = (json.dumps(outcome(replace(given_), request).to_dict()) for _ in range(2))
    assert first == second


@given(any_terms(), any_request)
def test_the_plan_adds_up(given_: Terms, request: Request) -> None:
    found = outcome(given_, request)
    assert found.kv_bytes == min(found.share, found.room)
    assert found.own == sum(size_ for _, size_ in found.own_parts)
    assert found.excess == sum(size_ for _, size_ in found.excess_items)
    assert found.leftover == found.kv_bytes - found.cost
    assert found.blocks >= given_.backed, "nothing is given back here"
    if found.status == "ok":
        assert found.cost <= found.room
        assert found.blocks <= found.planned
        assert request.utilization is not None or found.cost <= found.requested


@given(any_terms(), shares)
def test_use_stays_within_the_request(given_: Terms, request: Request) -> None:
    found = outcome(given_, request)
    if found.status == "ok":
        headroom = sum(size_ for _, size_ in given_.headroom)
        assert found.own + headroom + found.cost <= found.requested
        one_more = found.cost + BLOCK
        assert found.bound_by == "capacity" or one_more > found.kv_bytes, "no whole block is wasted"


@given(any_terms(), shares, sizes)
def test_more_free_memory_never_lifts_kv_above_the_share(given_: Terms, request: Request, more: int) -> None:
    before, after = outcome(given_, request), outcome(replace(given_, free=given_.free + more), request)
    assert after.share == before.share
    assert before.kv_bytes <= after.kv_bytes <= after.share


@given(any_terms(), shares, signed)
def test_a_later_reading_never_lowers_what_is_charged(given_: Terms, request: Request, seen: int) -> None:
    """A neighbour that frees memory makes the reading negative; what was seen before stays charged."""
    later = replace(given_, others=(*given_.others, ("later", seen)))
    assert outcome(later, request).own >= outcome(given_, request).own
    assert outcome(later, request).terms.others[-1] == ("later", seen), "raw and signed, invariant 13"


def test_budget_imports_the_standard_library_alone() -> None:
    """Invariant 14: planning needs no framework, no driver and no layout."""
    tree = ast.parse(Path(budget.__file__).read_text(encoding="utf-8"))
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    outside = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    assert outside == {"vmm_kv.errors", "vmm_kv.request"}
