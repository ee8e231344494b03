"""How many blocks several ranks can hold: named terms in, a `RankedPlan` out. Pure, and without measuring anything.

Bytes are plain ints. For each rank, with the terms that it declares:

    requested = ceil(total * utilization)               or the explicit bytes, or the cost of the explicit blocks
    share     = requested - permanent - transient       an explicit request: the request itself
    room      = free - permanent - transient - margin
    kv_bytes  = min(share, room)
    blocks    = the least over the ranks of min(capacity, blocks_within(kv_bytes))

Nothing is clamped in silence: terms are kept raw and signed, and what is negative is shown so. The same inputs give the
same plan, byte for byte. `vmm_kv.budget` sizes one cache from readings instead, when the engine has come up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from vmm_kv import rank_plan_text as text
from vmm_kv.budget import BudgetError, requested_in_all, utilization_advice
from vmm_kv.kv_groups import Cache, Group, same_span
from vmm_kv.rank_terms import GRAPHS, Rank
from vmm_kv.request import Request

RankBound = Literal["request", "free memory", "capacity", "explicit bytes", "explicit blocks", "another rank"]
RankedStatus = Literal["ok", "floored", "too_small", "refused", "inconsistent"]


@dataclass(frozen=True)
class GroupPlan:
    """What one group gets on one rank."""

    name: str
    kind: str
    block_size: int
    bytes_per_block: int
    blocks: int
    """Block ids that it can draw on; 0 for one that is held for requests from the start."""
    nbytes: int
    """Bytes of these, or held from the start; groups of one pool lie on the same. Without rounding."""
    request_bytes: int | None
    """Bytes of one request of `max_model_len`; None if that is not known."""


@dataclass(frozen=True)
class RankPlan:
    """One rank's part. Bytes; what is negative is shown so."""

    name: str
    rank: Rank
    bound_by: RankBound
    free: int
    requested: int
    permanent: int
    transient: int
    startup_peak: int
    """Permanent terms and those of the start-up: before the KV cache is there."""
    margin: int
    co_resident: int
    share: int
    room: int
    kv_bytes: int
    own_blocks: int
    """Blocks that this rank alone could hold."""
    nbytes: int
    """Bytes that the plan's blocks take here, each segment rounded up to granules."""
    surplus: int
    """`kv_bytes` - `nbytes`: what is left because another rank, or the last block, binds; negative where floored."""
    short: int
    """Bytes by which what is free falls short of what the request asks for."""
    groups: tuple[GroupPlan, ...]


