"""Whatever a thread's state does to a scope, an operation has happened or it has not, and nothing is left behind.

The calls for it ("context", "device", "capture_mode", "stream") fail one after the other in every operation of a cache
(invariants 2, 3 and 9), and a Ctrl-C comes at every point of opening a device and of a scope.
"""

from __future__ import annotations

import gc
import importlib
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Any

import pytest
import torch

from vmm_kv.cache import KVCache
from vmm_kv.device import Device
from vmm_kv.driver import cuda_binding, hip_binding
from vmm_kv.errors import DriverError, OutOfPhysicalMemory, VmmError
from vmm_kv.gpu_drivers import KINDS, open_driver
from vmm_kv.holdings import empty_graveyard
from vmm_kv.host import HostFramework
from vmm_kv.layout import TensorSpec
from vmm_kv.testing import EmulatedModel, load_cuda, load_hip

GRANULE = 2 << 20
NOTHING = {"handles": 0, "mappings": 0, "reservations": 0}
CALLS = {"cuda": ("context", "capture_mode", "stream"), "hip": ("device", "capture_mode", "stream")}


def opened(kind: str) -> tuple[EmulatedModel, Device]:
    """Device 1, which is not the thread's, so that a scope has something to restore."""
    model = (load_cuda if kind == "cuda" else load_hip)(devices=2, budget=32 * GRANULE)
    driver = open_driver(kind, 1)
    return model, Device(driver, torch.device("cpu"), HostFramework(model, 1, name=driver.name), emulated=True)


