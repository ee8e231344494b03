"""What groups of layers cost and hold: pools, windows, states, drafts. The arithmetic layout cases of `cases.md`."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmm_kv.kv_groups import Cache, Group, same_span

GIB = 1 << 30


def gib(size: float) -> int:
    return round(size * GIB)


# Arguments


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"bytes_per_block": -1}, "at least 0, got -1"),
        ({"bytes_per_block": 8, "block_size": 0}, "block_size must be at least 1"),
        ({"bytes_per_block": 8, "context_parallel": 0}, "context_parallel"),
        ({"bytes_per_block": 8, "requests": 0}, "requests must be at least 1, got 0"),
        ({"bytes_per_block": 8, "kind": "window", "window": 0}, "window must be at least 1, got 0"),
        ({"bytes_per_block": 8, "kind": "window"}, "a window is what"),
        ({"bytes_per_block": 8, "window": 5}, "a window is what"),
        ({"kind": "state"}, "bytes_per_request above 0"),
        ({"kind": "state", "bytes_per_request": 5, "bytes_per_block": 5}, "no bytes_per_block"),
        ({}, "bytes_per_block must be above 0"),
        ({"bytes_per_block": 9, "segments": 2}, "9 bytes a block do not split into 2"),
    ],
)
def test_group_that_contradicts_itself(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Group("kv", **wrong)


@pytest.mark.parametrize(
    ("groups", "options", "match"),
    [
        ((), {}, "at least one"),
        ((Group("kv", 8), Group("kv", 8)), {}, "one name"),
        ((Group("kv", 8),), {"granule": 0}, "granule"),
        ((Group("kv", 8),), {"max_model_len": 0}, "max_model_len"),
        ((Group("kv", 8), Group("full", 8, requests=3)), {}, "give max_model_len"),
        ((Group("ring", 8, kind="window", window=4, requests=3),), {}, "requests=None"),
    ],
)
def test_cache_that_contradicts_itself(groups: tuple[Group, ...], options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Cache(groups, **options)


def test_a_block_is_the_same_on_every_rank() -> None:
    same_span([Cache((Group("a", 8, 16),)), Cache((Group("b", 4, 8, context_parallel=2),))])
    with pytest.raises(ValueError, match=r"\[8, 16\]"):
        same_span([Cache((Group("a", 8, 16),)), Cache((Group("b", 8, 8),))])


# One pool


def test_one_full_group() -> None:
    cache = Cache((Group("kv", 10, 16),))
    assert (cache.cost(7), cache.blocks_within(79), cache.need(17)) == (70, 7, 2)
    assert (cache.tokens(7), cache.largest_request(7), int(cache.concurrency(7, 17))) == (112, 112, 3)
    assert (cache.tokens(0), cache.largest_request(0)) == (0, 0)


def test_granules_round_each_segment() -> None:
    """96 segments of 16 KiB a block on granules of 2 MiB: 128 blocks for 192 MiB, not one more (C65)."""
    split = Cache((Group("kv", 96 << 14, segments=96),), granule=2 << 20)
    assert (split.cost(0), split.cost(1), split.cost(128), split.cost(129)) == (0, 192 << 20, 192 << 20, 384 << 20)
    assert [split.blocks_within(mib << 20) for mib in (191, 192, 383, 384)] == [0, 128, 128, 256]
    assert Cache((Group("kv", 96 << 14),), granule=2 << 20).cost(1) == 2 << 20


def test_c55_states_take_their_blocks_and_no_more() -> None:
    """C55: of 8000 blocks states hold 400 from the start: 121600 tokens, not 32000."""
    page = 1000
    states = [
        Group(f"state {i}", kind="state", bytes_per_request=n * page, requests=100) for i, n in enumerate((1, 1, 2))
    ]
    cache = Cache((Group("attention", page, 16), *states), max_model_len=4096)
    blocks = cache.blocks_within(8000 * page)
    assert (cache.fixed_bytes, blocks, cache.tokens(blocks)) == (400 * page, 7600, 121600)
    assert cache.concurrency(blocks, 16) == 100, "no more requests than states"


def hybrid(layers: int, page_tokens: int) -> Cache:
    """One attention group and states of a block each, on the same block ids."""
    states = [Group(f"state {i}", kind="state", bytes_per_request=1 << 20) for i in range(layers - 1)]
    return Cache((Group("attention", 1 << 20, page_tokens), *states))


@pytest.mark.parametrize(("page_tokens", "blocks", "share"), [(7808, 70, 0.329), (3584, 90, 0.255)])
def test_c56_small_requests_hold_a_block_of_every_group(page_tokens: int, blocks: int, share: float) -> None:
    """C56: 23 groups: a prompt of 12 tokens holds 32.9 % or 25.5 % of the pool, so 3 fit and 4 do not."""
    cache = hybrid(23, page_tokens)
    assert cache.need(12) / blocks == pytest.approx(share, abs=0.001)
    assert int(cache.concurrency(blocks, 12)) == 3


@pytest.mark.parametrize(("pool", "held"), [(457880, 150642), (356667, 90950)])
def test_c56_as_tokens(pool: int, held: int) -> None:
    """C56: the same from the printed tokens."""
    cache = Cache((Group("kv", 1), Group("state", kind="state", bytes_per_request=held - 12)))
    assert int(cache.concurrency(pool, 12)) == 3


def test_c57_groups_of_different_block_sizes() -> None:
    """C57: blocks of 256, 64, 8 and 4 tokens: capacity is concurrency x length, of no one group's blocks."""
    windows = {64: 128, 8: 128, 4: 64}
    groups = [Group(f"w{n}", 1 << 20, n, kind="window", window=w) for n, w in windows.items()]
    cache = Cache((Group("full", 1 << 20, 256), *groups), max_model_len=262144)
    assert cache.need(262144) == 1024 + 3 + 17 + 17  # a window touches one block more than it fills
    tokens = cache.tokens(1223)
    assert tokens == 1223 * 262144 // 1061
    assert tokens is not None and tokens / 262144 == pytest.approx(float(cache.concurrency(1223, 262144)), abs=1e-4)


