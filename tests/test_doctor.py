"""What `vmm-kv doctor` finds: on a machine without a GPU, quickly and without torch; and on emulated drivers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from vmm_kv import cli, doctor, gpu_drivers, testing
from vmm_kv.doctor import WORKS, Diagnosis, KindFacts, Shortfall, TorchFacts, diagnose, torch_facts
from vmm_kv.doctor_show import show
from vmm_kv.errors import UnsupportedError
from vmm_kv.installed import installed
from vmm_kv.testing import EmulatedModel

GIB = 1 << 30
SIZE = 2 << 20
emulated = pytest.mark.emulated


def kind(found: Diagnosis, name: str) -> KindFacts:
    return next(facts for facts in found.kinds if facts.kind == name)


def printed(found: Diagnosis) -> str:
    console = Console(file=io.StringIO(), width=80)
    show(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def words(text: str) -> str:
    """On one line: a table breaks sentences."""
    return " ".join(text.split())


# A process of its own, since this one has torch


SCRIPT = """
import sys
from vmm_kv.cli import main
status = main(["doctor", "--json"])
print(status, "torch" in sys.modules)
"""


def test_it_imports_no_torch() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True)
    assert done.stderr == ""
    report, facts = done.stdout.splitlines()
    status, torch_there = facts.split()
    assert (status, torch_there) == ("0", "False")
    found = json.loads(report)
    assert found["works"] and found["torch"]["version"] == torch.__version__
    assert found["torch"]["cuda"] == torch.version.cuda and found["torch"]["hip"] == torch.version.hip
    assert [facts["kind"] for facts in found["kinds"]] == ["host", "cuda", "hip"]


def test_the_host_was_tried() -> None:
    host = kind(diagnose(), "host")
    (device,) = host.devices
    assert host.usable and host.shortfalls == ()
    assert (device.vmm, device.granule, device.handle_types) == (True, SIZE, {"none": WORKS})
    assert device.quirks == ("fresh_zero",) and device.granule_recommended is None
    assert 0 < device.free == device.total


# Without bindings, drivers, torch


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with no GPU and no driver, as `count` sees it."""

    def count(kind: str) -> int:
        raise UnsupportedError(f"no {kind} driver was found")

    monkeypatch.setattr(gpu_drivers, "count", count)
    monkeypatch.setattr(gpu_drivers, "visible", lambda kind: None)


def test_a_machine_without_a_gpu_works_and_says_what_is_missing(bare: None) -> None:
    found = diagnose()
    assert found.works
    for name, vendor in (("cuda", "NVIDIA"), ("hip", "AMD")):
        facts = kind(found, name)
        assert not facts.usable and facts.devices == ()
        first, second = facts.shortfalls
        assert first.what == f"no {vendor} GPU is visible to this process"
        assert "in a container, pass it in" in first.todo
        assert second.what == f"no {name} driver was found"


@pytest.mark.parametrize(
    ("name", "packages", "todo"),
    [
        ("cuda", {"cuda-python", "cuda-bindings"}, "pip install 'cuda-python"),
        ("hip", {"hip-python", "rocm-bindings-hip"}, "pip install 'hip-python"),
        ("cuda", set(), "install NVIDIA's display driver"),
        ("cuda", {"cuda-python"}, "install NVIDIA's display driver"),
        ("hip", set(), "install ROCm"),
    ],
)
def test_first_the_binding_then_the_driver(
    bare: None, monkeypatch: pytest.MonkeyPatch, name: str, packages: set[str], todo: str
) -> None:
    monkeypatch.setattr(doctor, "installed", lambda package: None if package in packages else "1.0")
    facts = kind(diagnose(), name)
    assert facts.shortfalls[-1].todo.startswith(todo)
    assert {package for package, version in facts.packages.items() if version is None} == packages


def test_a_gpu_that_is_visible_and_hidden_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_drivers, "visible", lambda kind: f"a {kind} GPU is visible")
    monkeypatch.setattr(gpu_drivers, "count", lambda kind: 0)
    monkeypatch.setattr(gpu_drivers, "versions", lambda kind: {"driver": "13.0"})
    facts = kind(diagnose(), "cuda")
    assert facts.versions == {"driver": "13.0"} and not facts.usable
    assert facts.shortfalls == (
        Shortfall("a cuda GPU is visible, but the driver shows no device", "look at CUDA_VISIBLE_DEVICES"),
    )


def test_without_torch_not_even_the_host_works(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "torch_facts", lambda: TorchFacts(None))
    found = diagnose()
    assert not found.works
    assert kind(found, "host").shortfalls == (Shortfall("torch is not installed", "pip install 'torch>=2.6'"),)
    monkeypatch.setattr(doctor, "diagnose", lambda: found)
    assert cli.main(["doctor", "--json"]) == 1


