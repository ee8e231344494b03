"""Opening devices: which one a name means, what is refused and with what advice, and what a device reads."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from vmm_kv import device as device_module
from vmm_kv import gpu_drivers
from vmm_kv._native import DeviceModel
from vmm_kv.cache import KVCache
from vmm_kv.device import Device, open_device, open_host
from vmm_kv.driver import DeviceProperties, Quirks
from vmm_kv.driver.host import HostDriver
from vmm_kv.errors import OutOfPhysicalMemory, StateError, UnsupportedError, VmmError
from vmm_kv.host import HostFramework
from vmm_kv.layout import TensorSpec
from vmm_kv.memory_source import HostFigures, SecondSource
from vmm_kv.testing import load_cuda
from vmm_kv.torch_gpu import TorchDevice

MIB, GIB = 1 << 20, 1 << 30
UUID = "8f3c1d2e-0000-4a5b-8c6d-7e8f90a1b2c3"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")


@pytest.fixture(autouse=True)
def no_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VMM_KV_TESTING", raising=False)


# Names


@pytest.mark.parametrize("name", ["host:4MiB", "host:4194304"])
def test_a_host_device_has_the_budget_that_its_name_gives(name: str) -> None:
    device = open_device(name)
    assert (device.name, device.total_bytes, device.torch_device.type) == ("host:0", 4 * MIB, "cpu")
    assert not device.emulated and device.context_bytes == 0


def test_a_host_device_has_half_of_the_machines_memory_otherwise() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 <= memory // 2 - open_device("host").total_bytes < 2 * MIB


@pytest.mark.parametrize("name", ["", "gpu", "cpu", "hosts", "cuda0", "cuda:x", "cuda:-1", "hip:0.5", "auto:0"])
def test_a_name_that_means_nothing_lists_those_that_do(name: str) -> None:
    with pytest.raises(ValueError, match=r"'auto', 'host\[:size\]', 'cuda\[:index\]' or 'hip\[:index\]'"):
        open_device(name)


@pytest.mark.parametrize("name", ["host:", "host:2GB", "host:-1", "cuda:0:x", "host:0"])
def test_a_size_that_is_none(name: str) -> None:
    if name == "host:":
        assert open_device(name).total_bytes == open_device("host").total_bytes
        return
    with pytest.raises(ValueError, match="is not a size"):
        open_device(name)


@pytest.mark.parametrize(
    "text", ["129TiB", "99999999TiB", "9" * 21, "9" * 5000, "9" * 400 + ".5GiB", "1." + "0" * 400, "0", "0.1B", "-1GiB"]
)
def test_absurd_sizes_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size") as caught:
        open_device(f"host:{text}")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", [None, 0, torch.device("cpu")])
def test_a_name_is_a_str(name: object) -> None:
    with pytest.raises(TypeError, match="open_device takes a name as a str, 'auto'"):
        open_device(name)  # type: ignore[arg-type]


def test_a_real_gpu_takes_no_size() -> None:
    with pytest.raises(ValueError, match="has the memory it has"):
        open_device("cuda:0:2GiB")


@pytest.mark.parametrize("value", ["yes", "cuda", "2"])
def test_an_unknown_mode_of_emulation_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("VMM_KV_TESTING", value)
    with pytest.raises(ValueError, match="it is 1 or quirks"):
        open_device("cuda:0")


def test_host_memory_cannot_be_handed_to_others() -> None:
    assert open_device("host:2MiB", handle_types=("fabric", "none")).driver.memory_traits.handle_type == "none"
    with pytest.raises(UnsupportedError, match="host memory has no fabric or posix_fd handles"):
        open_device("host:2MiB", handle_types=("fabric", "posix_fd"))


# GPUs, with drivers that stand in


class Gpu(HostDriver):
    """A driver that says it is a GPU's. Keeps how it was opened."""

    def __init__(self, kind: str, index: int, model: DeviceModel, properties: DeviceProperties) -> None:
        super().__init__(model)
        self.kind = kind
        self.index_told = index
        self.told = properties
        self.scopes = 0

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.index_told}"

    def properties(self) -> DeviceProperties:
        return self.told

    @contextmanager
    def scope(self) -> Iterator[None]:
        self.scopes += 1
        with super().scope():
            yield


