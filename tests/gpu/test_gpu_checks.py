"""The checks of `vmm_kv.testing.gpu_check` as tests, each in a process of its own or one that it shares."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vmm_kv.testing.gpu_check import run_checks
from vmm_kv.testing.gpu_registry import all_checks

_START = 60
"""Seconds that a process may take to import torch."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", all_checks())
def test_check(gpu: str, name: str, record_property: Callable[[str, object], None]) -> None:
    """A surprise is no failure: it is told with the test's properties."""
    check = all_checks()[name]
    [result] = run_checks(gpu, [check], limit=check.seconds + _START)
    record_property(result.outcome, result.facts)
    if result.outcome == "skipped":
        pytest.skip(result.facts)
    assert result.outcome in ("ok", "surprise"), result.facts
