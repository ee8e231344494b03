"""HipDriver beyond the contract: opening a device, quirks, threads, and that every status is looked at."""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vmm_kv.cache import KVCache
from vmm_kv.driver import Quirks
from vmm_kv.driver import hip_binding as binding
from vmm_kv.driver.hip import HipDriver, quirks_of
from vmm_kv.errors import (
    DriverError,
    DriverGone,
    OutOfAddressSpace,
    OutOfPhysicalMemory,
    StateError,
    UnsupportedError,
)
from vmm_kv.layout import TensorSpec
from vmm_kv.testing import load_hip
from vmm_kv.testing.emulation import EmulatedModel

hip: Any = importlib.import_module("hip").hip  # the binding says of its functions that they have no types

GRANULE = 2 << 20


@pytest.fixture
def model() -> EmulatedModel:
    return load_hip(devices=2, budget=64 * GRANULE, granule=GRANULE)


@pytest.fixture
def driver(model: EmulatedModel) -> HipDriver:
    return HipDriver()


# Versions and quirks.


@pytest.mark.parametrize(
    ("version", "quirks"),
    [
        ("5.7.31921", Quirks(single_memset=True, single_unmap=True)),
        ("6.3.42134", Quirks(single_memset=True, single_unmap=True)),
        ("6.4.43482", Quirks(single_memset=True, single_unmap=True, memory_with_addresses=True)),
        ("7.0.51831", Quirks(single_memset=True, uniform_chunks=True, memory_with_addresses=True)),
        ("7.2.0", Quirks(single_memset=True, uniform_chunks=True, memory_with_addresses=True)),
        ("7.13.99999", Quirks(single_memset=True, uniform_chunks=True, memory_with_addresses=True)),
        ("7.14.0", Quirks(single_memset=True)),
        ("10.0.1", Quirks(single_memset=True)),
    ],
)
def test_quirks_follow_the_version(model: EmulatedModel, version: str, quirks: Quirks) -> None:
    """B1, B2 and B4 by the versions of HIP that have them; B13 in all."""
    major, minor, patch = map(int, version.split("."))
    number = major * 10_000_000 + minor * 100_000 + patch
    assert quirks_of(number) == quirks
    model.set("runtime_version", number)
    assert HipDriver().quirks == quirks
    assert HipDriver.versions()["runtime"] == version


def test_quirks_that_are_given_win(model: EmulatedModel) -> None:
    model.set("runtime_version", 70_200_000)
    assert HipDriver(quirks=Quirks(fresh_zero=True)).quirks == Quirks(fresh_zero=True)


def test_versions_and_count(model: EmulatedModel) -> None:
    assert HipDriver.count() == 2
    versions = HipDriver.versions()
    assert set(versions) == {"binding", "driver", "runtime"}
    assert all(version[0].isdigit() for version in versions.values())


# What memory is made like.


@pytest.mark.parametrize(("order", "chosen"), [(["posix_fd", "none"], "posix_fd"), (["none", "posix_fd"], "none")])
def test_the_first_handle_type_that_works_is_taken(model: EmulatedModel, order: list[str], chosen: str) -> None:
    driver = HipDriver(handle_types=order)
    assert driver.memory_traits.handle_type == chosen
    assert driver.memory_traits.refusals == ()
    with driver.scope():
        handle = driver.create(GRANULE)
        fd = exported_fd(handle)
        driver.release(handle)
    assert (fd is not None) == (chosen == "posix_fd"), "the handle is really of that type"


def exported_fd(handle: int) -> int | None:
    fd = ctypes.c_int(-1)
    kind = hip.hipMemAllocationHandleType.hipMemHandleTypePosixFileDescriptor
    (status,) = hip.hipMemExportToShareableHandle(ctypes.addressof(fd), handle, kind, 0)
    if status:
        return None
    os.close(fd.value)
    return fd.value


@pytest.mark.parametrize(("fabric", "reason"), [(0, "HandleTypeFabricSupported"), (1, "create on hip:0 failed")])
def test_fabric_handles_are_refused_with_the_reason(model: EmulatedModel, fabric: int, reason: str) -> None:
    """C5: with the attribute unset, and with a runtime that says yes and refuses the create."""
    model.set("fabric", fabric)
    traits = HipDriver(handle_types=("fabric", "posix_fd")).memory_traits
    assert traits.handle_type == "posix_fd"
    ((refused, text),) = traits.refusals
    assert refused == "fabric"
    assert reason in text
    with pytest.raises(UnsupportedError, match=f"fabric: .*{reason}"):
        HipDriver(handle_types=("fabric",))