class Machine:
    """What a machine has: `opened` lists the drivers opened, with their options."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.opened: list[tuple[str, int, dict[str, Any]]] = []
        self.nodes: set[str] = set()
        self.counts: dict[str, int | Exception] = {}
        monkeypatch.setattr(gpu_drivers, "visible", lambda kind: f"a {kind} GPU" if kind in self.nodes else None)
        monkeypatch.setattr(gpu_drivers, "count", self._count)
        monkeypatch.setattr(gpu_drivers, "open_driver", self._open)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def torch_sees(self, *devices: TorchDevice, current: int = 0, hip: str | None = None) -> None:
        self.patch.setattr(torch.cuda, "is_available", lambda: True)
        self.patch.setattr(torch.cuda, "current_device", lambda: current)
        self.patch.setattr(torch.cuda, "get_device_name", lambda ordinal: f"torch's {ordinal}")
        self.patch.setattr(torch.version, "cuda", None if hip else "13.0")
        self.patch.setattr(torch.version, "hip", hip)
        self.patch.setattr(device_module, "torch_devices", lambda: devices)
        self.patch.setattr(device_module, "TorchFramework", self._framework)

    def _framework(self, ordinal: int) -> Any:
        framework: Any = HostFramework(DeviceModel([4 * MIB]))
        framework.ordinal = ordinal
        framework.current_stream = lambda: 0x70 + ordinal
        return framework

    def _count(self, kind: str) -> int:
        found = self.counts.get(kind, 0)
        if isinstance(found, Exception):
            raise found
        return found

    def _open(self, kind: str, index: int, **options: Any) -> Gpu:
        self.opened.append((kind, index, options))
        properties = DeviceProperties("H200", UUID, "0000:3b:00.0", False, 4 * MIB, False)
        return Gpu(kind, index, DeviceModel([4 * MIB]), properties)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


OTHER, SAME = TorchDevice(0, "other", "0000:01:00", "A40"), TorchDevice(1, UUID, "0000:3b:00", "H200")


def test_tensors_go_to_the_torch_device_that_is_the_drivers(machine: Machine) -> None:
    machine.torch_sees(OTHER, SAME)
    device = open_device("cuda:0", handle_types=("fabric", "none"))
    assert (device.name, device.torch_device) == ("cuda:0", torch.device("cuda", 1))
    kind, index, options = machine.opened[0]
    assert (kind, index, options["handle_types"]) == ("cuda", 0, ("fabric", "none"))
    assert options["current_stream"]() == 0x71, "torch's stream on torch's ordinal"


def test_while_the_driver_is_opened_there_is_no_stream_of_torch_yet(machine: Machine) -> None:
    machine.torch_sees(SAME)
    streams: list[int] = []

    def opening(kind: str, index: int, *, current_stream: Callable[[], int], **options: Any) -> Gpu:
        streams.append(current_stream())
        return machine._open(kind, index, current_stream=current_stream, **options)

    machine.patch.setattr(gpu_drivers, "open_driver", opening)
    open_device("cuda:0")
    assert streams == [0]


@pytest.mark.parametrize(("name", "opened"), [("cuda", 0), ("cuda:", 0), ("cuda:3", 3), ("hip:2", 2)])
def test_a_gpus_index_is_the_drivers(machine: Machine, name: str, opened: int) -> None:
    machine.torch_sees(SAME, hip="7.1" if name.startswith("hip") else None)
    assert open_device(name).name == f"{name.partition(':')[0]}:{opened}"


def test_a_gpu_that_torch_does_not_see_is_refused(machine: Machine) -> None:
    machine.torch_sees(OTHER)
    with pytest.raises(UnsupportedError, match=f"none of torch's devices is H200, UUID {UUID}.*A40"):
        open_device("cuda:0")


@pytest.mark.parametrize(("kind", "wheel"), [("cuda", "<cu126"), ("hip", "<rocm")])
def test_a_cpu_build_of_torch_beside_a_real_driver(machine: Machine, kind: str, wheel: str) -> None:
    machine.patch.setattr(torch.version, "cuda", None)
    machine.patch.setattr(torch.version, "hip", None)
    with pytest.raises(UnsupportedError, match=f"{kind}:0 is there, but torch .* is built for the CPU only.*{wheel}"):
        open_device(kind)


def test_a_torch_for_the_other_vendor(machine: Machine) -> None:
    machine.torch_sees(SAME)
    with pytest.raises(UnsupportedError, match=r"built for CUDA 13\.0 and cannot have tensors on a hip device"):
        open_device("hip:0")


# Auto


def test_auto_is_the_host_where_no_gpu_is_visible(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vmm_kv"):
        assert open_device().name == "host:0"
    assert "no GPU is visible, opening the host device" in caplog.text
    assert machine.opened == []


@pytest.mark.parametrize(("hip", "name"), [(None, "cuda:1"), ("7.1", "hip:1")])
def test_auto_is_the_gpu_that_torch_sees(
    machine: Machine, caplog: pytest.LogCaptureFixture, hip: str | None, name: str
) -> None:
    machine.torch_sees(OTHER, SAME, current=1, hip=hip)
    with caplog.at_level(logging.INFO, "vmm_kv"):
        device = open_device("auto", handle_types=("posix_fd",))
    assert (device.name, device.torch_device) == (name, torch.device("cuda", 1))
    assert machine.opened[0][2]["handle_types"] == ("posix_fd",)
    assert f"torch sees torch's 1, opening {name}" in caplog.text


@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_auto_names_what_is_missing_for_a_visible_gpu(machine: Machine, kind: str) -> None:
    machine.nodes = {kind}
    machine.counts[kind] = UnsupportedError("pip install the-binding")
    with pytest.raises(UnsupportedError, match=f"a {kind} GPU, but cannot be driven: pip install the-binding.*'host'"):
        open_device()


def test_auto_names_the_torch_that_is_missing_for_a_visible_gpu(machine: Machine) -> None:
    machine.nodes, machine.counts = {"hip"}, {"hip": 1}
    machine.patch.setattr(torch.version, "hip", None)
    with pytest.raises(UnsupportedError, match="hip:0 is there, but torch"):
        open_device()


def test_auto_believes_a_driver_that_shows_no_device(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """As with an empty CUDA_VISIBLE_DEVICES."""
    machine.nodes, machine.counts = {"cuda", "hip"}, {"cuda": 0, "hip": 0}
    with caplog.at_level(logging.INFO, "vmm_kv"):
        assert open_device().name == "host:0"
    assert caplog.text.count("but the driver shows this process no device") == 2


def test_auto_never_falls_back_from_a_gpu_that_fails(machine: Machine) -> None:
    machine.torch_sees(SAME)

    def broken(*arguments: Any, **options: Any) -> Gpu:
        raise UnsupportedError("cuda:0 does not support virtual memory management")

    machine.patch.setattr(gpu_drivers, "open_driver", broken)
    with pytest.raises(UnsupportedError, match="virtual memory management"):
        open_device()


# Readings


def shared(monkeypatch: pytest.MonkeyPatch, properties: DeviceProperties, host: HostFigures | None) -> Device:
    monkeypatch.setattr(device_module, "host_figures", lambda: host)
    model = DeviceModel([64 * MIB])
    return Device(Gpu("hip", 0, model, properties), torch.device("cpu"), HostFramework(model))


def test_c41_the_readings_of_an_integrated_device_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = DeviceProperties("GB10", "", "", True, 64 * MIB, False)
    device = shared(monkeypatch, properties, HostFigures(64 * MIB, 5 * MIB, 30 * MIB))
    reading = device.reading("start")
    assert (reading.free, reading.total, reading.source) == (30 * MIB, 64 * MIB, "host available")
    assert reading.told == (64 * MIB, 64 * MIB) and reading.notes


def test_c42_a_device_asks_the_kernel_for_a_second_word(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = DeviceProperties("an APU", "", "0000:c1:00.0", False, 64 * MIB, False)
    asked: list[str] = []

    def figures(pci: str) -> SecondSource:
        asked.append(pci)
        return SecondSource("system files", 96 * MIB)

    monkeypatch.setattr(device_module, "gpu_figures", figures)
    monkeypatch.setattr(Gpu, "mem_info", lambda self: (80 * MIB, 16 * MIB))
    device = shared(monkeypatch, properties, None)
    reading = device.reading("start")
    assert (device.total_bytes, reading.free, reading.source) == (96 * MIB, 80 * MIB, "system files")
    assert set(asked) == {"0000:c1:00.0"}


def test_c42_a_device_without_a_second_word_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpu, "mem_info", lambda self: (80 * MIB, 16 * MIB))
    with pytest.raises(VmmError, match=r"an APU.*80\.00 MiB.*16\.00 MiB"):
        shared(monkeypatch, DeviceProperties("an APU", "", "", False, 0, False), None)


def test_readings_are_made_in_the_devices_scope() -> None:
    device = open_host(4 * MIB)
    model = DeviceModel([4 * MIB])
    gpu = Gpu("cuda", 0, model, device.properties)
    opened = Device(gpu, torch.device("cpu"), HostFramework(model))
    before = gpu.scopes
    opened.reading("start")
    assert gpu.scopes == before + 1


# The stand-in behind a device


def test_graphs_of_a_host_device_are_counted() -> None:
    device = open_host(64 * MIB)
    x, graph, pool = torch.ones(8), device.new_graph(), device.graph_pool()
    with torch.no_grad(), device.capture(graph, pool):
        y = x * 2
    x.fill_(3)
    graph.replay()
    assert (device.captures, y[0].item()) == (1, 6.0)
    with pytest.raises(RuntimeError), device.capture(device.new_graph(), pool):
        raise RuntimeError
    assert device.captures == 1


def test_what_operations_allocate_on_a_host_device_is_charged() -> None:
    device = open_host(64 * MIB)
    with device.active():
        kept = torch.ones(MIB)
    assert device.memory.allocated() == kept.nbytes
    assert device.reading("with a tensor").free == 60 * MIB


# Emulated drivers

emulated = pytest.mark.emulated
SPECS = [TensorSpec("kv", (None, 1024, 1024), torch.float32)]


@emulated
@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_an_emulated_device_says_so(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VMM_KV_TESTING", "1")
    device = open_device(f"{kind}:1:64MiB")
    assert (device.name, device.driver.kind, device.torch_device.type) == (f"{kind}:1", kind, "cpu")
    assert (device.emulated, device.total_bytes, device.context_bytes) == (True, 64 * MIB, 0)
    assert "(emulated driver)" in repr(device)
    assert "EMULATED driver" in caplog.text


@emulated
def test_an_emulated_device_has_two_gibibytes_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMM_KV_TESTING", "1")
    assert open_device("cuda").total_bytes == 2 * GIB


@emulated
@pytest.mark.parametrize("value", ["", "0"])
def test_without_the_variable_no_emulation_is_opened(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Not even where its library is loaded: the driver is taken for a real one, which torch cannot go with."""
    load_cuda()
    monkeypatch.setenv("VMM_KV_TESTING", value)
    with pytest.raises(UnsupportedError, match=r"cuda:0 is there, but torch .* is built for the CPU only"):
        open_device("cuda:0")


