"""The CUDA driver beside the contract: what it needs, how it opens a device, contexts and threads, every status."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from vmm_kv.cache import KVCache
from vmm_kv.driver import cuda_binding
from vmm_kv.driver.cuda import PRIMITIVES, CudaDriver, count, versions
from vmm_kv.errors import (
    DriverError,
    DriverGone,
    OutOfAddressSpace,
    OutOfPhysicalMemory,
    StateError,
    UnsupportedError,
)
from vmm_kv.layout import TensorSpec
from vmm_kv.testing import load_cuda
from vmm_kv.testing.emulation import EmulatedModel

GRANULE = 2 << 20
NOTHING = {"handles": 0, "mappings": 0, "reservations": 0}
GLOBAL, THREAD_LOCAL, RELAXED = range(3)


@pytest.fixture
def model() -> EmulatedModel:
    return load_cuda(devices=2, budget=64 * GRANULE)


@pytest.fixture
def api(model: EmulatedModel) -> ModuleType:
    """The binding, on the emulated library."""
    return importlib.import_module("cuda.bindings.driver")


def answer(api: ModuleType, status: int) -> Callable[..., tuple[object, None]]:
    return lambda *_: (api.CUresult(status), None)


def current_context(api: ModuleType) -> int:
    status, context = api.cuCtxGetCurrent()
    assert status == 0
    return int(context)


def current_device(api: ModuleType) -> int:
    status, device = api.cuCtxGetDevice()
    assert status == 0
    return int(device)


def capture_mode(api: ModuleType) -> int:
    """Of the calling thread: there is no question but the exchange."""
    status, mode = api.cuThreadExchangeStreamCaptureMode(api.CUstreamCaptureMode(RELAXED))
    assert status == 0
    status, _ = api.cuThreadExchangeStreamCaptureMode(mode)
    assert status == 0
    return int(mode)


@contextmanager
def thread_state(api: ModuleType, context: int, mode: int) -> Iterator[None]:
    """The thread as somebody else left it: a context that is current (0: none), a capture mode."""
    _, before = api.cuThreadExchangeStreamCaptureMode(api.CUstreamCaptureMode(mode))
    if context:
        assert api.cuCtxPushCurrent(context)[0] == 0
    try:
        yield
        assert (current_context(api), capture_mode(api)) == (context, mode)
    finally:
        while current_context(api):
            assert api.cuCtxPopCurrent()[0] == 0
        api.cuThreadExchangeStreamCaptureMode(before)


def in_thread(work: Callable[[], object]) -> None:
    """Runs it to its end on a thread that never met a device, and raises what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def device(driver: CudaDriver) -> Any:
    """As much of a `Device` as a cache needs."""
    with driver.scope():
        total = driver.mem_info()[1]
    return SimpleNamespace(driver=driver, name=driver.name, total_bytes=total, torch_device=torch.device("cpu"))


def make_cache(driver: CudaDriver) -> KVCache:
    spec = TensorSpec("kv", (2, None, 1 << 20), torch.int8)
    return KVCache.reserve(device(driver), [spec], 8, chunk=GRANULE)


# --- what is missing --------------------------------------------------------------------------------------------------


class Hidden:
    """An import hook: nothing of a package can be found."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, *_: object) -> None:
        if name == self.package or name.startswith(f"{self.package}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("package", ["cuda", "cuda.bindings"])
@pytest.mark.parametrize("action", [lambda: CudaDriver(0), count, versions])
def test_a_missing_binding(monkeypatch: pytest.MonkeyPatch, package: str, action: Callable[[], object]) -> None:
    for name in list(sys.modules):
        if name == package or name.startswith(f"{package}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hidden(package), *sys.meta_path])
    with pytest.raises(UnsupportedError, match=r"No module named 'cuda.*pip install 'cuda-python>=12\.6'"):
        action()


PROBE = """
import sys
from vmm_kv.driver import cuda
assert "cuda" not in sys.modules, "the binding is imported before it is needed"
from vmm_kv.errors import UnsupportedError
for action in (cuda.count, cuda.versions, lambda: cuda.CudaDriver(0)):
    try:
        action()
    except UnsupportedError as error:
        print(error)
