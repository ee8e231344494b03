"""The contract, kept by the driver of a real GPU. Memory is looked at through torch."""

from __future__ import annotations

import ctypes

import pytest
import torch
from driver_contract import Bench, DriverContract

from vmm_kv.driver import Driver
from vmm_kv.testing.gpu_registry import Skipped, all_checks
from vmm_kv.testing.gpu_rig import Rig, open_rig


class TestRealDriver(DriverContract):
    drift = 6 << 20
    """Less than the four granules of 2 MiB that the tests take, more than a driver takes for its page tables."""

    rig: Rig

    @pytest.fixture
    def driver(self, gpu: str) -> Driver:
        self.free_checks_size = gpu.startswith("cuda")
        try:
            with open_rig(gpu, all_checks()["tensors.moved"]) as rig:
                self.rig = rig
        except Skipped as reason:
            pytest.skip(str(reason))
        return self.rig.driver

    def peek(self, address: int, size: int) -> bytes:
        there = self.rig.bytes_at(address, size).cpu()
        return ctypes.string_at(there.data_ptr(), size)

    def poke(self, address: int, data: bytes) -> None:
        self.rig.bytes_at(address, len(data)).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.rig.settle()

    def test_a_handle_is_released_once(self, bench: Bench) -> None:
        pytest.skip("L1: a second release is undefined on a real driver; the check rules.release tries it apart")

    def test_addresses_go_back_exactly_as_they_came(self, bench: Bench) -> None:
        pytest.skip("F1, F2: what wrong addresses do is not documented; the check rules.free_address tries it apart")