@pytest.mark.parametrize(("tokens", "ratio"), [(302945, 1.1556), (123433, 0.47086)])
def test_c57_two_figures_of_one_pool(tokens: int, ratio: float) -> None:
    """C57: 302945 / 262144 and 0.47086 x 262144: each is a concurrency at the same maximum length."""
    cache = Cache((Group("kv", 1),), max_model_len=262144)
    assert float(cache.concurrency(tokens, 262144)) == pytest.approx(ratio, abs=1e-4)


def test_c58_fixed_bytes_and_bytes_a_token() -> None:
    """C58: 3.2e9 B a request and 3300 B a token: what 24.5 GiB hold depends on the maximum length."""
    groups = (Group("kv", 3300, bytes_per_request=3_200_000_000),)
    assert (groups[0].request_bytes(50_000), groups[0].request_bytes(500_000)) == (3_365_000_000, 4_850_000_000)
    cache = Cache(groups, max_model_len=50_000)
    blocks = cache.blocks_within(gib(24.5))
    assert cache.tokens(blocks) == pytest.approx(390886, rel=1e-4)
    assert Cache(groups, max_model_len=500_000).tokens(blocks) == pytest.approx(2_712_064, rel=1e-4)


def test_c60_bytes_a_token_do_not_change_with_the_length() -> None:
    """C60: fp8 of 49152 B a token. What changed between the two starts is the memory, not the dtype."""
    cache = Cache((Group("kv", 49152),))
    assert cache.cost(221008) / GIB == pytest.approx(10.117, abs=0.001)
    assert cache.tokens(cache.blocks_within(gib(10.55))) == pytest.approx(230528, rel=1e-3)
    assert cache.tokens(cache.blocks_within(gib(5.59))) == pytest.approx(122115, rel=1e-3)
    bf16 = Cache((Group("kv", 98304),))
    assert bf16.blocks_within(gib(10.55)) == cache.blocks_within(gib(10.55)) // 2


