"""GraphPool: where blocks go, and when segments come back."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from vmm_kv._native import DeviceModel
from vmm_kv.host import GraphPool, HostMemory

MIB = 1 << 20


class User:
    """Stands for a graph."""


@pytest.fixture
def model() -> DeviceModel:
    return DeviceModel([4096 * MIB])


@pytest.fixture
def memory(model: DeviceModel) -> HostMemory:
    return HostMemory(model, 0)


def test_blocks_are_aligned_and_apart(memory: HostMemory) -> None:
    pool = GraphPool(memory)
    storages = [pool.allocate(n) for n in (1, 512, 513, 4096)]
    spans = sorted((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages)
    assert all(start % 512 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert pool.used == 512 + 512 + 1024 + 4096
    assert pool.bytes == memory.pooled() == memory.reserved() == 2 * MIB


def test_the_smallest_gap_that_fits_is_taken(memory: HostMemory) -> None:
    pool = GraphPool(memory)
    pool.join(user := User())
    wide, wall, narrow, end = (pool.allocate(n) for n in (4096, 512, 1024, 512))
    at = narrow.data_ptr()
    del wide, narrow
    assert pool.allocate(1000).data_ptr() == at
    assert (wall.nbytes(), end.nbytes(), isinstance(user, User)) == (512, 512, True)


def test_freed_neighbours_become_one_gap(memory: HostMemory) -> None:
    pool = GraphPool(memory)
    pool.join(user := User())
    blocks: list[torch.UntypedStorage | None] = [pool.allocate(MIB // 2) for _ in range(4)]
    first = min(s.data_ptr() for s in blocks if s)
    for at in (1, 3, 2, 0):
        blocks[at] = None
    assert pool.used == 0
    assert pool.allocate(2 * MIB).data_ptr() == first
    assert pool.bytes == 2 * MIB and isinstance(user, User)


def test_a_large_block_gets_a_segment_of_its_size(memory: HostMemory) -> None:
    pool = GraphPool(memory)
    storage = pool.allocate(5 * MIB + 1)
    assert pool.bytes == 6 * MIB and storage.nbytes() == 5 * MIB + 1


def test_a_twin_shares_the_bytes_but_does_not_keep_the_block(memory: HostMemory) -> None:
    pool = GraphPool(memory)
    pool.join(user := User())
    storage = pool.allocate(8)
    twin = pool.twin(storage)
    assert twin is not None and twin.data_ptr() == storage.data_ptr()
    torch.empty(0).set_(storage, 0, (2,)).fill_(7.0)  # type: ignore[call-overload]
    assert torch.empty(0).set_(twin, 0, (2,)).tolist() == [7.0, 7.0]  # type: ignore[call-overload]
    del storage
    assert pool.used == 0 and isinstance(user, User)
    assert pool.twin(torch.ones(2).untyped_storage()) is None


def test_segments_return_when_the_last_graph_and_the_last_tensor_are_gone(
    model: DeviceModel, memory: HostMemory
) -> None:
    pool = GraphPool(memory)
    first, second = User(), User()
    pool.join(first)
    leave = pool.join(second)
    storage = pool.allocate(100)
    del first
    leave()
    leave()
    memory.empty_cache()
    assert model.used(0) == memory.pooled() == 2 * MIB  # a tensor lives
    del storage
    assert (memory.pooled(), memory.reserved()) == (0, 2 * MIB)  # cached, as any freed bytes
    memory.empty_cache()
    assert model.used(0) == pool.bytes == 0
    assert pool.allocate(1).nbytes() == 1  # and the pool can be used again


def test_free_segments_stay_while_a_graph_uses_the_pool(model: DeviceModel, memory: HostMemory) -> None:
    pool = GraphPool(memory)
    pool.join(user := User())
    pool.allocate(100)
    memory.empty_cache()
    assert pool.used == 0 and model.used(0) == 2 * MIB
    del user
    memory.empty_cache()
    assert model.used(0) == 0


@pytest.mark.parametrize(("order", "held"), [((100, 200, 400, 800), 1500), ((800, 400, 200, 100), 800)])
def test_largest_first_holds_the_largest_and_smallest_first_the_sum(
    memory: HostMemory, order: tuple[int, ...], held: int
) -> None:
    """Case C27: each capture's memory is free by the time of the next one."""
    pool = GraphPool(memory)
    users = []
    for size in order:
        users.append(user := User())
        pool.join(user)
        pool.allocate(size * MIB)
    assert pool.bytes == held * MIB and len(users) == 4


def test_out_of_memory_flushes_the_cache_and_leaves_the_pool_as_it_was() -> None:
    model = DeviceModel([8 * MIB])
    memory = HostMemory(model, 0)
    pool = GraphPool(memory)
    with memory.charging():
        torch.ones(MIB)  # 4 MiB, cached from here on
    kept = pool.allocate(6 * MIB)  # does not come out of cached bytes, so these have to go
    assert (memory.reserved(), model.used(0)) == (6 * MIB, 6 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"allocate 4\.00 MiB.*graph pools 6\.00 MiB"):
        pool.allocate(3 * MIB)
    assert (pool.bytes, pool.used, model.used(0)) == (6 * MIB, 6 * MIB, 6 * MIB)
    assert kept.nbytes() == 6 * MIB
