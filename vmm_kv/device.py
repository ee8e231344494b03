"""One device: its driver, the torch device that goes with it, its framework's memory figures, and its graphs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vmm_kv import emulated, gpu_drivers
from vmm_kv._native import DeviceModel
from vmm_kv.capture import capture_in_progress
from vmm_kv.driver import Driver
from vmm_kv.driver.handle_types import checked
from vmm_kv.driver.host import HostDriver
from vmm_kv.errors import UnsupportedError
from vmm_kv.holdings import empty_graveyard
from vmm_kv.host import HostFramework
from vmm_kv.measure import FrameworkMemory, MemoryReading, read_memory
from vmm_kv.memory_source import DeviceMemory, resolve
from vmm_kv.sizes import parse_bytes
from vmm_kv.system_files import gpu_figures, half_of_memory, host_figures
from vmm_kv.torch_gpu import TorchFramework, match_device, torch_devices

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_GRANULE = 2 << 20
_NAMES = "'auto', 'host[:size]', 'cuda[:index]' or 'hip[:index]', for example 'host:2GiB' or 'cuda:0'"


class Graph(Protocol):
    """A captured graph: `torch.cuda.CUDAGraph`, or the host's stand-in."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class Framework(Protocol):
    """What a device needs of a framework: `TorchFramework` on a GPU, `HostFramework` where tensors are on the CPU."""

    @property
    def memory(self) -> FrameworkMemory: ...

    @property
    def context_bytes(self) -> int | None: ...

    def active(self) -> AbstractContextManager[None]: ...

    def graph_pool(self) -> Any: ...

    def new_graph(self) -> Graph: ...

    def capture(self, graph: Any, pool: Any) -> AbstractContextManager[None]: ...


class Device:
    """A device that is open. Made by `open_device`.

    driver: whose chunks back the KV cache. torch_device: where its tensors are. The two are separate settings: an
    emulated driver (`emulated`) goes with tensors on the CPU.
    memory: the framework's figures on this device, in bytes. captures: how many graph captures it has seen.
    context_bytes: what the process holds on the device by having it open, None where nobody can tell.
    total_bytes: the device's memory, as the readings tell it.
    """

    def __init__(
        self, driver: Driver, torch_device: torch.device, framework: Framework, *, emulated: bool = False
    ) -> None:
        self.driver = driver
        self.torch_device = torch_device
        self.emulated = emulated
        self.properties = driver.properties()
        self.captures = 0
        self._framework = framework
        with driver.scope():
            self.total_bytes = self._resolve(*driver.mem_info()).total

    @property
    def name(self) -> str:
        """The driver's kind and device number, `"host:0"`: not what distinguishes two host devices."""
        return self.driver.name

    @property
    def memory(self) -> FrameworkMemory:
        """The framework's figures on this device."""
        return self._framework.memory

    @property
    def context_bytes(self) -> int | None:
        """Bytes that the process holds by having the device open; None where nobody can tell."""
        return self._framework.context_bytes

    def active(self) -> AbstractContextManager[None]:
        """The device is torch's current one inside; on the CPU, what operations allocate is charged to its budget.

        On a GPU torch still makes tensors on the CPU unless told otherwise: `device=device.torch_device`.
        """
        return self._framework.active()

    def reading(self, label: str, kv_bytes: int = 0) -> MemoryReading:
        """What is free and who holds what, in bytes. `kv_bytes` is the memory our own chunks hold, from our books.

        Raises `VmmError` where the figures for the device contradict each other.
        """
        with self.driver.scope():
            empty_graveyard(self.driver.name)
            return read_memory(label, self.driver.mem_info, self.memory, kv_bytes, resolve=self._resolve)

    def graph_pool(self) -> Any:
        """Memory for the intermediates of graphs, which all graphs captured with it share."""
        return self._framework.graph_pool()

    def new_graph(self) -> Graph:
        """An empty graph, for one `capture`. It keeps the capture's memory until it dies or is reset."""
        return self._framework.new_graph()

    @contextmanager
    def capture(self, graph: Graph, pool: Any) -> Iterator[None]:
        """Records the torch operations inside into `graph`, their intermediates placed in `pool`."""
        with capture_in_progress(), self._framework.capture(graph, pool):
            yield
        self.captures += 1

    def _resolve(self, free: int, total: int) -> DeviceMemory:
        host = host_figures() if self.properties.integrated else None
        second = None if self.emulated else gpu_figures(self.properties.pci)
        return resolve(free, total, self.properties, host, second)

    def __repr__(self) -> str:
        kind = " (emulated driver)" if self.emulated else ""
        return f"<Device {self.name}{kind}, {self.total_bytes} bytes, tensors on {self.torch_device}>"