def test_c61_key_bytes_and_key_and_value_bytes() -> None:
    """C61: 24064 B of keys a token are 8.234 GiB for 367404 tokens, both 16.47; 178880 tokens are 8.018 GiB."""
    keys, both = Cache((Group("k", 24064),)), Cache((Group("kv", 48128),))
    assert keys.cost(367404) / GIB == pytest.approx(8.234, abs=0.001)
    assert both.cost(367404) / GIB == pytest.approx(16.47, abs=0.01)
    assert both.cost(178880) / GIB == pytest.approx(8.018, abs=0.001)


def test_c54_tokens_of_a_whole_model() -> None:
    """C54: 73728 B a token with its sliding layers: 5.3822 GiB are 4899 blocks of 16, 78384 tokens."""
    cache = Cache((Group("kv", 73728 * 16, 16),))
    blocks = cache.blocks_within(gib(5.38221))
    assert (blocks, cache.tokens(blocks)) == (4899, 78384)
    assert Cache((Group("kv", 983040),)).cost(26800) == 26345472000


def test_c59_latent_attention() -> None:
    """C59: 43 layers of a packed slot of 584 B: 24.52 GiB at 1048576 tokens, where full heads would be 86."""
    assert Cache((Group("mla", 43 * 584),)).cost(1048576) / GIB == pytest.approx(24.52, abs=0.01)
    assert Cache((Group("generic", 88064),)).cost(1048576) == 86 * GIB


# Windows


def test_window_in_a_pool_stops_growing() -> None:
    cache = Cache((Group("full", 10, 16), Group("window", 10, 16, kind="window", window=64)), max_model_len=1600)
    assert [cache.need(t) for t in (1, 16, 64, 65, 1600)] == [2, 2, 8, 10, 105]
    assert cache.tokens(210) == 3200
    assert cache.largest_request(210) == (210 - 5) * 16


