"""A layer's paged KV tensor, (blocks, 2, block_size, kv_heads, head_dim): where a token lies, and how it gets there.

A block may be followed by those of other layers, so that the tensor is strided in its first dimension. Only addressed
rows are ever touched: most of the tensor may lie over addresses that have no memory yet. A cache of bytes (uint8) holds
keys and values as 8-bit floats.
"""

from __future__ import annotations

import torch
from torch import Tensor

NULL_BLOCK = 0
"""Padding rows of a captured batch write here and their block tables point here. Never handed out."""
_QUANTISED = torch.float8_e4m3fn


def rows_per_block(kv: Tensor) -> int:
    """Rows from one block to the next, a row being a token's keys or values."""
    return kv.stride(0) // kv.stride(2)


def slot(table: list[int], position: int, block_size: int, per_block: int | None = None) -> int:
    """The row of `rows(kv)` for the key of a sequence's token at `position`. Its value lies block_size further.

    `per_block` is `rows_per_block` of the tensor, for one that is strided.
    """
    return table[position // block_size] * (per_block or 2 * block_size) + position % block_size


def rows(kv: Tensor) -> Tensor:
    """The tensor as (rows, kv_heads, head_dim), from its first block to the end of its last. Nothing is read."""
    count = (kv.shape[0] - 1) * rows_per_block(kv) + 2 * kv.shape[2]
    return kv.as_strided((count, *kv.shape[3:]), kv.stride()[2:])


def write(kv: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Stores keys and values, (B, T, kv_heads, head_dim) each, at slots (B, T)."""
    flat, block_size = rows(kv), kv.shape[2]
    slots = slots.reshape(-1)
    flat.index_copy_(0, slots, _stored(kv, keys.flatten(0, 1)))
    flat.index_copy_(0, slots + block_size, _stored(kv, values.flatten(0, 1)))


def read(kv: Tensor, tables: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Keys and values, (B, kv_heads, N * block_size, head_dim) each, of the blocks in tables (B, N).

    In `dtype`, where the cache is quantised.
    """
    halves, picks = _halves(kv), tables.reshape(-1) * (rows_per_block(kv) // kv.shape[2])
    keys, values = halves.index_select(0, picks), halves.index_select(0, picks + 1)
    if kv.dtype is torch.uint8:
        keys, values = (half.view(_QUANTISED).to(dtype or torch.float32) for half in (keys, values))
    shape = (len(tables), -1, *kv.shape[3:])
    return keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)


def _halves(kv: Tensor) -> Tensor:
    """(halves, block_size, kv_heads, head_dim): a half is the keys or the values of a block, or lies between two."""
    count = (kv.shape[0] - 1) * (rows_per_block(kv) // kv.shape[2]) + 2
    return kv.as_strided((count, *kv.shape[2:]), (kv.stride(1), *kv.stride()[2:]))


def _stored(kv: Tensor, x: Tensor) -> Tensor:
    return x.to(_QUANTISED).view(torch.uint8) if kv.dtype is torch.uint8 else x