@emulated
def test_auto_is_never_an_emulation(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMM_KV_TESTING", "1")
    assert open_device("auto").name == "host:0"


@emulated
def test_handle_types_reach_an_emulated_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """C92: fabric first, then the next that works, with the reason."""
    monkeypatch.setenv("VMM_KV_TESTING", "1")
    traits = open_device("cuda:0", handle_types=("fabric", "posix_fd", "none")).driver.memory_traits
    assert traits.handle_type == "posix_fd"
    assert [name for name, _ in traits.refusals] == ["fabric"]


@emulated
@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_tensors_and_chunks_share_an_emulated_devices_budget(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMM_KV_TESTING", "1")
    device = open_device(f"{kind}:0:64MiB")
    with KVCache.reserve(device, SPECS, 32) as cache:
        cache.commit(4)
        with device.active():
            kept = torch.ones(2 * MIB)
        reading = device.reading("both", cache.physical_bytes)
        assert (reading.free, reading.reserved, reading.kv) == (40 * MIB, kept.nbytes, 16 * MIB)
        with pytest.raises(torch.OutOfMemoryError, match=f"{kind}:0 is out of memory"), device.active():
            torch.ones(16 * MIB)
        with pytest.raises(OutOfPhysicalMemory):
            cache.commit(16)


@emulated
@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_an_emulated_driver_sees_a_capture(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 7: on the driver's word, since nobody else declared the capture."""
    monkeypatch.setenv("VMM_KV_TESTING", "1")
    device = open_device(f"{kind}:0:64MiB")
    with KVCache.reserve(device, SPECS, 8) as cache:
        with torch.no_grad(), device.capture(device.new_graph(), device.graph_pool()):
            with pytest.raises(StateError, match="while a graph is being captured"):
                cache.commit(2)
            assert device.driver.capturing()
        assert not device.driver.capturing()
        assert cache.commit(2) == 2


@emulated
@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_quirks_are_every_bug_that_is_known(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMM_KV_TESTING", "quirks")
    device = open_device(f"{kind}:0:64MiB")
    rocm = kind == "hip"
    assert device.driver.quirks == Quirks(
        uniform_chunks=rocm, memory_with_addresses=rocm, single_unmap=rocm, single_memset=rocm
    )
    assert device.driver.granule == 2 * MIB, "B7: this runtime says 4096"
    with KVCache.reserve(device, SPECS, 8, zero=[]) as cache:
        cache.commit(1)
        assert cache.view("kv").isnan().all(), "C7: fresh memory has no defined contents"


@emulated
@pytest.mark.parametrize("fails", [False, True])
def test_c91_expandable_segments_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """C91: the cache is no memory of torch's allocator, so the setting is neither needed nor changed."""
    setting = "expandable_segments:True"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, setting)
    monkeypatch.setenv("VMM_KV_TESTING", "1")
    changed: list[object] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", changed.append)
    device = open_device("cuda:0:64MiB")
    with KVCache.reserve(device, SPECS, 32) as cache:
        cache.back(1)
        if fails:
            with pytest.raises(OutOfPhysicalMemory):
                cache.commit(32)
        else:
            cache.commit(4)
            cache.view("kv").fill_(1)
            assert cache.view("kv").sum().item() == 4 * MIB
    assert [os.environ[name] for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")] == [setting] * 2
    assert changed == []
