"""torch's side of a real GPU: which of its devices is the driver's, and what is asked of torch.

Without a GPU torch's functions are replaced by ones that write down how they were called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vmm_kv.driver import DeviceProperties
from vmm_kv.errors import UnsupportedError
from vmm_kv.measure import FrameworkMemory, flush, step_peak
from vmm_kv.torch_gpu import TorchDevice, TorchFramework, TorchMemory, match_device, torch_devices

A, B = "8f3c1d2e-0000-4a5b-8c6d-7e8f90a1b2c3", "11111111-2222-3333-4444-555555555555"


def wanted(uuid: str = "", pci: str = "", *, multi_instance: bool = False) -> DeviceProperties:
    return DeviceProperties("H200", uuid, pci, False, 1 << 30, multi_instance)


def seen(*devices: tuple[str, str]) -> list[TorchDevice]:
    return [TorchDevice(ordinal, uuid, pci, "H200") for ordinal, (uuid, pci) in enumerate(devices)]


# Which device it is


@pytest.mark.parametrize("uuid", [A, A.upper(), f"GPU-{A}", f"MIG-{A}", A.replace("-", "")])
def test_the_uuid_decides_however_it_is_written(uuid: str) -> None:
    assert match_device(wanted(A), seen((B, ""), (uuid, ""))) == 1


def test_the_uuid_decides_over_the_pci_id() -> None:
    """Slices of one GPU have one PCI id."""
    devices = seen((A, "0000:3b:00"), (B, "0000:3b:00"))
    assert match_device(wanted(B, "0000:3b:00.0", multi_instance=True), devices) == 1


@pytest.mark.parametrize(
    ("driver", "torch_says"),
    [("0000:3b:00.0", "00:3b:00"), ("00000000:3B:00.0", "0000:3b:00"), ("3b:00.0", "0:3b:0"), ("0001:3b:00", "1:3b:0")],
)
def test_the_pci_id_decides_where_no_uuid_does(driver: str, torch_says: str) -> None:
    assert match_device(wanted("", driver), seen(("", "0000:01:00"), ("", torch_says))) == 1
    assert match_device(wanted(A, driver), seen((B, "0000:01:00"), ("", torch_says))) == 1


def test_indexes_are_not_compared() -> None:
    devices = seen((B, "0000:01:00"), (A, "0000:3b:00"))
    assert match_device(wanted(A, "0000:3b:00.0"), devices) == 1
    assert match_device(wanted(B, "0000:01:00.0"), devices) == 0


@pytest.mark.parametrize("zero", ["", "00000000-0000-0000-0000-000000000000"])
def test_a_uuid_of_zeros_is_none(zero: str) -> None:
    with pytest.raises(UnsupportedError, match="none of torch's devices is H200"):
        match_device(wanted(zero), seen((zero, "")))
    assert match_device(wanted(zero, "01:00.0"), seen((zero, "0:2:0"), (zero, "0:1:0"))) == 1


def test_no_match_names_what_was_wanted_and_what_is_seen() -> None:
    with pytest.raises(UnsupportedError) as caught:
        match_device(wanted(A, "0000:3b:00.0"), seen((B, "0000:01:00")))
    text = str(caught.value)
    assert text.startswith("none") and A in text and B in text and "0000:01:00" in text
    assert "CUDA_VISIBLE_DEVICES" in text
    with pytest.raises(UnsupportedError, match="torch sees: no GPU"):
        match_device(wanted(A), [])


def test_two_matches_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="more than one of torch's devices"):
        match_device(wanted("", "0000:3b:00.0"), seen((A, "0000:3b:00"), (B, "0000:3b:00")))


def test_torchs_devices_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [
        SimpleNamespace(name="one", uuid=A, pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0),
        SimpleNamespace(name="an older torch tells less"),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(known))
    monkeypatch.setattr(torch.cuda, "get_device_properties", known.__getitem__)
    first, second = torch_devices()
    assert match_device(wanted(A), [first, second]) == match_device(wanted("", "0000:3b:00.0"), [first, second]) == 0
    assert second == TorchDevice(1, "", "", "an older torch tells less")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_a_torch_without_a_gpu_has_no_devices() -> None:
    assert torch_devices() == ()


# What is asked of torch


class Calls:
    """Stands in for `torch.cuda`: keeps what was called, in order, and which device was current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.current = 0
        monkeypatch.setattr(torch.cuda, "init", lambda: self.note("init"))
        for name, answer in {"memory_allocated": 5, "memory_reserved": 7, "max_memory_reserved": 11}.items():
            monkeypatch.setattr(torch.cuda, name, self.function(name, answer))
        for name in ("reset_peak_memory_stats", "empty_cache", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, self.function(name, None))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.function("graph_pool_handle", (0, 1)))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self.function("CUDAGraph", "a graph"))
        monkeypatch.setattr(torch.cuda, "Stream", lambda ordinal: ("stream", self.note("Stream", ordinal)))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda ordinal: SimpleNamespace(cuda_stream=0x70 + ordinal))
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    def note(self, name: str, *arguments: object) -> int:
        self.made.append((name, *arguments, self.current))
        return len(self.made)

    def function(self, name: str, answer: object) -> Any:
        def call(*arguments: object) -> object:
            self.note(name, *arguments)
            return answer

        return call

    @contextmanager
    def device(self, ordinal: int) -> Iterator[None]:
        before, self.current = self.current, ordinal
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: object, *, pool: object, stream: object) -> Iterator[None]:
        self.note("begin", graph, pool, stream)
        yield
        self.note("end", graph)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_the_figures_are_those_of_the_device(calls: Calls) -> None:
    memory: FrameworkMemory = TorchMemory(3)
    assert (memory.allocated(), memory.reserved(), memory.peak_reserved()) == (5, 7, 11)
    memory.reset_peak()
    memory.synchronize()
    memory.empty_cache()
    assert {call[1:] for call in calls.made[:5]} == {(3, 0)}
    assert calls.made[5] == ("empty_cache", 3), "torch empties the cache of the current device"


