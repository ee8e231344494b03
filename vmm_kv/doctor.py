"""What can be used on this machine, why the rest cannot, and what to do about it. Imports no torch: it is quick."""

from __future__ import annotations

import importlib.util
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vmm_kv import gpu_drivers
from vmm_kv.driver import Driver
from vmm_kv.driver.binding import BrokenBinding
from vmm_kv.driver.handle_types import HANDLE_TYPES
from vmm_kv.errors import VmmError
from vmm_kv.installed import installed
from vmm_kv.memory_source import resolve
from vmm_kv.system_files import gpu_figures, half_of_memory, host_figures

WORKS = "works"

_GRANULE = 2 << 20

_VENDORS = {"cuda": "NVIDIA", "hip": "AMD"}
_BINDINGS = {"cuda": ("cuda-python", "cuda-bindings"), "hip": ("hip-python", "rocm-bindings-hip")}
_PACKAGES = {"cuda": "'cuda-python>=12.6'", "hip": "'hip-python>=6.4'"}
_HAVE_DRIVER = {
    "cuda": "install NVIDIA's display driver, until `nvidia-smi` lists the GPU",
    "hip": "install ROCm, until `rocminfo` lists the GPU; set ROCM_PATH where it is not in /opt/rocm",
}
_SHOW_GPU = {
    "cuda": "nothing, if the machine has no NVIDIA GPU; in a container, pass it in (docker run --gpus all)",
    "hip": "nothing, if the machine has no AMD GPU; in a container, pass it in (--device /dev/kfd --device /dev/dri)",
}
_HIDDEN = {"cuda": "CUDA_VISIBLE_DEVICES", "hip": "HIP_VISIBLE_DEVICES and who may read /dev/kfd"}


@dataclass(frozen=True)
class Shortfall:
    """What is missing and what to do about it."""

    what: str
    todo: str


@dataclass(frozen=True)
class DeviceFacts:
    """One device, opened and tried. Sizes in bytes."""

    name: str
    model: str
    uuid: str
    pci: str
    vmm: bool
    """Virtual memory management works: memory was made. A device without it stands among the shortfalls instead."""
    granule: int
    granule_recommended: int | None
    """None where the driver does not tell."""
    handle_types: dict[str, str]
    """For each type `"works"`, or why it was refused. Found out by making such memory."""
    rdma: bool
    quirks: tuple[str, ...]
    """Departures from the common contract that the library goes around."""
    free: int
    total: int
    source: str
    """Whose figures `free` and `total` are."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class KindFacts:
    """One kind of device: `"host"`, `"cuda"` or `"hip"`."""

    kind: str
    usable: bool
    packages: dict[str, str | None]
    """Version of each package of its binding, None where it is not installed."""
    versions: dict[str, str]
    """Of binding, driver and runtime, as they tell themselves."""
    devices: tuple[DeviceFacts, ...]
    shortfalls: tuple[Shortfall, ...]


@dataclass(frozen=True)
class TorchFacts:
    """The torch that is installed, read from its files. None: not installed, or not built for it."""

    version: str | None
    cuda: str | None = None
    hip: str | None = None

    def __str__(self) -> str:
        if self.version is None:
            return "not installed"
        built = f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.hip}" if self.hip else "CPU only"
        return f"{self.version} ({built})"


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found out."""

    vmm_kv: str
    python: str
    system: str
    torch: TorchFacts
    kinds: tuple[KindFacts, ...]

    @property
    def works(self) -> bool:
        """Whether at least the host device does."""
        return any(kind.usable for kind in self.kinds if kind.kind == "host")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "works": self.works}


def diagnose() -> Diagnosis:
    """Looks at this machine. Opens every device it can and gives back what that took."""
    torch = torch_facts()
    return Diagnosis(
        vmm_kv=installed("vmm-kv") or "not installed",
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        torch=torch,
        kinds=(_host(torch), *(_gpu(kind, torch) for kind in gpu_drivers.KINDS)),
    )


