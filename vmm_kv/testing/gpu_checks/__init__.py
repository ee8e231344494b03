"""The checks. Importing this registers all of them, in the order in which they run: what matters most comes first."""

# isort: off
from vmm_kv.testing.gpu_checks import (
    device, memory, times, startup, graphs, modes, rules, tensors, torch_ways, endings,
)  # fmt: skip

__all__ = ["device", "endings", "graphs", "memory", "modes", "rules", "startup", "tensors", "times", "torch_ways"]
