"""The device model, rule by rule, and the lease.

The rows (R1, M3, ...) are the rules that the CUDA driver documents or is seen to keep. What ends or starves a process
is tried in a child process.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from vmm_kv._native import DeviceModel, Lease

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
G = 2 * MIB
NONE, READ, READ_WRITE = 0, 1, 3
OK, INVALID, OUT_OF_MEMORY, BAD_DEVICE = 0, 1, 2, 101
HUGE = 2**64 - G  # with any address but 0 added, it leaves 64 bits


class Rig:
    """A model of two devices, with shortcuts that insist on success."""

    def __init__(self, budgets: tuple[int, ...] = (16 * G, 8 * G), granule: int = G) -> None:
        self.model = DeviceModel(budgets, granule)

    def reserve(self, size: int = 8 * G, alignment: int = 0, hint: int = 0) -> int:
        status, base = self.model.reserve(size, alignment, hint)
        assert status == OK
        return base

    def create(self, size: int = G, device: int = 0) -> int:
        status, handle = self.model.create(device, size)
        assert status == OK
        return handle

    def map(self, address: int, handle: int, size: int = G) -> None:
        assert self.model.map(address, size, 0, handle) == OK

    def grant(self, address: int, size: int = G, device: int = 0, access: int = READ_WRITE) -> None:
        assert self.model.set_access(address, size, device, access) == OK

    def chunk(self, address: int, size: int = G) -> int:
        """Creates, maps and grants."""
        handle = self.create(size)
        self.map(address, handle, size)
        self.grant(address, size)
        return handle

    def access(self, address: int, device: int = 0) -> int:
        status, access = self.model.get_access(address, device)
        assert status == OK
        return access

    def free(self, device: int = 0) -> int:
        return self.model.mem_info(device)[1]

    def state(self) -> object:
        """All that a call which failed must leave alone."""
        m = self.model
        spans = m.mapped()
        access = [m.get_access(address, d) for address, _ in spans for d in range(m.devices)]
        return m.live(), spans, access, [(m.used(d), m.peak_used(d)) for d in range(m.devices)]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def peek(address: int, size: int = 1) -> bytes:
    return ctypes.string_at(address, size)


def poke(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def areas(base: int, size: int) -> list[str]:
    """The protections of the kernel's map areas that touch a range."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, protection = line.split()[:2]
        start, end = (int(n, 16) for n in span.split("-"))
        if start < base + size and base < end:
            found.append(protection)
    return found


def resident() -> int:
    """Bytes of this process in memory."""
    fields = Path("/proc/self/status").read_text().split()
    return int(fields[fields.index("VmRSS:") + 1]) * KIB


def child(body: str) -> subprocess.CompletedProcess[str]:
    preamble = "import ctypes, os, sys\nfrom vmm_kv._native import DeviceModel, Lease\n"
    return subprocess.run([sys.executable, "-c", preamble + body], capture_output=True, text=True, timeout=100)


# --- The rules -------------------------------------------------------------------------------------------------------

RULES: list[tuple[str, Callable[[Rig], None]]] = []


def rule(row: str) -> Callable[[Callable[[Rig], None]], Callable[[Rig], None]]:
    def register(check: Callable[[Rig], None]) -> Callable[[Rig], None]:
        RULES.append((row, check))
        return check

    return register


@rule("R1")
def reserve_takes_whole_granules(rig: Rig) -> None:
    for size in (0, 1, G - 1, G + 4096):
        assert rig.model.reserve(size, 0, 0) == (INVALID, 0)
    assert rig.reserve(G) % G == 0


@rule("R2")
def alignment_is_zero_or_a_power_of_two(rig: Rig) -> None:
    for alignment in (3, G + 1, 3 * G):
        assert rig.model.reserve(G, alignment, 0) == (INVALID, 0)
    for alignment in (1, 4096, G, 64 * MIB, GIB):
        assert rig.reserve(3 * G, alignment) % max(alignment, G) == 0


