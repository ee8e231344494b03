"""The CPU stand-in for the framework side of an accelerator: a caching allocator and graphs, on a byte budget.

A stand-in, not a product: it shows what capture and warm-up do to memory, and says nothing about speed on a GPU.
"""

from __future__ import annotations

from vmm_kv.host.framework import HostFramework
from vmm_kv.host.graph import HostGraph, capture
from vmm_kv.host.memory import HostMemory
from vmm_kv.host.pool import GraphPool

__all__ = ["GraphPool", "HostFramework", "HostGraph", "HostMemory", "capture"]