def test_no_memory_is_no_refusal(model: EmulatedModel) -> None:
    """Taken for one, a full device would silently get a handle type that was not wanted."""
    assert model.charge(0, model.budget(0)) == 0
    with pytest.raises(OutOfPhysicalMemory, match=f"asked for {GRANULE} bytes; 0 of {model.budget(0)} bytes are free"):
        HipDriver(handle_types=("posix_fd", "none"))
    assert model.credit(0, model.budget(0)) == 0
    assert HipDriver(handle_types=("posix_fd", "none")).memory_traits.handle_type == "posix_fd"


@pytest.mark.parametrize(
    ("call", "nth", "status"), [("device", 2, 999), ("capture_mode", 1, 999), ("create", 1, 3), ("release", 1, 999)]
)
def test_a_failure_of_opening_is_no_refusal_either(model: EmulatedModel, call: str, nth: int, status: int) -> None:
    model.fail(call, nth, status)
    with pytest.raises(DriverError, match=rf"^{call} on hip:0 failed: .*\({status}\)"):
        HipDriver(handle_types=("posix_fd", "none"))
    assert current_device() == 0


def test_whatever_a_create_says_to_a_type_is_a_refusal_while_there_is_another(model: EmulatedModel) -> None:
    model.fail("create", 1, 304)
    traits = HipDriver(handle_types=("posix_fd", "none")).memory_traits
    assert traits.handle_type == "none" and "(304)" in dict(traits.refusals)["posix_fd"]


@pytest.mark.parametrize("index", [0.5, "0", None])
def test_a_device_number_is_an_integer(model: EmulatedModel, index: Any) -> None:
    with pytest.raises(TypeError, match="integer"):
        HipDriver(index)


def test_opening_leaves_no_memory_behind(model: EmulatedModel) -> None:
    HipDriver(1, handle_types=("fabric", "posix_fd", "none"))
    assert model.used(0) == model.used(1) == 0
    assert model.live() == {"handles": 0, "mappings": 0, "reservations": 0}


def test_the_recommended_granule_is_told(model: EmulatedModel) -> None:
    model.set("recommended_granularity", 16 * GRANULE)
    assert HipDriver().memory_traits.recommended_granule == 16 * GRANULE


def test_a_reported_granule_under_2_mib_is_not_believed(model: EmulatedModel) -> None:
    """B7."""
    model.set("quirk_4k_granularity", 1)
    driver = HipDriver()
    assert driver.granule == 2 << 20
    with driver.scope():
        assert driver.reserve(driver.granule) % driver.granule == 0
    coarse = HipDriver(least_granule=32 << 20)
    assert coarse.granule == 32 << 20
    with coarse.scope():
        assert [coarse.reserve(GRANULE) % coarse.granule for _ in range(4)] == [0] * 4, "aligned without being asked"


def test_the_rdma_flag_only_where_supported(model: EmulatedModel) -> None:
    """C6."""
    for supported in (0, 1):
        model.set("rdma", supported)
        driver = HipDriver()
        assert driver.memory_traits.rdma == bool(supported)
        with driver.scope():
            status, made = hip.hipMemGetAllocationPropertiesFromHandle(driver.create(GRANULE))
        assert status == 0
        assert made.allocFlags.gpuDirectRDMACapable == supported


# What is missing.


def test_a_missing_binding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hip", None)
    for action in (HipDriver, HipDriver.count, HipDriver.versions):
        with pytest.raises(UnsupportedError, match=r"pip install 'hip-python"):
            action()


def test_another_package_called_hip_is_no_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hip", SimpleNamespace())
    with pytest.raises(UnsupportedError, match=r"pip install 'hip-python"):
        HipDriver()


