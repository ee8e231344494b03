"""Which figures for free and total memory are believed. Case numbers are those of public faults in other engines."""

from __future__ import annotations

import re

import pytest

from vmm_kv.budget import BudgetError, requested_bytes
from vmm_kv.driver import DeviceProperties
from vmm_kv.errors import VmmError
from vmm_kv.measure import MemoryReading, plan_from_readings, read_memory
from vmm_kv.memory_source import DeviceMemory, HostFigures, SecondSource, as_told, resolve
from vmm_kv.request import Request

MIB = 1 << 20
GIB = 1 << 30


def gib(value: float) -> int:
    return round(value * GIB)


def device(total: float = 0, *, integrated: bool = False, multi_instance: bool = False) -> DeviceProperties:
    """A device whose own property says `total` GiB, 0 for not known."""
    return DeviceProperties("a GPU", "", "", integrated, gib(total), multi_instance)


def host(total: float, available: float, free: float = 0) -> HostFigures:
    """The machine's memory in GiB."""
    return HostFigures(gib(total), gib(free), gib(available))


class Allocator:
    """A framework that holds nothing."""

    def allocated(self) -> int:
        return 0

    reserved = peak_reserved = allocated

    def reset_peak(self) -> None: ...

    empty_cache = synchronize = reset_peak


def reading(label: str, memory: DeviceMemory) -> MemoryReading:
    return MemoryReading(label, memory.free, memory.total, 0, 0, 0, 0.0, None, memory.source, memory.told, memory.notes)


def test_a_pair_that_agrees_is_believed() -> None:
    assert resolve(gib(70), gib(80), device(80)) == DeviceMemory(gib(70), gib(80), "driver", (), None)


@pytest.mark.parametrize(("free", "total"), [(0, 80), (80, 80)])
def test_nothing_and_everything_free_are_no_contradiction(free: float, total: float) -> None:
    """C34: equal is not an error."""
    assert resolve(gib(free), gib(total), device(total)).free == gib(free)


# C41: unified memory


C41 = resolve(gib(26.5), gib(119.56), device(119.56, integrated=True), host(119.56, 56.3, 26.5))


def test_c41_a_device_that_shares_the_machines_memory_has_what_the_host_has_available() -> None:
    assert (C41.free, C41.total, C41.source) == (gib(56.3), gib(119.56), "host available")
    assert C41.told == (gib(26.5), gib(119.56))
    assert "MemFree is 26.50 GiB" in C41.notes[0] and "min_free_kbytes" in C41.notes[0]


def test_c41_the_shortage_names_its_source_and_the_raw_figures() -> None:
    """Wanted 59.78 GiB, available 56.3: short by 3.48, no negative or wrapped number."""
    wanted = requested_bytes(C41.total, 0.5)
    assert round(wanted / GIB, 2) == 59.78
    with pytest.raises(BudgetError, match=r"short by 3\.48 GiB") as caught:
        plan_from_readings(
            [reading("R0", C41), reading("R1", C41)],
            request=Request(kv_bytes=wanted),
            capacity=1 << 20,
            cost=lambda n: n * MIB,
            blocks_within=lambda budget: budget // MIB,
            peak_of_step=None,
            min_blocks=wanted // MIB,
        )
    text = str(caught.value)
    assert "note: the device shares the machine's memory" in text
    assert f"{gib(56.3)} bytes" in text and f"{gib(26.5)} bytes" in text
    assert caught.value.plan is not None and C41.notes[0] in caught.value.plan.notes


def test_c41_a_plan_that_fits_says_so_too() -> None:
    plan = plan_from_readings(
        [reading("R0", C41), reading("R1", C41)],
        request=Request(utilization=0.4),
        capacity=1 << 20,
        cost=lambda n: n * MIB,
        blocks_within=lambda budget: budget // MIB,
        peak_of_step=None,
    )
    assert plan.notes[-1] == C41.notes[0]
    assert plan.blocks == int(0.4 * 119.56 * 1024)


def test_c41_what_is_available_never_exceeds_the_device() -> None:
    assert resolve(gib(1), gib(100), device(100, integrated=True), host(110, 105)).free == gib(100)


def test_an_integrated_device_without_host_figures_is_as_the_driver_tells() -> None:
    assert resolve(gib(20), gib(100), device(100, integrated=True)).source == "driver"


# C42: free above total


FREE_42, TOTAL_42, FILES_42 = 102891683840, 16631242752, 103079215104


@pytest.mark.parametrize("integrated", [False, True])
def test_c42_without_a_second_source_it_is_an_error_with_the_pair(integrated: bool) -> None:
    with pytest.raises(VmmError, match=rf"inconsistent.*{FREE_42} bytes.*{TOTAL_42} bytes.*no budget can be computed"):
        resolve(FREE_42, TOTAL_42, device(integrated=integrated), host(31, 20))