def make(device: Device) -> KVCache:
    return KVCache.reserve(device, [TensorSpec("kv", (2, None, GRANULE // 2), torch.int8)], 16, chunk=GRANULE)


def thread_state(kind: str) -> tuple[int, int]:
    """Current context or device, and the capture mode."""
    if kind == "hip":
        hip: Any = importlib.import_module("hip").hip
        binding = hip_binding.HipBinding()
        mode = binding._swap_capture_mode("hip", "", 0)
        binding._swap_capture_mode("hip", "", mode)
        return int(hip.hipGetDevice()[1]), mode
    api: Any = importlib.import_module("cuda.bindings.driver")
    _, mode = api.cuThreadExchangeStreamCaptureMode(api.CUstreamCaptureMode(0))
    api.cuThreadExchangeStreamCaptureMode(mode)
    return int(api.cuCtxGetCurrent()[1]), int(mode)


def figures(cache: KVCache, model: EmulatedModel) -> tuple[object, ...]:
    return cache.state, cache.blocks, cache.physical_bytes, model.used(1), model.live()


OPERATIONS: dict[str, tuple[Callable[[KVCache], object], Callable[[KVCache], object]]] = {
    "back": (lambda cache: None, lambda cache: cache.back(3)),
    "alias": (lambda cache: None, lambda cache: cache.back(alias=True)),
    "commit": (lambda cache: None, lambda cache: cache.commit(5)),
    "commit from a prefix": (lambda cache: cache.back(2), lambda cache: cache.commit(5)),
    "commit from an alias": (lambda cache: cache.back(alias=True), lambda cache: cache.commit(5)),
    "grow": (lambda cache: cache.commit(5), lambda cache: cache.commit(9)),
    "shrink": (lambda cache: cache.commit(9), lambda cache: cache.shrink(3)),
    "close": (lambda cache: cache.commit(5), lambda cache: cache.close()),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("kind", "call"), [(kind, call) for kind in KINDS for call in CALLS[kind]])
def test_an_operation_whose_scope_fails_has_happened_or_not(kind: str, call: str, operation: str) -> None:
    before, act = OPERATIONS[operation]
    model, device = opened(kind)
    state = thread_state(kind)
    for nth in range(1, 40):
        cache = make(device)
        before(cache)
        then = figures(cache, model)
        model.fail(call, nth, 999)
        calls = model.other_calls()[call]
        try:
            act(cache)
            failed = False
        except DriverError as error:
            failed = True
            assert error.call == call
            assert figures(cache, model) == then, f"{call} {nth} failed and something is changed"
        except VmmError as error:  # that of a close, which goes on
            failed = False
            assert "close" in operation and "is complete, but" in str(error)
        reached = model.other_calls()[call] - calls >= nth
        model.clear_faults()
        assert thread_state(kind) == state
        if failed:
            act(cache)
        assert figures(cache, model) != then
        cache.close()
        assert model.live() == NOTHING
        if not reached:
            break
    assert not reached, "every call was made to fail"


@pytest.mark.parametrize(("kind", "call"), [(kind, call) for kind in KINDS for call in CALLS[kind]])
def test_no_addresses_are_left_by_a_cache_that_is_none(kind: str, call: str) -> None:
    model, device = opened(kind)
    for nth in range(1, 20):
        model.fail(call, nth, 999)
        try:
            cache = make(device)
            made = True
        except DriverError:
            made = False
        model.clear_faults()
        if made:
            cache.close()
        else:
            gc.collect()
            empty_graveyard()
        assert model.live() == NOTHING, nth
    assert made


def test_addresses_go_to_the_graveyard_where_tensors_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, device = opened("cuda")

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("vmm_kv.cache.byte_tensor", fail)
    with pytest.raises(MemoryError):
        make(device)
    gc.collect()
    empty_graveyard()
    assert model.live() == NOTHING


# What cannot be restored


def stays_as_it_is(monkeypatch: pytest.MonkeyPatch, kind: str, call: str, device: Device) -> None:
    """What the end of a scope has to call fails for good, after what its beginning calls."""
    binding: Any = device.driver._binding  # type: ignore[attr-defined]
    api = binding.api
    failing: dict[tuple[str, str], tuple[Any, str, int, Callable[[], object]]] = {
        ("cuda", "context"): (api, "cuCtxPopCurrent", 0, lambda: (api.CUresult(999), None)),
        ("cuda", "capture_mode"): (api, "cuThreadExchangeStreamCaptureMode", 1, lambda: (api.CUresult(999), None)),
        ("hip", "device"): (api, "hipSetDevice", 1, lambda: (api.hipError_t(999),)),
        ("hip", "capture_mode"): (binding, "_exchange", 1, lambda: 999),
    }
    owner, name, passed, failure = failing[kind, call]
    real, calls = getattr(owner, name), count(1)
    monkeypatch.setattr(owner, name, lambda *arguments: real(*arguments) if next(calls) <= passed else failure())


@pytest.mark.parametrize("body", [None, KeyboardInterrupt(), OutOfPhysicalMemory("full", call="create", status=2)])
@pytest.mark.parametrize(
    ("kind", "call"), [("cuda", "context"), ("cuda", "capture_mode"), ("hip", "device"), ("hip", "capture_mode")]
)
def test_what_cannot_be_restored_is_no_error(
    kind: str,
    call: str,
    body: BaseException | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The body's own end is what the caller sees, and the rest of the state is restored all the same."""
    _, device = opened(kind)
    state = thread_state(kind)
    raised: BaseException | None = None
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        try:
            stays_as_it_is(patch, kind, call, device)
            with device.driver.scope():
                if body:
                    raise body
        except BaseException as error:
            raised = error
    assert raised is body
    assert [record.getMessage().partition(" asked")[0] for record in caplog.records] == (
        [f"this thread is left changed, since {kind}:1"]
    )
    left = thread_state(kind)
    assert (left[0] != state[0], left[1] != state[1]) == (call != "capture_mode", call == "capture_mode")
    put_back(kind, left, state)


def put_back(kind: str, left: tuple[int, int], state: tuple[int, int]) -> None:
    if kind == "hip":
        importlib.import_module("hip").hip.hipSetDevice(state[0])
        hip_binding.HipBinding()._swap_capture_mode("hip", "", state[1])
        return
    api: Any = importlib.import_module("cuda.bindings.driver")
    if left[0] != state[0]:
        api.cuCtxPopCurrent()
    api.cuThreadExchangeStreamCaptureMode(api.CUstreamCaptureMode(state[1]))


# A Ctrl-C at any point


@pytest.fixture
def python_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler is back"
    signal.signal(signal.SIGINT, before)


def interrupted_at(nth: int, action: Callable[[], object]) -> bool:
    """The signal comes at the nth line, call or return in the package's drivers. Whether there are as many."""
    points = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal points
        if "/vmm_kv/driver/" not in frame.f_code.co_filename:
            return None
        points += 1
        if points == nth:
            signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return points >= nth


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_while_a_device_is_opened_leaves_nothing(
    kind: str, python_handler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = opened(kind)
    state = thread_state(kind)
    remembered = (cuda_binding, "_primary") if kind == "cuda" else (hip_binding, "_streams")
    nth = 1
    while interrupted_at(nth, lambda: open_driver(kind, 1)):
        assert model.live() == NOTHING, nth
        assert thread_state(kind) == state, nth
        monkeypatch.setattr(*remembered, {})  # as the first time
        nth += 1
    assert nth > 100


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_in_a_scope_leaves_the_thread_as_it_was(kind: str, python_handler: None) -> None:
    _, device = opened(kind)
    state = thread_state(kind)

    def enter() -> None:
        with device.driver.scope():
            device.driver.mem_info()

    nth = 1
    while interrupted_at(nth, enter):
        assert thread_state(kind) == state, nth
        nth += 1
    assert nth > 20
