"""How many blocks the memory holds: named terms in, a `Plan` out.

Pure arithmetic on plain ints, all of them bytes unless the name says blocks. It knows no device, no framework and no
layout: what a block costs comes in as two callables. The same inputs give the same plan, byte for byte.

    own      = context + reserved + other           or process_used - kv, where the driver tells
    share    = requested - own - sum(items)         an explicit request: the request itself
    room     = free + in_place - sum(items)
    kv_bytes = min(share, room)
    blocks   = min(capacity, blocks_within(kv_bytes))

Only `other` and the transient are clamped, and the raw figures stand next to them in the plan. `vmm_kv.rank_plan` plans
several ranks, groups and requests from declared terms, before anything is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from vmm_kv.errors import VmmError
from vmm_kv.request import Request

Items = tuple[tuple[str, int], ...]
"""(name, bytes) pairs, in the order in which they are shown."""
Bound = Literal["request", "free memory", "capacity", "explicit bytes", "explicit blocks"]
Status = Literal["ok", "over_budget", "refused", "too_small"]

NOISE = 128 << 20
"""Bytes by which device-wide readings differ on an idle card that also drives a display; below it no note is made."""


@dataclass(frozen=True)
class Terms:
    """What was measured and what the caller declares. Bytes; `ValueError` where they contradict each other."""

    total: int
    free_0: int
    """Device-wide free bytes at the first reading."""
    free: int
    """Device-wide free bytes at the last reading, after the flush."""
    reserved: int
    """Held by this process's framework allocator at the last reading."""
    kv: int
    """Physical bytes of our own chunks at the last reading."""
    others: Items = ()
    """For each reading: growth since the first one that neither the allocator nor our chunks explain. Raw, signed."""
    context: int | None = None
    """Held by this process outside the allocator at the first reading, `None` where nobody can tell."""
    process_used: int | None = None
    """What the driver tells of this process at the last reading, our chunks included."""
    headroom: Items = ()
    """What to leave free. Open-ended: transient, safety, encoder, ..."""
    in_place: int = 0
    """KV bytes that stay: mapped ones of a prefix or an earlier commit, and unmapped ones kept for growth."""
    backed: int = 0
    """Blocks that `in_place` backs."""
    footprint: int | None = None
    """What captures kept, raw and signed. Reported; `own` holds it already."""
    graph_pool: int | None = None
    """The part of `footprint` that lies in the framework's allocator. Explains an excess."""

    def __post_init__(self) -> None:
        named = [(name, getattr(self, name) or 0) for name in ("reserved", "kv", "context", "process_used")]
        named += [("in_place", self.in_place), ("backed", self.backed)]
        for name, value in [*named, *((f"headroom {name!r}", size) for name, size in self.headroom)]:
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if self.in_place > self.kv:
            raise ValueError(f"in_place is {self.in_place} bytes, but only {self.kv} bytes of KV chunks exist")