def test_a_host_that_cannot_map_does_not_work(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(driver: object) -> None:
        raise OSError("no memory file")

    monkeypatch.setattr(doctor, "_try_mapping", broken)
    found = diagnose()
    assert not found.works
    assert "no memory file" in kind(found, "host").shortfalls[0].what


# torch, from its files


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Any = None\n", ("2.13.0+cpu", None, None)),
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n", ("2.13.0+cu130", "13.0", None)),
        ("__version__ = '2.9.1'\ncuda = '12.8'\nhip = None\n", ("2.9.1", "12.8", None)),
        ("__version__ = '2.9.1+rocm6.4'\ncuda = None\nhip = '6.4.43482'\n", ("2.9.1+rocm6.4", None, "6.4.43482")),
        ("__version__ = '2.9.1+cu126'\n", ("2.9.1+cu126", "12.6", None)),
        ("__version__ = '2.9.1+rocm6.4'\n", ("2.9.1+rocm6.4", None, "6.4")),
        ("__version__ = '2.9.1+cu1'\n", ("2.9.1+cu1", "1", None)),
        ("__version__ = '2.9.1+rocm7'\n", ("2.9.1+rocm7", None, "7")),
        ("", (None, None, None)),
    ],
)  # fmt: skip
def test_torchs_build_is_read_from_the_text(tmp_path: Path, text: str, found: tuple[str | None, ...]) -> None:
    file = tmp_path / "version.py"
    file.write_text(f"from typing import Optional\n\n__all__ = ['__version__', 'cuda', 'hip']\n{text}")
    assert torch_facts(file) == TorchFacts(*found)


def test_this_torch_is_read_as_it_says_itself() -> None:
    assert torch_facts() == TorchFacts(torch.__version__, torch.version.cuda, torch.version.hip)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (TorchFacts(None), "not installed"),
        (TorchFacts("2.13.0", "13.0"), "2.13.0 (CUDA 13.0)"),
        (TorchFacts("2.13.0", None, "7.1"), "2.13.0 (ROCm 7.1)"),
        (TorchFacts("2.13.0+cpu"), "2.13.0+cpu (CPU only)"),
    ],
)
def test_torch_for_people(facts: TorchFacts, text: str) -> None:
    assert str(facts) == text


# Devices, on emulated drivers


LOADERS = {"cuda": testing.load_cuda, "hip": testing.load_hip}
FITTING = {"cuda": TorchFacts("2.13.0", "13.0"), "hip": TorchFacts("2.13.0", None, "7.1")}


def loaded(name: str, monkeypatch: pytest.MonkeyPatch, devices: int = 1) -> EmulatedModel:
    """Emulated devices, and a torch that would fit."""
    monkeypatch.setattr(doctor, "torch_facts", lambda: FITTING[name])
    return LOADERS[name](devices=devices, budget=GIB)