"""


def test_a_missing_driver() -> None:
    """In a process of its own, where no library was put in place: this one has the emulated one."""
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has a driver")
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (
        len(re.findall("CUDA devices need NVIDIA's driver, and none was found .* install the display", done.stdout))
        == 3
    )


@pytest.mark.parametrize("status", [34, 802, 803, 804, 999])
def test_a_driver_that_cannot_be_used(api: ModuleType, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(api, "cuInit", answer(api, status))
    with pytest.raises(UnsupportedError, match=rf"cannot be used: CUDA_ERROR_\w+ \({status}\): .+"):
        CudaDriver(0)


@pytest.mark.parametrize(("status", "kind"), [(3, StateError), (4, DriverGone)])
def test_a_process_whose_driver_is_gone(
    api: ModuleType, monkeypatch: pytest.MonkeyPatch, status: int, kind: type[Exception]
) -> None:
    monkeypatch.setattr(api, "cuInit", answer(api, status))
    with pytest.raises(kind):
        CudaDriver(0)


def test_no_device(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "cuInit", answer(api, 100))
    assert count() == 0
    with pytest.raises(UnsupportedError, match=r"cuda:0: the CUDA driver sees 0 devices.*CUDA_VISIBLE_DEVICES"):
        CudaDriver(0)


def test_a_device_that_is_not_there(model: EmulatedModel) -> None:
    assert count() == 2
    with pytest.raises(UnsupportedError, match="cuda:2: the CUDA driver sees 2 devices"):
        CudaDriver(2)
    with pytest.raises(ValueError, match="device -1"):
        CudaDriver(-1)


def test_a_device_without_virtual_memory_management(model: EmulatedModel) -> None:
    model.set("vmm_supported", 0)
    with pytest.raises(UnsupportedError, match=r"cuda:0 does not support virtual memory management .*102"):
        CudaDriver(0)


def test_a_function_that_the_driver_is_too_old_to_have(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError('Function "cuMemCreate" not found')

    monkeypatch.setattr(api, "cuMemCreate", missing)
    with pytest.raises(UnsupportedError, match='Function "cuMemCreate" not found'):
        CudaDriver(0)


# --- what a device says of itself -------------------------------------------------------------------------------------


def test_versions(model: EmulatedModel) -> None:
    model.set("driver_version", 12080)
    found = versions()
    assert re.match(r"\d+\.\d+", found["binding"])
    assert found["driver"] == "12.8"


def test_properties_need_no_context_and_no_primitive(model: EmulatedModel, api: ModuleType) -> None:
    drivers = [CudaDriver(0), CudaDriver(1)]
    before = model.calls()
    properties = [driver.properties() for driver in drivers]
    assert current_context(api) == 0
    assert model.calls() == before
    for mine in properties:
        assert mine.name
        assert mine.total == 64 * GRANULE
        assert not mine.integrated
        assert not mine.multi_instance
    assert properties[0].uuid != properties[1].uuid
    assert properties[0].pci != properties[1].pci
    model.set("integrated", 1)
    assert drivers[0].properties().integrated


def test_ids_are_written_as_other_tools_write_them(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CudaDriver(0)
    wanted = SimpleNamespace(bytes=bytes(range(16)))
    for name in ("cuDeviceGetUuid", "cuDeviceGetUuid_v2"):
        monkeypatch.setattr(api, name, lambda _: (api.CUresult(0), wanted), raising=False)
    monkeypatch.setattr(api, "cuDeviceGetPCIBusId", lambda *_: (api.CUresult(0), b"0000:3B:00.0\0\0\0"))
    monkeypatch.setattr(api, "cuDeviceGetName", lambda *_: (api.CUresult(0), b"NVIDIA H100 MIG 1g.10gb\0\0"))
    mine = driver.properties()
    assert mine.uuid == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert mine.pci == "0000:3b:00.0"
    assert mine.name == "NVIDIA H100 MIG 1g.10gb"
    assert mine.multi_instance


def test_a_device_without_ids(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CudaDriver(0)
    for name in ("cuDeviceGetUuid", "cuDeviceGetUuid_v2", "cuDeviceGetPCIBusId"):
        monkeypatch.setattr(api, name, answer(api, 801), raising=False)
    assert (driver.properties().uuid, driver.properties().pci) == ("", "")


@pytest.mark.parametrize(("version", "rdma"), [(10020, False), (12000, True)])
def test_an_attribute_that_the_driver_does_not_know_means_no(model: EmulatedModel, version: int, rdma: bool) -> None:
    """Drivers before 12.3 answer "invalid value" to the question for fabric handles, older ones to that for RDMA."""
    model.set("fabric", 2)
    model.set("rdma", 1)
    model.set("driver_version", version)
    traits = CudaDriver(0, handle_types=("fabric", "none")).memory_traits
    assert (traits.handle_type, traits.rdma) == ("none", rdma)
    assert "CUdevice_attribute 128" in dict(traits.refusals)["fabric"]


def test_an_attribute_that_the_binding_does_not_know_means_no(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise ValueError(f"{number} is not a valid CUdevice_attribute")

    driver = CudaDriver(0)
    monkeypatch.setattr(api, "CUdevice_attribute", unknown)
    assert not driver.properties().integrated


def test_the_granule_is_the_minimum_for_the_very_properties(
    model: EmulatedModel, api: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1, C74: one granularity for create, reserve and map, asked for with the handle type and the network flag."""
    model.set("recommended_granularity", 16 * GRANULE)
    model.set("rdma", 1)
    seen: list[tuple[int, int, int]] = []
    query = api.cuMemGetAllocationGranularity

    def spy(allocation: Any, option: Any) -> object:
        seen.append((int(allocation.requestedHandleTypes), allocation.allocFlags.gpuDirectRDMACapable, int(option)))
        return query(allocation, option)

    monkeypatch.setattr(api, "cuMemGetAllocationGranularity", spy)
    driver = CudaDriver(0, handle_types=("posix_fd",))
    assert (driver.granule, driver.memory_traits.recommended_granule) == (GRANULE, 16 * GRANULE)
    assert seen == [(1, 1, 0), (1, 1, 1)]


