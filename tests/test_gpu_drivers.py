"""GPU drivers by kind: which torch goes with them, and how a machine shows a GPU."""

from __future__ import annotations

import os
import re

import pytest

from vmm_kv import gpu_drivers
from vmm_kv.gpu_drivers import torch_shortfall


@pytest.mark.parametrize(
    ("kind", "cuda", "hip"), [("cuda", "13.0", None), ("cuda", "12.6", None), ("hip", None, "7.1.25424")]
)
def test_a_torch_built_for_the_kind_lacks_nothing(kind: str, cuda: str | None, hip: str | None) -> None:
    assert torch_shortfall(kind, "2.13.0", cuda, hip) is None


@pytest.mark.parametrize(
    ("kind", "version", "cuda", "hip", "what", "todo"),
    [
        ("cuda", "2.13.0+cpu", None, None, r"2\.13\.0\+cpu is built for the CPU only", "CUDA.*whl/<cu126"),
        ("cuda", "2.13.0", None, "7.1", r"for ROCm 7\.1 and cannot .* cuda device", "CUDA.*whl/<cu126"),
        ("hip", "2.13.0+cu130", "13.0", None, r"for CUDA 13\.0 and cannot .* hip device", "ROCm.*whl/<rocm6"),
        ("hip", None, None, None, "torch is not installed", "ROCm.*whl/<rocm6"),
    ],
)
def test_a_torch_that_does_not_fit_names_the_one_to_install(
    kind: str, version: str | None, cuda: str | None, hip: str | None, what: str, todo: str
) -> None:
    found = torch_shortfall(kind, version, cuda, hip)
    assert found is not None
    assert re.search(what, found[0]) and re.search(todo, found[1])


@pytest.mark.parametrize("kind", gpu_drivers.KINDS)
def test_a_device_node_makes_a_gpu_visible(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: path == gpu_drivers._NODES[kind])
    assert [other for other in gpu_drivers.KINDS if gpu_drivers.visible(other)] == [kind]
    assert gpu_drivers._NODES[kind] in (gpu_drivers.visible(kind) or "")
