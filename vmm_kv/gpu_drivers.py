"""The GPU drivers by kind, and whether this machine shows such a GPU. Imports no binding before one is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from vmm_kv.driver import Driver

KINDS = ("cuda", "hip")

_CLASSES = {"cuda": "CudaDriver", "hip": "HipDriver"}
_NODES = {"cuda": "/dev/nvidiactl", "hip": "/dev/kfd"}
_VENDORS = {"cuda": "an NVIDIA GPU", "hip": "an AMD GPU"}


def open_driver(
    kind: str,
    index: int,
    *,
    handle_types: Sequence[str] = ("none",),
    current_stream: Callable[[], int] | None = None,
    **options: Any,
) -> Driver:
    """Opens device `index`, as the driver counts. `UnsupportedError` names what is missing and what to install.

    handle_types: the most wanted first. current_stream: tells the caller's current stream. options: the driver's own.
    """
    driver: Driver = _driver_class(kind)(index, handle_types=handle_types, current_stream=current_stream, **options)
    return driver


def count(kind: str) -> int:
    """Devices that the driver shows this process. `UnsupportedError` where binding or driver are missing."""
    return int(_offered(kind, "count")())


def versions(kind: str) -> dict[str, str]:
    """Of binding, driver and, where there is one, runtime. `UnsupportedError` where they are missing."""
    return dict(_offered(kind, "versions")())


def visible(kind: str) -> str | None:
    """How this machine shows a GPU of that kind to this process, None where it shows none. Asks no driver."""
    node = _NODES[kind]
    return f"{_VENDORS[kind]} is visible ({node})" if os.path.exists(node) else None


def torch_shortfall(kind: str, version: str | None, cuda: str | None, hip: str | None) -> tuple[str, str] | None:
    """Why a torch build cannot have tensors on a `kind` device, and what to do about it; None if it can.

    version: None where torch is not installed. cuda, hip: as in `torch.version`.
    """
    if (cuda if kind == "cuda" else hip) is not None:
        return None
    build = "CUDA" if kind == "cuda" else "ROCm"
    wheels = "cu126 or later" if kind == "cuda" else "rocm6.4 or later"
    todo = (
        f"install torch built for {build}, no newer than the driver: "
        f"pip install torch --index-url https://download.pytorch.org/whl/<{wheels}>"
    )
    if version is None:
        return "torch is not installed", todo
    built = f"for CUDA {cuda}" if cuda else f"for ROCm {hip}" if hip else "for the CPU only"
    return f"torch {version} is built {built} and cannot have tensors on a {kind} device", todo


def _module(kind: str) -> Any:
    return import_module(f"vmm_kv.driver.{kind}")


def _driver_class(kind: str) -> Any:
    return getattr(_module(kind), _CLASSES[kind])


def _offered(kind: str, name: str) -> Any:
    module = _module(kind)
    return getattr(module, name, None) or getattr(_driver_class(kind), name)