# --- how handles are made ---------------------------------------------------------------------------------------------

ORDER = ("fabric", "posix_fd", "none")


@pytest.mark.parametrize(
    ("fabric", "order", "chosen", "reasons"),
    [
        (0, ORDER, "posix_fd", {"fabric": r"CUdevice_attribute 128"}),
        (1, ORDER, "posix_fd", {"fabric": r"create on cuda:0 failed: CUDA_ERROR_NOT_PERMITTED \(800\)"}),
        (2, ORDER, "fabric", {}),
        (1, ("fabric", "none"), "none", {"fabric": r"\(800\)"}),
        (2, ("none", "fabric"), "none", {}),
    ],
)
def test_handle_types_in_the_order_asked(
    model: EmulatedModel, fabric: int, order: Sequence[str], chosen: str, reasons: dict[str, str]
) -> None:
    """C92: the device may say yes and refuse."""
    model.set("fabric", fabric)
    traits = CudaDriver(0, handle_types=order).memory_traits
    assert traits.handle_type == chosen
    assert {name for name, _ in traits.refusals} == set(reasons)
    for name, reason in traits.refusals:
        assert re.search(reasons[name], reason)
    assert model.live() == NOTHING


def test_no_handle_type_can_be_had(model: EmulatedModel) -> None:
    model.set("fabric", 1)
    with pytest.raises(UnsupportedError, match=r"fabric: .*\(800\).*Add 'none'"):
        CudaDriver(0, handle_types=("fabric",))


@pytest.mark.parametrize("order", [(), ("fd",)])
def test_a_handle_type_that_is_none(model: EmulatedModel, order: Sequence[str]) -> None:
    with pytest.raises(ValueError, match="handle types"):
        CudaDriver(0, handle_types=order)


def test_a_full_device_is_not_one_without_fabric_handles(model: EmulatedModel) -> None:
    """C92, and the text says what there is: one `mem_info`, only then."""
    model.set("fabric", 2)
    assert model.charge(0, 64 * GRANULE - 4096) == 0
    with pytest.raises(OutOfPhysicalMemory, match=rf"4096 of {64 * GRANULE} bytes are free"):
        CudaDriver(0, handle_types=ORDER)
    assert model.calls()["create"] == 1


def test_free_memory_that_cannot_be_told_is_unknown(model: EmulatedModel) -> None:
    driver = CudaDriver(0)
    model.fail("create", 1, 2)
    model.fail("mem_info", 1, 999)
    with driver.scope(), pytest.raises(OutOfPhysicalMemory, match="how many bytes are free is unknown"):
        driver.create(GRANULE)


