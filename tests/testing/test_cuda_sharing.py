"""Export, import and pointers of the emulated CUDA library (rules X1, X2, P1), through unmodified cuda-python."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from cuda_rig import (
    FABRIC,
    INVALID,
    NOT_PERMITTED,
    NOT_SUPPORTED,
    OK,
    POSIX_FD,
    WIN32,
    G,
    Rig,
    cuda,
    peek,
    poke,
    prop,
    release,
    status,
    unmap,
    value,
)

from vmm_kv.testing import load_cuda


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(load_cuda(devices=2, budget=16 * G, granule=G))
    rig.use(0)
    yield rig
    rig.close()


def exported(handle: int, kind: int = POSIX_FD, flags: int = 0) -> tuple[Any, ...]:
    answer: tuple[Any, ...] = cuda.cuMemExportToShareableHandle(handle, cuda.CUmemAllocationHandleType(kind), flags)
    return answer


def imported(shareable: Any, kind: int = POSIX_FD) -> tuple[Any, ...]:
    answer: tuple[Any, ...] = cuda.cuMemImportFromShareableHandle(shareable, cuda.CUmemAllocationHandleType(kind))
    return answer


@pytest.fixture
def fd(rig: Rig) -> Iterator[int]:
    """Exported from a handle of two granules that is mapped and says so."""
    base = rig.reserve()
    handle = rig.create(2 * G, prop(types=POSIX_FD))
    rig.map(base, handle, 2 * G)
    rig.grant(base, 2 * G)
    poke(base, b"shared")
    fd = int(value(exported(handle)))
    yield fd
    os.close(fd)


def test_x1_export_takes_a_type_asked_for_at_create(rig: Rig) -> None:
    rig.model.set("fabric", 2)
    plain, posix = rig.create(), rig.create(made=prop(types=POSIX_FD))
    assert status(exported(plain)) == INVALID
    assert status(exported(posix, FABRIC)) == INVALID
    assert status(exported(posix, WIN32)) == INVALID
    assert status(exported(posix, flags=1)) == INVALID
    assert status(exported(12345)) == INVALID
    os.close(int(value(exported(posix))))


def test_x1_every_export_is_a_descriptor_of_the_callers(rig: Rig) -> None:
    handle = rig.create(made=prop(types=POSIX_FD))
    first, second = (int(value(exported(handle))) for _ in range(2))
    assert first != second
    os.close(first)
    assert os.fstat(second).st_size == G
    os.close(second)
    assert release(handle) == OK
    assert rig.free() == 16 * G


def test_x1_the_file_of_a_handle_cannot_be_resized(fd: int) -> None:
    for size in (0, G, 4 * G):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, 1033, 0)  # F_ADD_SEALS: sealed for good


def test_x2_an_import_is_the_same_memory_and_is_not_charged_again(rig: Rig, fd: int) -> None:
    free, live = rig.free(), rig.model.live()["handles"]
    handle = int(value(imported(fd)))
    assert (rig.free(), rig.model.live()["handles"]) == (free, live + 1)
    base = rig.reserve()
    rig.map(base, handle, 2 * G)
    rig.grant(base, 2 * G)
    assert peek(base, 6) == b"shared"


def test_x2_each_import_has_its_own_release(rig: Rig) -> None:
    original = rig.create(2 * G, prop(types=POSIX_FD))
    fd = int(value(exported(original)))
    first, second = (int(value(imported(fd))) for _ in range(2))
    assert len({original, first, second}) == 3
    assert [release(first), release(first)] == [OK, INVALID]
    assert release(original) == OK
    assert rig.free() == 14 * G, "the second import holds it"
    base = rig.reserve()
    rig.map(base, second, 2 * G)
    assert int(value(cuda.cuMemRetainAllocationHandle(base))) == original, "the handle that it was made with"
    assert [release(second), release(original), unmap(base, 2 * G)] == [OK] * 3
    assert rig.free() == 16 * G
    os.close(fd)


def test_x2_only_what_was_exported_is_imported(rig: Rig) -> None:
    with open("/dev/zero", "rb") as other:
        assert status(imported(other.fileno())) == INVALID
    unsealed = os.memfd_create("other")
    os.ftruncate(unsealed, G)
    assert status(imported(unsealed)) == INVALID
    os.close(unsealed)
    assert status(imported(unsealed)) == INVALID, "closed"
    assert status(imported(0, WIN32)) == NOT_SUPPORTED


def test_x2_another_process_imports_what_this_one_exported(rig: Rig, fd: int) -> None:
    child = f"""
