"""When the emulated libraries go in place, and when not: never by accident, never where a real driver could be meant.

A copy of an emulated library, from another folder, stands in for a real driver. Each case is a process of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vmm_kv import testing
from vmm_kv.errors import UnsupportedError
from vmm_kv.testing import EmulatedModel, load_cuda, load_hip

CUDA, HIP = "libcuda.so.1", "libamdhip64.so"
EITHER = pytest.mark.parametrize(("load", "name"), [("load_cuda", CUDA), ("load_hip", HIP)])


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder with `lib/` that holds a driver of each kind."""
    (tmp_path / "lib").mkdir()
    for model in (load_cuda(), load_hip()):
        shutil.copy(model.library, tmp_path / "lib" / model.library.name)
    return tmp_path


def run(script: str, **environment: str) -> str:
    """What the script prints. A ROCm that the tests' own process knows of is not handed down."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("ROCM_PATH", "ROCM_HOME")}
    preamble = "import ctypes, os, sys\nfrom vmm_kv import testing\nfrom vmm_kv.errors import UnsupportedError\n"
    done = subprocess.run(
        [sys.executable, "-c", preamble + script],
        capture_output=True,
        text=True,
        timeout=100,
        env={**inherited, **environment},
    )
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout


def refusal(load: str, before: str = "", **environment: str) -> str:
    """The text of the refusal; the emulated library was not loaded."""
    return run(
        f"""
{before}
try:
    testing.{load}()
except UnsupportedError as error:
    print(error)
ours = os.path.join("vmm_kv", "testing", "lib")
assert not any(ours in str(path) for path in testing.loaded_libraries())
""",
        **environment,
    )


@pytest.mark.parametrize("load", [load_cuda, load_hip])
@pytest.mark.parametrize(("kind", "build"), [("cuda", "a CUDA build (12.8)"), ("hip", "a ROCm build (12.8)")])
def test_refused_under_a_gpu_build_of_torch(
    load: Callable[[], EmulatedModel], kind: str, build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testing, "_loaded", {})  # as in a process that has not loaded any
    for other in ("cuda", "hip"):
        monkeypatch.setattr(torch.version, other, "12.8" if other == kind else None)
    with pytest.raises(UnsupportedError, match=rf"{re.escape(build)}.*CPU build of torch"):
        load()
    assert testing._loaded == {}


@EITHER
@pytest.mark.parametrize("real", [CUDA, HIP])
def test_refused_beside_a_real_driver_that_is_loaded(stand_ins: Path, load: str, name: str, real: str) -> None:
    library = stand_ins / "lib" / real
    text = refusal(load, f"ctypes.CDLL({str(library)!r})")
    assert f"a real driver library is loaded already: {library}" in text


@EITHER
def test_refused_where_the_loader_would_find_a_real_driver(stand_ins: Path, load: str, name: str) -> None:
    text = refusal(load, LD_LIBRARY_PATH=str(stand_ins / "lib"))
    assert f"a real {name} is on the loader's search path" in text


@pytest.mark.parametrize("variable", ["ROCM_PATH", "ROCM_HOME"])
def test_refused_where_rocm_is_installed(stand_ins: Path, variable: str) -> None:
    text = refusal("load_hip", **{variable: str(stand_ins)})
    assert f"a real driver library would be found: {stand_ins / 'lib' / HIP}" in text


@pytest.mark.parametrize("package", ["rocm", "_rocm_sdk_core"])
def test_refused_where_a_wheel_brings_rocm(stand_ins: Path, package: str) -> None:
    (stand_ins / "wheel" / package).mkdir(parents=True)
    (stand_ins / "wheel" / package / "__init__.py").touch()
    shutil.move(stand_ins / "lib", stand_ins / "wheel" / package / "lib")
    text = refusal("load_hip", PYTHONPATH=str(stand_ins / "wheel"))
    assert "a real driver library would be found" in text
    assert str(stand_ins / "wheel" / package) in text


def test_refused_where_the_libraries_were_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmm_kv.testing.resources.files", lambda package: tmp_path)
    with pytest.raises(UnsupportedError, match="VMM_KV_EMULATED_DRIVERS=ON"):
        load_cuda()


def test_nothing_is_loaded_without_being_asked_for() -> None:
    printed = run("""
