"""Every kind of layout in every set-up: each block's bytes are where the engine's own indexing looks for them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from setups import SETUPS, G, OpenedDevice, opened
from test_layout import LAYOUTS

from vmm_kv.cache import KVCache
from vmm_kv.layout import Placement
from vmm_kv.spans import Spans, covers, difference, union

CAPACITY = 150
COUNTS = (1, 2, 37, 99, CAPACITY)


@pytest.fixture(params=SETUPS)
def device(request: pytest.FixtureRequest) -> Iterator[OpenedDevice]:
    with opened(request.param, 4096 * G) as device:
        yield device


@pytest.fixture(params=sorted(LAYOUTS))
def cache(device: OpenedDevice, request: pytest.FixtureRequest) -> Iterator[KVCache]:
    with KVCache(device, LAYOUTS[request.param](CAPACITY)) as cache:
        yield cache


def mapped(device: OpenedDevice, cache: KVCache) -> Spans:
    return union((a - cache.base, a - cache.base + size) for a, size in device.model.mapped())


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


def test_a_commit_maps_exactly_the_granules_that_the_blocks_need(device: OpenedDevice, cache: KVCache) -> None:
    """With uniform chunks (B1, B4) the unit is the chunk, and what a shrink unmaps stays with the cache (B4)."""
    layout = cache.layout
    for count in COUNTS:
        cost = cache.cost(count)
        assert cache.commit(count) == count
        assert mapped(device, cache) == layout.granules(count, cache.unit)
        assert cost == cache.mapped_bytes == cache.physical_bytes == device.model.used(0)
        assert count <= cache.backed <= CAPACITY
    held = cache.physical_bytes
    returned = cache.shrink(COUNTS[1])
    assert covers(mapped(device, cache), layout.granules(COUNTS[1], cache.unit))
    assert (returned, cache.physical_bytes) == (held - device.model.used(0), device.model.used(0))
    if device.driver.quirks.memory_with_addresses:
        assert (returned, cache.spare_bytes) == (0, held - cache.mapped_bytes)
    else:
        assert (returned, cache.spare_bytes) == (held - cache.mapped_bytes, 0)


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
