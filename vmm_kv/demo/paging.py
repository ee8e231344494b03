"""A layer's paged KV tensor, (blocks, 2, block_size, kv_heads, head_dim): where a token lies, and how it gets there.

Only addressed rows are ever touched: most of the tensor may lie over addresses that have no memory yet.
"""

from __future__ import annotations

from torch import Tensor

NULL_BLOCK = 0
"""Padding rows of a captured batch write here and their block tables point here. Never handed out."""


def slot(table: list[int], position: int, block_size: int) -> int:
    """The row of `rows(kv)` for the key of a sequence's token at `position`. Its value lies block_size further."""
    return table[position // block_size] * 2 * block_size + position % block_size


def rows(kv: Tensor) -> Tensor:
    """The tensor as (blocks * 2 * block_size, kv_heads, head_dim). A view: nothing is read."""
    return kv.view(-1, *kv.shape[3:])


def write(kv: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Stores keys and values, (B, T, kv_heads, head_dim) each, at slots (B, T)."""
    flat, block_size = rows(kv), kv.shape[2]
    slots = slots.reshape(-1)
    flat.index_copy_(0, slots, keys.flatten(0, 1))
    flat.index_copy_(0, slots + block_size, values.flatten(0, 1))


def read(kv: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, (B, kv_heads, N * block_size, head_dim) each, of the blocks in tables (B, N)."""
    halves, picks = kv.view(-1, *kv.shape[2:]), tables.reshape(-1) * 2
    keys, values = halves.index_select(0, picks), halves.index_select(0, picks + 1)
    shape = (len(tables), -1, *kv.shape[3:])
    return keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)