@rule("R3")
def hint_is_a_wish(rig: Rig) -> None:
    base = rig.reserve(4 * G)
    assert rig.model.free_address(base, 4 * G) == OK
    assert rig.reserve(4 * G, hint=base) == base
    assert rig.reserve(4 * G, hint=base) != base, "taken: another address, and no error"
    assert rig.reserve(G, alignment=GIB, hint=base | 4096) % GIB == 0
    assert rig.reserve(G, hint=HUGE) != HUGE
    assert rig.model.reserve(G, 0, base + 1) == (INVALID, 0)


@rule("R4")
def reserve_knows_no_flags(rig: Rig) -> None:
    assert rig.model.reserve(G, 0, 0, 1) == (INVALID, 0)


@rule("R5")
def addresses_run_out(rig: Rig) -> None:
    for size in (1 << 48, 1 << 63, HUGE):
        assert rig.model.reserve(size, 0, 0) == (OUT_OF_MEMORY, 0)
    assert rig.model.reserve(G, 1 << 63, 0) == (OUT_OF_MEMORY, 0)
    assert rig.model.live()["reservations"] == 0


@rule("F1")
def free_takes_exactly_what_was_reserved(rig: Rig) -> None:
    base = rig.reserve(4 * G)
    for wrong in ((base, 2 * G), (base + G, 3 * G), (base, 8 * G), (0, 4 * G), (base, 0), (base, HUGE)):
        assert rig.model.free_address(*wrong) == INVALID
    assert rig.model.free_address(base, 4 * G) == OK
    assert rig.model.free_address(base, 4 * G) == INVALID


@rule("F2")
def free_refuses_what_is_mapped(rig: Rig) -> None:
    base = rig.reserve(4 * G)
    rig.chunk(base + 2 * G)
    assert rig.model.free_address(base, 4 * G) == INVALID
    assert rig.model.unmap(base + 2 * G, G) == OK
    assert rig.model.free_address(base, 4 * G) == OK


@rule("C1")
def create_takes_whole_granules(rig: Rig) -> None:
    for size in (0, 1, G - 1, G + 4096):
        assert rig.model.create(0, size) == (INVALID, 0)


@rule("C2")
def memory_runs_out(rig: Rig) -> None:
    rig.create(15 * G)
    for size in (2 * G, 16 * G, 1 << 62, HUGE):
        assert rig.model.create(0, size) == (OUT_OF_MEMORY, 0)
    rig.create(G)
    assert rig.model.create(0, G) == (OUT_OF_MEMORY, 0)
    rig.create(8 * G, device=1)


@rule("C3")
def device_must_exist(rig: Rig) -> None:
    for device in (-1, 2, 1 << 20):
        assert rig.model.create(device, G) == (BAD_DEVICE, 0)
        assert rig.model.mem_info(device) == (BAD_DEVICE, 0, 0)
        assert rig.model.charge(device, 1) == BAD_DEVICE
        assert rig.model.credit(device, 1) == BAD_DEVICE
        with pytest.raises(ValueError, match=f"no device {device}; the model has 2"):
            rig.model.used(device)


@rule("C4")
def create_knows_no_flags(rig: Rig) -> None:
    assert rig.model.create(0, G, 1) == (INVALID, 0)


@rule("C7")
def fresh_memory_is_zero_or_poisoned(rig: Rig) -> None:
    base = rig.reserve()
    for poison, expected in ((False, b"\0"), (True, b"\xff"), (False, b"\0")):
        rig.model.poison = poison
        handle = rig.chunk(base)
        assert peek(base, G) == expected * G
        poke(base, b"left over" * 100)
        assert rig.model.unmap(base, G) == OK
        assert rig.model.release(handle) == OK


@rule("C8")
def memory_counts_from_create_to_the_last_holder(rig: Rig) -> None:
    base = rig.reserve()
    assert rig.free() == 16 * G
    handle = rig.create(2 * G)
    assert rig.free() == 14 * G
    rig.map(base, handle, 2 * G)
    rig.map(base + 2 * G, handle, 2 * G)
    assert rig.free() == 14 * G
    assert rig.model.release(handle) == OK
    assert rig.model.unmap(base, 2 * G) == OK
    assert rig.free() == 14 * G
    assert rig.model.unmap(base + 2 * G, 2 * G) == OK
    assert rig.free() == 16 * G

    handle = rig.create()
    rig.map(base, handle)
    assert rig.model.unmap(base, G) == OK
    assert rig.free() == 15 * G
    assert rig.model.release(handle) == OK
    assert rig.free() == 16 * G


