"""A tensor as the engine sees it, before it is known where it lies. Imports no torch."""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vmm_kv.errors import LayoutError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as the engine sees it. `None` in `shape`, exactly once, marks the block dimension.

    `order` is the physical order of the dimensions, outermost first: `order[i]` is the logical dimension at physical
    position i; None means as written. So `(2, None, 16, 8, 128)` has two segments (K, then V), `(None, 2, 16, 8, 128)`
    has one, and the latter with order `(1, 0, 2, 3, 4)` two again.

    Raises `TypeError` for a dtype that is none of torch's and for a dimension that is no whole number, `ValueError` for
    a dimension below 1, `LayoutError` without exactly one block dimension and for an order that is no permutation.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_dtype(self.name, self.dtype)
        shape = tuple(None if size is None else _whole(self.name, "shape", size) for size in self.shape)
        object.__setattr__(self, "shape", shape)  # plain ints, whatever came
        if self.order is not None:
            object.__setattr__(self, "order", tuple(_whole(self.name, "order", dim) for dim in self.order))
        if (count := self.shape.count(None)) != 1:
            raise LayoutError(f"{self.name}: shape {self.shape} has {count} block dimensions (None), not 1")
        if any(size is not None and size < 1 for size in self.shape):
            raise ValueError(f"{self.name}: shape {self.shape} has a dimension below 1")
        if self.order is not None and sorted(self.order) != list(range(len(self.shape))):
            raise LayoutError(f"{self.name}: order {self.order} is no permutation of {len(self.shape)} dimensions")

    @property
    def block_dim(self) -> int:
        """The logical index of the block dimension."""
        return self.shape.index(None)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes in the whole tensor, K and V alike, without padding."""
        return math.prod(size for size in self.shape if size is not None) * self.itemsize

    @property
    def block_outermost(self) -> bool:
        """Whether blocks are whole, one after another: nothing but dimensions of size 1 lies around the block's."""
        order = self.order or range(len(self.shape))
        return all(self.shape[dim] == 1 for dim in order[: order.index(self.block_dim)])

    def shape_for(self, capacity: int) -> tuple[int, ...]:
        """The shape with `capacity` blocks. ValueError if that is below 1."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 block, got {capacity}")
        return tuple(capacity if size is None else size for size in self.shape)

    def strides(self, capacity: int, block_stride: int | None = None) -> tuple[int, ...]:
        """Bytes between neighbours along each logical dimension, dense in the physical order.

        `block_stride` spreads the blocks: bytes from one to the next, which the dimensions around them then span.
        """
        shape, order = self.shape_for(capacity), self.order or range(len(self.shape))
        strides, step = [0] * len(shape), self.itemsize
        for dim in reversed(order):
            if dim == self.block_dim and block_stride is not None:
                step = block_stride
            strides[dim] = step
            step *= shape[dim]
        return tuple(strides)


def _whole(name: str, field: str, number: int) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name}: {number!r} in {field} is no whole number") from None


def _check_dtype(name: str, dtype: object) -> None:
    torch = sys.modules.get("torch")  # a dtype of torch's is there only where torch is
    if torch is None or not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: dtype {dtype!r} is no torch.dtype such as torch.bfloat16")