@pytest.mark.parametrize("rdma", [0, 1])
def test_the_network_flag_follows_the_device(
    model: EmulatedModel, api: ModuleType, monkeypatch: pytest.MonkeyPatch, rdma: int
) -> None:
    """C88, C6: set where the device has it; where not, a create with it is refused."""
    model.set("rdma", rdma)
    flags: list[int] = []
    create = api.cuMemCreate

    def spy(size: int, allocation: Any, zero: int) -> object:
        flags.append(allocation.allocFlags.gpuDirectRDMACapable)
        return create(size, allocation, zero)

    monkeypatch.setattr(api, "cuMemCreate", spy)
    driver = CudaDriver(0)
    with driver.scope():
        driver.release(driver.create(GRANULE))
    assert driver.memory_traits.rdma is bool(rdma)
    assert flags == [rdma, rdma]


# --- captures ---------------------------------------------------------------------------------------------------------


def test_capturing_asks_for_the_callers_stream(
    model: EmulatedModel, api: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    question = api.cuStreamIsCapturing

    def spy(stream: int) -> object:
        asked.append(int(stream))
        return question(0)

    monkeypatch.setattr(api, "cuStreamIsCapturing", spy)
    streams = iter([0, 0x7700])
    driver = CudaDriver(0, current_stream=lambda: next(streams))
    assert not driver.capturing()
    model.set("capturing", 1)
    assert driver.capturing()
    assert asked == [0, 0x7700]
    assert current_context(api) == 0


@pytest.mark.parametrize("state", [1, 2])
def test_a_capture_that_was_invalidated_is_one(api: ModuleType, monkeypatch: pytest.MonkeyPatch, state: int) -> None:
    driver = CudaDriver(0)
    monkeypatch.setattr(api, "cuStreamIsCapturing", lambda _: (api.CUresult(0), api.CUstreamCaptureStatus(state)))
    assert driver.capturing()


def test_the_legacy_stream_answers_for_the_blocking_ones(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CudaDriver(0)
    monkeypatch.setattr(api, "cuStreamIsCapturing", answer(api, 906))
    assert driver.capturing()
    monkeypatch.setattr(api, "cuStreamIsCapturing", answer(api, 999))
    with pytest.raises(DriverError, match=r"stream on cuda:0 failed: CUDA_ERROR_UNKNOWN \(999\)"):
        driver.capturing()


def test_a_capture_is_refused_before_a_primitive_is_called(model: EmulatedModel) -> None:
    """Invariant 7, S1."""
    driver = CudaDriver(0)
    cache = make_cache(driver)
    cache.commit(2)
    model.set("capturing", 1)
    before = model.calls()
    for operation in (lambda: cache.commit(4), lambda: cache.shrink(1), lambda: make_cache_from(cache), cache.close):
        with pytest.raises(StateError, match="captured"):
            operation()
    assert model.calls() == before
    model.set("capturing", 0)
    cache.close()


def make_cache_from(cache: KVCache) -> KVCache:
    return KVCache(cache.device, cache.layout)


def test_the_thread_is_in_relaxed_mode_inside_a_scope(api: ModuleType) -> None:
    driver = CudaDriver(0)
    for mode in (GLOBAL, THREAD_LOCAL, RELAXED):
        with thread_state(api, 0, mode):
            with driver.scope():
                assert capture_mode(api) == RELAXED
            assert capture_mode(api) == mode


# --- contexts, threads and processes ----------------------------------------------------------------------------------


def test_a_scope_restores_none_as_none(api: ModuleType) -> None:
    driver = CudaDriver(1)
    with thread_state(api, 0, GLOBAL):
        with driver.scope():
            assert current_device(api) == 1
            with driver.scope():
                assert current_device(api) == 1
            assert current_device(api) == 1
        assert current_context(api) == 0


def test_nothing_is_pushed_where_the_context_is_current(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CudaDriver(0)
    with driver.scope():
        mine = current_context(api)
    with thread_state(api, mine, GLOBAL), monkeypatch.context() as patch:
        patch.setattr(api, "cuCtxPushCurrent", answer(api, 999))
        patch.setattr(api, "cuCtxPopCurrent", answer(api, 999))
        with driver.scope():
            driver.mem_info()


def test_the_primary_context_is_retained_once(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    first = CudaDriver(0)
    monkeypatch.setattr(api, "cuDevicePrimaryCtxRetain", answer(api, 999))
    monkeypatch.setattr(api, "cuStreamCreate", answer(api, 999))
    second = CudaDriver(0)
    with first.scope(), second.scope():
        second.mem_info()


def test_the_stream_for_zeroing_waits_for_no_other(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_binding, "_primary", {})
    flags: list[int] = []
    create = api.cuStreamCreate

    def spy(value: int) -> object:
        flags.append(value)
        return create(value)

    monkeypatch.setattr(api, "cuStreamCreate", spy)
    CudaDriver(0)
    assert flags == [int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)]


def test_the_context_goes_back_where_no_stream_can_be_made(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_binding, "_primary", {})
    released: list[int] = []
    release = api.cuDevicePrimaryCtxRelease

    def spy(device: int) -> object:
        released.append(device)
        return release(device)

    monkeypatch.setattr(api, "cuDevicePrimaryCtxRelease", spy)
    monkeypatch.setattr(api, "cuStreamCreate", answer(api, 999))
    with pytest.raises(DriverError, match="stream on cuda:1 failed"):
        CudaDriver(1)
    assert released == [1]


def test_a_cache_on_device_1_while_0_is_current(model: EmulatedModel, api: ModuleType) -> None:
    """Invariant 6. Used from this thread and from one that never had a context: every call is made on device 1."""
    zero, one = CudaDriver(0), CudaDriver(1)
    with zero.scope():
        context = current_context(api)
    before = model.calls_on(0)
    with thread_state(api, context, GLOBAL):
        cache = make_cache(one)
        cache.commit(2)

        def elsewhere() -> None:
            cache.commit(6)
            assert current_context(api) == 0
            cache.shrink(4)
            assert (current_context(api), capture_mode(api)) == (0, GLOBAL)

        in_thread(elsewhere)
        assert current_device(api) == 0
        assert model.used(0) == 0
        assert model.used(1) == cache.physical_bytes > 0
        cache.close()
        assert current_device(api) == 0
    assert model.calls_on(0) == before
    assert model.calls_on(1) >= sum(one.calls().values()) > 0
    assert model.live() == NOTHING


def test_calls_are_counted_from_many_threads(model: EmulatedModel) -> None:
    driver = CudaDriver(0)

    def work() -> None:
        with driver.scope():
            for _ in range(200):
                driver.mem_info()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.calls()["mem_info"] == 800


def test_a_forked_child_may_not_open_a_device(model: EmulatedModel) -> None:
    """C85, G4. The contract has the scope of a device that the parent opened."""
    CudaDriver(0)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            CudaDriver(0)
        except StateError as error:
            code = 0 if "spawn" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# --- every status -----------------------------------------------------------------------------------------------------


class Life:
    """Every primitive once, and what it takes to undo it."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        with driver.scope():
            self.base = driver.reserve(4 * GRANULE)
            self.handle = driver.create(GRANULE)
            driver.map(self.base, GRANULE, self.handle)
            driver.set_access(self.base, GRANULE)

    def actions(self) -> dict[str, Callable[[], object]]:
        driver, base, size = self.driver, self.base, GRANULE
        return {
            "reserve": lambda: driver.reserve(size),
            "free_address": lambda: driver.free_address(base, 4 * size),
            "create": lambda: driver.create(size),
            "release": lambda: driver.release(self.handle),
            "map": lambda: driver.map(base + size, size, self.handle),
            "unmap": lambda: driver.unmap(base, size),
            "set_access": lambda: driver.set_access(base, size),
            "get_access": lambda: driver.get_access(base),
            "mem_info": driver.mem_info,
            "zero": lambda: driver.zero([(base, base + size)]),
        }

    def end(self) -> None:
        with self.driver.scope():
            self.driver.unmap(self.base, GRANULE)
            self.driver.release(self.handle)
            self.driver.free_address(self.base, 4 * GRANULE)


SHORTAGES = {"create": OutOfPhysicalMemory, "reserve": OutOfAddressSpace}
KINDS: dict[int, Callable[[str], type[DriverError]]] = {
    1: lambda _: DriverError,
    2: lambda call: SHORTAGES.get(call, OutOfAddressSpace),
    4: lambda _: DriverGone,
    900: lambda _: DriverError,
    999: lambda _: DriverError,
    12345: lambda _: DriverError,  # newer than the binding
}


@pytest.mark.parametrize("status", KINDS)
@pytest.mark.parametrize("call", PRIMITIVES)
def test_every_primitive_checks_its_status(model: EmulatedModel, api: ModuleType, call: str, status: int) -> None:
    driver = CudaDriver(0)
    with thread_state(api, 0, GLOBAL):
        life = Life(driver)
        live, used = model.live(), model.used(0)
        model.fail(call, 1, status)
        with pytest.raises(DriverError) as caught, driver.scope():
            life.actions()[call]()
        error = caught.value
        assert type(error) is KINDS[status](call)
        assert (error.call, error.status) == (call, status)
        name = api.CUresult(status).name if status != 12345 else "a status that the binding does not know"
        assert str(error).startswith(f"{call} on cuda:0 failed: {name} ({status}); asked for ")
        assert (model.live(), model.used(0)) == (live, used)
        life.end()
    assert model.live() == NOTHING


@pytest.mark.parametrize(("call", "asked"), [("create", 1), ("reserve", 0), ("map", 0)])
def test_free_memory_is_asked_for_only_where_it_is_the_point(model: EmulatedModel, call: str, asked: int) -> None:
    driver = CudaDriver(0)
    life = Life(driver)
    model.fail(call, 1, 2)
    with pytest.raises(DriverError), driver.scope():
        life.actions()[call]()
    assert driver.calls()["mem_info"] == model.calls()["mem_info"] == asked
    life.end()


def test_zero_waits_for_what_it_launched_before_it_raises(
    model: EmulatedModel, api: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody unmaps after a failure: nothing may be in flight then."""
    driver = CudaDriver(0)
    life = Life(driver)
    waited: list[int] = []
    wait = api.cuStreamSynchronize

    def spy(stream: int) -> object:
        waited.append(int(stream))
        return wait(stream)

    monkeypatch.setattr(api, "cuStreamSynchronize", spy)
    half = life.base + GRANULE // 2
    with driver.scope():
        model.fail("zero", 2, 999)
        with pytest.raises(DriverError, match=f"zero on cuda:0 failed.*at {half:#x}"):
            driver.zero([(life.base, half), (half, life.base + GRANULE)])
        assert len(waited) == 1
        assert waited[0] > 2, "a stream of its own: neither the legacy nor the thread's default stream"
        monkeypatch.setattr(api, "cuStreamSynchronize", answer(api, 700))
        with pytest.raises(DriverError, match=r"stream on cuda:0 failed: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
            driver.zero([(life.base, half)])
    monkeypatch.undo()
    life.end()


def fail_once(monkeypatch: pytest.MonkeyPatch, api: ModuleType, name: str, nth: int, status: int = 999) -> None:
    """The nth call from now answers a failure, and nothing is done."""
    real, calls = getattr(api, name), iter(range(1, 1000))

    def call(*arguments: object) -> object:
        return (api.CUresult(status), None) if next(calls) == nth else real(*arguments)

    monkeypatch.setattr(api, name, call)


@pytest.mark.parametrize(
    ("name", "nth", "call"),
    [
        ("cuCtxGetCurrent", 1, "context"),
        ("cuCtxPushCurrent", 1, "context"),
        ("cuThreadExchangeStreamCaptureMode", 1, "capture_mode"),
    ],
)
@pytest.mark.parametrize(("status", "kind"), [(999, DriverError), (4, DriverGone)])
def test_a_scope_that_cannot_be_entered(
    api: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, nth: int, call: str, status: int, kind: type[Exception]
) -> None:
    """The body is not run, and the thread is as it was."""
    driver = CudaDriver(1)
    with thread_state(api, 0, THREAD_LOCAL):
        with monkeypatch.context() as patch:
            fail_once(patch, api, name, nth, status)
            with pytest.raises(kind, match=rf"{call} on cuda:1 failed: CUDA_ERROR_\w+ \({status}\)"), driver.scope():
                pytest.fail("the body ran")
        assert (current_context(api), capture_mode(api)) == (0, THREAD_LOCAL)
        with driver.scope():
            driver.mem_info()


def test_a_context_that_somebody_destroyed_is_made_again(model: EmulatedModel, api: ModuleType) -> None:
    """As cudaDeviceReset does. What was opened before stays of no use."""
    old = CudaDriver(0)
    while int(api.cuDevicePrimaryCtxRelease(0)[0]) == 0:
        pass
    with pytest.raises(DriverError, match=r"^context on cuda:0 failed: .* \((201|709)\)"), old.scope():
        pass
    life = Life(CudaDriver(0))
    for name in ("mem_info", "zero"):
        with life.driver.scope():
            life.actions()[name]()
    life.end()


def test_a_context_that_fails_otherwise_is_kept(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    CudaDriver(0)
    kept = dict(cuda_binding._primary)
    with monkeypatch.context() as patch:
        fail_once(patch, api, "cuCtxPushCurrent", 1)
        with pytest.raises(DriverError, match="context on cuda:0 failed"):
            CudaDriver(0)
    assert cuda_binding._primary == kept


@pytest.mark.parametrize("index", [0.5, "0", None])
def test_a_device_number_is_an_integer(model: EmulatedModel, index: Any) -> None:
    with pytest.raises(TypeError, match="integer"):
        CudaDriver(index)


def test_synchronize_checks_its_status(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CudaDriver(0)
    monkeypatch.setattr(api, "cuCtxSynchronize", answer(api, 719))
    with (
        driver.scope(),
        pytest.raises(DriverError, match=r"context on cuda:0 failed: CUDA_ERROR_LAUNCH_FAILED \(719\)"),
    ):
        driver.synchronize()


OPENING = (
    ("cuDeviceGetCount", "device"),
    ("cuDeviceGet", "device"),
    ("cuDeviceGetAttribute", "device"),
    ("cuCtxGetCurrent", "context"),
    ("cuCtxPushCurrent", "context"),
    ("cuThreadExchangeStreamCaptureMode", "capture_mode"),
    ("cuMemGetAllocationGranularity", "granularity"),
    ("cuMemCreate", "create"),
    ("cuMemRelease", "release"),
    ("cuDevicePrimaryCtxRetain", "context"),
    ("cuStreamCreate", "stream"),
)


@pytest.mark.parametrize(("name", "call"), OPENING)
def test_opening_checks_every_status(api: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, call: str) -> None:
    # As in a process that has not opened the device yet.
    monkeypatch.setattr(cuda_binding, "_primary", {})
    with thread_state(api, 0, GLOBAL):
        with monkeypatch.context() as patch:
            fail_once(patch, api, name, 1)
            with pytest.raises(DriverError, match=rf"{call} on cuda(:0)? failed: CUDA_ERROR_UNKNOWN \(999\)"):
                CudaDriver(0)
        assert current_context(api) == 0
        CudaDriver(0)


def test_what_a_device_says_is_checked(api: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CudaDriver(0)
    names = ("cuDeviceGetName", "cuDeviceTotalMem", "cuDeviceGetPCIBusId", "cuDeviceGetAttribute")
    for name in (*names, "cuDeviceGetUuid_v2" if hasattr(api, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"):
        with monkeypatch.context() as patch:
            fail_once(patch, api, name, 1)
            with pytest.raises(DriverError, match=r"device on cuda:0 failed: CUDA_ERROR_UNKNOWN \(999\)"):
                driver.properties()
    with monkeypatch.context() as patch:
        fail_once(patch, api, "cuDriverGetVersion", 1)
        with pytest.raises(DriverError, match="device on cuda failed"):
            versions()


def test_a_driver_that_has_shut_down(model: EmulatedModel) -> None:
    """C84: late at the end of a process every call answers "deinitialized"."""
    driver = CudaDriver(0)
    life = Life(driver)
    model.set("deinitialized", 1)
    with pytest.raises(DriverGone), driver.scope():
        pass
    with pytest.raises(DriverGone):
        driver.capturing()
    for name, action in life.actions().items():
        with pytest.raises(DriverGone, match=f"{name} on cuda:0 failed"):
            action()
    with pytest.raises(DriverGone):
        CudaDriver(1)
    model.set("deinitialized", 0)
    life.end()