@rule("M1")
def map_stays_inside_one_reservation(rig: Rig) -> None:
    base = rig.reserve(4 * G)
    neighbour, _ = rig.model.reserve(4 * G, 0, base + 4 * G)
    handle = rig.create(2 * G)
    for address in (base - 2 * G, base - G, base + 3 * G, 0, HUGE):
        assert rig.model.map(address, 2 * G, 0, handle) == INVALID, (hex(address), hex(neighbour))
    rig.map(base + 2 * G, handle, 2 * G)


@rule("M2")
def map_takes_nothing_that_is_mapped(rig: Rig) -> None:
    base = rig.reserve()
    rig.chunk(base + 2 * G, 2 * G)
    handle = rig.create(2 * G)
    for offset in (1, 2, 3):
        assert rig.model.map(base + offset * G, 2 * G, 0, handle) == INVALID
    rig.map(base, handle, 2 * G)
    rig.map(base + 4 * G, handle, 2 * G)


@rule("M3")
def map_is_aligned_whole_and_without_flags(rig: Rig) -> None:
    base, handle = rig.reserve(), rig.create(2 * G)
    assert rig.model.map(base + 4096, 2 * G, 0, handle) == INVALID
    assert rig.model.map(base, 2 * G + 4096, 0, handle) == INVALID
    assert rig.model.map(base, 0, 0, handle) == INVALID
    assert rig.model.map(base, G, G, handle) == INVALID, "offset"
    assert rig.model.map(base, 2 * G, 0, handle, 1) == INVALID, "flags"


@rule("M4")
def map_takes_whole_handles(rig: Rig) -> None:
    base, handle = rig.reserve(), rig.create(2 * G)
    for size in (G, 3 * G, HUGE):
        assert rig.model.map(base, size, 0, handle) == INVALID


@rule("M5")
def one_handle_lies_at_many_addresses(rig: Rig) -> None:
    base, handle = rig.reserve(), rig.create()
    for i in range(8):
        rig.map(base + i * G, handle)
    rig.grant(base, 8 * G)
    poke(base + 3 * G + 5, b"seen everywhere")
    assert all(peek(base + i * G + 5, 15) == b"seen everywhere" for i in range(8))
    assert rig.free() == 15 * G


@rule("M6")
def pages_cannot_be_touched_before_access_is_granted(rig: Rig) -> None:
    base, handle = rig.reserve(), rig.create()
    rig.map(base, handle)
    assert rig.access(base) == NONE
    assert set(areas(base, G)) == {"---s"}


@rule("M7")
def handle_may_go_while_it_is_mapped(rig: Rig) -> None:
    base = rig.reserve()
    handle = rig.chunk(base)
    poke(base, b"kept")
    assert rig.model.release(handle) == OK
    assert rig.model.live() == {"handles": 0, "mappings": 1, "reservations": 1}
    assert peek(base, 4) == b"kept"
    rig.chunk(base + G)
    assert peek(base, 4) == b"kept", "memory of a mapping is not handed out again"
    assert rig.model.map(base + 2 * G, G, 0, handle) == INVALID, "but the handle is gone"


@rule("A1")
def access_is_granted_to_whole_mappings(rig: Rig) -> None:
    base = rig.reserve()
    rig.map(base, rig.create(2 * G), 2 * G)
    rig.map(base + 2 * G, rig.create())
    rig.map(base + 4 * G, rig.create())
    wrong = ((base, G), (base + G, G), (base + G, 2 * G), (base, 4 * G), (base + 2 * G, 3 * G), (base + 3 * G, G))
    for address, size in (*wrong, (base, 0), (base, HUGE), (base, 2 * G - 1)):
        assert rig.model.set_access(address, size, 0, READ_WRITE) == INVALID
        assert rig.access(base) == rig.access(base + 2 * G) == rig.access(base + 4 * G) == NONE
    rig.grant(base, 3 * G)
    assert [rig.access(base + offset) for offset in (0, G, 3 * G - 1, 4 * G)] == [3, 3, 3, 0]


