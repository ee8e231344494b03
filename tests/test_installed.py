"""Versions of packages, and packages of which pip's part is missing."""

from __future__ import annotations

import importlib.metadata

import pytest

from vmm_kv.installed import installed


def test_a_package_that_is_there() -> None:
    assert installed("pytest") == pytest.__version__
    assert installed("there-is-no-such-package") is None


@pytest.mark.parametrize("error", [importlib.metadata.PackageNotFoundError("torch"), KeyError("Version")])
def test_a_package_of_which_pips_part_is_missing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise error

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert installed("torch") is None
