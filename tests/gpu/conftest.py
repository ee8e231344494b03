"""Whether there is a GPU to check, and which. Everything in this folder needs one and is skipped without."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vmm_kv import gpu_drivers
from vmm_kv.testing.gpu_check import default_device, missing

# The contract's tests lie beside the drivers that are tested everywhere.
sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))


def why_not(device: str) -> str | None:
    """The reason to skip. A driver is asked only where a GPU is visible: other tests load emulated ones."""
    if not any(map(gpu_drivers.visible, gpu_drivers.KINDS)):
        return "no GPU is visible"
    return missing(device)


DEVICE = default_device()
REASON = why_not(DEVICE)


@pytest.fixture(scope="session")
def gpu() -> str:
    """The device's name, `"cuda:0"` or `"hip:0"`."""
    if REASON:
        pytest.skip(REASON)
    return DEVICE