@rule("A2")
def access_is_none_read_or_read_write(rig: Rig) -> None:
    base = rig.reserve()
    rig.chunk(base)
    for access in (-1, 2, 4, 7):
        assert rig.model.set_access(base, G, 0, access) == INVALID
    for access, protection in ((READ, "r--s"), (NONE, "---s"), (READ_WRITE, "rw-s")):
        rig.grant(base, access=access)
        assert (rig.access(base), areas(base, G)) == (access, [protection])


@rule("A3")
def access_is_for_a_device_that_exists(rig: Rig) -> None:
    base = rig.reserve()
    rig.chunk(base)
    for device in (-1, 2):
        assert rig.model.set_access(base, G, device, READ_WRITE) == BAD_DEVICE
        assert rig.model.get_access(base, device) == (BAD_DEVICE, 0)
        assert rig.model.zero(base, G, device) == BAD_DEVICE


@rule("A4")
def access_belongs_to_device_and_mapping(rig: Rig) -> None:
    base = rig.reserve()
    handle = rig.chunk(base)
    rig.map(base + G, handle)
    assert (rig.access(base, 0), rig.access(base, 1), rig.access(base + G, 0)) == (READ_WRITE, NONE, NONE)
    rig.grant(base, device=1, access=READ)
    rig.grant(base, device=0, access=NONE)
    assert areas(base, G) == ["r--s"], "the pages allow what any device may do"
    rig.grant(base, device=0)
    assert areas(base, G) == ["rw-s"]
    assert rig.access(base, 1) == READ

    assert rig.model.unmap(base, G) == OK
    rig.map(base, handle)
    assert (rig.access(base, 0), rig.access(base, 1)) == (NONE, NONE)
    assert areas(base, G) == ["---s"]


@rule("A5")
def access_of_nothing_is_an_error(rig: Rig) -> None:
    base = rig.reserve()
    rig.chunk(base + G)
    for address in (0, base, base + 2 * G, base + G - 1, HUGE):
        assert rig.model.get_access(address, 0) == (INVALID, 0)


@rule("U1")
def unmap_takes_whole_mappings(rig: Rig) -> None:
    base = rig.reserve()
    for i, size in ((0, 2), (2, 1), (3, 1), (5, 1)):
        rig.chunk(base + i * G, size * G)
    wrong = ((0, 1), (1, 1), (1, 3), (0, 5), (3, 3), (4, 1), (0, 0))
    for i, size in wrong:
        assert rig.model.unmap(base + i * G, size * G) == INVALID
    for odd in (HUGE, 2 * G - 4096):
        assert rig.model.unmap(base, odd) == INVALID
    assert rig.model.live()["mappings"] == 4
    assert rig.model.unmap(base, 4 * G) == OK, "several adjacent mappings at once"
    assert rig.model.mapped() == [(base + 5 * G, G)]
    assert areas(base, 4 * G) == ["---p"]


@rule("L1")
def release_is_once(rig: Rig) -> None:
    base, handle = rig.reserve(), rig.create()
    for wrong in (0, handle + 1, handle - 1, 2**64 - 1):
        assert rig.model.release(wrong) == INVALID
        assert rig.model.map(base, G, 0, wrong) == INVALID
    assert rig.model.release(handle) == OK
    assert rig.model.release(handle) == INVALID
    assert rig.create() != handle, "never used again"


@pytest.mark.parametrize("check", [pytest.param(check, id=row) for row, check in RULES])
def test_rule(rig: Rig, check: Callable[[Rig], None]) -> None:
    check(rig)


@pytest.mark.parametrize(("budgets", "granule"), [((), G), ((G,) * 33, G), ((G,), 0), ((G,), 3 * 4096), ((G,), 2048)])
def test_a_model_that_cannot_be(budgets: tuple[int, ...], granule: int) -> None:
    with pytest.raises(ValueError, match=r"granule is|budgets; 1 to 32"):
        DeviceModel(budgets, granule)


# --- Budgets ---------------------------------------------------------------------------------------------------------


