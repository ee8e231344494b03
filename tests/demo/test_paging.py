"""Where tokens lie in a layer's tensor: contiguous, strided between other layers, or in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from vmm_kv.demo import paging

BLOCKS, SIZE, HEADS, DIM = 6, 4, 2, 8
TABLE = [5, 2]


def interleaved(layers: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Tensors of several layers whose blocks lie side by side, as `outermost="block"` lays them."""
    whole = torch.zeros(BLOCKS, layers, 2, SIZE, HEADS, DIM, dtype=dtype)
    return list(whole.unbind(1))


def stored(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Six tokens written to the blocks of TABLE, and read back."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 6, HEADS, DIM, generator=generator)
    per_block = paging.rows_per_block(kv)
    slots = torch.tensor([[paging.slot(TABLE, position, SIZE, per_block) for position in range(6)]])
    paging.write(kv, slots, keys, values)
    return paging.read(kv, torch.tensor([TABLE]))


def test_a_strided_layer_holds_what_a_contiguous_one_does_and_leaves_its_neighbours_alone() -> None:
    plain = torch.zeros(BLOCKS, 2, SIZE, HEADS, DIM)
    first, middle, last = interleaved(3)
    expected = stored(plain)
    for found, wanted in zip(stored(middle), expected, strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(middle, plain)
    assert not first.any() and not last.any()
    assert paging.rows_per_block(plain) == 2 * SIZE and paging.rows_per_block(middle) == 6 * SIZE


def test_the_last_layer_ends_where_its_memory_ends() -> None:
    last = interleaved(3)[2]
    rows = paging.rows(last)
    end = last.storage_offset() + (last.shape[0] - 1) * last.stride(0) + last[0].numel()
    assert rows.storage_offset() + rows.numel() == end == last.untyped_storage().nbytes() // 4


def test_a_cache_of_bytes_holds_8_bit_floats() -> None:
    keys, values = stored(interleaved(2, torch.uint8)[1])
    exact_keys, exact_values = stored(torch.zeros(BLOCKS, 2, SIZE, HEADS, DIM))
    assert keys.dtype is values.dtype is torch.float32
    assert not torch.equal(keys, exact_keys)
    for found, exact in ((keys, exact_keys), (values, exact_values)):
        torch.testing.assert_close(found, exact, rtol=0.0625, atol=0.002)  # three bits after the leading one