@dataclass(frozen=True)
class RankedPlan:
    """What all ranks agree on. `tokens` is the one capacity figure, computed once."""

    status: RankedStatus
    bound_by: RankBound
    bound_rank: str
    """The rank that binds."""
    request: Request
    max_model_len: int | None
    planned: int
    """Blocks that the request alone would give, were memory free."""
    blocks: int
    """Blocks granted on every rank."""
    capacity: int | None
    """Blocks that there are addresses for, None if that is no bound."""
    needed: int
    """Blocks that one longest request needs, at least `min_blocks`."""
    min_blocks: int
    """Blocks that must fit in any case, at least 1."""
    tokens: int | None
    """Tokens held by all ranks together; None if nothing bounds them. See `Cache.tokens`."""
    tokens_per_rank: int | None
    """The part of `tokens` on one rank, where context parallelism spreads them."""
    largest_request: int | None
    """Tokens of the longest request that fits; None if nothing bounds it."""
    concurrent_requests: int | None
    """Whole requests of `max_model_len` held at once; None if that is not known."""
    concurrency: float | None
    """The same in fractions, to 4 decimals."""
    imbalanced: tuple[str, ...]
    """Ranks with less than 0.9 of the free memory of another one."""
    ranks: tuple[RankPlan, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    advice: tuple[str, ...]
    advised_utilization: float | None

    @property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes that the blocks take on each rank, after rounding."""
        return tuple(rank.nbytes for rank in self.ranks)

    def caches(self) -> tuple[Cache, ...]:
        """The arithmetic of each rank's groups."""
        return tuple(Cache(r.rank.groups, r.rank.granule, self.max_model_len) for r in self.ranks)

    def concurrent(self, tokens: int) -> int:
        """Whole requests of that many tokens that are held at once."""
        return min(int(cache.concurrency(self.blocks, tokens)) for cache in self.caches())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the same inputs give the same JSON text."""
        return asdict(self)

    def __str__(self) -> str:
        return text.table(self)


class RankBudgetError(BudgetError):
    """The ranks cannot hold what was asked for. `ranked` has every term of every rank."""

    def __init__(self, message: str, ranked: RankedPlan) -> None:
        super().__init__(message)
        self.ranked = ranked


def plan_ranks(
    ranks: Sequence[Rank],
    request: Request,
    *,
    max_model_len: int | None = None,
    min_blocks: int = 1,
    capacity: int | None = None,
    floor: int = 0,
    strict: bool = False,
) -> RankedPlan:
    """Sizes the KV cache of one or several ranks.

    max_model_len: tokens of the longest request, which must fit. min_blocks: blocks that must fit in any case.
    capacity: blocks that there are addresses for. floor: blocks granted where a utilization comes to fewer, although
    memory does not hold them; the status is then `"floored"`, or, with `strict`, that is an error.

    Raises `RankBudgetError` where a rank's figures contradict each other, an explicit request does not fit, or what
    fits is less than one longest request; it says how many bytes or tokens are short. `ValueError` for wrong arguments.
    """
    _check(ranks, request, max_model_len, capacity, floor)
    caches = [Cache(rank.groups, rank.granule, max_model_len) for rank in ranks]
    same_span(caches)
    named = [replace(rank, name=rank.name or f"rank {i}") for i, rank in enumerate(ranks)]
    if len({rank.name for rank in named}) < len(named):
        raise ValueError(f"two ranks have one name: {', '.join(rank.name for rank in named)}")
    parts = [_rank_plan(rank, cache, request, capacity) for rank, cache in zip(named, caches, strict=True)]
    planned = request.blocks or _least(capacity, (c.blocks_within(p.share) for c, p in zip(caches, parts, strict=True)))
    fitting = min(part.own_blocks for part in parts)
    needed = max(1, min_blocks, *(cache.need(max_model_len) for cache in caches if max_model_len is not None))
    status = _status(parts, caches, request, planned, fitting, floor, needed)
    blocks = max(fitting, floor) if status in ("floored", "too_small") else fitting
    tightest = min(parts, key=lambda part: (part.own_blocks, part.kv_bytes))
    longest = [size for cache in caches if (size := cache.largest_request(blocks)) is not None]
    held = [size for cache in caches if (size := cache.tokens(blocks)) is not None]
    tokens = min(held, default=None)
    at_once = min(c.concurrency(blocks, max_model_len) for c in caches) if max_model_len is not None else None
    found = RankedPlan(
        status=status,
        bound_by=tightest.bound_by,
        bound_rank=tightest.name,
        request=request,
        max_model_len=max_model_len,
        planned=planned,
        blocks=blocks,
        capacity=capacity,
        needed=needed,
        min_blocks=max(1, min_blocks),
        tokens=tokens,
        tokens_per_rank=None if tokens is None else -(-tokens // max(cache.context_parallel for cache in caches)),
        largest_request=min(longest, default=None),
        concurrent_requests=None if at_once is None else int(at_once),
        concurrency=None if at_once is None else round(float(at_once), 4),
        imbalanced=_imbalanced(parts),
        ranks=tuple(_granted(p, c, blocks, tightest) for p, c in zip(parts, caches, strict=True)),
        notes=(),
        warnings=(),
        advice=(),
        advised_utilization=None,
    )
    return _explained(found, strict)


def _check(
    ranks: Sequence[Rank], request: Request, max_model_len: int | None, capacity: int | None, floor: int
) -> None:
    if not ranks:
        raise ValueError("a plan needs at least one rank")
    if not isinstance(request, Request):
        raise TypeError(f"the request is a Request, such as Request(utilization=0.9); got {request!r}")
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity must be at least 1 block, got {capacity}")
    if request.blocks is not None and capacity is not None and request.blocks > capacity:
        raise ValueError(f"asked for {request.blocks} blocks, there are addresses for {capacity}")
    if floor < 0 or (floor and request.utilization is None):
        raise ValueError(f"a floor of blocks, 0 or more, goes with a utilization; got {floor} with {request}")
    if capacity is not None and floor > capacity:
        raise ValueError(f"the floor is {floor} blocks, there are addresses for {capacity}")


def _rank_plan(rank: Rank, cache: Cache, request: Request, capacity: int | None) -> RankPlan:
    """What one rank could hold by itself; the other ranks' word comes in later."""
    permanent, transient = rank.held("permanent"), rank.held("transient")
    margin, away = rank.held("margin"), rank.held("co-resident")
    requested = requested_in_all(rank.total, request, cache.cost)
    share = requested if request.utilization is None else requested - permanent - transient
    room = rank.free_bytes - permanent - transient - margin
    if not rank.consistent:  # no budget is computed from such a pair
        requested = share = room = 0
    kv_bytes = min(share, room)
    return RankPlan(
        name=rank.name,
        rank=rank,
        bound_by=_bound_by(request, share, room, cache, capacity),
        free=rank.free_bytes,
        requested=requested,
        permanent=permanent,
        transient=transient,
        startup_peak=permanent + rank.held("startup"),
        margin=margin,
        co_resident=away,
        share=share,
        room=room,
        kv_bytes=kv_bytes,
        # Where rounding leaves place for more than the explicit count, that count still is the answer.
        own_blocks=_least(_smaller(capacity, request.blocks), [cache.blocks_within(kv_bytes)]),
        nbytes=0,
        surplus=0,
        short=max(0, share - room),
        groups=(),
    )


def _bound_by(request: Request, share: int, room: int, cache: Cache, capacity: int | None) -> RankBound:
    if capacity is not None and request.blocks is None and cache.cost(capacity + 1) <= min(share, room):
        return "capacity"
    if room < share:
        return "free memory"
    if request.utilization is not None:
        return "request"
    return "explicit blocks" if request.blocks is not None else "explicit bytes"


def _status(
    parts: Sequence[RankPlan],
    caches: Sequence[Cache],
    request: Request,
    planned: int,
    fitting: int,
    floor: int,
    needed: int,
) -> RankedStatus:
    if not all(part.rank.consistent for part in parts):
        return "inconsistent"
    explicit = request.utilization is None
    refused = explicit and any(cache.cost(planned) > part.room for cache, part in zip(caches, parts, strict=True))
    if (refused and planned) or any(part.startup_peak > part.free for part in parts):
        return "refused"
    if max(fitting, floor) < needed:
        return "too_small"
    return "floored" if fitting < floor else "ok"


def _granted(part: RankPlan, cache: Cache, blocks: int, tightest: RankPlan) -> RankPlan:
    """The rank's part of what all agreed on."""
    nbytes = cache.cost(blocks)
    waits = part is not tightest and part.own_blocks > blocks
    return replace(
        part,
        bound_by="another rank" if waits else part.bound_by,
        nbytes=nbytes,
        surplus=part.kv_bytes - nbytes,
        groups=tuple(_group_plan(group, cache, blocks) for group in part.rank.groups),
    )


def _group_plan(group: Group, cache: Cache, blocks: int) -> GroupPlan:
    length = cache.max_model_len
    known = length is not None or group.kind != "full"
    if group.requests is not None:
        count, nbytes = 0, group.requests * group.request_bytes(length)
    else:
        pool = next(pool for pool in cache.pools if group in pool.groups)
        count = cache.pool_blocks(pool, blocks)
        nbytes = count * pool.block_bytes
    return GroupPlan(
        name=group.name,
        kind=group.kind,
        block_size=group.block_size,
        bytes_per_block=group.bytes_per_block,
        blocks=count,
        nbytes=nbytes,
        request_bytes=group.request_bytes(length) if known else None,
    )


def _imbalanced(parts: Sequence[RankPlan]) -> tuple[str, ...]:
    most = max(part.free for part in parts)
    return tuple(part.name for part in parts if 10 * part.free < 9 * most)


def _explained(found: RankedPlan, strict: bool) -> RankedPlan:
    """The plan with its notes, warnings and advice, or the error that it is."""
    found = replace(found, notes=text.notes(found), warnings=text.warnings(found))
    if found.status == "ok":
        advised, advice = _advice(found)
        return replace(found, advice=advice, advised_utilization=advised)
    if found.status == "floored" and not strict:
        return replace(found, advice=text.remedies(found))
    raise RankBudgetError(text.failure(found), found)


def _advice(found: RankedPlan) -> tuple[float | None, tuple[str, ...]]:
    """What to change to get more, from the constraint that binds on the rank that binds."""
    part = next(rank for rank in found.ranks if rank.name == found.bound_rank)
    if found.bound_by != "request" or found.request.utilization is None:
        return None, text.advice(found, part)
    graphs = next((term.counted for term in part.rank.terms if term.name == GRAPHS), 0)
    advised, advice = utilization_advice(
        found.request.utilization, part.rank.total, part.room - part.share + part.requested, graphs
    )
    where = f"{part.name}: " if len(found.ranks) > 1 else ""
    return advised, tuple(where + line for line in advice)


def _smaller(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else min(a, b)


def _least(bound: int | None, counts: Iterable[int]) -> int:
    least = min(counts)
    return least if bound is None else min(bound, least)