def test_devices_have_budgets_of_their_own(rig: Rig) -> None:
    rig.create(3 * G, device=0)
    rig.create(5 * G, device=1)
    assert rig.model.mem_info(0) == (OK, 13 * G, 16 * G)
    assert rig.model.mem_info(1) == (OK, 3 * G, 8 * G)
    assert (rig.model.devices, rig.model.granule, rig.model.budget(1)) == (2, G, 8 * G)


def test_charge_and_credit_share_the_budget_with_handles(rig: Rig) -> None:
    m = rig.model
    assert m.charge(0, 10 * G + 1) == OK
    assert m.charge(0, 6 * G) == OUT_OF_MEMORY
    assert m.charge(0, 2**64 - 1) == OUT_OF_MEMORY
    assert m.create(0, 6 * G) == (OUT_OF_MEMORY, 0)
    rig.create(5 * G)
    assert m.used(0) == 15 * G + 1
    assert m.credit(0, 10 * G + 2) == INVALID, "more than was charged: those bytes are a handle's"
    assert m.credit(0, 10 * G + 1) == OK
    assert (m.used(0), m.peak_used(0)) == (5 * G, 15 * G + 1)
    assert "charge" not in m.calls()


def test_peak(rig: Rig) -> None:
    m = rig.model
    handle = rig.create(3 * G)
    m.release(handle)
    assert m.create(0, 17 * G)[0] == OUT_OF_MEMORY
    assert (m.used(0), m.peak_used(0)) == (0, 3 * G), "a failure leaves no peak"
    rig.create(G)
    m.reset_peak(0)
    assert m.peak_used(0) == G


# --- Memory ----------------------------------------------------------------------------------------------------------


def test_a_large_reservation_costs_nothing(rig: Rig) -> None:
    before = resident()
    base = rig.reserve(TIB)
    assert resident() - before < 8 * MIB
    assert areas(base, TIB) == ["---p"]


def test_a_large_budget_costs_what_is_written() -> None:
    rig = Rig((80 * GIB,))
    base = rig.reserve(80 * GIB)
    before = resident()
    status, handles = rig.model.map_chunks(base, 2 * GIB, 40, 0)
    assert (status, len(handles), rig.free()) == (OK, 40, 0)
    for i in range(40):
        poke(base + i * 2 * GIB + GIB, b"x")
    assert resident() - before < 256 * MIB, "a page each, or a huge page"


def test_contiguous_chunks_are_one_area(rig: Rig) -> None:
    base = rig.reserve(16 * G)
    for i in range(8):
        rig.chunk(base + i * G)
    assert areas(base, 8 * G) == ["rw-s"]


def test_freed_extents_join_and_are_used_again(rig: Rig) -> None:
    base = rig.reserve(16 * G)
    first = [rig.create() for _ in range(16)]
    for handle in (*first[1:8:2], *first[0:8:2]):
        assert rig.model.release(handle) == OK
    rig.chunk(base, 8 * G)
    rig.map(base + 8 * G, first[8])
    rig.grant(base + 8 * G)
    assert areas(base, 9 * G) == ["rw-s"], "the eight joined, and lie right before the ninth"


def test_remapping_swaps_the_pages_under_an_address(rig: Rig) -> None:
    base = rig.reserve()
    old = rig.chunk(base)
    poke(base, b"old")
    assert rig.model.unmap(base, G) == OK
    new = rig.chunk(base)
    assert peek(base, 3) == b"\0\0\0"
    assert rig.model.unmap(base, G) == OK
    rig.map(base, old)
    rig.grant(base)
    assert peek(base, 3) == b"old"
    assert new != old


def test_zero_writes_bytes_where_the_device_may_write(rig: Rig) -> None:
    m = rig.model
    base = rig.reserve()
    rig.chunk(base)
    rig.chunk(base + G)
    poke(base, b"\xff" * 2 * G)
    assert m.zero(base + G - 3, 7, 0) == OK
    assert peek(base + G - 4, 9) == b"\xff" + b"\0" * 7 + b"\xff"
    assert m.zero(base, 0, 0) == OK

    for address, size in ((base - 1, 2), (base + 2 * G - 1, 2), (base + 4 * G, 1), (base, HUGE), (base, 2**64 - 1)):
        assert m.zero(address, size, 0) == INVALID
    assert m.zero(base, G, 1) == INVALID, "the other device has no access"
    rig.grant(base + G, access=READ)
    assert m.zero(base, 2 * G, 0) == INVALID
    assert peek(base, 1) == b"\xff", "nothing was written"