@dataclass(frozen=True)
class Plan:
    """Every term of the sizing and its result. Bytes unless said otherwise; what is negative is shown so."""

    status: Status
    bound_by: Bound
    request: Request
    terms: Terms
    requested: int
    own: int
    own_parts: Items
    """Sums to `own`."""
    share: int
    room: int
    kv_bytes: int
    planned: int
    """Blocks that the request alone would give, were memory free; 0 where it does not hold what is mapped."""
    blocks: int
    """Blocks granted."""
    capacity: int
    """Blocks that there are addresses for."""
    cost: int
    """Bytes that `blocks` take, `in_place` included."""
    leftover: int
    """`kv_bytes` - `cost`."""
    next_step: int | None
    """Bytes that one more block would take, `None` at capacity."""
    excess: int
    """Bytes by which what is backed exceeds `kv_bytes`."""
    excess_items: Items
    """Sums to `excess`: what the graph pool explains, and what nothing explains."""
    notes: tuple[str, ...]
    advice: tuple[str, ...] = ()
    advised_utilization: float | None = None
    """At which captures cost no KV; only where utilization binds and memory allows."""

    def itemised(self) -> Items:
        """Where the memory goes, term after term, in the order of the formula."""
        own = (*((f"  {name}", size) for name, size in self.own_parts), ("own", self.own))
        headroom = tuple((f"headroom {name}", size) for name, size in self.terms.headroom)
        head = (("total", self.terms.total), ("requested", self.requested), *own, *headroom, ("share", self.share))
        middle = (("free", self.terms.free), ("in place", self.terms.in_place), ("room", self.room))
        tail = (("kv bytes", self.kv_bytes), ("cost", self.cost), ("leftover", self.leftover))
        over = (("excess", self.excess), *((f"  {name}", size) for name, size in self.excess_items))
        return (*head, *middle, *tail, *(over if self.status == "over_budget" else ()))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the same inputs give the same JSON text."""
        return asdict(self)

    def __str__(self) -> str:
        granted = "are backed and stay" if self.status == "over_budget" else "granted"
        head = f"{self.blocks} blocks {granted}, {self.planned} planned ({self.status}, bound by {self.bound_by})"
        lines = [f"  {name:<28} {exactly(size)}" for name, size in self.itemised()]
        return "\n".join([head, *lines, *(f"  note: {note}" for note in self.notes)])


class BudgetError(VmmError):
    """Memory does not hold what was asked for. `plan` has every term; `None` if it failed before there was one."""

    def __init__(self, message: str, plan: Plan | None = None) -> None:
        super().__init__(message)
        self.plan = plan


def readable(size: int) -> str:
    """Bytes in binary units with two decimals and the sign kept: `2542796800` is `2.37 GiB`."""
    if abs(size) < 1024:
        return f"{size} B"
    value, units = size / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1023.995 and len(units) > 1:  # what would print as 1024.00 is written in the next unit
        value, units = value / 1024, units[1:]
    return f"{value:.2f} {units[0]}"


def exactly(size: int) -> str:
    """Readable and exact: `2.37 GiB (2542796800 bytes)`."""
    return f"{readable(size)} ({size} bytes)"


def transient(peak_reserved: int, reserved: int) -> int:
    """Bytes that a step takes above what stays reserved after the flush. Never negative."""
    return max(0, peak_reserved - reserved)


def requested_bytes(total: int, utilization: float) -> int:
    """ceil(total * utilization), of the decimal number the user wrote: 0.1 of 10 bytes is 1, not 2."""
    return math.ceil(Fraction(repr(float(utilization))) * total)


def capacity_bound(request: Request, total: int, free: int, own: int) -> int:
    """Upper bound of the bytes that the KV cache can take, to reserve addresses before anything is captured.

    From the reading after the weights were loaded and the cache flushed: for a utilization, the share without headroom
    or what is free, if less (pass `total` as `free` to count on neighbours that leave); for explicit bytes, these.
    Raises `BudgetError` if nothing is left, `ValueError` for a block count, which is its own capacity.
    """
    if request.blocks is not None:
        raise ValueError(f"a request for {request.blocks} blocks needs no bound in bytes: reserve that many blocks")
    if request.utilization is None:
        return request.kv_bytes or 0
    requested = requested_bytes(total, request.utilization)
    bound = min(requested - own, free)
    if bound <= 0:
        raise BudgetError(
            f"no memory for a KV cache: requested {exactly(requested)} of {exactly(total)}, this process holds "
            f"{exactly(own)}, free are {exactly(free)}; raise the utilization or free memory on the device"
        )
    return bound


def plan(
    terms: Terms,
    request: Request,
    *,
    capacity: int,
    cost: Callable[[int], int],
    blocks_within: Callable[[int], int],
    min_blocks: int = 1,
) -> Plan:
    """Sizes the KV cache.

    `cost(n)` is the bytes held for `n` blocks, what stays anyway (`in_place`) included; asked for n in 0..capacity.
    `blocks_within(bytes)` is the largest n that costs no more; it may stop at `capacity` (blocks). `min_blocks` is what
    one longest request needs.

    What is backed is never given back here: where it exceeds `kv_bytes` the status is `over_budget`, and `blocks` is
    what is backed. Raises `ValueError` for a count beyond capacity, and `BudgetError` for an explicit request that does
    not fit, and for a result of no blocks or below `min_blocks`.
    """
    if request.blocks is not None and request.blocks > capacity:
        raise ValueError(f"asked for {request.blocks} blocks, there are addresses for {capacity}")
    own_parts = _own_parts(terms)
    own = sum(size for _, size in own_parts)
    kept = sum(size for _, size in terms.headroom)
    requested = requested_in_all(terms.total, request, cost)
    share = requested if request.utilization is None else requested - own - kept
    room = terms.free + terms.in_place - kept
    kv_bytes = min(share, room)

    def fitting(budget: int) -> int:
        # Below what is mapped anyway no count fits, and a layout need not answer for a negative budget.
        return min(capacity, blocks_within(budget)) if budget >= max(0, terms.in_place) else 0

    planned = fitting(share) if request.blocks is None else request.blocks
    blocks = min(planned, fitting(kv_bytes))
    status: Status = "ok"
    if request.utilization is None and planned > terms.backed and cost(planned) > room:
        status, blocks = "refused", terms.backed
    elif kv_bytes < terms.in_place or blocks < terms.backed:
        status, blocks = "over_budget", terms.backed
    elif blocks < max(1, min_blocks):
        status = "too_small"
    excess = max(0, terms.in_place - kv_bytes) if status == "over_budget" else 0
    found = Plan(
        status=status,
        bound_by=_bound_by(request, share, room, blocks, capacity, cost),
        request=request,
        terms=terms,
        requested=requested,
        own=own,
        own_parts=own_parts,
        share=share,
        room=room,
        kv_bytes=kv_bytes,
        planned=planned,
        blocks=blocks,
        capacity=capacity,
        cost=cost(blocks),
        leftover=kv_bytes - cost(blocks),
        next_step=cost(blocks + 1) - cost(blocks) if blocks < capacity else None,
        excess=excess,
        excess_items=_excess_items(excess, terms.graph_pool),
        notes=_notes(terms),
    )
    advised, advice = _advice(found)
    found = replace(found, advised_utilization=advised, advice=advice)
    if status == "refused":
        raise BudgetError(_refusal(found, cost(planned)), found)
    if blocks < max(1, min_blocks):
        raise BudgetError(_too_small(found, max(1, min_blocks), cost), found)
    return found


def _own_parts(terms: Terms) -> Items:
    """What this process holds besides the KV cache."""
    if terms.process_used is None:
        # The largest of the readings: a neighbour that frees memory later cannot hide what was seen before.
        other = max([0, *(size for _, size in terms.others)])
        return (("context", terms.context or 0), ("allocator", terms.reserved), ("other", other))
    # The allocator's figure is a lower bound that needs no driver's word.
    outside = max(0, terms.process_used - terms.kv - terms.reserved)
    return (("allocator", terms.reserved), ("outside the allocator", outside))


def requested_in_all(total: int, request: Request, cost: Callable[[int], int]) -> int:
    """The requested share, the explicit bytes, or what the explicit blocks cost by `cost`."""
    if request.utilization is not None:
        return requested_bytes(total, request.utilization)
    return cost(request.blocks) if request.blocks is not None else request.kv_bytes or 0


def _bound_by(request: Request, share: int, room: int, blocks: int, capacity: int, cost: Callable[[int], int]) -> Bound:
    limit: Bound = "explicit blocks" if request.blocks is not None else "explicit bytes"
    if request.utilization is not None:
        limit = "request"
    if room < share:
        limit = "free memory"
    # Addresses bind only if one more block would have fitted. There is no such block to ask for, so the last one stands
    # for it; without this, a capacity derived from the request would always seem to bind.
    if request.blocks is None and blocks == capacity > 0:
        step = cost(capacity) - cost(capacity - 1)
        if min(share, room) - cost(capacity) >= (step or cost(capacity) // capacity):
            return "capacity"
    return limit


def _excess_items(excess: int, graph_pool: int | None) -> Items:
    """The allocator's pool is surely ours. What lies outside it may be a neighbour's, so it stays unexplained."""
    pool = min(excess, max(0, graph_pool or 0))
    return (("graph pool", pool), ("unexplained", excess - pool)) if excess else ()


def _notes(terms: Terms) -> tuple[str, ...]:
    notes = []
    if terms.process_used is not None:
        notes.append("own is the driver's figure for this process; growth seen device-wide is not charged")
        if terms.process_used - terms.kv < terms.reserved:
            notes.append(
                f"the driver tells {exactly(terms.process_used)} of this process, its allocator and KV chunks alone "
                f"are {exactly(terms.reserved + terms.kv)}: these are charged"
            )
    elif terms.context is None:
        notes.append("context not charged: not known")
    if "transient" not in dict(terms.headroom):
        notes.append("transient not charged: no worst-case step was measured")
    if terms.process_used is None and terms.others:
        notes += _notes_on_others(terms.others)
    if terms.free > terms.free_0:
        grown = readable(terms.free - terms.free_0)
        notes.append(f"free memory grew by {grown} since the first reading: somebody else freed memory")
    if terms.footprint is not None and terms.footprint < 0:
        notes.append(f"captures came out at {exactly(terms.footprint)}, counted as 0")
    return tuple(notes)


def _notes_on_others(others: Items) -> list[str]:
    label, most = max(others, key=lambda pair: pair[1])
    last_label, last = others[-1]
    if most > 0 and most - last > NOISE:
        return [
            f"other memory fell by {readable(most - last)} from {label!r} to {last_label!r} and is charged as it was "
            f"at {label!r} ({exactly(most)}): if that was a neighbour's, a per-process reading would tell"
        ]
    if last < -NOISE:
        return [f"other memory at {last_label!r} came out at {exactly(last)}, counted as 0"]
    return []


def _advice(found: Plan) -> tuple[float | None, tuple[str, ...]]:
    """What to change to get more, from the constraint that binds; and the utilization at which captures cost no KV."""
    if found.status == "over_budget":
        above = f"{found.blocks} blocks are backed, {exactly(found.excess)} above the budget"
        return None, (f"{above}: shrink the cache, or free that much elsewhere",)
    if found.bound_by == "free memory":
        kept = ", ".join(f"{name} {readable(size)}" for name, size in found.terms.headroom) or "none"
        return None, (f"free memory binds, not the request: free memory on the device, or lower the headroom ({kept})",)
    if found.bound_by == "capacity":
        left = readable(found.leftover)
        return None, (f"addresses bind: reserve more than {found.capacity} blocks, {left} are left",)
    if found.request.utilization is None:
        return None, (f"the explicit request binds: up to {exactly(found.room)} would fit",)
    room = found.room - found.share + found.requested
    return utilization_advice(found.request.utilization, found.terms.total, room, found.terms.footprint or 0)


def utilization_advice(
    utilization: float, total: int, room: int, captures: int
) -> tuple[float | None, tuple[str, ...]]:
    """Where utilization binds: the one at which captures cost no KV, if memory allows it, and what to say.

    `room`: bytes of the device that this process could take in all. `captures`: bytes that they keep, raw.
    """
    most = min(Fraction(1), Fraction(room, total))
    captures = max(0, captures)
    keep = Fraction(repr(float(utilization))) + Fraction(captures, total)
    binds = "utilization binds: a higher one gives more blocks"
    if utilization == 1:
        binds = "the whole device is asked for: only less beside the KV cache gives more blocks"
    elif most < 1:
        binds = f"utilization binds; above {math.floor(most * 10000) / 10000:.4f} free memory would"
    if not captures or keep > most:
        return None, (binds,)
    advised = round(float(keep), 4)
    return advised, (binds, f"utilization {advised:.4f} gives back the {readable(captures)} that captures keep")


def _refusal(found: Plan, need: int) -> str:
    return (
        f"the explicit request needs {exactly(need)}, room is for {exactly(found.room)}: "
        f"short by {exactly(need - found.room)}; ask for less, lower the headroom or free memory on the device\n{found}"
    )


def _too_small(found: Plan, need: int, cost: Callable[[int], int]) -> str:
    """Names what is short, what to change, and every term."""
    head = f"the KV cache comes to {found.blocks} blocks, one longest request needs {need}"
    if need > found.capacity:
        return f"{head}, there are addresses for {found.capacity}: reserve more\n{found}"
    wanted, change = cost(need), []
    if wanted > found.share and found.request.utilization is None:
        change.append(f"ask for at least {need} blocks, {exactly(wanted)}")
    elif wanted > found.share:
        least = math.ceil(Fraction(found.requested + wanted - found.share, found.terms.total) * 10000)
        no_share = "no utilization suffices: take a larger device or a smaller model"
        change.append(no_share if least > 10000 else f"raise utilization to {least / 10000:.4f}")
    if wanted > found.room:
        change.append(f"free {exactly(wanted - found.room)} on the device or in the headroom")
    change.append("or shorten the longest request")
    return f"{head}: short by {exactly(wanted - found.kv_bytes)}; {', '.join(change)}\n{found}"
