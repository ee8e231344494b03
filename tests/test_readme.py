"""The README's example runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_runs_and_prints_where_the_memory_went(tmp_path: Path) -> None:
    (example,) = EXAMPLE
    assert len([line for line in example.splitlines() if line]) <= 20
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("utilization", "sampler", "transient", "blocks"):
        assert word in done.stdout, done.stdout


def test_the_example_makes_every_tensor_on_the_device() -> None:
    """On a GPU torch makes tensors on the CPU unless told otherwise."""
    (example,) = EXAMPLE
    made = re.findall(r"torch\.(?:randn|ones|zeros|empty|tensor)\(.*", example)
    assert len(made) == 3
    assert all("device=device.torch_device" in call for call in made), made
