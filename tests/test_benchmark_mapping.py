"""The mapping benchmark runs, and counts what it says it counts. How long it takes is not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "mapping.py"
SMALL = ("--gib", "1", "--chunk-mib", "8", "--layers", "4", "--pairs", "3")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def test_its_json_counts_at_most_three_driver_calls_a_chunk() -> None:
    done = run(*SMALL, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert (result["chunks"], result["segments"], result["pairs"]) == (128, 8, 3)
    assert result["calls"]["create"] == result["calls"]["map"] == 1
    assert result["calls"]["set_access"] == 1 / 128  # once for the contiguous run
    assert result["calls"]["all"] == 2 + 1 / 128 <= 3
    assert result["library"] > 0 and result["loop"] > 0 and result["ratio"] > 0
    assert result["own_lowest"] <= result["own"] <= result["own_highest"]


def test_its_text_names_both_sides_and_the_difference() -> None:
    done = run(*SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 GiB in 128 chunks of 8 MiB" in done.stdout
    for line in ("KVCache.commit", "C++ loop", "the library's own", "driver calls a chunk: create 1.000, map 1.000"):
        assert line in done.stdout


def test_sizes_that_do_not_divide_are_refused() -> None:
    done = run("--gib", "1", "--chunk-mib", "64", "--layers", "5")
    assert done.returncode == 2
    assert "10 segments of whole chunks" in done.stderr