def test_a_missing_runtime_is_named() -> None:
    """In a process of its own, where nobody loaded the emulated one."""
    program = """
        import sys
        from vmm_kv.driver.hip import HipDriver
        from vmm_kv.errors import UnsupportedError
        assert not any(name.split(".")[0] in ("hip", "rocm") for name in sys.modules), "imported before it is needed"
        for action in (HipDriver, HipDriver.count, HipDriver.versions):
            try:
                action()
            except UnsupportedError as error:
                assert "install ROCm" in str(error) and "libamdhip64" in str(error), error
            else:
                sys.exit("no error")
    """
    code = "\n".join(line[8:] for line in program.splitlines())
    nowhere = {name: value for name, value in os.environ.items() if name != "ROCM_PATH"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=nowhere)


def test_a_device_that_is_not_there(model: EmulatedModel) -> None:
    with pytest.raises(UnsupportedError, match=r"hip:2: the ROCm runtime sees 2 devices.*HIP_VISIBLE_DEVICES"):
        HipDriver(2)
    with pytest.raises(ValueError, match="device -1"):
        HipDriver(-1)


def test_no_device_at_all(model: EmulatedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """hipErrorNoDevice is an answer, not a failure."""
    no_device = hip.hipError_t.hipErrorNoDevice
    monkeypatch.setattr(binding, "_import_binding", lambda: Answering(hipGetDeviceCount=(no_device, 0)))
    assert HipDriver.count() == 0
    with pytest.raises(UnsupportedError, match="hip:0: the ROCm runtime sees 0 devices"):
        HipDriver()


def test_a_runtime_that_cannot_be_used(model: EmulatedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    insufficient = hip.hipError_t.hipErrorInsufficientDriver
    monkeypatch.setattr(binding, "_import_binding", lambda: Answering(hipGetDeviceCount=(insufficient, 0)))
    with pytest.raises(UnsupportedError, match=r"hipErrorInsufficientDriver \(35\).*rocminfo"):
        HipDriver.count()


class Answering:
    """The binding, but for some functions that answer what they are told."""

    def __init__(self, **answers: tuple[object, ...]) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> object:
        if name in self._answers:
            return lambda *_: self._answers[name]
        return getattr(hip, name)


def test_no_virtual_memory_management(model: EmulatedModel) -> None:
    """G5, B12."""
    model.set("vmm_supported", 0)
    with pytest.raises(UnsupportedError, match="hip:0 does not support virtual memory management"):
        HipDriver()


def test_a_question_that_the_runtime_does_not_know_means_no(
    model: EmulatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = (hip.hipError_t.hipErrorInvalidValue, 0)
    monkeypatch.setattr(binding, "_import_binding", lambda: Answering(hipDeviceGetAttribute=unknown))
    with pytest.raises(UnsupportedError, match="hip:0 does not support virtual memory management"):
        HipDriver()


def test_a_status_that_the_binding_does_not_know(model: EmulatedModel, driver: HipDriver) -> None:
    """The binding raises ValueError there; HIP has no 800."""
    model.fail("create", 1, 800)
    with driver.scope(), pytest.raises(DriverError, match=r"create on hip:0 failed: .*\(800\)") as caught:
        driver.create(GRANULE)
    assert caught.value.status == 800


def test_properties(model: EmulatedModel) -> None:
    first, second = HipDriver(0).properties(), HipDriver(1).properties()
    assert first.name
    assert first.total == 64 * GRANULE
    assert not first.integrated
    assert len(first.uuid) == 36 and [len(group) for group in first.uuid.split("-")] == [8, 4, 4, 4, 12]
    assert first.uuid != second.uuid
    assert first.pci != second.pci
    assert replace(second, uuid=first.uuid, pci=first.pci) == first
    model.set("integrated", 1)
    assert HipDriver(0).properties().integrated


def test_properties_count_as_no_primitive(model: EmulatedModel, driver: HipDriver) -> None:
    before = model.calls()
    driver.properties()
    assert model.calls() == before


# Devices and threads.


def use(driver: HipDriver) -> None:
    """Every primitive, inside one scope."""
    with driver.scope():
        base = driver.reserve(4 * GRANULE)
        handle = driver.create(GRANULE)
        driver.map(base, GRANULE, handle)
        driver.set_access(base, GRANULE)
        assert driver.get_access(base) == 3
        driver.zero([(base, base + GRANULE)])
        driver.synchronize()
        driver.mem_info()
        assert not driver.capturing()
        driver.unmap(base, GRANULE)
        driver.release(handle)
        driver.free_address(base, 4 * GRANULE)


def current_device() -> int:
    status, device = hip.hipGetDevice()
    assert status == 0
    return int(device)


def in_a_thread(action: Callable[[], object]) -> None:
    """Raises what the action raised."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def test_every_call_is_made_on_the_device(model: EmulatedModel) -> None:
    """G3: memory is made on the current device, so a call on another device is wrong even if it succeeds."""
    driver = HipDriver(1)
    before = [model.calls_on(0), model.calls_on(1)]
    assert current_device() == 0
    use(driver)
    assert current_device() == 0, "what was current before"
    assert model.calls_on(0) == before[0]
    assert model.calls_on(1) == before[1] + sum(driver.calls().values()) > before[1]


def test_from_a_thread_that_never_called_hip(model: EmulatedModel) -> None:
    driver = HipDriver(1)
    before = model.calls_on(0)

    def action() -> None:
        assert current_device() == 0, "where every thread starts"
        use(driver)
        assert current_device() == 0

    in_a_thread(action)
    assert model.calls_on(0) == before


def test_the_current_device_is_restored_after_a_failure(model: EmulatedModel) -> None:
    driver = HipDriver(1)
    with pytest.raises(DriverError), driver.scope():
        driver.create(1)
    assert current_device() == 0


def test_a_device_that_is_current_is_not_made_current(
    model: EmulatedModel, driver: HipDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = Answering(hipSetDevice=(hip.hipError_t.hipErrorUnknown,))
    monkeypatch.setattr(driver._binding, "api", refusing)
    use(driver)
    second = HipDriver(1)
    monkeypatch.setattr(second._binding, "api", refusing)
    with pytest.raises(DriverError, match=r"device on hip:1 failed: hipErrorUnknown \(999\)"), second.scope():
        raise AssertionError("never gets here")


def capture_mode(driver: HipDriver) -> int:
    """The thread's, read by setting it twice."""
    mode = driver._binding._swap_capture_mode("hip", "", 0)
    driver._binding._swap_capture_mode("hip", "", mode)
    return mode


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_the_capture_mode_is_relaxed_inside_and_restored(driver: HipDriver, mode: int) -> None:
    """The binding's own function cannot do it: it takes the mode for a result."""

    def action() -> None:
        driver._binding._swap_capture_mode("hip", "", mode)
        with driver.scope():
            assert capture_mode(driver) == 2
            with driver.scope():
                assert capture_mode(driver) == 2
            assert capture_mode(driver) == 2
        assert capture_mode(driver) == mode

    in_a_thread(action)


# Every status is looked at.

CALLS: dict[str, Callable[[HipDriver, int, int], object]] = {
    "reserve": lambda d, base, handle: d.reserve(GRANULE),
    "free_address": lambda d, base, handle: d.free_address(base, 4 * GRANULE),
    "create": lambda d, base, handle: d.create(GRANULE),
    "release": lambda d, base, handle: d.release(handle),
    "map": lambda d, base, handle: d.map(base + GRANULE, GRANULE, handle),
    "unmap": lambda d, base, handle: d.unmap(base, GRANULE),
    "set_access": lambda d, base, handle: d.set_access(base, GRANULE),
    "get_access": lambda d, base, handle: d.get_access(base),
    "mem_info": lambda d, base, handle: d.mem_info(),
    "zero": lambda d, base, handle: d.zero([(base, base + GRANULE)]),
    "stream": lambda d, base, handle: d.capturing(),
    "device": lambda d, base, handle: d.synchronize(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [1, 2, 4, 719, 999])
def test_every_failure_is_an_error_of_its_class(
    model: EmulatedModel, driver: HipDriver, call: str, status: int
) -> None:
    with driver.scope():
        base, handle = driver.reserve(4 * GRANULE), driver.create(GRANULE)
        driver.map(base, GRANULE, handle)
        driver.set_access(base, GRANULE)
        model.fail(call, 1, status)
        with pytest.raises(DriverError, match=f"^{call} on hip:0 failed: hipError[A-Za-z]+ \\({status}\\)") as caught:
            CALLS[call](driver, base, handle)
        CALLS["mem_info"](driver, base, handle)
    error = caught.value
    assert (error.call, error.status) == (call, status)
    expected = {4: DriverGone, 2: {"create": OutOfPhysicalMemory}.get(call, OutOfAddressSpace)}.get(status, DriverError)
    assert type(error) is expected
    if (call, status) == ("create", 2):
        free = model.budget(0) - model.used(0)
        assert f"asked for {GRANULE} bytes; {free} of {model.budget(0)} bytes are free" in str(error)


@pytest.mark.parametrize(("call", "nth"), [("device", 1), ("device", 2), ("capture_mode", 1)])
def test_a_scope_that_cannot_be_entered(model: EmulatedModel, call: str, nth: int) -> None:
    """The calls are: get the device, set it, set the mode. The body is not run, and the thread is as it was."""
    driver = HipDriver(1)

    def action() -> None:
        model.fail(call, nth, 999)
        with pytest.raises(DriverError, match=f"^{call} on hip:1 failed: hipErrorUnknown"), driver.scope():
            pytest.fail("the body ran")
        assert (current_device(), capture_mode(driver)) == (0, 0)

    in_a_thread(action)


def test_the_free_memory_is_unknown_where_that_fails_too(model: EmulatedModel, driver: HipDriver) -> None:
    model.fail("create", 1, 2)
    model.fail("mem_info", 1, 999)
    with driver.scope(), pytest.raises(OutOfPhysicalMemory, match="how many bytes are free is unknown"):
        driver.create(GRANULE)


def test_calls_are_the_runtimes_calls(model: EmulatedModel, driver: HipDriver) -> None:
    assert set(driver.calls().values()) == {0}, "counted from when the device is open"
    before = model.calls()
    use(driver)
    after = model.calls()
    assert {name: after[name] - before[name] for name in driver.calls()} == dict(driver.calls())


def test_zeroing_stops_at_the_first_failure_and_waits(model: EmulatedModel, driver: HipDriver) -> None:
    with driver.scope():
        base, handle = driver.reserve(GRANULE), driver.create(GRANULE)
        driver.map(base, GRANULE, handle)
        driver.set_access(base, GRANULE)
        model.fail("zero", 2, 999)
        model.fail("stream", 1, 719)
        with pytest.raises(DriverError, match=f"^zero on hip:0 failed: .*asked for 2 bytes at {base + 2:#x}"):
            driver.zero([(base, base + 1), (base + 2, base + 4), (base + 5, base + 6)])
        driver.capturing()  # the armed stream failure was the wait's
        model.fail("stream", 1, 719)
        with pytest.raises(DriverError, match=r"^stream on hip:0 failed: hipErrorLaunchFailure \(719\)"):
            driver.zero([(base, base + 1)])
        driver.zero([])


def test_b13_a_memset_stays_within_one_mapping(model: EmulatedModel, driver: HipDriver) -> None:
    """Naively it is refused; a cache zeroes mapping by mapping, also into mappings that were there before."""
    model.set("quirk_single_memset", 1)
    model.poison = True
    with driver.scope():
        base, handles = driver.reserve(2 * GRANULE), [driver.create(GRANULE), driver.create(GRANULE)]
        for number, handle in enumerate(handles):
            driver.map(base + number * GRANULE, GRANULE, handle)
        driver.set_access(base, 2 * GRANULE)
        with pytest.raises(DriverError, match=r"^zero on hip:0 failed: hipErrorInvalidValue"):
            driver.zero([(base, base + 2 * GRANULE)])
        driver.zero([(base, base + GRANULE), (base + GRANULE, base + 2 * GRANULE)])

    naive = cache_on(replace(driver.quirks, single_memset=False))
    with pytest.raises(DriverError, match=r"^zero on hip:0 failed"):
        naive.commit(8)
    naive.close()
    for back in (None, 1):
        cache = cache_on(driver.quirks)
        if back:
            cache.back(back)
        for blocks in (3, 8):
            assert cache.commit(blocks) == blocks
            assert not cache.view("kv")[:, :blocks].any()
        cache.close()


def cache_on(quirks: Quirks) -> KVCache:
    """Eight blocks of 3/4 of a granule, twice: the borders of blocks lie within mappings."""
    driver = HipDriver(quirks=replace(quirks, uniform_chunks=True))
    with driver.scope():
        total = driver.mem_info()[1]
    device: Any = SimpleNamespace(driver=driver, name=driver.name, total_bytes=total, torch_device=torch.device("cpu"))
    return KVCache.reserve(device, [TensorSpec("kv", (2, None, 3 * GRANULE // 4), torch.int8)], 8, chunk=GRANULE)


@pytest.mark.parametrize("alignment", [0, GRANULE, 8 * GRANULE])
def test_addresses_are_aligned_where_the_runtime_ignores_it(
    model: EmulatedModel, driver: HipDriver, alignment: int
) -> None:
    """R2: the aligned part of a larger reservation, of which exactly the whole is freed."""
    model.set("ignore_alignment", 1)
    with driver.scope():
        bases = [driver.reserve(3 * GRANULE, alignment) for _ in range(3)]
        assert [base % (alignment or GRANULE) for base in bases] == [0] * 3
        assert model.live()["reservations"] == 3, "what lay askew was given back"
        handle = driver.create(GRANULE)
        for base in bases:
            driver.map(base + 2 * GRANULE, GRANULE, handle)
            driver.set_access(base + 2 * GRANULE, GRANULE)
        with pytest.raises(DriverError, match=r"^free_address on hip:0 failed"):
            driver.free_address(bases[0], 3 * GRANULE)  # something is mapped: and it can be tried again
        for base in bases:
            driver.unmap(base + 2 * GRANULE, GRANULE)
            driver.free_address(base, 3 * GRANULE)
        driver.release(handle)
    assert model.live() == {"handles": 0, "mappings": 0, "reservations": 0}
    assert driver._padded == {}


@pytest.mark.parametrize("nth", [1, 2])
def test_no_addresses_are_left_where_aligning_them_fails(model: EmulatedModel, driver: HipDriver, nth: int) -> None:
    model.set("ignore_alignment", 1)
    model.fail("reserve", nth, 2)
    with driver.scope(), pytest.raises(OutOfAddressSpace):
        driver.reserve(GRANULE)
    assert model.live()["reservations"] == 0


def test_addresses_that_are_renewed_lie_where_they_lay_though_the_first_were_padded(model: EmulatedModel) -> None:
    """B4: a shrink to nothing frees them and wishes for them again."""
    model.set("ignore_alignment", 1)
    model.set("quirk_memory_with_addresses", 1)
    cache = cache_on(Quirks(memory_with_addresses=True))
    cache.commit(8)
    cache.shrink(0)
    assert model.used(0) == 0
    assert cache.commit(8) == 8
    cache.close()


def test_zeroing_has_a_non_blocking_stream_of_its_own(model: EmulatedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the null stream it would wait for everybody, and join captures."""
    seen: dict[str, tuple[Any, ...]] = {}

    class Recording:
        def __getattr__(self, name: str) -> Any:
            function = getattr(hip, name)
            if name not in ("hipStreamCreateWithFlags", "hipMemsetD8Async", "hipStreamSynchronize"):
                return function

            def recorded(*arguments: Any) -> Any:
                seen[name] = arguments
                return function(*arguments)

            return recorded

    monkeypatch.setattr(binding, "_streams", {})
    monkeypatch.setattr(binding, "_import_binding", Recording)
    use(HipDriver(1))
    assert seen["hipStreamCreateWithFlags"] == (hip.hipStreamNonBlocking,)
    *_, stream = seen["hipMemsetD8Async"]
    assert stream == binding._streams[1] != 0
    assert seen["hipStreamSynchronize"] == (stream,)


def test_a_capture_of_the_current_stream_is_seen(model: EmulatedModel) -> None:
    asked: list[int] = []

    def current_stream() -> int:
        asked.append(1)
        return 0

    driver = HipDriver(current_stream=current_stream)
    assert not driver.capturing()
    model.set("capturing", 1)
    assert driver.capturing()
    assert len(asked) == 2


def test_another_streams_capture_is_the_null_streams_business(model: EmulatedModel, driver: HipDriver) -> None:
    """hipErrorStreamCaptureImplicit, with no capture status written."""
    model.fail("stream", 1, 906)
    assert driver.capturing()
    assert not driver.capturing()


def test_hip_of_before_a_fork_is_no_use_in_the_child(model: EmulatedModel) -> None:
    """G4: a device that is opened in a forked child, where the parent used HIP."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            HipDriver()
            code = 2
        except StateError as error:
            code = 0 if "spawn" in str(error) else 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