@given(st.integers(1, 80), st.integers(1, 20), st.integers(1, 200))
def test_a_window_touches_no_more_blocks_than_any_place_of_it(window: int, block_size: int, tokens: int) -> None:
    """By hand: the blocks of the last `window` tokens, at every length up to `tokens`."""
    touched = {end: {i // block_size for i in range(max(0, end - window), end)} for end in range(1, tokens + 1)}
    group = Group("window", 1, block_size, kind="window", window=window)
    assert group.own_blocks(tokens) >= max(len(blocks) for blocks in touched.values())
    if tokens >= window + block_size:
        assert group.own_blocks(tokens) == max(len(blocks) for blocks in touched.values()) == group.own_blocks(None)


@pytest.mark.parametrize(("max_model_len", "size"), [(1024, 31.27), (128, 3.91), (5000, 31.27)])
def test_c63_ring_is_no_longer_than_any_request(max_model_len: int, size: float) -> None:
    """C63: a ring of 1024 tokens for 32 users is 31.27 GiB; with requests of 128 tokens 3.91."""
    ring = Group("ring", gib(31.27) // (32 * 1024), kind="window", window=1024, requests=32)
    cache = Cache((Group("full", 1000), ring), max_model_len=max_model_len)
    assert cache.fixed_bytes / GIB == pytest.approx(size, abs=0.05)
    assert cache.largest_request(5000) == (128 if max_model_len == 128 else 5000)


def test_windows_and_states_alone_bound_no_request() -> None:
    window = Cache((Group("window", 10, 16, kind="window", window=64),), max_model_len=640)
    assert (window.largest_request(5), window.tokens(5), window.largest_request(3)) == (None, 640, 48)
    assert window.largest_request(4) == 64  # the 65th token may begin a fifth block
    assert Cache((Group("window", 10, 16, kind="window", window=60),)).largest_request(4) == 64  # as far as they reach
    states = Cache((Group("state", kind="state", bytes_per_request=100),))
    assert (states.cost(5), states.need(10**6), int(states.concurrency(5, 10**6))) == (500, 1, 5)
    assert (states.tokens(5), states.tokens(0)) == (None, 0)


# Several pools


def test_c62_draft_shares_the_token_count() -> None:
    """C62: 98304 + 8192 B a token in 24 GiB: 241968 tokens in both pools."""
    groups = (Group("target", 98304 * 16, 16), Group("draft", 8192 * 16, 16, pool="draft"))
    cache = Cache(groups)
    blocks = cache.blocks_within(24 * GIB)
    assert (cache.tokens(blocks), cache.cost(blocks) <= 24 * GIB) == (241968, True)


def test_draft_with_blocks_of_its_own_size() -> None:
    cache = Cache((Group("target", 100, 16), Group("draft", 60, 32, pool="draft")))
    assert [cache.cost(n) for n in (1, 2, 3)] == [160, 260, 420]
    assert (cache.need(33), cache.tokens(3), cache.largest_request(3)) == (3, 48, 48)


def test_context_parallel_block_stands_for_more_tokens() -> None:
    cache = Cache((Group("kv", 10, 16, context_parallel=8),))
    assert (cache.span, cache.need(129), cache.tokens(3), cache.context_parallel) == (128, 2, 384, 8)


# Properties


@st.composite
def any_cache(draw: st.DrawFn) -> Cache:
    size = st.integers(1, 40)
    groups = [
        Group(
            "full",
            draw(size) * 4,
            draw(size),
            context_parallel=draw(st.integers(1, 3)),
            segments=draw(st.sampled_from([1, 2, 4])),
        )
    ]
    if draw(st.booleans()):
        groups.append(Group("window", draw(size), draw(size), kind="window", window=draw(size)))
    if draw(st.booleans()):
        groups.append(Group("state", kind="state", bytes_per_request=draw(size)))
    if draw(st.booleans()):
        groups.append(Group("draft", draw(size), draw(size), pool="draft"))
    if draw(st.booleans()):
        groups.append(Group("ring", draw(size), draw(size), kind="window", window=draw(size), requests=draw(size)))
    order = draw(st.permutations(groups))
    return Cache(tuple(order), draw(st.integers(1, 50)), draw(st.integers(1, 500)))


@given(any_cache(), st.integers(-100, 4000))
def test_blocks_within_is_the_brute_force(cache: Cache, budget: int) -> None:
    brute = max((n for n in range(1, 4001) if cache.cost(n) <= budget), default=0)
    assert cache.blocks_within(budget) == brute


@given(any_cache(), st.integers(0, 200))
def test_cost_never_falls_and_covers_every_block(cache: Cache, blocks: int) -> None:
    assert cache.cost(blocks) <= cache.cost(blocks + 1)
    assert cache.cost(blocks) >= cache.fixed_bytes + blocks * cache.pools[0].block_bytes


def holds(cache: Cache, blocks: int, tokens: int) -> bool:
    return all(pool.need(tokens) <= cache.pool_blocks(pool, blocks) for pool in cache.pools)


@given(any_cache(), st.integers(1, 500))
def test_need_is_the_least_count_that_holds_the_request(cache: Cache, tokens: int) -> None:
    need = cache.need(tokens)
    assert holds(cache, need, tokens)
    assert not holds(cache, need - 1, tokens)


@given(any_cache(), st.integers(0, 60))
def test_largest_request_is_the_brute_force(cache: Cache, blocks: int) -> None:
    largest = cache.largest_request(blocks)
    assert largest is not None, "one group grows"
    reach = min([cache.max_model_len or 0, *([] if not cache._reserved_lengths() else cache._reserved_lengths())])
    if largest:
        assert holds(cache, blocks, largest)
    assert not holds(cache, blocks, largest + 1) or (cache._reserved_lengths() and largest == reach)


def test_a_ring_held_for_short_requests_does_not_bound_the_tokens_of_all() -> None:
    groups = (Group("full", 4), Group("ring", 1, kind="window", window=2, requests=2))
    cache = Cache(groups, max_model_len=1)
    assert (cache.largest_request(2), cache.concurrency(2, 1), cache.tokens(2)) == (1, Fraction(2), 2)


@given(any_cache(), st.integers(1, 60))
def test_whole_requests_really_fit(cache: Cache, blocks: int) -> None:
    length = cache.max_model_len or 1
    count = int(cache.concurrency(blocks, length))
    for pool in cache.pools:
        assert count * pool.need(length) <= cache.pool_blocks(pool, blocks)
    tokens = cache.tokens(blocks)
    assert tokens is not None and tokens >= count * length
