"""What every driver must do, whatever it drives. A driver's test file subclasses it.

Only `vmm_kv.driver.Driver` is used here, and what the subclass offers to look at memory. Where a driver's quirks
promise less, the tests ask for no more: chunks of one size on a grid (`uniform_chunks`), one unmap for each mapping
(`single_unmap`), no zeroing across the border of two (`single_memset`), memory that returns with the addresses
(`memory_with_addresses`).
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import pytest

from vmm_kv.driver import Driver
from vmm_kv.driver.handle_types import HANDLE_TYPES
from vmm_kv.errors import DriverError, OutOfAddressSpace, OutOfPhysicalMemory, StateError
from vmm_kv.spans import cut

NONE, READ_WRITE = 0, 3


class Bench:
    """A driver, and what the test made with it, which is undone in the contract's order when the test ends."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.granule = driver.granule
        self._mappings: dict[int, int] = {}
        self._handles: set[int] = set()
        self._reservations: dict[int, int] = {}

    def reserve(self, granules: int, alignment: int = 0, hint: int = 0) -> int:
        size = granules * self.granule
        base = self.driver.reserve(size, alignment, hint)
        self._reservations[base] = size
        return base

    def free_address(self, base: int) -> None:
        self.driver.free_address(base, self._reservations[base])
        del self._reservations[base]

    def create(self, granules: int = 1) -> int:
        handle = self.driver.create(granules * self.granule)
        self._handles.add(handle)
        return handle

    def release(self, handle: int) -> None:
        self.driver.release(handle)
        self._handles.discard(handle)

    def map(self, address: int, handle: int, granules: int = 1) -> None:
        self.driver.map(address, granules * self.granule, handle)
        self._mappings[address] = granules * self.granule

    def unmap(self, address: int, granules: int = 1) -> None:
        size = granules * self.granule
        self.driver.unmap(address, size)
        self._mappings = {a: s for a, s in self._mappings.items() if not address <= a < address + size}

    def chunk(self, address: int, granules: int = 1) -> int:
        """Creates, maps and grants."""
        handle = self.create(granules)
        self.map(address, handle, granules)
        self.driver.set_access(address, granules * self.granule)
        return handle

    def free(self) -> int:
        return self.driver.mem_info()[0]

    def clean(self) -> None:
        for address, size in self._mappings.items():
            self.driver.unmap(address, size)
        for handle in self._handles:
            self.driver.release(handle)
        for base, size in self._reservations.items():
            self.driver.free_address(base, size)


