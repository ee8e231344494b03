"""A binding that is installed and of no use, and a thread's state that is put back."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest

from vmm_kv import gpu_drivers
from vmm_kv.driver import cuda_binding, hip_binding
from vmm_kv.driver.binding import BrokenBinding, load, restore
from vmm_kv.errors import DriverError, DriverGone, UnsupportedError
from vmm_kv.testing import load_hip

PACKAGE = "some-binding>=1.0"
MODULES = {"cuda": cuda_binding, "hip": hip_binding}


class Panic(BaseException):
    """As the one of extensions written in Rust."""


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def call(*_: object) -> NoReturn:
        raise error

    return call


ERRORS = [
    RuntimeError("x"), OSError("x"), AttributeError("x"), SyntaxError("x"), KeyError("x"), Panic("x"), MemoryError("x"),
    ImportError("undefined symbol"), ModuleNotFoundError("No module named 'numpy'", name="numpy"),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_import_that_fails_says_to_install_it_again(error: BaseException) -> None:
    text = (
        r"^some-binding is installed, but its import fails: \w+: .+; reinstall it: pip install .* 'some-binding>=1.0'$"
    )
    with pytest.raises(BrokenBinding, match=text) as caught:
        load(PACKAGE, "some", raising(error), ())
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [SystemExit(1), KeyboardInterrupt(), ModuleNotFoundError("No module", name="some.part")]
)
def test_what_is_no_broken_import_is_raised_as_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        load(PACKAGE, "some", raising(error), ())
    assert caught.value is error


def test_a_binding_without_its_functions() -> None:
    module = SimpleNamespace(b=1)
    with pytest.raises(BrokenBinding, match="installed, but lacks a, c; reinstall"):
        load(PACKAGE, "some", lambda: module, ("a", "b", "c"))
    assert load(PACKAGE, "some", lambda: module, ("b",)) is module


@pytest.mark.parametrize("kind", gpu_drivers.KINDS)
@pytest.mark.parametrize(
    "action", [gpu_drivers.count, gpu_drivers.versions, lambda kind: gpu_drivers.open_driver(kind, 0)]
)
def test_a_broken_binding_is_an_unsupported_device(
    monkeypatch: pytest.MonkeyPatch, kind: str, action: Callable[[str], object]
) -> None:
    imports: Any = SimpleNamespace(import_module=raising(OSError("a library is cut short")))
    monkeypatch.setattr(MODULES[kind], "importlib", imports)
    with pytest.raises(UnsupportedError, match="installed, but its import fails: OSError: a library is cut short"):
        action(kind)
    empty = ModuleType("hip.hip")
    imports.import_module = lambda name: SimpleNamespace(hip=empty) if name == "hip" else empty
    with pytest.raises(UnsupportedError, match="installed, but lacks "):
        action(kind)


def test_a_binding_whose_c_layer_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    load_hip()
    gpu_drivers.count("hip")
    for layer in set(hip_binding._C_LAYERS.values()) & set(sys.modules):
        monkeypatch.setitem(sys.modules, layer, ModuleType(layer))
    with pytest.raises(BrokenBinding, match="hip-python is installed, but its C layer"):
        gpu_drivers.count("hip")


def test_a_version_that_nobody_wrote_down_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    load_hip()
    monkeypatch.setattr(importlib.metadata, "version", raising(importlib.metadata.PackageNotFoundError("hip-python")))
    assert gpu_drivers.versions("hip")["binding"] == "unknown"


# A thread's state


def undoing(*outcomes: Exception | None) -> Callable[[], None]:
    left = list(outcomes)

    def undo() -> None:
        if error := left.pop(0):
            raise error

    return undo


FAILED = DriverError("context failed", call="context", status=999)
GONE = DriverGone("gone", call="context", status=4)


@pytest.mark.parametrize(
    ("outcomes", "warned"),
    [
        ((None,), False),
        ((FAILED, None), False),
        ((GONE, None), False),
        ((FAILED, FAILED), True),
        ((FAILED, UnsupportedError("no such function")), True),
        ((FAILED, GONE), False),
        ((GONE, GONE), False),
    ],
)
def test_what_cannot_be_restored_is_tried_twice_and_told(
    outcomes: tuple[Exception | None, ...], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver that is gone is none of a thread's business any more."""
    with caplog.at_level(logging.WARNING):
        restore("cuda:1", "the context before", undoing(*outcomes))
    assert [record.getMessage() for record in caplog.records] == (
        [f"this thread is left changed, since cuda:1 asked twice for the context before: {outcomes[-1]}"] * warned
    )
