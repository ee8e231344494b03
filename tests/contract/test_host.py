"""The contract, kept by the host driver."""

from __future__ import annotations

import pytest
from driver_contract import DriverContract

from vmm_kv._native import DeviceModel
from vmm_kv.driver import DeviceProperties, Driver, MemoryTraits
from vmm_kv.driver.host import HostDriver
from vmm_kv.errors import DriverGone, OutOfAddressSpace


@pytest.mark.parametrize("granule", [4096, 65536, 2 << 20], scope="class")
class TestHostDriver(DriverContract):
    @pytest.fixture
    def driver(self, granule: int) -> Driver:
        return HostDriver(DeviceModel([64 * granule], granule))


def test_what_the_host_says_of_itself() -> None:
    driver = HostDriver(DeviceModel([4096, 8192], 4096), 1)
    assert driver.properties() == DeviceProperties("host", "", "", integrated=False, total=8192, multi_instance=False)
    assert driver.memory_traits == MemoryTraits("none", (), rdma=False)


def test_a_driver_that_has_shut_down() -> None:
    driver = HostDriver(DeviceModel([4096], 4096))
    driver.model.fail("create", 1, 4)
    with pytest.raises(DriverGone, match=r"create on host:0 failed: deinitialized \(4\)"):
        driver.create(4096)


def test_a_device_that_the_model_does_not_have() -> None:
    with pytest.raises(ValueError, match="device 1 of a model with 1"):
        HostDriver(DeviceModel([4096], 4096), 1)


@pytest.mark.parametrize("call", ["unmap", "set_access", "free_address", "map"])
def test_out_of_memory_elsewhere_than_in_create_is_about_mappings(call: str) -> None:
    """The kernel's limit of map areas: a shortage of addresses, not of the device's memory."""
    driver = HostDriver(DeviceModel([1 << 20], 4096))
    base, handle = driver.reserve(8192), driver.create(4096)
    driver.map(base, 4096, handle)
    driver.model.fail(call, 1, 2)
    actions = {
        "unmap": lambda: driver.unmap(base, 4096),
        "set_access": lambda: driver.set_access(base, 4096),
        "free_address": lambda: driver.free_address(base, 8192),
        "map": lambda: driver.map(base + 4096, 4096, handle),
    }
    with pytest.raises(OutOfAddressSpace, match=f"{call} on host:0 failed: out of memory .*vm.max_map_count"):
        actions[call]()


@pytest.mark.parametrize(("poison", "fresh_zero"), [(False, True), (True, False)])
def test_fresh_memory_is_zero_unless_it_is_poisoned(poison: bool, fresh_zero: bool) -> None:
    driver = HostDriver(DeviceModel([1 << 20], 4096))
    driver.model.poison = poison
    assert driver.quirks.fresh_zero is fresh_zero
