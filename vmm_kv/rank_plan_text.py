"""What a `RankedPlan` says to people: notes, warnings, advice, what is short, and the table. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING

from vmm_kv.budget import Items, exactly, readable

if TYPE_CHECKING:
    from vmm_kv.rank_plan import RankedPlan, RankPlan
    from vmm_kv.rank_terms import Rank


def notes(found: RankedPlan) -> tuple[str, ...]:
    """What to know about the figures."""
    lines = []
    for part in found.ranks:
        for term in part.rank.terms:
            if term.nbytes < 0:
                lines.append(f"{part.name}: {term.name} came out at {exactly(term.nbytes)}, counted as 0")
        if part.short and found.status != "inconsistent":
            lines.append(f"{part.name}: what is free is {exactly(part.short)} short of what the request asks for")
        if found.request.utilization is not None and part.requested < part.startup_peak <= part.free:
            above = readable(part.startup_peak - part.requested)
            lines.append(f"{part.name}: the start-up is {above} above the requested share, until the KV cache is there")
        lines += [f"{part.name}: {note}" for note in part.rank.notes]
    return tuple(lines)


def warnings(found: RankedPlan) -> tuple[str, ...]:
    """What will hurt later."""
    lines = []
    if found.status == "floored":
        lines.append(
            f"the floor granted {found.blocks} blocks although memory does not hold them: {found.planned} were planned"
        )
        lines += [f"{part.name}: {exactly(-part.surplus)} are missing" for part in found.ranks if part.surplus < 0]
    for name in found.imbalanced:
        free = {part.name: part.free for part in found.ranks}
        lines.append(
            f"{name} has {exactly(free[name])} free, less than 0.9 of another rank's {exactly(max(free.values()))}: "
            "every rank gets what the least of them holds"
        )
    for part in found.ranks:
        # Its transient counts too: the cache is mapped again to be used.
        own = part.permanent + part.transient + part.nbytes
        if part.co_resident and own + part.co_resident > part.rank.total:
            lines.append(
                f"{part.name}: resume will not fit: {exactly(own)} of this process beside {exactly(part.co_resident)} "
                f"co-resident are {exactly(own + part.co_resident - part.rank.total)} above the device's "
                f"{exactly(part.rank.total)}"
            )
    return tuple(lines)


def advice(found: RankedPlan, part: RankPlan) -> tuple[str, ...]:
    """What to change to get more, where no utilization binds on `part`, the rank that binds."""
    where = f"on {part.name}" if len(found.ranks) > 1 else "on the device"
    if found.bound_by == "free memory":
        kept = ", ".join(f"{t.name} {readable(t.nbytes)}" for t in part.rank.terms if t.kind in ("transient", "margin"))
        return (
            f"free memory binds, not the request: free memory {where}, or lower what is kept free ({kept or 'none'})",
        )
    if found.bound_by == "capacity":
        return (
            f"addresses bind: reserve more than {found.capacity} blocks, {readable(part.surplus)} are left {where}",
        )
    return (f"the explicit request binds: up to {exactly(part.room)} would fit {where}",)


def failure(found: RankedPlan) -> str:
    """Which rank is short of how many bytes or tokens, what to change, and every term."""
    if found.status == "inconsistent":
        lines = list(_inconsistent(found))
    elif found.status == "refused":
        lines = list(_refused(found))
    else:
        lines = [_too_small(found) if found.status == "too_small" else found.warnings[0], *_short(found)]
    return "\n".join(["; ".join([*lines, *remedies(found)]), table(found)])


def remedies(found: RankedPlan) -> tuple[str, ...]:
    """What would make the request fit, for what failed and for what a floor rescued."""
    if found.status in ("inconsistent", "refused"):
        return {
            "inconsistent": ("no budget can be computed from it, ask a second source",),
            "refused": ("ask for less, lower the terms or free memory",),
        }[found.status]
    if found.capacity is not None and found.needed > found.capacity:
        return (f"there are addresses for {found.capacity} blocks: reserve more",)
    lines = []
    needed = max(found.needed, found.blocks)
    wanted = [(part, cache.cost(needed)) for part, cache in zip(found.ranks, found.caches(), strict=True)]
    if found.request.utilization is not None and any(cost > part.share for part, cost in wanted):
        least = max(
            math.ceil(Fraction(part.requested + cost - part.share, part.rank.total) * 10000) for part, cost in wanted
        )
        no_share = "no utilization suffices: take larger devices or a smaller model"
        lines.append(no_share if least > 10000 else f"raise utilization to {least / 10000:.4f}")
    elif any(cost > part.share for part, cost in wanted):
        lines.append(f"ask for at least {needed} blocks, {exactly(max(cost for _, cost in wanted))}")
    over = [f"{exactly(cost - part.room)} more on {part.name}" for part, cost in wanted if cost > part.room]
    if over:
        lines.append("free " + " and ".join(over))
    shorter = found.max_model_len is not None and 0 < (found.largest_request or 0) < found.max_model_len
    if shorter and found.min_blocks <= found.blocks:
        lines.append(f"or lower max_model_len to {found.largest_request}")
    return tuple(lines)


def table(found: RankedPlan) -> str:
    """For people: the counts, then each rank's terms."""
    where = f" on {found.bound_rank}" if len(found.ranks) > 1 else ""
    lines = [
        f"{found.blocks} blocks, {found.planned} planned ({found.status}, bound by {found.bound_by}{where})",
        *_capacity(found),
    ]
    for part in found.ranks:
        lines += [f"{part.name} (bound by {part.bound_by})", *_rank(part)]
    for word, said in (("note", found.notes), ("warning", found.warnings), ("advice", found.advice)):
        lines += [f"{word}: {line}" for line in said]
    return "\n".join(lines)


