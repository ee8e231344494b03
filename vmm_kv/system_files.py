"""What Linux tells of memory in files: of the machine's, and of an AMD GPU's."""

from __future__ import annotations

import os
from pathlib import Path

from vmm_kv.memory_source import HostFigures, SecondSource


def host_figures(meminfo: Path = Path("/proc/meminfo")) -> HostFigures | None:
    """The machine's memory in bytes, None where the kernel does not tell."""
    try:
        lines = meminfo.read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
        return HostFigures(kib["MemTotal"] << 10, kib["MemFree"] << 10, kib["MemAvailable"] << 10)
    except (OSError, KeyError, ValueError):
        return None


def half_of_memory(granule: int) -> int:
    """Half of the machine's memory in bytes, a multiple of `granule`: what a host device has if nothing is said."""
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return half // granule * granule


def gpu_figures(pci: str, devices: Path = Path("/sys/bus/pci/devices")) -> SecondSource | None:
    """What the kernel's driver tells of the GPU at a PCI address, None where it tells nothing (NVIDIA's does not).

    A file that may not be read is an answer not given, not a zero.
    """
    if not pci:
        return None
    folder = devices / pci.lower()
    total, used = _number(folder / "mem_info_vram_total"), _number(folder / "mem_info_vram_used")
    if total is None:
        return None
    free = None if used is None else total - used
    return SecondSource("system files", total, free, _number(folder / "mem_info_gtt_total"))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
