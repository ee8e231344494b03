"""HostMemory: what torch operations are charged, when it comes back, and what happens when there is no more."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from vmm_kv._native import DeviceModel
from vmm_kv.host import HostMemory

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def model() -> DeviceModel:
    return DeviceModel([16 * MIB])


@pytest.fixture
def memory(model: DeviceModel) -> HostMemory:
    return HostMemory(model, 0)


def test_an_output_is_charged_rounded_to_512_bytes(model: DeviceModel, memory: HostMemory) -> None:
    with memory.charging():
        x = torch.ones(129)
    assert x.numel() == 129
    assert memory.allocated() == memory.reserved() == model.used(0) == 1024


def test_nothing_is_charged_outside(model: DeviceModel, memory: HostMemory) -> None:
    x = torch.ones(1024)
    with memory.charging(), memory.paused():
        y = x + 1
    assert y.numel() == 1024
    assert memory.reserved() == model.used(0) == 0


def test_views_and_operations_in_place_are_free(memory: HostMemory) -> None:
    x = torch.ones(64, 64)
    with memory.charging():
        views = [x[1:], x.t(), x.view(-1), x.detach(), *x.chunk(32), *torch.ops.aten.unsafe_split(x, 2)]
        views += [torch.ops.aten._unsafe_view(x, [4096]), x.add_(1), torch.mul(x, 2, out=x)]
    assert len(views) > 8 and memory.allocated() == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_charge_follows_the_storage_and_not_the_tensor(memory: HostMemory, mode: type[torch.no_grad]) -> None:
    with mode(), memory.charging():
        x = torch.ones(MIB // 4)
        view = x[3:5].view(2, 1)
        del x
        assert memory.allocated() == MIB
        del view
    assert (memory.allocated(), memory.reserved()) == (0, MIB)


def test_a_storage_that_several_outputs_share_counts_once(memory: HostMemory) -> None:
    with memory.charging():
        parts = (torch.ones(256) + 1).chunk(2)
    assert len(parts) == 2 and memory.allocated() == 1024


def test_tensor_from_a_list_is_charged_and_a_copy_of_it_once_more(memory: HostMemory) -> None:
    with memory.charging():
        x = torch.tensor([1.0, 2.0])
        assert memory.allocated() == 512
        y = x.clone()
        empty = torch.empty(0)
    assert (x.numel(), y.numel(), empty.numel()) == (2, 2, 0) and memory.allocated() == 1024


def test_memory_of_others_is_not_charged(memory: HostMemory) -> None:
    buffer = bytearray(4096)
    with memory.charging():
        x = torch.frombuffer(buffer, dtype=torch.uint8).view(torch.float32)
        meta = torch.ones(4096, device="meta") + 1
    assert x.numel() == 1024 and meta.numel() == 4096
    assert memory.allocated() == 0


def test_sparse_tensors_pass_uncharged(memory: HostMemory) -> None:
    x = torch.eye(4)
    with memory.charging():
        y = x.to_sparse().to_dense()
    assert torch.equal(x, y)


def test_modules_are_charged_and_converting_them_frees_the_old_weights(memory: HostMemory) -> None:
    with memory.charging():
        layer = nn.Linear(512, 512, bias=False)
        assert memory.allocated() == MIB
        layer.to(torch.bfloat16)
        assert memory.allocated() == MIB // 2
    gc.collect()
    assert memory.allocated() == MIB // 2


def test_cached_bytes_serve_the_next_request_first(model: DeviceModel, memory: HostMemory) -> None:
    with memory.charging():
        x = torch.ones(MIB)  # 4 MiB
        del x
        assert (memory.allocated(), memory.reserved(), model.used(0)) == (0, 4 * MIB, 4 * MIB)
        y = torch.ones(MIB // 2)
        assert (memory.allocated(), memory.reserved(), model.used(0)) == (2 * MIB, 4 * MIB, 4 * MIB)
        z = torch.ones(MIB)
        assert (memory.allocated(), memory.reserved(), model.used(0)) == (6 * MIB, 6 * MIB, 6 * MIB)
    del y, z
    memory.empty_cache()
    assert memory.reserved() == model.used(0) == 0


def test_peaks(memory: HostMemory) -> None:
    with memory.charging():
        x = torch.ones(MIB)
        y = x + 1
        del y
        assert (memory.peak_allocated(), memory.peak_reserved()) == (8 * MIB, 8 * MIB)
        memory.reset_peak()
        assert (memory.peak_allocated(), memory.peak_reserved()) == (4 * MIB, 8 * MIB)
        memory.empty_cache()
        memory.reset_peak()
        assert memory.peak_reserved() == 4 * MIB
        z = x[:10] + 1
    assert z.numel() == 10 and memory.peak_reserved() == 4 * MIB + 512


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_temporaries_inside_composite_operations_reach_the_peak(memory: HostMemory, mode: type[torch.no_grad]) -> None:
    """Inference mode hands a composite operation to us whole; its parts must count all the same."""
    x = torch.ones(4, 256, 256)
    with mode(), memory.charging():
        y = torch.einsum("bij,bjk->ik", x, x.transpose(1, 2).contiguous())
    assert y.shape == (256, 256)
    assert memory.peak_allocated() > 256 * KIB + MIB


def test_entering_twice_charges_once(memory: HostMemory) -> None:
    with memory.charging():
        with memory.charging():
            x = torch.ones(1024)
        y = torch.ones(1024)
    assert x.numel() == y.numel() and memory.allocated() == 8192


def test_two_devices_have_a_budget_each() -> None:
    model = DeviceModel([MIB, MIB])
    first, second = HostMemory(model, 0), HostMemory(model, 1)
    with first.charging():
        x = torch.ones(256)
    with second.charging():
        y = torch.ones(512)
    assert x.numel() + y.numel() == 768 and (model.used(0), model.used(1)) == (1024, 2048)


def test_out_of_memory_raises_with_the_figures_and_leaks_nothing(model: DeviceModel, memory: HostMemory) -> None:
    with memory.charging():
        x = torch.ones(2 * MIB)  # 8 MiB
        y = torch.ones(MIB)
        del y
        used = model.used(0)
        assert used == 12 * MIB
        with pytest.raises(
            torch.OutOfMemoryError, match=r"host:0 .*allocate 12\.00 MiB.* 16\.00 MiB in total.*8\.00 MiB"
        ):
            torch.ones(3 * MIB)
        assert (memory.allocated(), memory.reserved(), model.used(0)) == (8 * MIB, 8 * MIB, 8 * MIB)
        z = torch.ones(2 * MIB)  # exactly what is left
    del x, z
    memory.empty_cache()
    assert model.used(0) == 0


def test_bytes_that_the_driver_took_are_not_there_for_tensors(model: DeviceModel, memory: HostMemory) -> None:
    status, handle = model.create(0, 14 * MIB)
    assert status == 0
    with memory.charging(), pytest.raises(torch.OutOfMemoryError):
        torch.ones(MIB)
    assert model.release(handle) == 0
    with memory.charging():
        torch.ones(MIB)
    assert model.used(0) == 4 * MIB


def test_threads_charge_their_own_operations_and_the_books_add_up(model: DeviceModel, memory: HostMemory) -> None:
    kept: list[torch.Tensor] = []

    def work() -> None:
        with memory.charging():
            for step in range(200):
                x = torch.ones(256) + step
                if step % 50 == 0:
                    kept.append(x)
                    memory.empty_cache()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memory.empty_cache()
    assert memory.allocated() == memory.reserved() == model.used(0) == len(kept) * 1024 == 16 * 1024
    kept.clear()
    memory.empty_cache()
    assert model.used(0) == 0


def test_a_death_in_a_garbage_collection_is_booked(memory: HostMemory) -> None:
    class Node:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.me = tensor, self

    with memory.charging():
        Node(torch.ones(1024))
    assert memory.allocated() == 4096
    gc.collect()
    memory.synchronize()
    assert (memory.allocated(), memory.reserved()) == (0, 4096)


def test_interpreter_exit_with_everything_alive_is_silent() -> None:
    script = """
import torch
from vmm_kv._native import DeviceModel
from vmm_kv.host import GraphPool, HostGraph, HostMemory, capture
memory = HostMemory(DeviceModel([1 << 24]), 0)
mode = memory.charging()
mode.__enter__()
x = torch.ones(4096)
cycle = [x, x + 1]
cycle.append(cycle)
pool, graph = GraphPool(memory), HostGraph()
with torch.no_grad(), capture(graph, pool, memory):
    y = (x + 1).relu()
graph.replay()
torch.self = [y, graph]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
