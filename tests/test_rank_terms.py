"""Devices and the terms on them."""

from __future__ import annotations

import numpy as np
import pytest

from vmm_kv.kv_groups import Group
from vmm_kv.rank_terms import Rank, Term, TermKind


def test_two_terms_of_one_name() -> None:
    with pytest.raises(ValueError, match="one name: a, a"):
        Rank(10, (Term("a", 1), Term("a", 2)))


def test_only_what_comes_and_goes_takes_turns() -> None:
    with pytest.raises(ValueError, match="what is permanent takes no turns"):
        Term("weights", 1, turn="target")


@pytest.mark.parametrize(("kind", "held"), [("permanent", 3), ("transient", 17), ("startup", 0), ("margin", 4)])
def test_held(kind: TermKind, held: int) -> None:
    """Target and draft run one after the other: the larger turn counts, beside what is always there."""
    terms = (
        Term("weights", 3),
        Term("negative", -9),
        Term("sampler", 9, "transient"),
        Term("target", 5, "transient", turn="target"),
        Term("canary", 3, "transient", turn="target"),
        Term("draft", 7, "transient", turn="draft"),
        Term("margin", 4, "margin"),
    )
    assert Rank(100, terms).held(kind) == held


@pytest.mark.parametrize(
    ("total", "free", "good"), [(10, None, True), (10, 10, True), (10, 11, False), (0, 0, False), (10, -1, False)]
)
def test_consistent(total: int, free: int | None, good: bool) -> None:
    """C42: never a budget from a pair with more free than there is."""
    assert Rank(total, free=free).consistent is good


def test_a_kind_that_is_none_is_refused() -> None:
    """A term of a mistyped kind would be shown and never subtracted."""
    with pytest.raises(ValueError, match="'permanant' is no kind: permanent, transient"):
        Term("weights", 1, "permanant")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'nope' is no kind: full, window, state"):
        Group("full", 16, kind="nope")  # type: ignore[arg-type]


def test_what_is_no_whole_number_is_named() -> None:
    with pytest.raises(TypeError, match=r"term 'weights': nbytes must be a whole number, got 1\.5"):
        Term("weights", 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rank: total must be a whole number, got 80000000000"):
        Rank(80e9)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rank 1: free must be a whole number, got '9'"):
        Rank(10, free="9", name="rank 1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"group 'full': bytes_per_block must be a whole number, got 16\.0"):
        Group("full", 16.0)  # type: ignore[arg-type]
    assert type(Rank(np.int64(10)).total) is int and type(Group("full", np.int64(16)).bytes_per_block) is int
