"""A Ctrl-C or another signal at any moment leaves the driver and the books in agreement (invariants 2, 3 and 9)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from vmm_kv.cache import KVCache
from vmm_kv.device import open_host
from vmm_kv.driver.host import HostDriver
from vmm_kv.errors import VmmError
from vmm_kv.gate import Gate
from vmm_kv.interrupts import allowed, deferred
from vmm_kv.layout import TensorSpec
from vmm_kv.state import State

G = 4096
NOTHING = {"handles": 0, "mappings": 0, "reservations": 0}


@pytest.fixture(autouse=True)
def python_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler is back"
    signal.signal(signal.SIGINT, before)


def open_driver() -> tuple[KVCache, HostDriver]:
    device = open_host(2048 * G, granule=G)
    assert isinstance(device.driver, HostDriver)
    device.driver.model.poison = True
    return KVCache.reserve(device, [TensorSpec("kv", (2, None, G), torch.uint8)], 16, chunk=G), device.driver


def interrupt_after(driver: HostDriver, name: str) -> None:
    """The next call of the primitive is made, and the signal comes just after it."""
    real = getattr(driver, name)

    def call(*arguments: Any) -> Any:
        delattr(driver, name)
        result = real(*arguments)
        signal.raise_signal(signal.SIGINT)
        return result

    setattr(driver, name, call)


def check(cache: KVCache, driver: HostDriver) -> None:
    assert sorted(driver.model.mapped()) == sorted((address, size) for address, size, _ in cache.chunk_table())
    assert driver.model.used(0) == cache.physical_bytes
    if cache.blocks:
        assert cache.view("kv").sum() >= 0  # every usable block can be read
    cache.close()
    assert driver.model.live() == NOTHING
    assert driver.model.used(0) == 0


OPERATIONS: dict[str, tuple[Callable[[KVCache], object], Callable[[KVCache], object]]] = {
    "commit": (lambda cache: cache.back(2), lambda cache: cache.commit(16)),
    "commit from alias": (lambda cache: cache.back(alias=True), lambda cache: cache.commit(16)),
    "shrink": (lambda cache: cache.commit(16), lambda cache: cache.shrink(3)),
    "back": (lambda cache: None, lambda cache: cache.back(4)),
    "close": (lambda cache: cache.commit(16), lambda cache: cache.close()),
}


@pytest.mark.parametrize("primitive", ["create", "map", "set_access", "zero", "unmap", "release", "mem_info"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupt_just_after_a_driver_call_waits_for_the_end(operation: str, primitive: str) -> None:
    cache, driver = open_driver()
    before, act = OPERATIONS[operation]
    before(cache)
    interrupt_after(driver, primitive)
    try:
        act(cache)
    except KeyboardInterrupt:
        assert primitive not in vars(driver)
    vars(driver).pop(primitive, None)
    act(cache)
    check(cache, driver)


def test_a_timer_that_interrupts_again_and_again() -> None:
    """In a process of its own: a signal that another thread hands on late would hit pytest's own timer."""
    script = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_interrupts as here; here.ring_on()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("", 0)


def ring_on() -> None:
    def ring(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    class Heard:
        def before_unmap(self, spans: object, generation: int) -> None: ...

        def after_map(self, spans: object, generation: int) -> None: ...

    signal.signal(signal.SIGALRM, ring)
    rung = 0
    for round_ in range(200):
        cache, driver = open_driver()
        if round_ % 2:
            cache.add_listener(Heard())
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0001 + round_ * 0.00001, 0.0003)
                cache.back(**({"alias": True} if round_ % 4 > 1 else {"blocks": 2}))
                cache.commit(16)
                cache.shrink(3)
                cache.commit(12)
                cache.close()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            rung += 1
        assert signal.getsignal(signal.SIGALRM) is ring
        if cache.state is State.CLOSED:
            check(cache, driver)
            continue
        assert not cache._gate._lock.locked()
        cache.commit(16)
        check(cache, driver)
    assert rung > 20


