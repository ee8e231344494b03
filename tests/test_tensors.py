"""Which DLPack device a torch device is. What the tensors do is tested with the cache."""

from __future__ import annotations

import pytest
import torch

from vmm_kv.tensors import _dlpack_device


@pytest.mark.parametrize(
    ("device", "hip", "found"),
    [
        ("cpu", None, (1, 0)),
        ("cuda:0", None, (2, 0)),
        ("cuda:3", None, (2, 3)),
        ("cuda", None, (2, 0)),
        ("cuda:1", "7.1.25424", (10, 1)),
    ],
)
def test_a_rocm_build_of_torch_calls_its_devices_cuda_and_dlpack_does_not(
    device: str, hip: str | None, found: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """dlpack.h: kDLCPU 1, kDLCUDA 2, kDLROCM 10. A ROCm build refuses kDLCUDA, a CUDA build kDLROCM."""
    monkeypatch.setattr(torch.version, "hip", hip)
    assert _dlpack_device(torch.device(device)) == found


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="no DLPack device for meta"):
        _dlpack_device(torch.device("meta"))