def open_device(name: str = "auto", *, handle_types: Sequence[str] = ("none",)) -> Device:
    """Opens a device: `"auto"`, `"host"`, `"host:2GiB"`, `"cuda:0"` or `"hip:0"`.

    `"auto"` is the GPU that torch sees, else one that this machine shows, else the host. A GPU's index is the driver's
    (0 if not given); tensors go to the torch device that is the same GPU. `"host"` has a budget of half this machine's
    memory, or the size given (see `parse_bytes`); every call makes a new one.
    handle_types: how memory is to be shared with other processes, the most wanted first: `"fabric"`, `"posix_fd"`,
    `"none"`. The first that works is used.

    With `VMM_KV_TESTING` in the environment (`vmm_kv.emulated`) `"cuda:0"`, `"cuda:0:2GiB"` and the like open an
    emulated driver. Raises `TypeError` or `ValueError` for what is no such name, `UnsupportedError` naming what is
    missing and what to install, also where a GPU is there and cannot be driven: the host never stands in for it
    unasked.
    """
    handle_types = checked(handle_types)
    kind, index, budget = parse_name(name)
    if kind == "auto":
        return _open_auto(handle_types)
    if kind == "host":
        if "none" not in handle_types:
            raise UnsupportedError(f"host memory has no {' or '.join(handle_types)} handles: ask for 'none' as well")
        return open_host(budget or half_of_memory(_GRANULE))
    if emulated.mode():
        driver, framework = emulated.open_emulated(kind, index, budget or emulated.BUDGET, handle_types)
        log.warning("opened %s on an EMULATED driver: its memory is this machine's, its tensors are on the CPU", name)
        return Device(driver, torch.device("cpu"), framework, emulated=True)
    if budget:
        raise ValueError(f"device {name!r}: a GPU has the memory it has, only an emulated one takes a size")
    return _open_gpu(kind, index, handle_types)


def open_host(budget: int, *, granule: int = _GRANULE) -> Device:
    """A host device with `budget` bytes and a granule of `granule` bytes: 4 KiB, 64 KiB, 2 MiB."""
    if budget < granule:
        raise ValueError(f"a host device of {budget} bytes cannot hold one granule of {granule}")
    driver = HostDriver(DeviceModel([budget], granule))
    log.info("opened %s with a budget of %d bytes", driver.name, budget)
    return Device(driver, torch.device("cpu"), HostFramework(driver.model, driver.index))


def _open_auto(handle_types: Sequence[str]) -> Device:
    if torch.cuda.is_available():
        kind, index = ("hip" if torch.version.hip else "cuda"), torch.cuda.current_device()
        log.info("auto: torch sees %s, opening %s:%d", torch.cuda.get_device_name(index), kind, index)
        return _open_gpu(kind, index, handle_types)
    for kind in gpu_drivers.KINDS:
        shown = gpu_drivers.visible(kind)
        if shown is None:
            continue
        try:
            devices = gpu_drivers.count(kind)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{shown}, but cannot be driven: {error}. Or open 'host' to run on the CPU"
            ) from error
        if devices:
            log.info("auto: %s, opening %s:0", shown, kind)
            return _open_gpu(kind, 0, handle_types)
        log.info("auto: %s, but the driver shows this process no device", shown)
    log.info("auto: no GPU is visible, opening the host device")
    return open_device("host", handle_types=handle_types)


def _open_gpu(kind: str, index: int, handle_types: Sequence[str]) -> Device:
    framework: TorchFramework | None = None

    def current_stream() -> int:
        return framework.current_stream() if framework else 0

    driver = gpu_drivers.open_driver(kind, index, handle_types=handle_types, current_stream=current_stream)
    if shortfall := gpu_drivers.torch_shortfall(kind, torch.__version__, torch.version.cuda, torch.version.hip):
        why, todo = shortfall
        raise UnsupportedError(f"{driver.name} is there, but {why}: {todo}. Or open 'host' to run on the CPU")
    ordinal = match_device(driver.properties(), torch_devices())
    framework = TorchFramework(ordinal)
    log.info("opened %s (%s), torch's cuda:%d", driver.name, driver.properties().name, ordinal)
    return Device(driver, torch.device("cuda", ordinal), framework)


def parse_name(name: str) -> tuple[str, int, int]:
    """The kind, the index and the bytes in `"cuda:0:2GiB"`, 0 for each that is not given. Opens nothing.

    Raises `TypeError` or `ValueError` for what is no name of a device.
    """
    if not isinstance(name, str):
        raise TypeError(f"open_device takes a name as a str, {_NAMES}; got {name!r}")
    kind, _, rest = name.partition(":")
    if name == "auto":
        return name, 0, 0
    if kind == "host":
        return kind, 0, parse_bytes(rest) if rest else 0
    if kind not in gpu_drivers.KINDS:
        raise ValueError(f"device {name!r}: it is {_NAMES}")
    index, _, size = rest.partition(":")
    if index and not index.isdecimal():
        raise ValueError(f"device {name!r}: {index!r} is no device number; it is {_NAMES}")
    return kind, int(index or 0), parse_bytes(size) if size else 0