def test_an_unmapped_address_faults() -> None:
    touch = """
m = DeviceModel([1 << 30])
_, base = m.reserve(8 << 20, 0, 0)
_, handle = m.create(0, 2 << 20)
m.map(base, 2 << 20, 0, handle)
m.set_access(base, 2 << 20, 0, 3)
ctypes.string_at(base, 1)
print("alive", flush=True)
if sys.argv[-1] == "unmap": m.unmap(base, 2 << 20)
ctypes.string_at(base if sys.argv[-1] == "unmap" else base + (2 << 20), 1)
"""
    for last in ("beside", "unmap"):
        done = child(touch.replace("sys.argv[-1]", repr(last)))
        assert (done.stdout, done.returncode) == ("alive\n", -11)


# --- Faults ----------------------------------------------------------------------------------------------------------

PRIMITIVES: dict[str, Callable[[DeviceModel, int, int], object]] = {
    "reserve": lambda m, base, handle: m.reserve(G, 0, 0),
    "free_address": lambda m, base, handle: m.free_address(base, 8 * G),
    "create": lambda m, base, handle: m.create(0, G),
    "release": lambda m, base, handle: m.release(handle),
    "map": lambda m, base, handle: m.map(base + 2 * G, G, 0, handle),
    "unmap": lambda m, base, handle: m.unmap(base, G),
    "set_access": lambda m, base, handle: m.set_access(base, G, 0, READ),
    "get_access": lambda m, base, handle: m.get_access(base, 0),
    "mem_info": lambda m, base, handle: m.mem_info(0),
    "zero": lambda m, base, handle: m.zero(base, G, 0),
}


def test_the_primitives_are_these(rig: Rig) -> None:
    assert rig.model.calls() == dict.fromkeys(PRIMITIVES, 0)


@pytest.mark.parametrize("watched", ["itself", "any"])
@pytest.mark.parametrize("name", PRIMITIVES)
def test_a_fault_answers_and_does_nothing(rig: Rig, name: str, watched: str) -> None:
    m = rig.model
    base = rig.reserve()
    handle = rig.chunk(base)
    poke(base, b"here")
    before, count = rig.state(), m.calls()[name]

    m.fail(name if watched == "itself" else watched, 1, 719)
    answer = PRIMITIVES[name](m, base, handle)
    assert (answer if isinstance(answer, int) else answer[0]) == 719  # type: ignore[index]
    assert m.calls()[name] == count + 1
    assert rig.state() == before
    assert peek(base, 4) == b"here"

    expected = INVALID if name == "free_address" else OK  # it still holds a mapping
    answer = PRIMITIVES[name](m, base, handle)
    assert (answer if isinstance(answer, int) else answer[0]) == expected, "fires once"  # type: ignore[index]


def test_faults_add_up(rig: Rig) -> None:
    m = rig.model
    m.fail("create", 2, 2)
    m.fail("create", 2, 999)
    m.fail("any", 4, 719)
    assert [m.create(0, G)[0] for _ in range(3)] == [0, 2, 0], "the first armed answers, the other is spent"
    assert m.mem_info(0)[0] == 719
    m.fail("any", 1, 719)
    m.clear_faults()
    assert m.mem_info(0)[0] == OK


@pytest.mark.parametrize(("name", "nth", "status"), [("charge", 1, 2), ("", 1, 2), ("map", 0, 2), ("map", 1, 0)])
def test_a_fault_that_cannot_be(rig: Rig, name: str, nth: int, status: int) -> None:
    with pytest.raises(ValueError, match=r"no primitive|the next call is 1|no fault"):
        rig.model.fail(name, nth, status)


