"""What is read from /proc and /sys, from files laid out as the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from vmm_kv.memory_source import HostFigures, SecondSource
from vmm_kv.system_files import gpu_figures, half_of_memory, host_figures

GIB = 1 << 30


def test_the_machines_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  1048576 kB\nMemFree: 1024 kB\nMemAvailable:    2048 kB\nHugePages_Total:  0\n\n")
    assert host_figures(meminfo) == HostFigures(GIB, 1 << 20, 2 << 20)


@pytest.mark.parametrize("text", [None, "", "MemTotal: 5 kB\n", "MemTotal: x kB\n"])
def test_a_kernel_that_does_not_tell(tmp_path: Path, text: str | None) -> None:
    meminfo = tmp_path / "meminfo"
    if text is not None:
        meminfo.write_text(text)
    assert host_figures(meminfo) is None


def test_this_machine_tells() -> None:
    found = host_figures()
    assert found is not None and 0 < found.available <= found.total


def test_half_of_memory_is_whole_granules() -> None:
    found = host_figures()
    assert found is not None
    assert half_of_memory(2 << 20) % (2 << 20) == 0
    assert 0 <= found.total // 2 + (1 << 20) - half_of_memory(2 << 20) < 4 << 20


def gpu(folder: Path, pci: str, **files: str) -> None:
    (folder / pci).mkdir()
    for name, text in files.items():
        (folder / pci / f"mem_info_{name}").write_text(text)


def test_a_gpus_memory(tmp_path: Path) -> None:
    gpu(tmp_path, "0000:c1:00.0", vram_total=f"{96 * GIB}\n", vram_used=f"{GIB}\n", gtt_total=f"{16 * GIB}\n")
    assert gpu_figures("0000:C1:00.0", tmp_path) == SecondSource("system files", 96 * GIB, 95 * GIB, 16 * GIB)


def test_c44_what_may_not_be_read_is_not_known_and_not_zero(tmp_path: Path) -> None:
    gpu(tmp_path, "0000:01:00.0", vram_total=f"{GIB}\n")
    (tmp_path / "0000:01:00.0" / "mem_info_vram_used").mkdir()  # a read fails, for root too
    assert gpu_figures("0000:01:00.0", tmp_path) == SecondSource("system files", GIB)


def test_a_gpu_whose_driver_writes_no_such_files(tmp_path: Path) -> None:
    gpu(tmp_path, "0000:01:00.0")
    assert gpu_figures("0000:01:00.0", tmp_path) is None
    assert gpu_figures("0000:02:00.0", tmp_path) is None
    assert gpu_figures("", tmp_path) is None
