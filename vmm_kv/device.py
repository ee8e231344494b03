"""One device: its driver, the torch device that goes with it, its framework's memory figures, and its graphs."""

from __future__ import annotations

import logging
import os
import re
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from vmm_kv._native import DeviceModel
from vmm_kv.driver import Driver
from vmm_kv.driver.host import HostDriver
from vmm_kv.errors import UnsupportedError
from vmm_kv.holdings import empty_graveyard
from vmm_kv.host import GraphPool, HostGraph, HostMemory, capture
from vmm_kv.measure import FrameworkMemory, MemoryReading, read_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_GRANULE = 2 << 20


class Graph(Protocol):
    """A captured graph: `torch.cuda.CUDAGraph`, or the host's stand-in."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class Device:
    """A device that is open. Made by `open_device`.

    driver: whose chunks back the KV cache. torch_device: where its tensors are. The two are separate settings.
    memory: the framework's figures on this device, in bytes. captures: how many graph captures it has seen.
    context_bytes: what the process holds on the device by having it open, None where nobody can tell.
    """

    def __init__(self, driver: Driver, torch_device: torch.device, memory: HostMemory) -> None:
        self.driver = driver
        self.torch_device = torch_device
        self.memory: FrameworkMemory = memory
        self.captures = 0
        self.context_bytes: int | None = 0
        self._host = memory
        with driver.scope():
            self.total_bytes = driver.mem_info()[1]

    @property
    def name(self) -> str:
        return self.driver.name

    def active(self) -> AbstractContextManager[None]:
        """Torch operations inside run on the device; on the host, what they allocate is charged to its budget."""
        return self._host.charging()

    def reading(self, label: str, kv_bytes: int = 0) -> MemoryReading:
        """What is free and who holds what, in bytes. `kv_bytes` is the memory our own chunks hold, from our books."""
        with self.driver.scope():
            empty_graveyard(self.driver.name)
            return read_memory(label, self.driver.mem_info, self.memory, kv_bytes)

    def graph_pool(self) -> GraphPool:
        """Memory for the intermediates of graphs, which all graphs captured with it share."""
        return GraphPool(self._host)

    def new_graph(self) -> HostGraph:
        return HostGraph()

    @contextmanager
    def capture(self, graph: HostGraph, pool: GraphPool) -> Iterator[None]:
        """Records the torch operations inside into `graph`, their intermediates placed in `pool`."""
        with capture(graph, pool, self._host):
            yield
        self.captures += 1

    def __repr__(self) -> str:
        return f"<Device {self.name}, {self.total_bytes} bytes, tensors on {self.torch_device}>"


def open_device(name: str = "auto") -> Device:
    """Opens a device: `"host"`, `"host:2GiB"` (a budget of its own, see `parse_bytes`), or `"auto"`.

    `"host"` has a budget of half this machine's memory. Every call makes a new host device. `"auto"` is the host where
    no GPU is visible. Raises `UnsupportedError` where a GPU is asked for or found that this version cannot drive.
    """
    kind, _, rest = name.partition(":")
    if name == "auto":
        if gpu := _visible_gpu():
            raise UnsupportedError(f"{gpu}, and this version drives host devices only: open 'host' to run on the CPU")
        log.info("no GPU is visible: opening the host device")
        kind = "host"
    if kind in ("cuda", "hip"):
        raise UnsupportedError(f"{name}: this version drives host devices only; open 'host' or 'host:<size>'")
    if kind != "host":
        raise ValueError(f"device {name!r}: it is 'auto', 'host' or 'host:<size>', for example 'host:2GiB'")
    return open_host(parse_bytes(rest) if rest else _half_of_memory())


def open_host(budget: int, *, granule: int = _GRANULE) -> Device:
    """A host device with `budget` bytes and a granule of `granule` bytes: 4 KiB, 64 KiB, 2 MiB."""
    if budget < granule:
        raise ValueError(f"a host device of {budget} bytes cannot hold one granule of {granule}")
    driver = HostDriver(DeviceModel([budget], granule))
    log.info("opened %s with a budget of %d bytes", driver.name, budget)
    return Device(driver, torch.device("cpu"), HostMemory(driver.model, driver.index))


def parse_bytes(text: str) -> int:
    """`"2GiB"`, `"512MiB"`, `"1073741824"` as a number of bytes. Binary units only. Raises `ValueError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size: a number with B, KiB, MiB, GiB or TiB, for example 2GiB")
    size = float(match[1]) * _UNITS[match[2]] if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    if size < 1:
        raise ValueError(f"{text!r} is not a size: it must be at least one byte")
    return int(size)


def _half_of_memory() -> int:
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return half // _GRANULE * _GRANULE


def _visible_gpu() -> str | None:
    if torch.cuda.is_available():
        return f"torch sees {torch.cuda.get_device_name(0)}"
    for node, vendor in (("/dev/nvidiactl", "an NVIDIA"), ("/dev/kfd", "an AMD")):
        if os.path.exists(node):
            return f"{vendor} GPU is visible ({node})"
    return None