def test_readings_are_not_calls(rig: Rig) -> None:
    m = rig.model
    m.fail("any", 1, 719)
    m.charge(0, 1), m.credit(0, 1), m.used(0), m.budget(0), m.peak_used(0), m.live(), m.mapped()
    assert sum(m.calls().values()) == 0
    assert m.mem_info(0)[0] == 719


def test_map_chunks_stops_where_a_call_fails(rig: Rig) -> None:
    m = rig.model
    base = rig.reserve()
    m.fail("map", 3, 719)
    status, handles = m.map_chunks(base, G, 4, 0)
    assert (status, len(handles)) == (719, 3)
    assert m.mapped() == [(base, G), (base + G, G)]


def test_a_sealed_model_ends_the_process() -> None:
    done = child("m = DeviceModel([1 << 30]); m.seal(); m.used(0); m.live(); print('reads', flush=True); m.release(1)")
    assert done.stdout == "reads\n"
    assert done.returncode == -6
    assert "release" in done.stderr


# --- Limits and threads ----------------------------------------------------------------------------------------------


@pytest.fixture
def area_limit() -> int:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 300_000:
        pytest.skip(f"vm.max_map_count is {limit} here: reaching it takes too long")
    return limit


def test_at_the_limit_of_map_areas_unmap_still_works(area_limit: int) -> None:
    done = child(f"""
page, count = 4096, {area_limit} + 10
m = DeviceModel([1 << 20], page)
_, base = m.reserve(count * page, 0, 0)
_, handle = m.create(0, page)
mapped = 0
while (status := m.map(base + mapped * page, page, 0, handle)) == 0:
    mapped += 1
assert status == 2 and mapped > {area_limit} // 2, (status, mapped)
assert m.live()["mappings"] == mapped
assert m.get_access(base + mapped * page, 0)[0] == 1
assert m.map(base + mapped * page, page, 0, handle) == 2

middle = range(1000, 1200, 2)
for i in middle:  # every other one, so that the holes do not join at once
    assert m.unmap(base + i * page, page) == 0, i
for i in middle:
    assert m.map(base + i * page, page, 0, handle) == 0, i
assert m.unmap(base, mapped * page) == 0
assert m.live()["mappings"] == 0
assert m.free_address(base, count * page) == 0
print("survived")
""")
    assert (done.stdout, done.stderr, done.returncode) == ("survived\n", "", 0)


def test_at_the_limit_of_map_areas_access_is_all_or_nothing(area_limit: int) -> None:
    """Every other page of one merged area made read-only: each one splits it, until the kernel refuses."""
    done = child(f"""
page, count = 4096, {area_limit} + 10
m = DeviceModel([count * page], page)
_, front = m.reserve((count + 1) * page, 0, 0)
base = front + page
status, handles = m.map_chunks(base, page, count, 0)
assert status == 0
assert m.map(front, page, 0, handles[-1]) == 0
assert m.set_access(front, page, 0, 3) == 0
i = 3
while (status := m.set_access(base + i * page, page, 0, 1)) == 0:
    i += 2
assert status == 2 and i > {area_limit} // 2, (status, i)
assert m.get_access(base + i * page, 0) == (0, 3)
ctypes.memset(base + i * page, 1, page)

# The first page is an area of its own and can be changed, the second would have to be cut off an area.
assert m.set_access(front, 2 * page, 0, 1) == 2
assert [m.get_access(a, 0) for a in (front, base)] == [(0, 3)] * 2
ctypes.memset(front, 1, 2 * page)

assert m.set_access(base, count * page, 0, 3) == 0, "one area again"
assert m.set_access(front, 2 * page, 0, 1) == 0
print("survived")
""")
    assert (done.stdout, done.stderr, done.returncode) == ("survived\n", "", 0)


def test_a_long_call_lets_other_threads_run(rig: Rig) -> None:
    base = rig.reserve(8 * G)
    rig.chunk(base, 8 * G)
    calling = False
    seen = threading.Event()

    def work() -> None:
        nonlocal calling
        for _ in range(500):
            calling = True
            assert rig.model.zero(base, 8 * G, 0) == OK
            calling = False
            if seen.is_set():
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # so that only a call that lets go of the GIL lets this thread see `calling`
    try:
        worker = threading.Thread(target=work)
        worker.start()
        while worker.is_alive() and not calling:
            time.sleep(0)
        if calling:
            seen.set()
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen.is_set()


