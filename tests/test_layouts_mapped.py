"""Every kind of layout on the host device: each block's bytes are where the engine's own indexing looks for them."""

from __future__ import annotations

import ctypes
from itertools import product

import pytest
import torch
from test_layout import LAYOUTS

from vmm_kv._native import DeviceModel
from vmm_kv.cache import KVCache
from vmm_kv.device import open_host
from vmm_kv.driver.host import HostDriver
from vmm_kv.layout import Placement
from vmm_kv.spans import covers, difference, union

G = 4096
CAPACITY = 150
COUNTS = (1, 2, 37, 99, CAPACITY)


@pytest.fixture(params=sorted(LAYOUTS))
def cache(request: pytest.FixtureRequest) -> KVCache:
    device = open_host(4096 * G, granule=G)
    assert isinstance(device.driver, HostDriver)
    device.driver.model.poison = True
    return KVCache(device, LAYOUTS[request.param](CAPACITY))


def model(cache: KVCache) -> DeviceModel:
    driver = cache.device.driver
    assert isinstance(driver, HostDriver)
    return driver.model


def ends(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the one after its last."""
    item = tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * item


def around(placement: Placement) -> list[tuple[int | slice, ...]]:
    """The engine's indices of the dimensions around the block's, one for each segment in order."""
    dims = zip(placement.spec.shape_for(1), placement.strides, strict=True)
    outside = [size > 1 and stride >= placement.block_stride for size, stride in dims]
    choices: list[list[int | slice]] = [
        list(range(size)) if out else [slice(None)]
        for size, out in zip(placement.spec.shape_for(1), outside, strict=True)
    ]
    return list(product(*choices))


def test_each_end_of_each_block_is_where_the_engine_looks(cache: KVCache) -> None:
    layout, base = cache.layout, cache.base
    within = [layout.spans(n) for n in range(CAPACITY + 1)]
    for placement in layout.placements:
        tensor = cache.tensors[placement.spec.name]
        assert tensor.dtype == placement.spec.dtype
        assert tuple(tensor.shape) == placement.spec.shape_for(CAPACITY)
        segments = around(placement)
        assert len(segments) == len(placement.segments)
        for segment, where in zip(placement.segments, segments, strict=True):
            # a number as an index takes its dimension away
            at = sum(not isinstance(i, int) for i in where[: placement.spec.block_dim])
            for block in range(CAPACITY):
                first, stop = ends(tensor[where].narrow(at, block, 1))
                assert (first - base, stop - base) == segment.block(block)
                assert covers(within[block + 1], (segment.block(block),))


def test_a_commit_maps_exactly_the_granules_that_the_blocks_need(cache: KVCache) -> None:
    layout = cache.layout
    for count in COUNTS:
        cost = cache.cost(count)
        assert cache.commit(count) == count
        mapped = union((a - cache.base, a - cache.base + size) for a, size in model(cache).mapped())
        assert mapped == layout.granules(count, G)
        assert cost == cache.mapped_bytes == cache.physical_bytes == model(cache).used(0)
        assert count <= cache.backed <= CAPACITY
    cache.shrink(COUNTS[1])
    mapped = union((a - cache.base, a - cache.base + size) for a, size in model(cache).mapped())
    assert covers(mapped, layout.granules(COUNTS[1], G))


def test_what_the_engine_writes_to_one_block_stays_when_others_come_and_go(cache: KVCache) -> None:
    """Blocks hold 1, 2, ... through their own tensor, are read back by address, and growth leaves them alone."""
    layout = cache.layout
    placements = layout.placements if not layout.aliasing else layout.placements[:1]

    def fill(first: int, stop: int) -> None:
        for placement in placements:
            tensor = cache.tensors[placement.spec.name].movedim(placement.spec.block_dim, 0)
            for block in range(first, stop):
                tensor[block].fill_(block % 100 + 1)

    def check(stop: int) -> None:
        for placement in placements:
            tensor = cache.tensors[placement.spec.name].movedim(placement.spec.block_dim, 0)
            for block in range(stop):
                assert torch.all(tensor[block] == block % 100 + 1)
                for segment in placement.segments:
                    address = cache.base + segment.block(block)[0]
                    word = ctypes.string_at(address, placement.spec.itemsize)
                    assert int.from_bytes(word, "little") == block % 100 + 1

    cache.commit(20)
    fill(0, 20)
    cache.commit(100)
    check(20)
    fill(20, 100)
    cache.shrink(7)
    check(7)
    cache.commit(CAPACITY)
    check(7)
    for start, end in difference(layout.spans(CAPACITY), layout.spans(7)):
        assert not any(ctypes.string_at(cache.base + start, end - start))


def test_every_block_can_be_touched_with_an_alias_backing(cache: KVCache) -> None:
    cache.back(alias=True)
    for tensor in cache.tensors.values():
        tensor.fill_(1)
    addresses = {name: tensor.data_ptr() for name, tensor in cache.tensors.items()}
    cache.commit(COUNTS[2])
    assert {name: tensor.data_ptr() for name, tensor in cache.tensors.items()} == addresses
    for name in addresses:
        assert not cache.view(name).any()