def torch_facts(version_file: Path | None = None) -> TorchFacts:
    """Reads torch's version and build from the text of its `torch/version.py`, or of another file for tests.

    The package's metadata alone would not do: a CUDA build from PyPI has no local tag there.
    """
    text = _text(version_file or _torch_version_file())
    found = dict(re.findall(r"^(\w+)(?:\s*:[^=]+)?\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    version = found.get("__version__") or (None if version_file else installed("torch"))
    cuda, hip = found.get("cuda"), found.get("hip") or found.get("rocm")
    local = (version or "").partition("+")[2]
    if not cuda and not hip and (tag := re.fullmatch(r"(cu|rocm)([\d.]+)", local)):
        # Read from the tag where the file is another than expected: cu130 is 13.0.
        number = tag[2] if "." in tag[2] or len(tag[2]) == 1 else f"{tag[2][:-1]}.{tag[2][-1]}"
        cuda, hip = (number, None) if tag[1] == "cu" else (None, number)
    return TorchFacts(version, cuda, hip)


def _text(file: Path | None) -> str:
    """Empty where there is no such file, or none that can be read."""
    try:
        return file.read_text(errors="replace") if file is not None else ""
    except OSError:
        return ""


def _torch_version_file() -> Path | None:
    try:
        spec = importlib.util.find_spec("torch")  # finds a top-level package without importing it
    except (ImportError, ValueError):  # somebody put a half of it into sys.modules
        return None
    return Path(spec.origin).parent / "version.py" if spec is not None and spec.origin else None


def _host(torch: TorchFacts) -> KindFacts:
    if torch.version is None:
        lacking = Shortfall("torch is not installed", "pip install 'torch>=2.6'")
        return KindFacts("host", False, {}, {}, (), (lacking,))
    try:
        from vmm_kv._native import DeviceModel
        from vmm_kv.driver.host import HostDriver

        driver = HostDriver(DeviceModel([half_of_memory(_GRANULE)], _GRANULE))
        _try_mapping(driver)
        facts = (_facts(driver, {"none": WORKS}),)
    except (ImportError, MemoryError, VmmError, ValueError, OSError) as error:
        todo = "build the package again: pip install --force-reinstall vmm-kv (it needs Linux and a C++ compiler)"
        return KindFacts("host", False, {}, {}, (), (Shortfall(f"the host device does not work: {error}", todo),))
    return KindFacts("host", True, {}, {}, facts, ())


def _try_mapping(driver: Driver) -> None:
    """One chunk, mapped, written and given back."""
    size = driver.granule
    with driver.scope():
        base = driver.reserve(size)
        handle = driver.create(size)
        driver.map(base, size, handle)
        driver.set_access(base, size)
        driver.zero([(base, base + size)])
        driver.unmap(base, size)
        driver.release(handle)
        driver.free_address(base, size)


def _gpu(kind: str, torch: TorchFacts) -> KindFacts:
    packages = {name: installed(name) for name in _BINDINGS[kind]}
    shortfalls: list[Shortfall] = []
    devices: list[DeviceFacts] = []
    versions: dict[str, str] = {}
    shown = gpu_drivers.visible(kind)
    try:
        count, versions = gpu_drivers.count(kind), gpu_drivers.versions(kind)
    except VmmError as error:
        count = 0
        todo = _HAVE_DRIVER[kind] if any(packages.values()) else f"pip install {_PACKAGES[kind]}"
        if isinstance(error, BrokenBinding):
            todo = f"pip install --force-reinstall {_PACKAGES[kind]}"
        shortfalls.append(Shortfall(str(error), todo))
    if not count and not shown:
        shortfalls.insert(0, Shortfall(f"no {_VENDORS[kind]} GPU is visible to this process", _SHOW_GPU[kind]))
    elif not count and not shortfalls:
        shortfalls.append(Shortfall(f"{shown}, but the driver shows no device", f"look at {_HIDDEN[kind]}"))
    for index in range(count):
        try:
            devices.append(_open(kind, index))
        except VmmError as error:
            shortfalls.append(
                Shortfall(str(error), f"do what the message says, or use another device than {kind}:{index}")
            )
    if devices and (shortfall := gpu_drivers.torch_shortfall(kind, torch.version, torch.cuda, torch.hip)):
        shortfalls.append(Shortfall(*shortfall))
        return KindFacts(kind, False, packages, versions, tuple(devices), tuple(shortfalls))
    return KindFacts(kind, bool(devices), packages, versions, tuple(devices), tuple(shortfalls))


def _open(kind: str, index: int) -> DeviceFacts:
    """Opens the device once for each handle type, for a driver stops at the first type that works."""
    driver = gpu_drivers.open_driver(kind, index)
    answers = {"none": WORKS}
    for wanted in HANDLE_TYPES:
        if wanted in answers:
            continue
        try:
            traits = gpu_drivers.open_driver(kind, index, handle_types=(wanted, "none")).memory_traits
        except VmmError as error:
            answers[wanted] = f"could not be tried: {error}"
        else:
            answers[wanted] = dict(traits.refusals).get(wanted, WORKS)
    return _facts(driver, answers)


def _facts(driver: Driver, handle_types: dict[str, str]) -> DeviceFacts:
    properties, traits = driver.properties(), driver.memory_traits
    with driver.scope():
        told = driver.mem_info()
    host = host_figures() if properties.integrated else None
    memory = resolve(*told, properties, host, gpu_figures(properties.pci))
    return DeviceFacts(
        name=driver.name,
        model=properties.name,
        uuid=properties.uuid,
        pci=properties.pci,
        vmm=True,
        granule=driver.granule,
        granule_recommended=traits.recommended_granule,
        handle_types=handle_types,
        rdma=traits.rdma,
        quirks=tuple(name for name, on in asdict(driver.quirks).items() if on),
        free=memory.free,
        total=memory.total,
        source=memory.source,
        notes=memory.notes,
    )
