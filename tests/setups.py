"""The set-ups that the tests of a cache run on: the host device, and GPU drivers on the emulated libraries.

`opened` and `open_driver` open a device in this process, with granules of 4 KiB, so that tests are quick.
`Children` runs scripts in processes of their own, which open devices as a user's process does.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from vmm_kv._native import DeviceModel
from vmm_kv.device import Device
from vmm_kv.driver import Driver, Quirks
from vmm_kv.driver.cuda import CudaDriver
from vmm_kv.driver.hip import HipDriver
from vmm_kv.driver.host import HostDriver
from vmm_kv.emulated import retire
from vmm_kv.holdings import empty_graveyard
from vmm_kv.host import HostFramework
from vmm_kv.testing import EmulatedModel, load_cuda, load_hip

G = 4096
Model = DeviceModel | EmulatedModel

HOST, CUDA, HIP, QUIRKY = "host", "cuda", "hip", "hip quirky"
SWITCHES = ("access_from_first", "joint_unmap_busy", "memory_with_addresses", "4k_granularity", "single_memset")
QUIRKS = Quirks(uniform_chunks=True, memory_with_addresses=True, single_unmap=True, single_memset=True)
"""Every departure that the library obeys, from a device that really has it: B1, B2, B4 and B13."""

SETUPS: list[Any] = [HOST, *(pytest.param(name, marks=pytest.mark.emulated) for name in (CUDA, HIP, QUIRKY))]
"""The names, for `pytest.mark.parametrize`."""


# --- devices in this process ------------------------------------------------------------------------------------------


def open_driver(name: str, budget: int, *, fresh_zero: bool = False) -> tuple[Driver, Model]:
    """The driver of a fresh device of `budget` bytes, and the books of that device.

    Fresh memory is filled with garbage, or with `fresh_zero` it is zero and the driver says so. There is one emulation
    in a process: the device that was opened before is dead.
    """
    quirks = replace(QUIRKS if name == QUIRKY else Quirks(), fresh_zero=fresh_zero)
    if name == HOST:
        host = DeviceModel([budget], G)
        host.poison = not fresh_zero
        return HostDriver(host, quirks=quirks), host
    _end_of_others(os.environ["PYTEST_CURRENT_TEST"].partition("::")[0])
    _end_of_last()
    model = (load_cuda if name == CUDA else load_hip)(budget=budget, granule=G)
    model.poison = not fresh_zero
    for switch in SWITCHES if name == QUIRKY else ():
        model.set(f"quirk_{switch}", 1)
    driver = CudaDriver(0, quirks=quirks) if name == CUDA else HipDriver(0, quirks=quirks, least_granule=G)
    _last.append(driver)
    return driver, model


class OpenedDevice(Device):
    """The device of a set-up, with its books."""

    def __init__(self, name: str, budget: int, *, fresh_zero: bool = False) -> None:
        driver, model = open_driver(name, budget, fresh_zero=fresh_zero)

        def tell_capturing(capturing: bool) -> None:
            if isinstance(model, EmulatedModel):
                model.set("capturing", int(capturing))

        framework = HostFramework(model, name=driver.name, tell_capturing=tell_capturing)
        super().__init__(driver, torch.device("cpu"), framework, emulated=name != HOST)
        self.model = model


@contextmanager
def opened(name: str, budget: int, *, fresh_zero: bool = False) -> Iterator[OpenedDevice]:
    """A device for one test."""
    device = OpenedDevice(name, budget, fresh_zero=fresh_zero)
    try:
        yield device
    finally:
        empty_graveyard(device.name)
        _end_of_last()


_last: list[Driver] = []


def _end_of_last() -> None:
    """A cache of the device that is collected later meets a driver that has shut down, and is forgotten.

    Its handles and addresses may be those of another cache on the next emulated device.
    """
    empty_graveyard()
    while _last:
        retire(_last.pop(), "the next one")


@cache
def _end_of_others(test_file: str) -> None:
    """The same for caches that other test files have left in reference cycles, once before the tests of a file."""
    gc.collect()
    for load in (load_cuda, load_hip):
        load().set("deinitialized", 1)
    empty_graveyard()


# --- devices in processes of their own --------------------------------------------------------------------------------

_FORKS = """
import gc, json, os, signal, sys, types, warnings
import torch

torch.set_num_threads(1)
gc.freeze()  # what is here by now is no script's business, and going through it at each exit takes long
for line in sys.stdin:
    case = json.loads(line)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has threads, of which the child has no need
        child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
signal.alarm(100)
os.environ.update(case["environment"])
for number, path in enumerate(case["paths"], 1):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
# Not this module, which is frozen: what a script leaves in its globals has to die at exit.
sys.modules["__main__"] = types.ModuleType("__main__")
exec(case["script"], vars(sys.modules["__main__"]))
"""

_OPEN = """
import logging
import torch
logging.getLogger("vmm_kv.device").setLevel(logging.ERROR)
from vmm_kv import testing
from vmm_kv.device import open_device, open_host

def with_model(load):
    def loaded(*arguments, **options):
        global model
        model = load(*arguments, **options)
        return model
    return loaded

def open_setup(name, granules):
    # `granules` is the budget. Sets the globals device, model and G, the granule in bytes.
    global device, model, G
    if name == "host":
        G = 4096
        device = open_host(granules * G, granule=G)
        model = device.driver.model
    else:
        testing.load_cuda, testing.load_hip = with_model(testing.load_cuda), with_model(testing.load_hip)
        device = open_device(f"{name.split()[0]}:0:{granules * (2 << 20)}")
        G = device.driver.granule

def uniform(size):
    # As the chunk of a cache: the size where the driver wants all alike, which by itself would be large.
    return size if device.driver.quirks.uniform_chunks else "auto"
"""


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class Children:
    """Runs scripts, each in a process of its own that ends as any interpreter does, with warnings as errors.

    They are forks of one process that has imported torch, which takes seconds, and nothing of vmm_kv.
    """

    def __init__(self, folder: Path) -> None:
        self._paths = [folder / "stdout", folder / "stderr"]
        command = [sys.executable, "-W", "error", "-c", _FORKS]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, name: str, script: str, *, first: str = "", granules: int = 2048) -> Done:
        """Runs `script` on the device of the set-up `name`: its globals `device`, `model` and `G`, the granule.

        first: what is run before anything of vmm_kv is imported. granules: the device's memory.
        """
        testing = "" if name == HOST else "quirks" if name == QUIRKY else "1"
        case = {
            "environment": {"VMM_KV_TESTING": testing},
            "paths": [str(path) for path in self._paths],
            "script": f"{first}\n{_OPEN}\nopen_setup({name!r}, {granules})\n{script}",
        }
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        returncode = int(self._process.stdout.readline())
        stdout, stderr = (path.read_text() for path in self._paths)
        return Done(returncode, stdout, stderr)

    def close(self) -> None:
        self._process.communicate()