def test_foreign_code_can_be_interrupted() -> None:
    cache, driver = open_driver()

    class Interrupted:
        def before_unmap(self, spans: object, generation: int) -> None:
            signal.raise_signal(signal.SIGINT)

        def after_map(self, spans: object, generation: int) -> None: ...

    cache.commit(16)
    cache.tensors["kv"].fill_(7)
    cache.add_listener(Interrupted())
    for operation in (lambda: cache.shrink(3), cache.close):
        with pytest.raises(KeyboardInterrupt):
            operation()
        assert cache.blocks == 16
        assert bool(cache.view("kv").eq(7).all())
    cache._listeners._listeners = ()
    check(cache, driver)


def test_signals_come_at_the_end_and_other_threads_do_nothing() -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt), deferred():
        with deferred():
            signal.raise_signal(signal.SIGINT)
        steps.append("inside")
    with pytest.raises(KeyboardInterrupt), deferred():
        signal.raise_signal(signal.SIGINT)
        steps.append("before")
        allowed(lambda: steps.append("never"))
    assert steps == ["inside", "before"]

    def elsewhere() -> None:
        with deferred():
            allowed(lambda: steps.append("elsewhere"))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert steps[-1] == "elsewhere"


def test_memory_of_a_step_that_nobody_gets_is_given_back() -> None:
    cache, driver = open_driver()
    interrupt_after(driver, "create")
    with pytest.raises(KeyboardInterrupt):
        cache.prepare(16)
    assert cache.physical_bytes == driver.model.used(0) == 0
    check(cache, driver)


def test_every_signal_that_came_is_delivered_once_although_the_first_raises() -> None:
    heard: list[int] = []
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    descriptor = signal.set_wakeup_fd(writing)
    try:
        with pytest.raises(KeyboardInterrupt), deferred():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGUSR1)
            assert heard == []
    finally:
        signal.set_wakeup_fd(descriptor)
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]
    assert os.read(reading, 16) == bytes([signal.SIGINT, signal.SIGUSR1]), "an event loop hears of each once"
    os.close(reading)
    os.close(writing)


def test_a_ctrl_c_ends_the_wait_for_another_threads_operation() -> None:
    cache, driver = open_driver()
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with cache._gate.operation("hold"):
            held.set()
            go_on.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(KeyboardInterrupt):
            cache.commit(16)
        assert cache._gate._lock.locked(), "the other thread's operation still has it"
    finally:
        signal.signal(signal.SIGALRM, before)
        go_on.set()
        thread.join()
    assert cache.commit(16) == 16
    check(cache, driver)


def test_a_signal_just_as_the_lock_is_taken_again_after_callbacks_leaves_the_gate_open() -> None:
    gate = Gate()
    lock = gate._lock

    def take(*arguments: Any, **named: Any) -> bool:
        """A signal comes between the lock's `acquire` and the line after it."""
        taken = lock.acquire(*arguments, **named)
        if gate._calling_back:
            raise KeyboardInterrupt
        return taken

    gate._lock = cast(Any, SimpleNamespace(acquire=take, release=lock.release))
    with pytest.raises(KeyboardInterrupt), gate.operation("commit"):
        gate.callbacks("commit", lambda: None)
    assert not lock.locked()
    with gate.operation("commit"):
        pass


def test_listeners_told_of_a_close_that_was_interrupted_hear_that_the_pages_stay() -> None:
    cache, driver = open_driver()
    heard: list[str] = []

    class Listener:
        def __init__(self, error: BaseException | None) -> None:
            self.error = error

        def before_unmap(self, spans: object, generation: int) -> None:
            heard.append("before")
            if self.error:
                raise self.error

        def after_map(self, spans: object, generation: int) -> None:
            heard.append("after")

    cache.commit(16)
    cache.add_listener(Listener(None))
    cache.add_listener(Listener(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        cache.close()
    assert (heard, cache.state, cache.blocks) == (["before", "before", "after"], State.COMMITTED, 16)
    cache._listeners._listeners = (Listener(RuntimeError("it goes on")),)
    with pytest.raises(VmmError, match="is complete, but it goes on"):
        cache.close()
    check(cache, driver)


def test_a_child_forked_from_another_thread_during_an_operation_can_be_interrupted() -> None:
    codes: list[int] = []

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    with deferred():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler, "here it still waits"
    assert codes == [0]