@emulated
@pytest.mark.parametrize("name", ["cuda", "hip"])
def test_devices_are_opened_and_described(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(name, monkeypatch, devices=2)
    assert model.charge(1, 5 * SIZE) == 0
    model.set("recommended_granularity", 8 * SIZE)
    facts = kind(diagnose(), name)
    assert facts.usable and facts.shortfalls == () and {"binding", "driver"} <= set(facts.versions)
    first, second = facts.devices
    assert (first.name, second.name) == (f"{name}:0", f"{name}:1")
    assert first.uuid and first.pci and first.uuid != second.uuid
    assert (first.free, second.free, first.total, first.source) == (GIB, GIB - 5 * SIZE, GIB, "driver")
    assert (first.vmm, first.granule, first.granule_recommended, first.rdma) == (True, SIZE, 8 * SIZE, False)
    assert first.handle_types["none"] == first.handle_types["posix_fd"] == WORKS
    assert model.live() == {"handles": 0, "mappings": 0, "reservations": 0}, "everything tried was given back"


@emulated
def test_c92_a_handle_type_works_if_such_memory_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """C92: fabric handles that the attribute promises and a create refuses."""
    model = loaded("cuda", monkeypatch)
    answers = []
    for fabric in (0, 1, 2):
        model.set("fabric", fabric)
        answers.append(kind(diagnose(), "cuda").devices[0].handle_types["fabric"])
    assert "no such handles" in answers[0] and "800" in answers[1] and answers[2] == WORKS


@emulated
def test_no_memory_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("cuda", monkeypatch)
    assert model.charge(0, GIB) == 0
    facts = kind(diagnose(), "cuda")
    assert not facts.usable and "out of memory" in facts.shortfalls[0].what.lower().replace("_", " ")
    assert "cuda:0" in facts.shortfalls[0].todo
    assert model.credit(0, GIB) == 0


@emulated
@pytest.mark.parametrize("name", ["cuda", "hip"])
def test_a_device_without_virtual_memory_management(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(name, monkeypatch).set("vmm_supported", 0)
    facts = kind(diagnose(), name)
    assert not facts.usable and facts.devices == ()
    assert "virtual memory management" in facts.shortfalls[0].what


@emulated
@pytest.mark.parametrize(("version", "quirks"), [(70200000, {"uniform_chunks"}), (71500000, {"single_memset"})])
def test_the_quirks_in_force_follow_the_version(
    version: int, quirks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded("hip", monkeypatch).set("runtime_version", version)
    (device,) = kind(diagnose(), "hip").devices
    assert quirks <= set(device.quirks) and bool(device.quirks) == bool(quirks)


@emulated
def test_rdma_is_the_devices_word(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded("cuda", monkeypatch).set("rdma", 1)
    assert kind(diagnose(), "cuda").devices[0].rdma


@emulated
@pytest.mark.parametrize("name", ["cuda", "hip"])
def test_a_torch_that_does_not_fit_is_a_shortfall(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    LOADERS[name](budget=GIB)
    monkeypatch.setattr(doctor, "torch_facts", lambda: TorchFacts("2.13.0+cpu"))
    facts = kind(diagnose(), name)
    assert not facts.usable and len(facts.devices) == 1
    assert "built for the CPU only" in facts.shortfalls[0].what and "download.pytorch.org" in facts.shortfalls[0].todo


# What is broken


@pytest.mark.parametrize(
    ("name", "file"),
    [("cuda", "cuda/bindings/driver.py"), ("hip", "hip/__init__.py")],
)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise OSError('libz.so is cut short')", "its import fails: OSError: libz.so is cut short"),
        ("def (", "its import fails: SyntaxError"),
        ("class hip: pass", "lacks "),
    ],
)
def test_a_broken_binding_is_a_shortfall(tmp_path: Path, name: str, file: str, text: str, said: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    for folder in path.parent.relative_to(tmp_path).parents[:-1]:
        (tmp_path / folder / "__init__.py").touch()
    (path.parent / "__init__.py").touch()
    path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, env=environment
    )
    assert done.stderr == ""
    report, facts = done.stdout.splitlines()
    assert facts == "0 False"
    found = next(facts for facts in json.loads(report)["kinds"] if facts["kind"] == name)
    last = found["shortfalls"][-1]
    assert not found["usable"] and f"installed, but {said}" in last["what"]
    assert last["todo"].startswith("pip install --force-reinstall ")


def test_a_package_without_metadata_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise KeyError("Version")

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert kind(diagnose(), "host").usable


def test_a_torch_that_cannot_be_read_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_facts(tmp_path) == TorchFacts(None), "a folder"
    (tmp_path / "version.py").write_bytes(b"\xff\xfe\n__version__ = '2.9.0+cu130'\n")
    assert torch_facts(tmp_path / "version.py") == TorchFacts("2.9.0+cu130", "13.0")

    def find_spec(name: str) -> None:
        raise ValueError(f"{name}.__spec__ is None")

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert torch_facts().version == installed("torch")


# What is shown


def test_people_see_every_kind_and_what_to_do_last(bare: None) -> None:
    found = diagnose()
    text = printed(found)
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert torch.__version__ in lines[1]
    for name in ("host", "cuda", "hip"):
        assert any(line.startswith(name) for line in lines)
    last = words(text.partition("What is missing, and what to do")[2])
    for facts in found.kinds:
        for shortfall in facts.shortfalls:
            assert words(shortfall.what) in words(last) and words(shortfall.todo) in last


@emulated
def test_people_see_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded("cuda", monkeypatch).set("recommended_granularity", 8 * SIZE)
    text = words(printed(diagnose()))
    device = kind(diagnose(), "cuda").devices[0]
    for said in (
        "1.00 GiB free of 1.00 GiB, by driver",
        "granule 2.00 MiB, recommended 16.00 MiB",
        device.uuid,
        device.handle_types["fabric"],
    ):
        assert words(said) in text


def test_people_see_that_nothing_is_missing() -> None:
    found = diagnose()
    fine = replace(found, kinds=tuple(replace(facts, shortfalls=()) for facts in found.kinds))
    assert printed(fine).endswith("Nothing is missing.\n")


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    assert "host:0" in capsys.readouterr().out


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kinds"][0] == json.loads(json.dumps(asdict(kind(diagnose(), "host"))))