def test_a_flush_and_a_step_ask_torch_in_order(calls: Calls) -> None:
    with step_peak(TorchMemory(1)) as peak:
        calls.note("step")
    flushed = ["synchronize", "empty_cache", "synchronize"]
    names = [call[0] for call in calls.made]
    assert names == [*flushed, "reset_peak_memory_stats", "step", "synchronize", "max_memory_reserved"]
    assert peak.reserved == 11
    flush(TorchMemory(1))
    assert calls.current == 0


def test_nobody_tells_what_the_context_holds(calls: Calls) -> None:
    assert TorchFramework(0).context_bytes is None
    assert calls.made == [("init", 0)], "before the first reading"


def test_the_current_stream_is_the_devices(calls: Calls) -> None:
    assert TorchFramework(2).current_stream() == 0x72


def test_operations_run_on_the_device(calls: Calls) -> None:
    with TorchFramework(2).active():
        assert calls.current == 2
    assert calls.current == 0


def test_captures_are_on_one_stream_of_the_device(calls: Calls) -> None:
    """torch's default capture stream lies on the device that captured first; blocks are reused within a stream."""
    framework = TorchFramework(2)
    pool = framework.graph_pool()
    for _ in range(2):
        with framework.capture(framework.new_graph(), pool):
            calls.note("operation")
    begins = [call for call in calls.made if call[0] == "begin"]
    assert [call[1:3] for call in begins] == [("a graph", pool)] * 2
    assert begins[0][3] is begins[1][3]
    assert [call for call in calls.made if call[0] == "Stream"] == [("Stream", 2, 2)]
    assert {call[-1] for call in calls.made if call[0] in ("begin", "operation", "end")} == {2}
    assert calls.current == 0


def test_a_capture_that_fails_restores_the_device(calls: Calls) -> None:
    framework = TorchFramework(1)
    with pytest.raises(RuntimeError, match="inside"), framework.capture(framework.new_graph(), framework.graph_pool()):
        raise RuntimeError("inside")
    assert calls.current == 0
