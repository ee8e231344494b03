"""What a device needs of a framework, from the CPU stand-in: for the host device and for emulated drivers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from vmm_kv.host.graph import HostGraph, capture
from vmm_kv.host.memory import Budget, HostMemory
from vmm_kv.host.pool import GraphPool


class HostFramework:
    """Tensors on the CPU, charged to device number `device` of `budget`; graphs that record torch operations.

    `name` stands in error texts. `tell_capturing` hears True when a capture begins and False when it ends: an emulated
    driver has to be told what a real one sees on its streams.
    """

    context_bytes: int | None = 0

    def __init__(
        self,
        budget: Budget,
        device: int = 0,
        *,
        name: str | None = None,
        tell_capturing: Callable[[bool], object] | None = None,
    ) -> None:
        self.memory = HostMemory(budget, device, name)
        self._tell_capturing = tell_capturing or (lambda capturing: None)

    def active(self) -> AbstractContextManager[None]:
        """What torch operations of this thread allocate inside is charged."""
        return self.memory.charging()

    def graph_pool(self) -> GraphPool:
        return GraphPool(self.memory)

    def new_graph(self) -> HostGraph:
        return HostGraph()

    @contextmanager
    def capture(self, graph: HostGraph, pool: GraphPool) -> Iterator[None]:
        """See `vmm_kv.host.graph.capture`."""
        with capture(graph, pool, self.memory):
            self._tell_capturing(True)
            try:
                yield
            finally:
                self._tell_capturing(False)
