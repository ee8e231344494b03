"""The rules of virtual memory management as this driver enforces them: exact statuses of calls that break one.

Each runs alone: what a driver does after a call that it should have refused is anybody's guess. Expected are the
statuses of the emulated driver; a surprise here is a rule to be written down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from vmm_kv.driver.failures import INVALID_VALUE, OUT_OF_MEMORY
from vmm_kv.testing.gpu_registry import check
from vmm_kv.testing.gpu_rig import GIB, MIB, Rig, status_of

_PAGE = 4096
_NONE, _READ_WRITE = 0, 3
_INVALID_CONTEXT = 201
_PARTS = 128


@check("rules.reserve", "R1 R2", alone=True)
def reserve(rig: Rig) -> None:
    """Sizes and alignments of reservations."""
    granule = rig.granule
    rig.expect_status("reserve 0", INVALID_VALUE, lambda: rig.reserve(0))
    rig.expect_status("one page", INVALID_VALUE, lambda: rig.reserve(_PAGE))
    rig.expect_status("granule + page", INVALID_VALUE, lambda: rig.reserve(granule + _PAGE))
    rig.expect_status("granule + 1", INVALID_VALUE, lambda: rig.reserve(granule + 1))
    rig.expect_status("alignment 3", INVALID_VALUE, lambda: rig.reserve(granule, alignment=3))
    rig.expect_status("alignment 1 GiB", 0, lambda: rig.reserve(granule, alignment=GIB))
    rig.expect_status("2^60 bytes", OUT_OF_MEMORY, lambda: rig.reserve(1 << 60))
    size, largest = 1 << 40, 0
    while size <= 1 << 48 and not status_of(partial(rig.reserve, size)):
        size, largest = 2 * size, size
    rig.findings.details["largest_reservation"] = largest
    rig.say(f"up to {largest >> 40} TiB in one reservation, beside smaller ones")


@check("rules.hint", "R3 B4")
def hint(rig: Rig) -> None:
    """Whether addresses that were given back can be had again at once, and what a hint at taken ones gives."""
    size = 64 * rig.granule
    base = rig.reserve(size)
    other = rig.reserve(size, hint=base)
    rig.say(f"a hint at taken addresses gives {'other ones' if other != base else 'the same'}")
    rig.require(other != base, "two reservations have the same addresses")
    again = 0
    for _ in range(10):
        rig.free_address(base)
        again += (found := rig.reserve(size, hint=base)) == base
        base = found
    rig.say(f"addresses just given back were had again {again} of 10 times")
    rig.expect("times that addresses came back", again, 10)


@check("rules.free_address", "F1 F2", alone=True)
def free_address(rig: Rig) -> None:
    """Giving back other addresses than were reserved, too many, too few, twice, and with a mapping in them."""
    granule = rig.granule
    base = rig.reserve(8 * granule)
    size_is_ignored = rig.driver.kind == "hip"
    rig.expect_status("another base", INVALID_VALUE, lambda: rig.free_address(base + granule, 7 * granule))
    if not size_is_ignored:
        rig.expect_status("too little", INVALID_VALUE, lambda: rig.free_address(base, 4 * granule))
        rig.expect_status("too much", INVALID_VALUE, lambda: rig.free_address(base, 9 * granule))
    rig.chunk(base + granule, granule)
    busy = 999 if size_is_ignored else INVALID_VALUE
    accepted = not rig.expect_status("with a mapping", busy, lambda: rig.free_address(base))
    rig.expect_status("unmap after that", 0, lambda: rig.unmap(base + granule, granule))
    if not accepted:
        rig.expect_status("free", 0, lambda: rig.free_address(base))
    rig.expect_status("twice", INVALID_VALUE, lambda: rig.free_address(base, 8 * granule))


@check("rules.create", "C1 C2", alone=True, seconds=30)
def create(rig: Rig) -> None:
    """Sizes of chunks, and how much of the device can be taken before it says that there is no more."""
    granule = rig.granule
    with rig.driver.scope():
        free, total = rig.driver.mem_info()
    rig.expect_status("create 0", INVALID_VALUE, lambda: rig.create(0))
    rig.expect_status("one page", INVALID_VALUE, lambda: rig.create(_PAGE))
    rig.expect_status("granule + 1", INVALID_VALUE, lambda: rig.create(granule + 1))
    too_much = (total // granule + 1) * granule
    rig.expect_status("more than there is", OUT_OF_MEMORY, lambda: rig.create(too_much))
    size = max(granule, total // _PARTS // granule * granule)
    handles: list[int] = []
    while not (status := status_of(lambda: handles.append(rig.create(size)))):
        pass
    left = rig.free()
    rig.expect("status when memory runs out", status, OUT_OF_MEMORY)
    for handle in handles:
        rig.release(handle)
    rig.say(f"{len(handles)} chunks of {size / MIB:.0f} MiB of {free / MIB:.0f} MiB free, {left / MIB:.0f} left")
    rig.findings.details.update(free=free, taken=len(handles) * size, left=left, back=rig.free() - free)
    rig.expect("all of it came back", abs(rig.free() - free) <= 16 * MIB, True)


@check("rules.release", "L1", alone=True)
def release(rig: Rig) -> None:
    """Releasing a handle twice."""
    handle = rig.create(rig.granule)
    rig.release(handle)
    rig.expect_status("release twice", INVALID_VALUE, lambda: rig.release(handle))
    rig.expect_status("create after that", 0, lambda: rig.release(rig.create(rig.granule)))


@check("rules.map", "M1 M2 M3 M4", alone=True)
def map_(rig: Rig) -> None:
    """Mappings of parts, of too much, over others, across the end and outside of a reservation."""
    granule = rig.granule
    base = rig.reserve(8 * granule)
    rig.chunk(base, granule)
    pair = rig.create(2 * granule)
    rig.expect_status("over another", INVALID_VALUE, lambda: rig.map(base, 2 * granule, pair))
    rig.expect_status("unaligned", INVALID_VALUE, lambda: rig.map(base + 2 * granule + _PAGE, 2 * granule, pair))
    rig.expect_status("across the end", INVALID_VALUE, lambda: rig.map(base + 7 * granule, 2 * granule, pair))
    rig.expect_status("outside", INVALID_VALUE, lambda: rig.map(base + 8 * granule, 2 * granule, pair))
    rig.expect_status("more than the handle", INVALID_VALUE, lambda: rig.map(base + 2 * granule, 3 * granule, pair))
    rig.expect_status("half of the handle", INVALID_VALUE, lambda: rig.map(base + 5 * granule, granule, pair))
    rig.expect_status("whole", 0, lambda: rig.map(base + 2 * granule, 2 * granule, pair))


@check("rules.access", "A1 A4 A5", alone=True)
def access(rig: Rig) -> None:
    """Grants over parts of mappings, over gaps and where nothing is mapped; what the access is when."""
    granule = rig.granule
    base, handle = rig.reserve(8 * granule), rig.create(2 * granule)
    rig.expect_status("get where nothing is", INVALID_VALUE, lambda: rig.get_access(base))
    rig.expect_status("set where nothing is", INVALID_VALUE, lambda: rig.set_access(base, granule))
    rig.map(base, 2 * granule, handle)
    rig.expect("access after map", rig.get_access(base), _NONE)
    rig.expect_status("set on half a mapping", INVALID_VALUE, lambda: rig.set_access(base, granule))
    rig.expect_status("set across a gap", INVALID_VALUE, lambda: rig.set_access(base, 3 * granule))
    rig.expect_status("set", 0, lambda: rig.set_access(base, 2 * granule))
    rig.expect("access after the grant", rig.get_access(base), _READ_WRITE)
    rig.unmap(base, 2 * granule)
    rig.map(base, 2 * granule, handle)
    rig.expect("access after unmap and map", rig.get_access(base), _NONE)


@check("rules.mixed_access", "A1 B1")
def mixed_access(rig: Rig) -> None:
    """One grant over a run of chunks of mixed sizes, from the base and from within."""
    granule, parts = rig.granule, (1, 16, 1, 4, 2, 8)
    base = place = rig.reserve(sum(parts) * granule)
    for part in parts:
        rig.map(place, part * granule, rig.create(part * granule))
        place += part * granule
    tail = base + 17 * granule
    within = status_of(lambda: rig.set_access(tail, place - tail))
    whole = status_of(lambda: rig.set_access(base, place - base))
    rig.findings.details.update(within=within, whole=whole)
    rig.say(f"from within {within}, from the base {whole}")
    if rig.driver.quirks.uniform_chunks:
        rig.expect("the quirk uniform_chunks shows", within != 0, True)
        return
    rig.require(not within and not whole, f"mixed chunks cannot be granted at once: {within}, {whole}. It is B1")
    rig.expect("access at the end", rig.get_access(place - granule), _READ_WRITE)


@check("rules.unmap", "U1 B2", alone=True)
def unmap(rig: Rig) -> None:
    """Unmapping parts, gaps and nothing; several mappings at once, and whether their addresses are free then."""
    granule, size = rig.granule, 2 * rig.granule
    base = rig.reserve(5 * size)
    rig.expect_status("where nothing is", INVALID_VALUE, lambda: rig.unmap(base, granule))
    for place in (0, 1, 2, 4):
        rig.chunk(base + place * size, size)
    rig.expect_status("half a mapping", INVALID_VALUE, lambda: rig.unmap(base, granule))
    rig.expect_status("one and a half", INVALID_VALUE, lambda: rig.unmap(base + granule, size + granule))
    rig.expect_status("across a gap", INVALID_VALUE, lambda: rig.unmap(base, 5 * size))
    joint = rig.expect_status("three at once", 0, lambda: rig.unmap(base, 3 * size))
    rig.expect_status("the last", 0, lambda: rig.unmap(base + 4 * size, size))
    freed = status_of(lambda: rig.free_address(base))
    rig.say(f"free after that {freed}")
    if rig.driver.quirks.single_unmap:
        rig.expect("the quirk single_unmap shows", freed != 0 or joint != 0, True)
        rig.forget(base)
    else:
        rig.require(not freed, f"the addresses cannot be freed after a joint unmap: {freed}. It is B2")


@check("rules.memset", "P2 B13", alone=True)
def memset(rig: Rig) -> None:
    """One memset that goes across the border of two mappings."""
    granule, base = rig.granule, rig.reserve(2 * rig.granule)
    for place in (0, 1):
        rig.chunk(base + place * granule, granule)

    def across() -> None:
        with rig.driver.scope():
            rig.driver.zero([(base + granule // 2, base + granule + granule // 2)])

    status = status_of(across)
    rig.say(f"across two mappings {status}")
    if rig.driver.quirks.single_memset:
        rig.expect("the quirk single_memset shows", status != 0, True)
    else:
        rig.require(not status, f"two mappings cannot be zeroed at once: {status}. It is B13")


@check("rules.context", "G2", alone=True)
def context(rig: Rig) -> None:
    """Which calls a thread may make without a current context."""
    driver, granule = rig.driver, rig.granule
    base, spare = rig.reserve(3 * granule), rig.create(granule)
    for place in (0, 1):
        rig.chunk(base + place * granule, granule)
    calls: dict[str, Callable[[], object]] = {
        "reserve": lambda: rig.reserve(granule),
        "create": lambda: rig.create(granule),
        "mem_info": rig.free,
        "get_access": lambda: rig.get_access(base),
        "set_access": lambda: rig.set_access(base, granule),
        "zero": lambda: driver.zero([(base, base + granule)]),
        "synchronize": driver.synchronize,
        "map": lambda: rig.map(base + 2 * granule, granule, spare),
        "unmap": lambda: rig.unmap(base + granule, granule),
    }
    statuses: dict[str, int | str] = {}

    def work() -> None:
        for name, call in calls.items():
            try:
                statuses[name] = status_of(call)
            except Exception as error:
                statuses[name] = repr(error)

    rig.scopes = False
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    rig.scopes = True
    rig.findings.details["statuses"] = statuses
    rig.say("without a context: " + ", ".join(f"{name} {status}" for name, status in statuses.items()))
    expected = 0 if driver.kind == "hip" else _INVALID_CONTEXT
    others = {name: status for name, status in statuses.items() if status != expected}
    rig.expect(f"calls that do not answer {expected}", others, {})