def _capacity(found: RankedPlan) -> Iterator[str]:
    drawing = [group for part in found.ranks for group in part.rank.groups if group.requests is None]
    by_length = any(group.kind != "full" or group.bytes_per_request for group in drawing)
    what = f"tokens, in requests of {found.max_model_len}" if by_length and found.max_model_len else "tokens"
    yield f"  {what:<28} {'unbounded' if found.tokens is None else found.tokens}"
    if found.tokens_per_rank != found.tokens:
        yield f"  {'tokens a rank':<28} {found.tokens_per_rank}"
    largest = "unbounded" if found.largest_request is None else f"{found.largest_request} tokens"
    yield f"  {'largest request':<28} {largest}"
    if found.max_model_len is not None:
        what = f"requests of {found.max_model_len}"
        yield f"  {what:<28} {found.concurrent_requests} at once ({found.concurrency:.2f}x)"


def _rank(part: RankPlan) -> Iterator[str]:
    for name, size in _items(part):
        yield f"  {name:<28} {exactly(size)}"
    yield from _pools(part)


def _pools(part: RankPlan) -> Iterator[str]:
    """A line for each pool of blocks, and one for each group that draws on it."""
    told: set[str] = set()
    for group, found in zip(part.rank.groups, part.groups, strict=True):
        if found.blocks and group.pool not in told:
            told.add(group.pool)
            yield f"  pool {group.pool}: {found.blocks} blocks, {exactly(found.nbytes)}"
        if group.requests is not None:
            what = f"held for {group.requests} requests, {exactly(found.nbytes)}"
        else:
            what = "whatever the length" if found.kind == "state" else f"blocks of {found.block_size} tokens"
        a_request = "" if found.request_bytes is None else f", one longest request {readable(found.request_bytes)}"
        yield f"  group {found.name} ({found.kind}): {what}{a_request}"


def _items(part: RankPlan) -> Items:
    """Where the memory goes, in the order of the formula. Terms are raw."""
    terms = tuple((f"  {_term(part.rank, i)}", term.nbytes) for i, term in enumerate(part.rank.terms))
    sums = (("permanent", part.permanent), ("transient", part.transient), ("margin", part.margin))
    peak = (("start-up peak", part.startup_peak),) if part.startup_peak != part.permanent else ()
    limits = (
        ("share: requested less terms", part.share),
        ("room: free less terms", part.room),
        ("for KV", part.kv_bytes),
    )
    device = (("total", part.rank.total), ("free", part.free), ("requested", part.requested))
    return (*device, *terms, *sums, *peak, *limits, ("blocks take", part.nbytes), ("surplus", part.surplus))


def _term(rank: Rank, index: int) -> str:
    term = rank.terms[index]
    more = [word for word in (term.kind if term.kind != "permanent" else "", term.source) if word]
    return f"{term.name} ({', '.join(more)})" if more else term.name


def _inconsistent(found: RankedPlan) -> Iterator[str]:
    for part in found.ranks:
        if not part.rank.consistent:
            yield (
                f"{part.name}: the memory figures are inconsistent, {exactly(part.free)} free of "
                f"{exactly(part.rank.total)}"
            )


def _refused(found: RankedPlan) -> Iterator[str]:
    for part, cache in zip(found.ranks, found.caches(), strict=True):
        need = cache.cost(found.planned)
        if part.startup_peak > part.free:
            yield (
                f"{part.name}: the start-up takes {exactly(part.startup_peak)} before there is a KV cache, "
                f"{exactly(part.free)} are free: short by {exactly(part.startup_peak - part.free)}"
            )
        elif found.request.utilization is None and need > part.room:
            yield (
                f"{part.name}: the explicit request needs {exactly(need)}, room is for {exactly(part.room)}: "
                f"short by {exactly(need - part.room)}"
            )


def _too_small(found: RankedPlan) -> str:
    head = f"the KV cache comes to {found.blocks} blocks, one longest request needs {found.needed}"
    largest = found.largest_request
    if found.max_model_len is None or largest is None or largest >= found.max_model_len:
        return head
    return (
        f"cannot hold one request of {found.max_model_len} tokens; largest is {largest}, "
        f"short by {found.max_model_len - largest} tokens: {head}"
    )


def _short(found: RankedPlan) -> Iterator[str]:
    """Each rank that does not hold what is needed, with its terms and the missing bytes."""
    for part, cache in zip(found.ranks, found.caches(), strict=True):
        missing = cache.cost(max(found.needed, found.blocks)) - part.kv_bytes
        if missing > 0:
            terms = ", ".join(f"{_term(part.rank, i)} {readable(t.nbytes)}" for i, t in enumerate(part.rank.terms))
            yield (
                f"{part.name} has {exactly(part.kv_bytes)} for KV (requested {readable(part.requested)}, free "
                f"{readable(part.free)}, {terms or 'no terms'}): short by {exactly(missing)}"
            )