@pytest.mark.parametrize("integrated", [False, True])
@pytest.mark.parametrize("free", [None, FREE_42])
def test_c42_a_second_source_is_used(integrated: bool, free: int | None) -> None:
    properties = DeviceProperties("an APU", "", "", integrated, TOTAL_42, False)
    found = resolve(FREE_42, TOTAL_42, properties, host(31, 20), SecondSource("system files", FILES_42, free))
    assert (found.free, found.total, found.source) == (FREE_42, FILES_42, "system files")
    assert found.told == (FREE_42, TOTAL_42)
    assert round(requested_bytes(found.total, 0.9) / GIB, 2) == 86.40


def test_c42_a_second_source_that_contradicts_it_too_is_an_error_with_both() -> None:
    with pytest.raises(VmmError, match=rf"{TOTAL_42} bytes.*system files.*{FREE_42} bytes.*{90 * GIB} bytes"):
        resolve(FREE_42, TOTAL_42, device(), None, SecondSource("system files", 90 * GIB))


def test_c42_a_reading_names_itself_in_the_error() -> None:
    with pytest.raises(VmmError, match=f"reading 'start'.*{FREE_42} bytes.*{TOTAL_42} bytes"):
        read_memory("start", lambda: (FREE_42, TOTAL_42), Allocator(), 0, resolve=lambda f, t: resolve(f, t, device()))
    with pytest.raises(VmmError, match=f"reading 'start'.*{FREE_42} bytes.*{TOTAL_42} bytes"):
        read_memory("start", lambda: (FREE_42, TOTAL_42), Allocator(), 0)


@pytest.mark.parametrize("pair", [(-1, GIB), (GIB + 1, GIB), (1, 0)])
def test_a_pair_that_contradicts_itself_is_an_error(pair: tuple[int, int]) -> None:
    with pytest.raises(VmmError, match="inconsistent"):
        as_told(*pair)
    with pytest.raises(VmmError, match="inconsistent"):
        resolve(*pair, device(integrated=True), host(128, 100))


# C43: linked cards


@pytest.mark.parametrize(("free", "used"), [(190, 32), (20, 20)])
def test_c43_a_pooled_total_is_capped_by_the_device(free: float, used: float) -> None:
    found = resolve(gib(free), gib(192), device(32))
    assert (found.free, found.total, found.source) == (gib(used), gib(32), "device property")
    assert requested_bytes(found.total, 0.9) == pytest.approx(gib(28.8), abs=1)
    assert re.search(r"192\.00 GiB.*32\.00 GiB.*linked", found.notes[0])
    assert found.told == (gib(free), gib(192))


# C44: slices


@pytest.mark.parametrize("tool", [None, SecondSource("management library", 141 * 10**9, 130 * 10**9)])
def test_c44_a_slice_is_what_the_driver_tells_of_it(tool: SecondSource | None) -> None:
    """A permission error of the library is None here, not 0."""
    found = resolve(gib(15), gib(16), device(16, multi_instance=True), None, tool)
    assert (found.free, found.total, found.source) == (gib(15), gib(16), "driver")
    assert requested_bytes(found.total, 0.9) == pytest.approx(gib(14.4), abs=1)


def test_c44_the_whole_gpus_figures_never_repair_a_slices() -> None:
    with pytest.raises(VmmError, match="inconsistent"):
        resolve(gib(17), gib(16), device(multi_instance=True), None, SecondSource("management library", 141 * 10**9))


# C45: APUs


@pytest.mark.parametrize("second", [None, SecondSource("system files", 0, 0, gib(128))])
def test_c45_no_memory_of_its_own(second: SecondSource | None) -> None:
    found = resolve(0, 0, device(integrated=True), host(128, 100), second)
    assert (found.free, found.total, found.source) == (gib(100), gib(128), "host available")


def test_c45_a_tiny_carve_out_beside_a_large_pool() -> None:
    second = SecondSource("system files", gib(0.5), gib(0.4), gib(110))
    found = resolve(gib(0.4), gib(0.5), device(0.5, integrated=True), host(120, 90), second)
    assert (found.free, found.total, found.source) == (gib(90), gib(110), "host available")


@pytest.mark.parametrize("second", [None, SecondSource("system files", gib(96), gib(90), gib(16))])
def test_c45_a_large_carve_out_is_not_bounded_by_the_host(second: SecondSource | None) -> None:
    found = resolve(gib(90), gib(96), device(96, integrated=True), host(32, 20), second)
    assert (found.free, found.total, found.source) == (gib(90), gib(96), "driver")


def test_c45_a_device_of_its_own_without_memory_is_an_error() -> None:
    with pytest.raises(VmmError, match="nobody else tells how much memory it has"):
        resolve(0, 0, device())


# Readings


def test_a_reading_keeps_the_source_and_takes_the_sample_with_most_free() -> None:
    available = iter([50, 56, 53])
    found = read_memory(
        "R0",
        lambda: (gib(20), gib(120)),
        Allocator(),
        0,
        resolve=lambda f, t: resolve(f, t, device(120, integrated=True), host(120, next(available))),
    )
    assert (found.free, found.source, found.told) == (gib(56), "host available", (gib(20), gib(120)))
    assert "56.00 GiB" in found.notes[0]


def test_a_reading_from_the_driver_has_nothing_to_note() -> None:
    found = read_memory("R0", lambda: (1, 2), Allocator(), 0)
    assert (found.source, found.told, found.notes) == ("driver", None, ())