import vmm_kv
device = vmm_kv.open_device("host")
print([str(path) for path in testing.loaded_libraries() if path.name.startswith(("libcuda.so", "libamdhip"))])
print("ROCM_PATH" in os.environ)
""")
    assert printed == "[]\nFalse\n"


def test_importing_the_library_does_not_import_its_testing_part() -> None:
    script = "import sys, vmm_kv; vmm_kv.open_device('host'); print('vmm_kv.testing' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.emulated
def test_the_bindings_find_the_emulated_libraries() -> None:
    printed = run("""
cuda_model, hip_model = testing.load_cuda(budget=1 << 30), testing.load_hip(devices=3)
from cuda.bindings import driver as cuda
from hip import hip
cuda.cuInit(0)
print(cuda.cuDeviceTotalMem(0)[1] == 1 << 30, hip.hipGetDeviceCount()[1])
""")
    assert printed == "True 3\n"


@pytest.mark.emulated
@pytest.mark.parametrize("before", [None, "/nowhere"])
def test_rocm_path_is_as_before(before: str | None) -> None:
    """A process that is started later must not take the emulation for a ROCm."""
    environment = {} if before is None else {"ROCM_PATH": before}
    printed = run(
        """
from vmm_kv import gpu_drivers
testing.load_hip(devices=3)
print(os.environ.get("ROCM_PATH"), gpu_drivers.count("hip"))
""",
        **environment,
    )
    assert printed == f"{before} 3\n"


@pytest.mark.emulated
def test_without_the_binding_the_library_is_loaded_all_the_same() -> None:
    printed = run("sys.modules['hip'] = None; testing.load_hip(); print(os.environ.get('ROCM_PATH'))")
    assert printed == "None\n"


@EITHER
@pytest.mark.emulated
def test_a_library_that_nobody_asked_for_has_no_device(load: str, name: str) -> None:
    """Every call, before it looks at its arguments; and after a fork the child may ask for devices."""
    library = {CUDA: load_cuda, HIP: load_hip}[name]().library
    printed = run(f"""
import re
path = {str(library)!r}
library = ctypes.CDLL(path)
with open(path, "rb") as file:
    words = {{word.decode() for word in re.findall(rb"\\b(?:cu|hip)[A-Z]\\w+", file.read())}}
calls = {{word for word in words if hasattr(library, word) and not re.search("GetError|GetProcAddress", word)}}
nothing = [ctypes.c_void_p()] * 6
print(len(calls) > 30, {{getattr(library, call)(*nothing) for call in calls}})
sys.stdout.flush()
if os.fork() == 0:
    from vmm_kv import gpu_drivers
    testing.{load}(devices=3)
    print(gpu_drivers.count({load.removeprefix("load_")!r}))
else:
    os.wait()
""")
    assert printed == "True {100}\n3\n"


@pytest.mark.emulated
def test_a_child_that_is_led_to_the_emulation_finds_no_gpu() -> None:
    package = str(load_hip().library.parent.parent)
    printed = run("from vmm_kv import gpu_drivers; print(gpu_drivers.count('hip'))", ROCM_PATH=package)
    assert printed == "0\n"


@pytest.mark.emulated
def test_loading_again_puts_fresh_devices_in_place() -> None:
    first = load_cuda(devices=1)
    first.charge(0, 1 << 20)
    second = load_cuda(devices=2)
    assert (second.used(0), second.budget(1)) == (0, 2 << 30)


@pytest.mark.emulated
def test_a_child_that_inherits_our_rocm_path_may_load_too() -> None:
    package = str(load_hip().library.parent.parent)
    assert run("print(testing.load_hip().devices)", ROCM_PATH=package) == "1\n"
