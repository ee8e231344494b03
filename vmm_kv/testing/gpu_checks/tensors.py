"""Tensors over addresses where nothing is mapped: made, viewed and kept; used once memory is there; touched before."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vmm_kv.pages import Reservation
from vmm_kv.tensors import byte_tensor
from vmm_kv.testing.gpu_checks.graphs import Scene
from vmm_kv.testing.gpu_registry import Failed, check
from vmm_kv.testing.gpu_rig import GIB, Rig, status_of

_ILLEGAL_ADDRESS = 700


@check("tensors.unmapped", "11 P1", needs="torch")
def unmapped(rig: Rig) -> None:
    """from_dlpack over 1 TiB of reserved addresses, and views of it; then memory behind one part, used."""
    size, granule, where = 1024 * GIB, rig.granule, rig.device.torch_device
    with rig.driver.scope():
        reservation = Reservation(rig.driver, size)
    whole = byte_tensor(reservation, where)
    rig.require(whole.data_ptr() == reservation.base, f"data_ptr is {whole.data_ptr():#x}, not {reservation.base:#x}")
    rig.expect("device", whole.device, where)
    offset = size - granule
    tail = whole[offset:].view(torch.bfloat16).view(-1, 128)
    strided = whole.view(torch.float32).as_strided((granule // 4 // 64, 64), (64, 1), offset // 4)
    rig.require(strided.data_ptr() == tail.data_ptr() == reservation.base + offset, "a view has another address")
    rig.chunk(reservation.base + offset, granule)
    tail.fill_(2.5)
    strided[1].fill_(7.0)
    found = [tail[-1, 0].item(), strided[1].sum().item()]
    rig.require(found == [2.5, 448.0], f"what was written is read as {found}")
    product = (tail[:64].float() @ tail[:64].float().T)[5, 6].item()
    rig.require(product == 128 * 6.25, f"a matrix product over it gives {product}")
    rig.settle()
    rig.unmap(reservation.base + offset, granule)
    rig.expect("leases while tensors live", reservation.lease.count, 1)
    del whole, tail, strided
    rig.expect("leases when they are gone", reservation.lease.count, 0)
    with rig.driver.scope():
        reservation.free()
    rig.say("made, viewed, mapped, used, unmapped; addresses are free when the last tensor is gone")


@check("tensors.moved", "1 2", needs="torch")
def moved(rig: Rig) -> None:
    """A chunk keeps its contents when it is mapped elsewhere; a tensor shows what is mapped under it now."""
    granule = rig.granule
    base = rig.reserve(2 * granule)
    first, second = rig.chunk(base, granule), rig.create(granule)
    here, there = rig.bytes_at(base, granule), rig.bytes_at(base + granule, granule)
    here.fill_(11)
    rig.settle()
    rig.unmap(base, granule)
    rig.map(base, granule, second)
    rig.map(base + granule, granule, first)
    rig.set_access(base, 2 * granule)
    here.fill_(22)
    counts = [(here == 22).sum().item(), (there == 11).sum().item()]
    rig.require(counts == [granule, granule], f"of {granule} bytes each, {counts} are right")
    rig.settle()
    rig.say("contents move with the chunk")


def _faults(rig: Rig, action: Callable[[], object]) -> None:
    """The action writes where it must not: the kernel faults and takes the context with it."""
    rig.spoil()
    try:
        action()
        torch.cuda.synchronize()
    except RuntimeError as error:
        rig.findings.details["error"] = str(error)
        rig.say(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    else:
        raise Failed("it was no error")
    with_context = status_of(rig.settle)
    rig.say(f"synchronize after that {with_context}")
    rig.expect("status after that", with_context, _ILLEGAL_ADDRESS)


@check("touch.unmapped", "M6", needs="torch", alone=True, emulated=False)
def touch_unmapped(rig: Rig) -> None:
    """A kernel writes where nothing is mapped."""
    address = rig.reserve(rig.granule)
    _faults(rig, lambda: rig.bytes_at(address, 4096).fill_(1))


@check("touch.no_access", "M6", needs="torch", alone=True, emulated=False)
def touch_without_access(rig: Rig) -> None:
    """A kernel writes where memory is mapped and access was not granted."""
    address = rig.reserve(rig.granule)
    rig.map(address, rig.granule, rig.create(rig.granule))
    _faults(rig, lambda: rig.bytes_at(address, 4096).fill_(1))


@check("touch.replay", "S2", needs="torch", alone=True, emulated=False)
def touch_by_replay(rig: Rig) -> None:
    """A graph is replayed after what it writes to was unmapped."""
    scene = Scene(rig)
    scene.cache.back(64)
    graph = scene.capture()
    scene.cache.commit(scene.blocks)
    scene.replay(graph, scene.blocks - 1, 1.0)
    scene.cache.shrink(64)
    scene.slot.fill_(scene.blocks - 1)
    _faults(rig, graph.replay)
