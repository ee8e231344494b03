"""What a plan of several ranks is told: each device, and the named terms that lie on it besides the KV cache. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from vmm_kv.kv_groups import Group
from vmm_kv.sizes import whole

TermKind = Literal["permanent", "transient", "startup", "margin", "co-resident"]

GRAPHS = "graphs"
"""The name of the term that captured graphs keep: advice says which utilization makes up for it."""


@dataclass(frozen=True)
class Term:
    """Memory besides the KV cache.

    `"permanent"`: this process holds it as long as the KV cache (weights, graphs, encoder cache). `"transient"`: it
    comes and goes while the KV cache is there (activation peak), so it is kept free. `"startup"`: gone before the KV
    cache is mapped; it counts only towards the peak at its time. `"margin"`: to be left free whoever uses it; taken off
    what is free, not off the share. `"co-resident"`: somebody else's who may be away now; taken off nothing, and the
    plan warns where the KV cache could not be mapped again beside it.
    """

    name: str
    nbytes: int
    """Raw and signed, as measured: what is negative counts as 0 and is noted."""
    kind: TermKind = "permanent"
    turn: str | None = None
    """Transient or start-up terms with different turns are never there at once: the largest turn counts."""
    source: str = ""
    """Where the figure is from, shown beside it: a strategy's name, a reading."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", whole(f"term {self.name!r}: nbytes", self.nbytes))
        if self.kind not in get_args(TermKind):
            raise ValueError(f"term {self.name!r}: {self.kind!r} is no kind: {', '.join(get_args(TermKind))}")
        if self.turn is not None and self.kind not in ("transient", "startup"):
            raise ValueError(f"term {self.name!r}: what is {self.kind} takes no turns, got turn={self.turn!r}")

    @property
    def counted(self) -> int:
        """`nbytes`, counted as 0 where it is negative."""
        return max(0, self.nbytes)


@dataclass(frozen=True)
class Rank:
    """One device and what this process puts on it. `ValueError` for two terms of one name."""

    total: int
    terms: tuple[Term, ...] = ()
    groups: tuple[Group, ...] = ()
    free: int | None = None
    """Device-wide free bytes before this process takes any of its terms; None if all of it is free."""
    name: str = ""
    """`"rank 0"`, ... if empty."""
    granule: int = 1
    """Bytes to which each segment of the KV cache is rounded up; 1 plans without rounding."""
    notes: tuple[str, ...] = ()
    """Shown in the plan: whose figures `total` and `free` are."""

    def __post_init__(self) -> None:
        for field in ("total", "free", "granule"):
            if (number := getattr(self, field)) is not None:
                object.__setattr__(self, field, whole(f"{self.name or 'rank'}: {field}", number))
        names = [term.name for term in self.terms]
        if len(set(names)) != len(names):
            raise ValueError(f"two terms of one rank have one name: {', '.join(names)}")

    @property
    def free_bytes(self) -> int:
        """`free`, all of `total` where it is not told."""
        return self.total if self.free is None else self.free

    @property
    def consistent(self) -> bool:
        """Whether a budget can be computed from what is free and in all."""
        return self.total > 0 and 0 <= self.free_bytes <= self.total

    def held(self, kind: TermKind) -> int:
        """Bytes of all terms of a kind; of those that take turns, the most that any turn comes to."""
        turns: dict[str | None, int] = {None: 0}
        for term in self.terms:
            if term.kind == kind:
                turns[term.turn] = turns.get(term.turn, 0) + term.counted
        always = turns.pop(None)
        return always + max(turns.values(), default=0)
