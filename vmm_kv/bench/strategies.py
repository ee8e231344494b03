"""The strategies that are compared, with their figures for a device of this size."""

from __future__ import annotations

from collections.abc import Callable

from vmm_kv.estimate import (
    ActivationRatio,
    FlatHeadroom,
    FlatPerGraph,
    FullProfile,
    NoReserve,
    PostCaptureFixedHeadroom,
    ReserveThenMap,
    SampledExtrapolation,
    SampledPerMode,
    Strategy,
)

MIB = 1 << 20
CARD_ROOM = 20 << 30
"""Bytes that weights of about 60 GB leave on a card of 80 GB. Published flat figures are meant for such cards; they are
taken in proportion to what the weights leave here, and at least 1 MiB."""

ORACLE, PLAN, OURS, FULL = "Oracle", "StartupPlan", "ReserveThenMap", "FullProfile"
"""Names that the benchmark treats apart: the first two need what an earlier start found, the others are the pair."""


def _scaled(published: int, room: int) -> int:
    return max(MIB, published * room // CARD_ROOM)


_MADE: dict[str, Callable[[int], Strategy]] = {
    OURS: lambda room: ReserveThenMap(),
    "PostCaptureFixedHeadroom": lambda room: PostCaptureFixedHeadroom(floor=_scaled(1536 * MIB, room)),
    FULL: lambda room: FullProfile(),
    "NoReserve": lambda room: NoReserve(),
    "ActivationRatio": lambda room: ActivationRatio(),
    "Sampled, floor 1 MiB": lambda room: SampledExtrapolation(floor=MIB),
    "Sampled, floor 1 MiB, flushed": lambda room: SampledExtrapolation(floor=MIB, flush=True),
    "Sampled, floor 16 MiB": lambda room: SampledExtrapolation(floor=16 * MIB),
    "Sampled per mode": lambda room: SampledPerMode(),
    "Sampled per mode, flushed": lambda room: SampledPerMode(flush=True),
    "FlatPerGraph": lambda room: FlatPerGraph(_scaled(60_000_000, room)),
    "FlatHeadroom": lambda room: FlatHeadroom(_scaled(int(2.3 * 2**30), room)),
}
NAMES = (ORACLE, OURS, PLAN, *list(_MADE)[1:])
"""In the order of the table. The plan comes after the start-up whose size it reuses."""


def make(name: str, room: int) -> Strategy:
    """One by its name, for `room` bytes beside the weights. Raises `ValueError` for a name that is none of them."""
    if name not in _MADE:
        raise ValueError(f"{name!r} is no strategy: {', '.join(NAMES)}")
    return _MADE[name](room)