class DriverContract:
    """The tests.

    drift: bytes that others may take or give back while a test looks at the free memory. free_checks_size: whether
    `free_address` refuses a size that is not the reservation's (F1: HIP does not look at it).
    """

    drift = 0
    free_checks_size = True

    def peek(self, address: int, size: int) -> bytes:
        """Reads the device's memory. Here it is this process's own."""
        return ctypes.string_at(address, size)

    def poke(self, address: int, data: bytes) -> None:
        """Writes the device's memory. Here it is this process's own."""
        ctypes.memmove(address, data, len(data))

    # The subclass offers a fixture `driver` as well.

    @pytest.fixture
    def bench(self, driver: Driver) -> Iterator[Bench]:
        with driver.scope():
            bench = Bench(driver)
            try:
                yield bench
            finally:
                bench.clean()

    def refused(self, driver: Driver, call: str, action: Callable[[], object], *numbers: int) -> DriverError:
        """The action fails in the primitive `call`, and the text says which, where, and on what."""
        with pytest.raises(DriverError) as caught:
            action()
        error = caught.value
        assert error.call == call
        assert error.status != 0
        text = str(error)
        assert text.startswith(f"{call} on {driver.name} failed: ")
        assert f"({error.status})" in text
        for number in numbers:
            assert str(number) in text or hex(number) in text
        return error

    # What a driver says of itself.

    def test_names_and_sizes(self, driver: Driver) -> None:
        assert driver.name == f"{driver.kind}:{driver.index}"
        assert driver.granule >= 4096
        assert driver.granule & (driver.granule - 1) == 0
        with driver.scope():
            free, total = driver.mem_info()
        assert 0 < free <= total
        assert not driver.capturing()

    def test_says_what_the_device_is(self, driver: Driver) -> None:
        """Without a scope and without a primitive: it is asked before anything is decided."""
        before = dict(driver.calls())
        properties = driver.properties()
        assert properties.name
        assert properties.total > 0
        assert not properties.uuid or re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", properties.uuid)
        assert not properties.pci or re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", properties.pci)
        assert dict(driver.calls()) == before

    def test_says_how_handles_are_made(self, driver: Driver) -> None:
        traits = driver.memory_traits
        assert traits.handle_type in HANDLE_TYPES
        assert traits.handle_type not in dict(traits.refusals)

    def test_calls_are_counted_failed_ones_too(self, bench: Bench) -> None:
        before = dict(bench.driver.calls())
        base = bench.reserve(2)
        bench.chunk(base)
        self.refused(bench.driver, "create", lambda: bench.driver.create(1), 1)
        bench.driver.mem_info()
        after = bench.driver.calls()
        counted = {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}
        assert counted == {"reserve": 1, "create": 2, "map": 1, "set_access": 1, "mem_info": 1}

    # Addresses.

    def test_a_reservation_costs_no_memory(self, bench: Bench) -> None:
        free = bench.free()
        base = bench.reserve(64)
        assert base % bench.granule == 0
        assert abs(bench.free() - free) <= self.drift
        bench.free_address(base)

    def test_alignment_is_kept(self, bench: Bench) -> None:
        for shift in (0, 1, 4):
            assert bench.reserve(3, alignment=bench.granule << shift) % (bench.granule << shift) == 0

    def test_reservations_lie_apart(self, bench: Bench) -> None:
        bases = sorted(bench.reserve(4) for _ in range(5))
        assert all(b - a >= 4 * bench.granule for a, b in pairwise(bases))

    def test_reserve_takes_whole_granules(self, bench: Bench) -> None:
        for size in (0, 1, bench.granule + 1):
            self.refused(bench.driver, "reserve", partial(bench.driver.reserve, size), size)

    def test_addresses_run_out(self, bench: Bench) -> None:
        size = 1 << 60
        error = self.refused(bench.driver, "reserve", lambda: bench.driver.reserve(size), size)
        assert isinstance(error, OutOfAddressSpace)
        assert "reserve a smaller capacity" in str(error)

    def test_addresses_go_back_exactly_as_they_came(self, bench: Bench) -> None:
        driver, granule = bench.driver, bench.granule
        base = bench.reserve(4)
        wrong = [(base + granule, 3 * granule), (base + granule, 4 * granule)]
        if self.free_checks_size:
            wrong += [(base, 2 * granule), (base, 5 * granule)]
        for start, size in wrong:
            self.refused(driver, "free_address", partial(driver.free_address, start, size), start, size)
        bench.chunk(base + granule)
        self.refused(driver, "free_address", lambda: driver.free_address(base, 4 * granule), base)
        bench.unmap(base + granule)
        bench.free_address(base)
        self.refused(driver, "free_address", lambda: driver.free_address(base, 4 * granule), base)

    # Memory.

    def test_memory_counts_from_create_to_release(self, bench: Bench) -> None:
        free, total = bench.driver.mem_info()
        handle = bench.create(4)
        assert abs(bench.free() - (free - 4 * bench.granule)) <= self.drift
        bench.release(handle)
        assert abs(bench.free() - free) <= self.drift
        assert bench.driver.mem_info()[1] == total

    def test_mapping_and_unmapping_neither_take_nor_give_memory(self, bench: Bench) -> None:
        base, handle = bench.reserve(4), bench.create(2)
        free = bench.free()
        bench.map(base, handle, 2)
        bench.driver.set_access(base, 2 * bench.granule)
        assert abs(bench.free() - free) <= self.drift
        bench.unmap(base, 2)
        assert abs(bench.free() - free) <= self.drift

    def test_create_takes_whole_granules(self, bench: Bench) -> None:
        for size in (0, 1, bench.granule + 1):
            self.refused(bench.driver, "create", partial(bench.driver.create, size), size)

    def test_memory_runs_out(self, bench: Bench) -> None:
        free, total = bench.driver.mem_info()
        size = total + bench.granule
        size -= size % bench.granule
        error = self.refused(bench.driver, "create", lambda: bench.driver.create(size), size, total)
        assert isinstance(error, OutOfPhysicalMemory)
        assert f"asked for {size} bytes" in str(error)
        if not self.drift:
            assert f"{free} of {total} bytes are free" in str(error)
        assert abs(bench.free() - free) <= self.drift

    def test_a_handle_is_released_once(self, bench: Bench) -> None:
        handle = bench.create()
        bench.release(handle)
        self.refused(bench.driver, "release", lambda: bench.driver.release(handle), handle)

    def test_fresh_memory_is_zero_where_the_driver_says_so(self, bench: Bench) -> None:
        if not bench.driver.quirks.fresh_zero:
            pytest.skip("contents of fresh memory are undefined here")
        base = bench.reserve(1)
        for _ in range(2):
            handle = bench.chunk(base)
            assert self.peek(base, bench.granule) == bytes(bench.granule)
            self.poke(base, b"\xff" * bench.granule)
            bench.unmap(base)
            bench.release(handle)

    # Mapping.

    def test_pages_keep_their_contents_when_they_move(self, bench: Bench) -> None:
        base = bench.reserve(2)
        handle = bench.chunk(base)
        self.poke(base + 7, b"here")
        bench.unmap(base)
        bench.map(base + bench.granule, handle)
        bench.driver.set_access(base + bench.granule, bench.granule)
        assert self.peek(base + bench.granule + 7, 4) == b"here"

    def test_one_handle_lies_at_many_addresses(self, bench: Bench) -> None:
        base, handle = bench.reserve(8), bench.create()
        free = bench.free()
        for i in range(8):
            bench.map(base + i * bench.granule, handle)
        bench.driver.set_access(base, 8 * bench.granule)
        self.poke(base + 3 * bench.granule + 5, b"seen everywhere")
        assert all(self.peek(base + i * bench.granule + 5, 15) == b"seen everywhere" for i in range(8))
        assert abs(bench.free() - free) <= self.drift

    def test_memory_of_a_released_handle_stays_while_it_is_mapped(self, bench: Bench) -> None:
        base, free = bench.reserve(1), bench.free()
        handle = bench.chunk(base)
        self.poke(base, b"kept")
        bench.release(handle)
        assert self.peek(base, 4) == b"kept"
        bench.unmap(base)
        if bench.driver.quirks.memory_with_addresses:
            bench.free_address(base)
        assert abs(bench.free() - free) <= self.drift

    def test_map_refuses_what_is_mapped(self, bench: Bench) -> None:
        base = bench.reserve(6)
        bench.chunk(base + 2 * bench.granule, 2)
        handle = bench.create(2)
        for i in (1, 2, 3):
            address = base + i * bench.granule
            self.refused(bench.driver, "map", partial(bench.map, address, handle, 2), address)

    def test_map_takes_whole_handles_inside_a_reservation(self, bench: Bench) -> None:
        base, handle = bench.reserve(4), bench.create(2)
        self.refused(bench.driver, "map", lambda: bench.map(base, handle, 1), base)
        self.refused(bench.driver, "map", lambda: bench.map(base, handle, 3), base)
        beyond = base + 3 * bench.granule
        self.refused(bench.driver, "map", lambda: bench.map(beyond, handle, 2), beyond)

    def test_unmap_takes_whole_mappings_without_a_gap(self, bench: Bench) -> None:
        quirks = bench.driver.quirks
        base, last = bench.reserve(8), 2 if quirks.uniform_chunks else 1
        bench.chunk(base, 2)
        bench.chunk(base + 2 * bench.granule, 2)
        bench.chunk(base + 6 * bench.granule, last)
        for start, count in ((0, 1), (1, 1), (1, 2), (0, 3), (0, 6), (0, 8), (4, 2), (4, 4), (7, 1)):
            address = base + start * bench.granule
            self.refused(bench.driver, "unmap", partial(bench.unmap, address, count), address)
        for start, count in ((0, 2), (2, 2)) if quirks.single_unmap else ((0, 4),):
            bench.unmap(base + start * bench.granule, count)
        bench.unmap(base + 6 * bench.granule, last)
        bench.free_address(base)

    # Access.

    def test_access_is_none_until_it_is_granted(self, bench: Bench) -> None:
        base, handle = bench.reserve(2), bench.create()
        bench.map(base, handle)
        assert bench.driver.get_access(base) == NONE
        bench.driver.set_access(base, bench.granule)
        assert bench.driver.get_access(base) == READ_WRITE
        self.poke(base, b"x")
        bench.unmap(base)
        bench.map(base, handle)
        assert bench.driver.get_access(base) == NONE, "a new mapping starts without"

    def test_access_of_what_is_not_mapped(self, bench: Bench) -> None:
        base = bench.reserve(4)
        self.refused(bench.driver, "get_access", lambda: bench.driver.get_access(base), base)
        bench.chunk(base, 2)
        beyond = base + 2 * bench.granule
        self.refused(bench.driver, "set_access", lambda: bench.driver.set_access(beyond, bench.granule), beyond)

    def test_one_grant_covers_a_run_of_mappings(self, bench: Bench) -> None:
        base = bench.reserve(4)
        for i in range(3):
            bench.map(base + i * bench.granule, bench.create())
        bench.driver.set_access(base, 3 * bench.granule)
        assert [bench.driver.get_access(base + i * bench.granule) for i in range(3)] == [READ_WRITE] * 3

    # Contents.

    def test_zero_takes_spans_to_the_byte(self, bench: Bench) -> None:
        base, size = bench.reserve(3), 3 * bench.granule
        for i in range(3):
            bench.chunk(base + i * bench.granule)
        self.poke(base, b"\xaa" * size)
        spans = ((5, 6), (17, 100), (bench.granule - 3, 2 * bench.granule + 1))
        borders = (bench.granule, 2 * bench.granule) if bench.driver.quirks.single_memset else ()
        bench.driver.zero([(base + start, base + stop) for start, stop in cut(spans, borders, None)])
        expected = bytearray(b"\xaa" * size)
        for start, stop in spans:
            expected[start:stop] = bytes(stop - start)
        assert self.peek(base, size) == bytes(expected)
        bench.driver.zero([])

    def test_synchronize_returns(self, bench: Bench) -> None:
        bench.driver.synchronize()

    def test_peak_is_the_most_in_use(self, bench: Bench) -> None:
        driver = bench.driver
        start = driver.peak_used(reset=True)
        if start is None:
            pytest.skip("this driver does not tell")
        start = driver.peak_used()
        assert start is not None
        handle = bench.create(4)
        bench.release(handle)
        assert driver.peak_used(reset=True) == start + 4 * bench.granule
        assert driver.peak_used() == start

    # Moments.

    def test_scope_nests(self, driver: Driver) -> None:
        with driver.scope(), driver.scope():
            driver.mem_info()
        with driver.scope():
            driver.mem_info()

    def test_any_thread_may_enter_a_scope(self, driver: Driver) -> None:
        """G2: a thread that never met the device, and that leaves with nothing of it."""
        seen: list[object] = []

        def work() -> None:
            try:
                with driver.scope():
                    seen.append(driver.mem_info()[1])
            except BaseException as error:
                seen.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with driver.scope():
            assert seen == [driver.mem_info()[1]]

    def test_scope_refuses_a_forked_child(self, driver: Driver) -> None:
        """C85. The exit status is all that comes back: 0 for `StateError` before any call."""
        before = dict(driver.calls())
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with driver.scope():
                    code = 2
            except StateError as error:
                code = 0 if "forked child" in str(error) and dict(driver.calls()) == before else 3
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
