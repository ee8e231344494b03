"""For tests only: emulated CUDA and ROCm driver libraries for the unmodified bindings, on memory of this process.

`load_cuda()` and `load_hip()` put a library in place, before the first call of a driver in the process. They act only
when called, and refuse where a real driver could be meant: under a GPU build of torch, beside a real driver library
that is loaded, or that would be found.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from vmm_kv import gpu_drivers
from vmm_kv.errors import UnsupportedError
from vmm_kv.testing.emulation import MOST_DEVICES, EmulatedModel, check_granularities, check_number

__all__ = ["MOST_DEVICES", "EmulatedModel", "load_cuda", "load_hip"]

_CUDA, _HIP = "libcuda.so.1", "libamdhip64.so"
_DRIVER_NAMES = ("libcuda.so", "libamdhip64.so")
# Where drivers lie that the loader's own search path may not name.
_CUDA_FOLDERS = ("/usr/lib/wsl/lib", "/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64")
_HIP_FOLDERS = ("/opt/rocm/lib", "/opt/rocm/lib64")

_loaded: dict[str, ctypes.CDLL] = {}


def load_cuda(
    devices: int = 1, budget: int = 2 << 30, granule: int = 2 << 20, recommended: int | None = None
) -> EmulatedModel:
    """Puts the emulated `libcuda.so.1` in place for cuda-python, with fresh devices of `budget` bytes each.

    `granule` is the minimum granularity in bytes, `recommended` the recommended one (the same by default). Where the
    library is in place already, its devices are replaced.
    Raises `UnsupportedError` beside a GPU build of torch or a real driver, ValueError for devices that cannot be; it
    has changed nothing then.
    """
    return _fresh_model(_CUDA, devices, budget, granule, recommended)


def load_hip(
    devices: int = 1, budget: int = 2 << 30, granule: int = 2 << 20, recommended: int | None = None
) -> EmulatedModel:
    """Puts the emulated `libamdhip64.so` in place for hip-python; else as `load_cuda`.

    Makes the binding's first call, with `ROCM_PATH` set meanwhile to the folder that the library lies in.
    """
    return _fresh_model(_HIP, devices, budget, granule, recommended)


def _fresh_model(name: str, devices: int, budget: int, granule: int, recommended: int | None) -> EmulatedModel:
    check_number("devices", devices, 1, MOST_DEVICES)
    check_number("budget", budget, 1)
    check_granularities(granule, recommended)
    path = _library_path(name)
    if name not in _loaded:
        _refuse_gpu_torch()
        _refuse_loaded_drivers()
        _refuse_drivers_that_would_be_found(name)
        _loaded[name] = ctypes.CDLL(str(path))
    if name == _HIP:
        with suppress(Exception):  # whoever opens a device is told what is wrong with the binding
            _lead_binding_to(path.parent.parent)
    model = EmulatedModel(_loaded[name], path)
    model.reset([budget] * devices, granule, recommended)
    return model


@cache
def _lead_binding_to(rocm: Path) -> None:
    """hip-python looks under ROCM_PATH before it asks for the library by name: once, at the first call of all.

    The variable is not left set, since processes that are started later would take the folder for a ROCm.
    """
    before = os.environ.get("ROCM_PATH")
    os.environ["ROCM_PATH"] = str(rocm)
    try:
        gpu_drivers.count("hip")
    finally:
        if before is None:
            del os.environ["ROCM_PATH"]
        else:
            os.environ["ROCM_PATH"] = before


def _library_path(name: str) -> Path:
    # Not beside this file: an editable installation keeps compiled parts elsewhere.
    path = Path(str(resources.files("vmm_kv.testing").joinpath("lib").joinpath(name)))
    if not path.is_file():
        raise UnsupportedError(
            f"the emulated driver {name} is not installed ({path}): build vmm_kv with VMM_KV_EMULATED_DRIVERS=ON"
        )
    return path


def _refuse_gpu_torch() -> None:
    import torch

    for kind, version in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)):
        if version:
            raise UnsupportedError(
                f"torch {torch.__version__} is a {kind} build ({version}) and would use the emulated driver as if it "
                "were real: run tests on emulated drivers with a CPU build of torch"
            )


def _refuse_loaded_drivers() -> None:
    for path in loaded_libraries():
        if path.name.startswith(_DRIVER_NAMES) and not _is_ours(path):
            raise UnsupportedError(f"a real driver library is loaded already: {path}. Emulated drivers need a process "
                                   "without one")  # fmt: skip


def _refuse_drivers_that_would_be_found(name: str) -> None:
    for path in _where_it_would_be_found(name):
        if path.exists() and not _is_ours(path):
            raise UnsupportedError(f"a real driver library would be found: {path}. Emulated drivers are for machines "
                                   "without one")  # fmt: skip
    if _library_path(name).resolve() in loaded_libraries():
        return  # somebody came upon ours without a loader: the name stands for it already
    try:
        ctypes.CDLL(name)
    except OSError:
        return
    raise UnsupportedError(
        f"a real {name} is on the loader's search path. Emulated drivers are for machines without one"
    )


def _where_it_would_be_found(name: str) -> Iterator[Path]:
    if name == _CUDA:
        yield from (Path(folder, name) for folder in _CUDA_FOLDERS)
        return
    homes = (os.environ.get(variable) for variable in ("ROCM_PATH", "ROCM_HOME"))
    yield from (Path(home, "lib", name) for home in homes if home)
    yield from (Path(folder, name) for folder in _HIP_FOLDERS)
    for package in ("rocm", "rocm_sdk", "_rocm_sdk_core"):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield from Path(folder).rglob(f"{name}*")


def loaded_libraries() -> set[Path]:
    """The shared libraries of this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = (line.split(maxsplit=5)[5:] for line in lines)
    return {Path(name[0]) for name in names if name and ".so" in name[0]}


def _is_ours(path: Path) -> bool:
    return any(path.resolve() == _library_path(name).resolve() for name in (_CUDA, _HIP) if name == path.name)