def test_threads_share_a_model() -> None:
    rig = Rig((64 * G,))
    m = rig.model
    base = rig.reserve(64 * G)
    failures: list[str] = []

    def work(mine: int) -> None:
        for turn in range(200):
            handle = rig.create(2 * G)
            rig.map(mine, handle, 2 * G)
            rig.grant(mine, 2 * G)
            if peek(mine, 8) != b"\0" * 8:
                failures.append(f"turn {turn}: not fresh")
            poke(mine, mine.to_bytes(8, "little"))
            if peek(mine, 8) != mine.to_bytes(8, "little"):
                failures.append(f"turn {turn}: somebody else's memory")
            if m.unmap(mine, 2 * G) or m.release(handle):
                failures.append(f"turn {turn}: not given back")

    workers = [threading.Thread(target=work, args=(base + i * 8 * G,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []
    assert m.live() == {"handles": 0, "mappings": 0, "reservations": 1}
    assert m.used(0) == 0
    assert m.calls()["map"] == 800


def test_a_model_that_goes_takes_its_pages_along() -> None:
    rig = Rig()
    base = rig.reserve()
    rig.chunk(base)
    assert areas(base, 8 * G)
    del rig
    gc.collect()
    assert not areas(base, 8 * G)


# --- Lease -----------------------------------------------------------------------------------------------------------


def test_a_capsule_nobody_took_is_counted_down() -> None:
    lease = Lease()
    capsule = lease.capsule(4096, 100, 1, 0)
    assert lease.count == 1
    del capsule
    assert lease.count == 0


def test_views_hold_the_lease() -> None:
    lease = Lease()
    tensor = from_dlpack(lease.capsule(1 << 40, 1 << 39, 1, 0))
    assert (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)) == (1 << 40, torch.uint8, (1 << 39,))
    view = tensor[4096:8192].view(torch.bfloat16).view(2, -1)
    second = from_dlpack(lease.capsule(1 << 40, 16, 1, 0))
    assert lease.count == 2
    del tensor, second
    gc.collect()
    assert lease.count == 1, "the view is left"
    assert view.data_ptr() == (1 << 40) + 4096
    del view
    assert lease.count == 0


def test_a_tensor_outlives_its_lease() -> None:
    lease = Lease()
    tensor = from_dlpack(lease.capsule(1 << 40, 64, 1, 0))
    del lease
    gc.collect()
    assert tensor.numel() == 64
    del tensor


def test_a_tensor_sees_what_is_mapped_under_it_later(rig: Rig) -> None:
    base = rig.reserve()
    lease = Lease()
    tensor = from_dlpack(lease.capsule(base, 8 * G, 1, 0))
    rig.chunk(base + G)
    part = tensor[G : 2 * G]
    assert int(part.sum()) == 0
    part.fill_(7)
    assert peek(base + G, 2) == b"\7\7"


def test_a_capsule_that_cannot_be() -> None:
    lease = Lease()
    with pytest.raises(ValueError, match="more than a tensor can have"):
        lease.capsule(4096, 1 << 63, 1, 0)
    assert lease.count == 0


def test_a_tensor_may_end_on_any_thread() -> None:
    lease = Lease()
    tensors = [from_dlpack(lease.capsule(4096 * i, 64, 1, 0)) for i in range(1, 1001)]

    shares = [tensors[i::4] for i in range(4)]
    tensors.clear()
    workers = [threading.Thread(target=share.clear) for share in shares]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert lease.count == 0


def test_the_interpreter_ends_quietly_with_tensors_and_models_alive() -> None:
    done = child("""
import torch
from torch.utils.dlpack import from_dlpack
m = DeviceModel([1 << 30])
_, base = m.reserve(2 << 20, 0, 0)
m.map_chunks(base, 2 << 20, 1, 0)
lease = Lease()
tensor = from_dlpack(lease.capsule(base, 2 << 20, 1, 0))
torch.kept_until_the_very_end = tensor, lease, m, lease.capsule(base, 1, 1, 0)
print("done")
""")
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)
