"""The choice of a handle type (C92): by a real create, refusals remembered, running out of memory never one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from vmm_kv import device
from vmm_kv.driver.handle_types import checked, choose
from vmm_kv.errors import DriverError, DriverGone, OutOfPhysicalMemory, UnsupportedError


def attempts(outcomes: Mapping[str, Exception | None], tried: list[str]) -> Callable[[str], None]:
    def attempt(name: str) -> None:
        tried.append(name)
        if error := outcomes[name]:
            raise error

    return attempt


def refusal(status: int, call: str = "create") -> DriverError:
    return DriverError(f"{call} failed ({status})", call=call, status=status)


def test_the_first_that_works_is_taken_and_no_other_tried() -> None:
    tried: list[str] = []
    outcomes = {"fabric": None, "posix_fd": None, "none": None}
    assert choose(["fabric", "posix_fd", "none"], attempts(outcomes, tried)) == ("fabric", ())
    assert tried == ["fabric"]


@pytest.mark.parametrize(
    "error", [*map(refusal, (801, 800, 1, 46, 101, 304, 802, 999)), UnsupportedError("no such attribute")]
)
def test_a_refusal_is_remembered_with_its_reason(error: Exception) -> None:
    tried: list[str] = []
    outcomes = {"fabric": error, "posix_fd": None}
    assert choose(["fabric", "posix_fd"], attempts(outcomes, tried)) == ("posix_fd", (("fabric", str(error)),))
    assert tried == ["fabric", "posix_fd"]


@pytest.mark.parametrize(
    "error",
    [
        OutOfPhysicalMemory("create failed (2)", call="create", status=2),
        DriverGone("create failed (4)", call="create", status=4),
        refusal(3),
        refusal(999, "release"),
        RuntimeError("anything else"),
    ],
)
def test_what_is_no_refusal_is_raised_as_it_is(error: Exception) -> None:
    tried: list[str] = []
    with pytest.raises(type(error)) as caught:
        choose(["fabric", "none"], attempts({"fabric": error, "none": None}, tried))
    assert caught.value is error
    assert tried == ["fabric"]


def test_of_the_last_type_only_what_means_it_is_a_refusal() -> None:
    with pytest.raises(DriverError, match="999") as caught:
        choose(["fabric", "none"], attempts({"fabric": refusal(801), "none": refusal(999)}, []))
    assert caught.value.status == 999


def test_all_refused_is_unsupported_with_every_reason() -> None:
    outcomes = {"fabric": refusal(800), "posix_fd": refusal(801)}
    with pytest.raises(UnsupportedError, match=r"fabric: create failed \(800\); posix_fd: create failed \(801\)"):
        choose(["fabric", "posix_fd"], attempts(outcomes, []))


def test_what_was_asked_for_already_is_not_advised() -> None:
    refused = {"fabric": refusal(800), "none": refusal(801)}
    with pytest.raises(UnsupportedError, match=r"\(800\). Add 'none' to the list"):
        choose(["fabric"], attempts(refused, []))
    with pytest.raises(UnsupportedError, match=r"\(801\)$"):
        choose(["fabric", "none"], attempts(refused, []))


@pytest.mark.parametrize("order", [[], ["win32"], ["none", "fabrik"]])
def test_an_order_that_is_none(order: list[str]) -> None:
    tried: list[str] = []
    with pytest.raises(ValueError, match="'none', 'posix_fd', 'fabric'"):
        choose(order, attempts({"none": None}, tried))
    assert tried == []


def test_a_str_is_no_order() -> None:
    """`"none"` alone would be four names."""
    with pytest.raises(TypeError, match=r"\('none',\) and not 'none'"):
        checked("none")
    with pytest.raises(TypeError):
        checked(3)  # type: ignore[arg-type]
    assert checked(iter(["fabric", "none"])) == ("fabric", "none")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["host:2MiB", "cuda:0", "hip:0", "auto"])
def test_an_order_is_looked_at_before_a_device_is_opened(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for opening in ("open_host", "_open_auto", "_open_gpu"):
        monkeypatch.setattr(device, opening, None)
    with pytest.raises(TypeError, match="sequence of names"):
        device.open_device(name, handle_types="none")
    with pytest.raises(ValueError, match="fabrik"):
        device.open_device(name, handle_types=("none", "fabrik"))


def test_any_sequence_is_an_order() -> None:
    assert device.open_device("host:2MiB", handle_types=iter(["none"])).name == "host:0"  # type: ignore[arg-type]
