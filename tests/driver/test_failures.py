"""Statuses become errors that name the call, the device, the bytes and what to change."""

from __future__ import annotations

import pytest

from vmm_kv.driver.failures import failure
from vmm_kv.errors import DriverError, DriverGone, OutOfAddressSpace, OutOfPhysicalMemory


@pytest.mark.parametrize(
    ("where", "call", "kind", "advice"),
    [
        ("cuda:1", "create", OutOfPhysicalMemory, "Ask for fewer blocks"),
        ("hip:0", "reserve", OutOfAddressSpace, "Addresses ran out, not memory"),
        ("host:0", "map", OutOfAddressSpace, "vm.max_map_count"),
        ("cuda:0", "map", OutOfAddressSpace, "no memory for more mappings"),
        ("hip:0", "unmap", OutOfAddressSpace, "no memory for more mappings"),
    ],
)
def test_out_of_memory_means_what_the_call_makes_of_it(
    where: str, call: str, kind: type[DriverError], advice: str
) -> None:
    error = failure(where, call, 2, "out of memory", "4096 bytes", "8 bytes free of 16")
    assert type(error) is kind
    assert (error.call, error.status) == (call, 2)
    text = str(error)
    assert text.startswith(f"{call} on {where} failed: out of memory (2); asked for 4096 bytes; 8 bytes free of 16. ")
    assert advice in text
    assert ("max_map_count" in text) is (where == "host:0")


def test_a_driver_that_has_shut_down_is_gone() -> None:
    assert type(failure("cuda:0", "unmap", 4, "deinitialized", "4096 bytes")) is DriverGone


def test_any_other_status_is_told_as_it_is() -> None:
    error = failure("cuda:0", "map", 999, "unknown", "4096 bytes at 0x1000")
    assert type(error) is DriverError
    assert str(error) == "map on cuda:0 failed: unknown (999); asked for 4096 bytes at 0x1000"