import ctypes, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from cuda_rig import *
from vmm_kv.testing import load_cuda
rig = Rig(load_cuda(devices=1, budget={16 * G}))
rig.use(0)
kind = cuda.CUmemAllocationHandleType(POSIX_FD)
handle = int(value(cuda.cuMemImportFromShareableHandle({fd}, kind)))
again = int(value(cuda.cuMemImportFromShareableHandle({fd}, kind)))
base = rig.reserve()
rig.map(base, handle, 2 * G)
rig.grant(base, 2 * G)
print(peek(base, 6), rig.model.used(0))
poke(base, b"answer")
print(unmap(base, 2 * G), release(handle), release(again), rig.model.live())
"""
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=100, pass_fds=[fd])
    assert done.stderr == ""
    assert done.stdout == "b'shared' 0\n0 0 0 {'handles': 0, 'mappings': 0, 'reservations': 1}\n"
    assert os.pread(fd, 6, 0) == b"answer"


def test_c5_fabric_handles_come_and_go(rig: Rig) -> None:
    rig.model.set("fabric", 2)
    original = rig.create(made=prop(types=FABRIC))
    shareable = value(exported(original, FABRIC))
    handle = int(value(imported(shareable.getPtr(), FABRIC)))
    assert handle != original
    assert rig.free() == 15 * G
    for fabric, answer in ((1, NOT_PERMITTED), (0, NOT_SUPPORTED)):
        rig.model.set("fabric", fabric)
        assert status(imported(shareable.getPtr(), FABRIC)) == answer
    rig.model.set("fabric", 2)
    assert [release(handle), release(original)] == [OK, OK]
    assert status(imported(shareable.getPtr(), FABRIC)) == INVALID


def test_properties_of_a_handle_are_those_it_was_made_with(rig: Rig) -> None:
    handle = rig.create(made=prop(1, types=POSIX_FD))
    made = value(cuda.cuMemGetAllocationPropertiesFromHandle(handle))
    assert (int(made.type), int(made.location.type), made.location.id) == (1, 1, 1)
    assert int(made.requestedHandleTypes) == POSIX_FD
    assert release(handle) == OK
    assert status(cuda.cuMemGetAllocationPropertiesFromHandle(handle)) == INVALID


def test_p1_a_reserved_address_has_a_range_and_is_not_mapped(rig: Rig) -> None:
    about = cuda.CUpointer_attribute
    base = rig.reserve(8 * G)
    rig.chunk(base + 2 * G, 2 * G)

    def ask(attribute: Any, address: int) -> int:
        return int(value(cuda.cuPointerGetAttribute(attribute, address)))

    for address, mapped in ((base + G, False), (base + 3 * G, True)):
        assert ask(about.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address) == base
        assert ask(about.CU_POINTER_ATTRIBUTE_RANGE_SIZE, address) == 8 * G
        assert bool(ask(about.CU_POINTER_ATTRIBUTE_MAPPED, address)) is mapped
    ordinal = about.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    assert ask(ordinal, base + 2 * G) == 0
    assert status(cuda.cuPointerGetAttribute(ordinal, base)) == INVALID
    assert status(cuda.cuPointerGetAttribute(about.CU_POINTER_ATTRIBUTE_MAPPED, 4096)) == INVALID
    several = [about.CU_POINTER_ATTRIBUTE_RANGE_SIZE, about.CU_POINTER_ATTRIBUTE_MAPPED]
    size, is_mapped = value(cuda.cuPointerGetAttributes(2, several, base))
    assert (int(size), bool(is_mapped)) == (8 * G, False)
