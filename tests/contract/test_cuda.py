"""The contract, kept by the CUDA driver on the emulated library."""

from __future__ import annotations

import pytest
from driver_contract import DriverContract

from vmm_kv.driver import Driver
from vmm_kv.driver.cuda import CudaDriver
from vmm_kv.testing import load_cuda


@pytest.mark.parametrize("granule", [65536, 2 << 20], scope="class")
class TestCudaDriver(DriverContract):
    @pytest.fixture
    def driver(self, granule: int) -> Driver:
        load_cuda(budget=64 * granule, granule=granule)
        return CudaDriver(0)


@pytest.mark.parametrize("handle_type", ["posix_fd", "fabric"])
class TestCudaDriverWithShareableHandles(DriverContract):
    @pytest.fixture
    def driver(self, handle_type: str) -> Driver:
        model = load_cuda(budget=128 << 20)
        model.set("fabric", 2)
        model.set("rdma", 1)
        driver = CudaDriver(0, handle_types=(handle_type,))
        assert driver.memory_traits.handle_type == handle_type
        assert driver.memory_traits.rdma
        return driver
