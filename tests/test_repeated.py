"""One figure measured several times."""

from __future__ import annotations

import pytest

from vmm_kv.repeated import repeated

MIB = 1 << 20


def test_c37_noise_larger_than_the_signal() -> None:
    """C37: twelve readings of what three graphs keep, on a card that drives a display. None of them is an error."""
    readings = [0, 0, 0, 8, 9.44, 9.89, 14.77, 21.11, 21.75, 26.44, 84.5, 101]
    found = repeated(round(mib * MIB) for mib in readings)
    assert (found.least, found.median, found.spread) == (0, round(9.89 * MIB), 101 * MIB)
    assert found.status == "noisy"


def test_negative_readings_count_as_nothing_and_are_kept() -> None:
    found = repeated([-5, 20, 22])
    assert (found.raw, found.least, found.median, found.spread) == ((-5, 20, 22), 0, 20, 22)
    assert found.status == "noisy"


def test_steady() -> None:
    assert repeated([20, 24, 22]).status == "steady"
    assert repeated([0]).status == "steady"


def test_nothing_measured() -> None:
    with pytest.raises(ValueError, match="at least one"):
        repeated([])
