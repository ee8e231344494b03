"""How layers of pipeline stages share block ids."""

from __future__ import annotations

import pytest

from vmm_kv.kv_groups import Group
from vmm_kv.model_shape import KvGroup
from vmm_kv.rank_plan import RankedPlan, plan_ranks
from vmm_kv.rank_terms import Rank
from vmm_kv.request import Request
from vmm_kv.stage_groups import cut, group_size, padding_layers, stage_groups

LAYER = 1024
"""Bytes a token of one layer."""


def window(*layers: int) -> KvGroup:
    count = len(layers)
    return KvGroup("window 64", "window", layers, LAYER * count, layer_bytes=(LAYER,) * count, window=64)


def full(*layers: int) -> KvGroup:
    return KvGroup("full", "full", layers, LAYER * len(layers), layer_bytes=(LAYER,) * len(layers))


def state(*layers: int, nbytes: int = 100_000) -> KvGroup:
    return KvGroup("state", "state", layers, bytes_per_request=nbytes * len(layers))


def plan(stages: list[list[KvGroup]], memory: int = 1 << 30, length: int = 1600) -> RankedPlan:
    ranks = [Rank(memory, groups=own.groups) for own in stage_groups(stages, 16)]
    return plan_ranks(ranks, Request(utilization=1.0), max_model_len=length)


@pytest.mark.parametrize(
    ("counts", "size"),
    [
        ([17, 16], 17),
        ([12, 13], 13),
        ([16, 22], 22),
        ([16, 24], 16),
        ([22, 4], 4),
        ([18, 18], 18),
        ([], 1),
        ([48, 17], 17),
    ],
)
def test_group_size(counts: list[int], size: int) -> None:
    assert group_size(counts) == size


@pytest.mark.parametrize(
    ("layers", "size", "pad", "waste"),
    [(48, 17, 3, 0.0625), (17, 17, 0, 0.0), (48, 5, 2, 0.0417), (16, 5, 4, 0.25)],
)
def test_c64_padding(layers: int, size: int, pad: int, waste: float) -> None:
    """C64: 48 states and 17 attention layers by 17; 48 and 16 by 5."""
    counts = [len(part) for part in cut(range(layers), size)]
    assert padding_layers([*counts, size]) == pad
    assert pad / layers == pytest.approx(waste, abs=1e-4)


def test_windows_and_full_layers_share_a_pool_in_equal_groups_c64() -> None:
    (found,) = stage_groups([[window(*range(22)), full(*range(22, 26))]], 16, step_tokens=32)
    assert [(g.kind, g.window) for g in found.groups] == [("window", 96)] * 6 + [("full", None)]
    assert {g.bytes_per_block for g in found.groups} == {4 * LAYER * 16}
    assert found.padding_layers == 2  # 24 layers for 22
    assert len({g.name for g in found.groups}) == 7
    (alone,) = stage_groups([[window(*range(22))]], 16)
    assert [(g.bytes_per_block, g.window) for g in alone.groups] == [(22 * LAYER * 16, 64)]
    assert alone.padding_layers == 0


def test_every_stage_counts_the_same_blocks_and_holds_its_layers_of_each_group() -> None:
    """The example of vLLM's comment: full.0, sw.0, sw.1 on one stage and full.1, sw.2, sw.3 on the other."""
    found = stage_groups([[full(0), window(1, 2)], [full(3), window(4, 5)]], 16)
    for stage in found:
        assert [(g.name, g.bytes_per_block) for g in stage.groups] == [
            ("full", LAYER * 16), ("window 64, 1 of 2", LAYER * 16), ("window 64, 2 of 2", LAYER * 16)
        ]  # fmt: skip
        assert stage.padding_layers == 0
    ranked = plan([[full(0), window(1, 2)], [full(3), window(4, 5)]])
    assert ranked.blocks == (1 << 30) // (LAYER * 16)
    assert ranked.concurrent_requests == ranked.blocks // (100 + 2 * 5)


def test_a_stage_without_attention_does_not_count_in_requests() -> None:
    """Its ids have the bytes that its states need in as many of them as the other stage's take."""
    with_attention, without = [full(0), state(1, 2, 3)], [state(4, 5, 6, 7)]
    first, second = stage_groups([with_attention, without], 16)
    ids = -(-300_000 // (LAYER * 16))
    assert first.groups == (Group("full", LAYER * 16, 16), Group("state", kind="state", bytes_per_request=300_000))
    assert {g.bytes_per_block for g in second.groups if g.kind == "full"} == {-(-400_000 // ids)}
    ranked, alone = plan([with_attention, without]), plan([with_attention])
    assert ranked.blocks == (1 << 30) // -(-400_000 // ids) < alone.blocks
    assert ranked.concurrent_requests == ranked.blocks // (100 + ids)
    assert ranked.bound_rank == "rank 1" and ranked.tokens is not None and ranked.largest_request is not None
    assert plan([with_attention, without[::-1]]) == ranked


def test_a_stage_with_the_smaller_state_takes_as_many_ids() -> None:
    found = stage_groups([[full(0), state(1, 2, 3)], [full(4), state(5)], [full(6, 7)]], 16)
    needs = {
        sum(g.own_blocks(160) - (-g.bytes_per_request // max(h.bytes_per_block for h in s.groups)) for g in s.groups)
        for s in found
    }
    assert needs == {10 + -(-300_000 // (LAYER * 16))}


def test_states_alone_are_counted_in_requests() -> None:
    ranked = plan([[state(0, 1)], [state(2)]])
    assert ranked.blocks == ranked.concurrent_requests == (1 << 30) // 200_000
    assert ranked.tokens == 1600 * ranked.blocks and ranked.largest_request is None


def test_a_stage_that_caches_nothing_has_no_groups() -> None:
    assert [stage.groups for stage in stage_groups([[full(0)], []], 16)] == [(Group("full", LAYER * 16, 16),), ()]


def test_layers_of_one_kind_may_differ_in_size() -> None:
    """Windows of 1, 8, 1 and 8 KiB a token in two groups: those of 8 are in one."""
    sizes = (LAYER, 8 * LAYER, LAYER, 8 * LAYER)
    uneven = KvGroup("window 64", "window", (0, 1, 2, 3), sum(sizes), layer_bytes=sizes, window=64)
    (found,) = stage_groups([[uneven, full(4, 5)]], 16)
    assert {group.bytes_per_block for group in found.groups} == {16 * LAYER * 16}
    (alone,) = stage_groups([[uneven]], 16)
    assert [group.bytes_per_block for group in alone.groups] == [18 * LAYER * 16]


@pytest.mark.parametrize("stages", [[[full(0)], [state(1)]], [[state(0)], [full(1, 2)], [state(3, 4)]]])
def test_no_stage_needs_to_have_both(stages: list[list[KvGroup]]) -> None:
    ranked = plan(stages)
    ids = -(-max(g.bytes_per_request for groups in stages for g in groups) // max(
        g.bytes_per_token * 16 for groups in stages for g in groups))  # fmt: skip
    assert ranked.concurrent_requests == ranked.blocks // (100 + ids)
    assert all(rank.nbytes <= 1 << 30 for rank in ranked.ranks)
