"""A start-up held against the report of an earlier one, whose size it is to reproduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vmm_kv.budget import BudgetError, Plan, exactly
from vmm_kv.fingerprint import Difference, Facts, Fingerprint, PinError, compare
from vmm_kv.measure import MemoryReading
from vmm_kv.report import CacheRecord, StartupReport
from vmm_kv.request import Request

if TYPE_CHECKING:
    from vmm_kv.cache import KVCache

_TRANSIENT = "transient"


class Pin:
    """The earlier report, and every check against it. Each raises `PinError` that itemises what differs."""

    def __init__(self, report: StartupReport) -> None:
        if not isinstance(report, StartupReport):
            raise TypeError(f"pinned takes a StartupReport, which StartupReport.load(path) gives; got {report!r}")
        self.report = report
        self.request = Request(blocks=report.blocks)
        items = dict(report.plan.terms.headroom)
        self.transient = items.pop(_TRANSIENT, None)
        """Bytes that the worst step took then; None if it was not measured."""
        self.headroom: dict[str, int] = items

    def check_fingerprint(self, now: Fingerprint) -> None:
        """Before anything else: model, ladder, versions and device are those of then."""
        if differences := self.report.fingerprint.differences(now):
            raise PinError("the pinned start-up is another one's", differences)

    def check_free(self, first: MemoryReading, headroom: Mapping[str, int]) -> None:
        """Whether what is surely needed is free, before weights are loaded. The last word is the sizing's."""
        then = self.report
        needed = (
            *(("allocator", then.plan.terms.reserved - then.readings[0].reserved), ("KV cache", then.mapped_bytes)),
            *((f"headroom {name}", size) for name, size in headroom.items()),
        )
        total = sum(size for _, size in needed)
        if first.free < total:
            items = ", ".join(f"{name} {exactly(size)}" for name, size in needed)
            raise PinError(
                f"the pinned start-up does not fit this device any more: it takes {exactly(total)} ({items}), short by "
                f"{exactly(total - first.free)}",
                [Difference("free at the start", exactly(then.readings[0].free), exactly(first.free))],
            )

    def capacity(self, index: int) -> int:
        """Blocks to reserve for the cache with this number."""
        caches = self.report.caches
        if index >= len(caches):
            raise PinError("the pinned start-up had fewer caches", [_caches(len(caches), index + 1)])
        return caches[index].capacity

    def check_caches(self, now: Sequence[CacheRecord], backed: int) -> None:
        """Before the commit: the same addresses for the same tensors, and no more backed than is to be granted."""
        then = self.report.caches
        differences = [_caches(len(then), len(now))] if len(then) != len(now) else []
        for number, (before, after) in enumerate(zip(then, now, strict=False)):
            differences += compare(f"cache {number} ", _facts(before), _facts(after))
        if backed > self.report.blocks:
            differences.append(Difference("blocks backed", f"{self.report.blocks} in all", str(backed)))
        if differences:
            raise PinError("the caches are not those of the pinned start-up", differences)

    def noted(self, now: Plan) -> Plan:
        """The plan, with a note where the share that the pinned start-up kept to is exceeded: its size comes first."""
        then = self.report.plan
        above = _taken(now) - max(then.requested, _taken(then))
        if then.request.utilization is None or above <= 0:
            return now
        share = f"{exactly(then.requested)}, a utilization of {then.request.utilization:g}"
        note = f"the pinned start-up kept to {share}; with its blocks this one takes {exactly(above)} more"
        return replace(now, notes=(*now.notes, note))

    def refused(self, error: BudgetError) -> PinError:
        """Memory does not hold the pinned count: every term of the sizing that is not as it was."""
        plan = error.plan
        differences = _terms(self.report.plan, plan) if plan else []
        short = f", short by {exactly(plan.requested - plan.room)}" if plan else f": {error}"
        return PinError(
            f"{self.report.blocks} blocks of the pinned start-up do not fit any more{short}", differences, plan
        )


def record(cache: KVCache) -> CacheRecord:
    """How the cache was reserved."""
    tensors = tuple(
        (place.spec.name, f"{place.spec.shape} {place.spec.dtype} at {place.offset}, strides {place.strides}")
        for place in cache.layout.placements
    )
    return CacheRecord(cache.capacity, cache.reserved_bytes, cache.unit, tensors)


def _taken(plan: Plan) -> int:
    """Bytes of the share that the process holds or keeps free."""
    return plan.own + sum(size for _, size in plan.terms.headroom) + plan.cost


def _facts(cache: CacheRecord) -> Facts:
    own = (("capacity", f"{cache.capacity} blocks"), ("reservation", exactly(cache.reserved_bytes)))
    return (*own, ("mapping unit", exactly(cache.unit)), *((f"tensor {name}", told) for name, told in cache.tensors))


def _caches(then: int, now: int) -> Difference:
    return Difference("caches", str(then), str(now))


def _terms(then: Plan, now: Plan) -> list[Difference]:
    """What is there for the cache and what holds the rest, now and then. Not the request: a pin has another."""
    return compare("", _shown(then), _shown(now))


def _shown(plan: Plan) -> Facts:
    named = [*plan.own_parts, *((f"headroom {name}", size) for name, size in plan.terms.headroom)]
    named = [("total", plan.terms.total), *named, ("free", plan.terms.free), ("in place", plan.terms.in_place)]
    return tuple((name, exactly(size)) for name, size in [*named, ("room for the cache", plan.room)])
