"""The unmodified `cuda.bindings.driver` with plain numbers in and out, for tests of the emulated library itself."""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any

from vmm_kv.testing import EmulatedModel

cuda: Any = import_module("cuda.bindings.driver")

MIB = 1 << 20
G = 2 * MIB
NONE, READ, READ_WRITE = 0, 1, 3
OK, INVALID, OUT_OF_MEMORY, NOT_INITIALIZED, DEINITIALIZED = 0, 1, 2, 3, 4
BAD_DEVICE, BAD_CONTEXT, BAD_HANDLE, NOT_FOUND, CONTEXT_DESTROYED = 101, 201, 400, 500, 709
NOT_PERMITTED, NOT_SUPPORTED, CAPTURING = 800, 801, 900
POSIX_FD, WIN32, FABRIC = 1, 2, 8


def status(answer: tuple[Any, ...]) -> int:
    return int(answer[0])


def value(answer: tuple[Any, ...]) -> Any:
    assert status(answer) == OK, answer
    return answer[1]


def location(device: int = 0, kind: int = 1) -> Any:
    where = cuda.CUmemLocation()
    where.type = cuda.CUmemLocationType(kind)
    where.id = device
    return where


def prop(device: int = 0, *, types: int = 0, rdma: bool = False, kind: int = 1, where: int = 1) -> Any:
    made = cuda.CUmemAllocationProp()
    made.type = cuda.CUmemAllocationType(kind)
    made.location = location(device, where)
    made.requestedHandleTypes = cuda.CUmemAllocationHandleType(types)
    made.allocFlags.gpuDirectRDMACapable = int(rdma)
    return made


def desc(device: int = 0, access: int = READ_WRITE) -> Any:
    made = cuda.CUmemAccessDesc()
    made.location = location(device)
    made.flags = cuda.CUmemAccess_flags(access)
    return made


class Rig:
    """Two emulated devices, and calls of the binding. Methods without `try_` insist on success."""

    def __init__(self, model: EmulatedModel) -> None:
        self.model = model
        assert status(cuda.cuInit(0)) == OK
        self.contexts = [value(cuda.cuDevicePrimaryCtxRetain(device)) for device in range(model.devices)]

    def use(self, device: int = 0) -> None:
        """Makes the device current for this thread."""
        assert status(cuda.cuCtxSetCurrent(self.contexts[device])) == OK

    def close(self) -> None:
        for device in range(len(self.contexts)):
            cuda.cuDevicePrimaryCtxRelease(device)

    def try_reserve(self, size: int, alignment: int = 0, hint: int = 0, flags: int = 0) -> tuple[int, int]:
        answer = cuda.cuMemAddressReserve(size, alignment, hint, flags)
        return status(answer), int(answer[1] or 0)

    def reserve(self, size: int = 8 * G, alignment: int = 0, hint: int = 0) -> int:
        code, base = self.try_reserve(size, alignment, hint)
        assert code == OK
        return base

    def try_create(self, size: int = G, made: Any = None, flags: int = 0) -> int:
        return status(cuda.cuMemCreate(size, made if made is not None else prop(), flags))

    def create(self, size: int = G, made: Any = None) -> int:
        return int(value(cuda.cuMemCreate(size, made if made is not None else prop(), 0)))

    def try_map(self, address: int, handle: int, size: int = G, offset: int = 0, flags: int = 0) -> int:
        return status(cuda.cuMemMap(address, size, offset, handle, flags))

    def map(self, address: int, handle: int, size: int = G) -> None:
        assert self.try_map(address, handle, size) == OK

    def try_grant(self, address: int, size: int, *descs: Any) -> int:
        return status(cuda.cuMemSetAccess(address, size, list(descs), len(descs)))

    def grant(self, address: int, size: int = G, device: int = 0, access: int = READ_WRITE) -> None:
        assert self.try_grant(address, size, desc(device, access)) == OK

    def chunk(self, address: int, size: int = G) -> int:
        """Creates, maps and grants."""
        handle = self.create(size)
        self.map(address, handle, size)
        self.grant(address, size)
        return handle

    def access(self, address: int, device: int = 0) -> int:
        return int(value(cuda.cuMemGetAccess(location(device), address)))

    def free(self) -> int:
        answer = cuda.cuMemGetInfo()
        assert status(answer) == OK
        return int(answer[1])


def free_address(base: int, size: int) -> int:
    return status(cuda.cuMemAddressFree(base, size))


def unmap(address: int, size: int = G) -> int:
    return status(cuda.cuMemUnmap(address, size))


def release(handle: int) -> int:
    return status(cuda.cuMemRelease(handle))


def peek(address: int, size: int = 1) -> bytes:
    return ctypes.string_at(address, size)


def poke(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))
