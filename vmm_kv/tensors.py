"""Torch tensors over raw addresses, mapped or not, that keep the addresses reserved for as long as they live."""

from __future__ import annotations

import torch

from vmm_kv.layout import Placement
from vmm_kv.pages import Reservation

# Device types of dlpack.h. A ROCm build of torch refuses kDLCUDA, a CUDA build kDLROCM.
_DL_CPU, _DL_CUDA, _DL_ROCM = 1, 2, 10


def _dlpack_device(device: torch.device) -> tuple[int, int]:
    if device.type == "cpu":
        return _DL_CPU, 0
    if device.type == "cuda":
        return (_DL_ROCM if torch.version.hip else _DL_CUDA), device.index or 0
    raise ValueError(f"no DLPack device for {device}: cpu and cuda are known")


def byte_tensor(reservation: Reservation, device: torch.device) -> torch.Tensor:
    """uint8 vector over the whole reservation, shape `(reservation.size,)`. Touches no memory.

    The capsule is always uint8 and other types are views of it, since older torch has no float8 in DLPack. The import
    takes the device from the capsule, so it asks the driver nothing about an address where nothing is mapped.
    """
    kind, index = _dlpack_device(device)
    capsule = reservation.lease.capsule(reservation.base, reservation.size, kind, index)
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return tensor


def placed_view(base: torch.Tensor, placement: Placement, blocks: int) -> torch.Tensor:
    """The tensor that `placement` describes, with `blocks` in its block dimension, as a view of the byte vector.

    Shape: the spec's shape with `None` replaced by `blocks`. Shares storage with `base`. Touches no memory.
    """
    spec = placement.spec
    itemsize = spec.dtype.itemsize
    shape = tuple(blocks if size is None else size for size in spec.shape)
    strides = tuple(stride // itemsize for stride in placement.strides)
    return base.view(spec.dtype).as_strided(shape, strides, placement.offset // itemsize)
