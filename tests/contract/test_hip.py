"""The contract, kept by the HIP driver on the emulated runtime: once well-behaved, once with ROCm's known bugs."""

from __future__ import annotations

import pytest
from driver_contract import DriverContract

from vmm_kv.driver import Driver, Quirks
from vmm_kv.driver.hip import HipDriver
from vmm_kv.testing import load_hip

GRANULE = 2 << 20
BUGS = (
    "quirk_access_from_first", "quirk_joint_unmap_busy", "quirk_memory_with_addresses", "quirk_4k_granularity",
    "quirk_single_memset", "ignore_alignment",
)  # fmt: skip


class TestHipDriver(DriverContract):
    free_checks_size = False

    @pytest.fixture
    def driver(self) -> Driver:
        load_hip(budget=64 * GRANULE, granule=GRANULE)
        return HipDriver()


class TestHipDriverWithEveryBug(TestHipDriver):
    @pytest.fixture
    def driver(self) -> Driver:
        model = load_hip(budget=64 * GRANULE, granule=GRANULE)
        for bug in BUGS:
            model.set(bug, 1)
        quirks = Quirks(uniform_chunks=True, memory_with_addresses=True, single_unmap=True, single_memset=True)
        return HipDriver(quirks=quirks)
