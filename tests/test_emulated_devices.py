"""What `VMM_KV_TESTING` opens: one emulation for each kind in a process, and what becomes of the one before it."""

from __future__ import annotations

import gc

import pytest
import torch

from vmm_kv import TensorSpec, emulated, open_device
from vmm_kv.cache import KVCache
from vmm_kv.device import Device
from vmm_kv.errors import DriverGone
from vmm_kv.holdings import empty_graveyard
from vmm_kv.testing import EmulatedModel

pytestmark = pytest.mark.emulated
MIB = 1 << 20
SPECS = [TensorSpec("kv", (None, 1024, 1024), torch.float32)]
KINDS = pytest.mark.parametrize("kind", ["cuda", "hip"])


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMM_KV_TESTING", "1")


def model_of(device: Device) -> EmulatedModel:
    memory: object = device.memory
    model: EmulatedModel = vars(memory)["_budget"]
    return model


def books(device: Device) -> tuple[dict[str, int], int]:
    model = model_of(device)
    return model.live(), model.used(0)


@KINDS
def test_a_device_that_was_replaced_says_so(kind: str) -> None:
    old = open_device(f"{kind}:0:64MiB")
    cache = KVCache.reserve(old, SPECS, 8)
    cache.commit(2)
    open_device(f"{kind}:1:64MiB")
    replaced = f"{kind}:0 is gone: this emulated device was replaced when {kind}:1 was opened"
    for use in (lambda: cache.commit(3), lambda: old.reading("R1"), lambda: KVCache.reserve(old, SPECS, 8)):
        with pytest.raises(DriverGone, match=replaced):
            use()
    cache.close()


@KINDS
def test_nothing_of_a_replaced_device_reaches_the_new_one(kind: str) -> None:
    """Neither by closing, nor by a prepared step, a tensor that dies, or a cache that nobody closed."""
    old = open_device(f"{kind}:0:64MiB")
    closed, dropped = (KVCache.reserve(old, SPECS, 4) for _ in range(2))
    closed.commit(2)
    dropped.commit(2)
    step = closed.prepare(3)
    with old.active():
        tensor = torch.ones(MIB)
    new = open_device(f"{kind}:0:64MiB")
    with KVCache.reserve(new, SPECS, 8) as cache:
        cache.commit(4)
        cache.view("kv").fill_(2)
        with new.active():
            kept = torch.ones(MIB)
        before = books(new)
        with pytest.raises(DriverGone):
            step.discard()
        closed.close()
        del dropped, tensor
        gc.collect()
        empty_graveyard()
        old.memory.empty_cache()
        assert books(new) == before
        assert cache.commit(5) == 5
        assert int(cache.view("kv")[:4].min()) == 2
    assert kept.sum().item() == MIB
    assert books(new)[0] == {"handles": 0, "mappings": 0, "reservations": 0}


def test_the_other_kind_is_not_replaced() -> None:
    cuda = open_device("cuda:0:64MiB")
    with KVCache.reserve(cuda, SPECS, 4) as cache:
        open_device("hip:0:64MiB")
        assert cache.commit(2) == 2


@KINDS
@pytest.mark.parametrize("index", [32, 999999999999])
def test_more_devices_than_there_can_be(kind: str, index: int) -> None:
    """And the device that is open stays."""
    with KVCache.reserve(open_device(f"{kind}:0:64MiB"), SPECS, 4) as cache:
        with pytest.raises(ValueError, match=f"device {kind}:{index}: an emulated machine has at most 32 devices"):
            open_device(f"{kind}:{index}")
        assert cache.commit(2) == 2


@pytest.mark.parametrize("mode", ["1", "quirks"])
def test_every_emulated_rocm_has_b13(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch and the quirk go together, so that a cache is zero over any number of mappings."""
    monkeypatch.setenv("VMM_KV_TESTING", mode)
    device = open_device("hip:0:64MiB")
    assert device.driver.quirks.single_memset and model_of(device).get("quirk_single_memset") == 1
    with KVCache.reserve(device, SPECS, 8, chunk=2 * MIB) as cache:
        cache.commit(3)
        assert not cache.view("kv").any()


@pytest.mark.parametrize(("value", "mode"), [("", ""), ("0", ""), (" 1 ", "1"), ("quirks", "quirks")])
def test_the_modes(value: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMM_KV_TESTING", value)
    assert emulated.mode() == mode
