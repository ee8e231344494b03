"""What a device needs of torch on a real GPU: the allocator's figures, graphs, and which of torch's devices it is.

ROCm builds of torch offer all of it under `torch.cuda` as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from vmm_kv.driver import DeviceProperties
from vmm_kv.errors import UnsupportedError


@dataclass(frozen=True)
class TorchDevice:
    """One of torch's devices and what tells which GPU it is. Empty where torch does not tell."""

    ordinal: int
    uuid: str
    pci: str
    """`domain:bus:device` in hexadecimal."""
    name: str


class TorchMemory:
    """torch's caching allocator on one device, graph pools included. Bytes. Also with `expandable_segments`."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal

    def allocated(self) -> int:
        return int(torch.cuda.memory_allocated(self._ordinal))

    def reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self._ordinal))

    def peak_reserved(self) -> int:
        return int(torch.cuda.max_memory_reserved(self._ordinal))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._ordinal)

    def empty_cache(self) -> None:
        with torch.cuda.device(self._ordinal):
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._ordinal)


class TorchFramework:
    """torch on its GPU number `ordinal`. Nobody tells what the context holds, so `context_bytes` is None."""

    context_bytes: int | None = None

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        torch.cuda.init()  # type: ignore[no-untyped-call]  # now, so that the first reading shows what that takes
        self.memory = TorchMemory(ordinal)

    def current_stream(self) -> int:
        """The driver's handle of the calling thread's current stream on the device."""
        return int(torch.cuda.current_stream(self._ordinal).cuda_stream)

    @contextmanager
    def active(self) -> Iterator[None]:
        """torch's current device is this one inside."""
        with torch.cuda.device(self._ordinal):
            yield

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def new_graph(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph()

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
        with torch.cuda.device(self._ordinal), torch.cuda.graph(graph, pool=pool, stream=self._capture_stream):
            yield

    @cached_property
    def _capture_stream(self) -> torch.cuda.Stream:
        """One for all captures: blocks of a pool are reused within a stream only.

        Not torch's default one, which lies on whichever device captured first in the process.
        """
        return torch.cuda.Stream(self._ordinal)  # type: ignore[no-untyped-call]


def torch_devices() -> tuple[TorchDevice, ...]:
    """All that torch sees, none for a CPU build."""
    if not torch.cuda.is_available():
        return ()
    return tuple(_described(ordinal) for ordinal in range(torch.cuda.device_count()))


def _described(ordinal: int) -> TorchDevice:
    properties: Any = torch.cuda.get_device_properties(ordinal)
    ids = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    pci = "" if None in ids else ":".join(f"{part:02x}" for part in ids)
    return TorchDevice(ordinal, str(getattr(properties, "uuid", "")), pci, properties.name)


def match_device(wanted: DeviceProperties, candidates: Sequence[TorchDevice]) -> int:
    """The ordinal of the torch device that is the driver's device: by UUID, else by PCI id.

    Indexes are not compared: torch and a driver may count differently. Slices of one GPU share its PCI id, so it
    decides only where one device has it. Raises `UnsupportedError` where none or several match.
    """
    uuid = _digits(wanted.uuid)
    found = [device for device in candidates if uuid and _digits(device.uuid) == uuid]
    if not found and wanted.pci:
        found = [device for device in candidates if device.pci and _pci(device.pci) == _pci(wanted.pci)]
    if len(found) == 1:
        return found[0].ordinal
    seen = "; ".join(f"cuda:{d.ordinal} {d.name}, UUID {d.uuid or '-'}, PCI {d.pci or '-'}" for d in candidates)
    raise UnsupportedError(
        f"{'none' if not found else 'more than one'} of torch's devices is {wanted.name}, UUID {wanted.uuid or '-'}, "
        f"PCI {wanted.pci or '-'}. torch sees: {seen or 'no GPU'}. Let both see the same devices "
        "(CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES)"
    )


def _digits(uuid: str) -> str:
    """Of `GPU-8f3c...` and `8f3c...` alike."""
    text = uuid.lower()
    for prefix in ("gpu-", "mig-"):
        text = text.removeprefix(prefix)
    return text.replace("-", "") if text.strip("0-") else ""


def _pci(pci: str) -> tuple[int, int, int]:
    """Domain, bus and device; the function does not tell GPUs apart."""
    *front, device = pci.split(":")
    domain, bus = front if len(front) == 2 else ("0", *front)
    return int(domain, 16), int(bus, 16), int(device.split(".")[0], 16)
