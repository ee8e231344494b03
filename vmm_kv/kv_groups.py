"""Groups of layers that share a KV cache: what n blocks of them cost, and what requests they hold. Pure.

Groups of one `pool` draw on the same block ids, one group an id at a time (vLLM's hybrid pool, `Layout.overlay`): their
blocks lie on the same bytes, and what a request takes adds up over the groups. Pools lie side by side and hold the same
tokens, as a draft model's beside its target's. A group held for a fixed number of requests from the start (`requests`)
has memory of its own, which costs the same whatever the block count.

A group that does not grow with a request's length takes nothing from the tokens but its fixed share (`cases.md` C55);
what a request costs has two parts, fixed bytes and bytes a token (C58).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal, get_args

from vmm_kv.sizes import whole

GroupKind = Literal["full", "window", "state"]
_LEAST = {
    "bytes_per_block": 0, "bytes_per_request": 0, "block_size": 1, "context_parallel": 1, "segments": 1, "window": 1,
    "requests": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Layers whose KV cache is handed out together, as one rank holds them. `ValueError` where it contradicts itself.

    `"full"` grows with the request, `"window"` up to `window` tokens, `"state"` not at all.
    """

    name: str
    bytes_per_block: int = 0
    """All its layers' bytes of one block on this rank. 0 for a state."""
    block_size: int = 1
    """Tokens in one block on this rank."""
    kind: GroupKind = "full"
    window: int | None = None
    """Tokens that a request keeps at most, those in flight included. In a pool they touch one block more than they fill
    where they do not begin with a block; what is held from the start is a ring, and does not."""
    bytes_per_request: int = 0
    """What each request takes whatever its length: a state, or what comes on top. In a pool, whole blocks of it."""
    requests: int | None = None
    """Held for this many requests from the start, in memory of its own. None: the pool's blocks, as they are needed."""
    context_parallel: int = 1
    """Ranks over which the tokens of one request are spread: a block then stands for as many times its tokens."""
    pool: str = "kv"
    segments: int = 1
    """Equal runs of memory that it lies in, each rounded up to granules: 1 if packed, 2 a layer if K and V are not."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GroupKind):
            raise ValueError(f"group {self.name!r}: {self.kind!r} is no kind: {', '.join(get_args(GroupKind))}")
        for name, least in _LEAST.items():
            if (given := getattr(self, name)) is None:
                continue
            object.__setattr__(self, name, number := whole(f"group {self.name!r}: {name}", given))
            if number < least:
                raise ValueError(f"group {self.name!r}: {name} must be at least {least}, got {number}")
        if (self.kind == "window") != (self.window is not None):
            raise ValueError(f"group {self.name!r}: a window is what kind='window' has, got {self.kind}, {self.window}")
        if self.kind == "state" and (self.bytes_per_block or not self.bytes_per_request):
            raise ValueError(f"group {self.name!r}: a state has bytes_per_request above 0, and no bytes_per_block")
        if self.kind != "state" and not self.bytes_per_block:
            raise ValueError(f"group {self.name!r}: bytes_per_block must be above 0")
        if self.bytes_per_block % self.segments:
            raise ValueError(
                f"group {self.name!r}: {self.bytes_per_block} bytes a block do not split into {self.segments} segments"
            )

    @property
    def span(self) -> int:
        """Tokens of a request that one block stands for."""
        return self.block_size * self.context_parallel

    def own_blocks(self, tokens: int | None) -> int:
        """Blocks for the tokens of one request, its fixed bytes not counted. None: of any length."""
        if self.kind == "state":
            return 0
        if self.window is None and tokens is None:
            raise ValueError(f"group {self.name!r} grows with the request: give max_model_len")
        all_blocks = None if tokens is None else -(-tokens // self.span)
        counts = [count for count in (self._window_blocks, all_blocks) if count is not None]
        return min(counts)

    @property
    def _window_blocks(self) -> int | None:
        """Blocks that a window touches at most."""
        if self.window is None:
            return None
        if self.requests is not None:
            return -(-self.window // self.span)
        return 1 - (-(self.window - 1) // self.span)

    def request_bytes(self, tokens: int | None) -> int:
        """Bytes of one request of that many tokens."""
        return self.own_blocks(tokens) * self.bytes_per_block + self.bytes_per_request


@dataclass(frozen=True)
class Pool:
    """Groups that draw on the same block ids."""

    groups: tuple[Group, ...]

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block: the largest group's. A pool of states alone has the largest state as its block."""
        return max(g.bytes_per_block for g in self.groups) or max(g.bytes_per_request for g in self.groups)

    @cached_property
    def segments(self) -> int:
        """Those of the group whose blocks are the largest."""
        return max(self.groups, key=lambda g: (g.bytes_per_block, g.segments)).segments

    @cached_property
    def span(self) -> int | None:
        """Tokens that a block stands for; None if no group has any."""
        return next((g.span for g in self.groups if g.kind != "state"), None)

    def need(self, tokens: int | None) -> int:
        """Blocks that a request of that many tokens takes, of any length for None."""
        return sum(g.own_blocks(tokens) - (-g.bytes_per_request // self.block_bytes) for g in self.groups)


@dataclass(frozen=True)
class Cache:
    """All groups of one rank: cost and capacity as functions of the block count.

    A block is one of the first pool; the other pools have as many as the same tokens need. Bytes are what is mapped,
    each segment rounded up to `granule` bytes; 1 is without rounding.
    """

    groups: tuple[Group, ...]
    granule: int = 1
    max_model_len: int | None = None
    """Tokens of the longest request; what is held for requests from the start is held for this length."""

    def __post_init__(self) -> None:
        names = [g.name for g in self.groups]
        if len(set(names)) != len(names):
            raise ValueError(f"two groups of one rank have one name: {', '.join(names)}")
        if not self.pools:
            raise ValueError("no group draws on a pool: at least one needs requests=None")
        if self.granule < 1:
            raise ValueError(f"granule must be at least 1 byte, got {self.granule}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ValueError(f"max_model_len must be at least 1 token, got {self.max_model_len}")
        _ = self.fixed_bytes  # asks for max_model_len where it is needed

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """In the order in which the groups name them."""
        drawing = [g for g in self.groups if g.requests is None]
        names = dict.fromkeys(g.pool for g in drawing)
        return tuple(Pool(tuple(g for g in drawing if g.pool == name)) for name in names)

    @cached_property
    def fixed_bytes(self) -> int:
        """Bytes held for requests from the start, whatever the block count."""
        held = [(g, g.requests * g.request_bytes(self.max_model_len)) for g in self.groups if g.requests is not None]
        return sum(_rounded(nbytes, g.segments, self.granule) for g, nbytes in held)

    @property
    def span(self) -> int | None:
        """Tokens that one block stands for; None for states alone."""
        return self.pools[0].span

    @property
    def context_parallel(self) -> int:
        """Of the first group that grows, 1 if none does."""
        return next((g.context_parallel for pool in self.pools for g in pool.groups if g.kind == "full"), 1)

    def pool_blocks(self, pool: Pool, blocks: int) -> int:
        """Blocks of `pool` beside `blocks` of the first: those of the same tokens."""
        if pool.span is None or self.span is None:
            return blocks
        return -(-blocks * self.span // pool.span)

    def cost(self, blocks: int) -> int:
        """Bytes mapped for that many blocks. Never falls as blocks are added."""
        pools = ((pool, self.pool_blocks(pool, blocks) * pool.block_bytes) for pool in self.pools)
        return self.fixed_bytes + sum(_rounded(nbytes, pool.segments, self.granule) for pool, nbytes in pools)

    def blocks_within(self, budget: int) -> int:
        """The most blocks that cost at most `budget` bytes; 0 if there are none. Exact, by bisection."""
        ceiling = max(0, budget) // self.pools[0].block_bytes
        return bisect_right(range(1, ceiling + 1), budget, key=self.cost)

    def need(self, tokens: int) -> int:
        """Blocks without which no request of that many tokens can be held."""
        return max(self._blocks_for(pool, pool.need(tokens)) for pool in self.pools)

    def _blocks_for(self, pool: Pool, need: int) -> int:
        """The least count beside which `pool` has `need` blocks."""
        if pool.span is None or self.span is None:
            return need
        return (need - 1) * pool.span // self.span + 1

    def largest_request(self, blocks: int) -> int | None:
        """Tokens of the longest request that all the blocks together hold; None if nothing bounds its length."""
        return self._longest(blocks, self._reserved_lengths())

    def _longest(self, blocks: int, reach: list[int]) -> int | None:
        counts = [(pool, self.pool_blocks(pool, blocks)) for pool in self.pools]
        full = [count * g.span for pool, count in counts for g in pool.groups if g.kind == "full"]
        full += reach
        if not full and all(pool.need(None) <= count for pool, count in counts):
            return None
        # Without a group that grows nothing changes any more above the longest window.
        ceiling = min(full) if full else max((g.window or 0) + g.span for g in self.groups)
        return bisect_right(range(1, ceiling + 1), 0, key=lambda t: any(pool.need(t) > count for pool, count in counts))

    def _reserved_lengths(self) -> list[int]:
        """Tokens beyond which what is held from the start does not reach."""
        length = self.max_model_len
        held = [g for g in self.groups if g.requests is not None and g.kind != "state"]
        return [length for g in held if length is not None and (g.window is None or length < g.window)]

    def concurrency(self, blocks: int, tokens: int) -> Fraction:
        """How many requests of that many tokens all the blocks hold together, in fractions; `requests` bound it too."""
        ratios = [Fraction(self.pool_blocks(pool, blocks), pool.need(tokens)) for pool in self.pools]
        return min([*ratios, *(Fraction(g.requests) for g in self.groups if g.requests is not None)])

    def tokens(self, blocks: int) -> int | None:
        """Tokens that the blocks hold.

        Where no request has a fixed cost, that is what one request could hold, were it not for what is held from the
        start for shorter ones. Else it depends on the length: counted for requests of `max_model_len`, in fractions of
        them; without that, what one could hold. None: no bound.
        """
        drawing = [g for pool in self.pools for g in pool.groups]
        if self.max_model_len is None or all(g.kind == "full" and not g.bytes_per_request for g in drawing):
            return self._longest(blocks, [])
        length = self.max_model_len
        return min(self.pool_blocks(pool, blocks) * length // pool.need(length) for pool in self.pools)


def same_span(caches: Sequence[Cache]) -> None:
    """`ValueError` unless a block stands for the same tokens on every rank."""
    spans = {cache.span for cache in caches if cache.span is not None}
    if len(spans) > 1:
        raise ValueError(f"a block must stand for the same tokens on every rank, got {sorted(spans)}")


def _rounded(nbytes: int, segments: int, granule: int) -> int:
    """Bytes of `segments` equal runs that hold `nbytes`, each rounded up to granules."""
    run = -(-nbytes // segments)
    return -(-run // granule) * granule * segments if granule > 1 else nbytes
