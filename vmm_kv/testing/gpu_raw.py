"""What a few checks ask of CUDA's binding itself, beside the seam: captures made by hand, and facts of pointers."""

from __future__ import annotations

from typing import Any

from vmm_kv.driver.cuda_binding import CudaBinding
from vmm_kv.testing.gpu_registry import Failed, Skipped
from vmm_kv.testing.gpu_rig import Rig

CAPTURE_MODES = ("global", "thread_local", "relaxed")
_POINTER_FACTS = {"range start": 11, "range size": 12, "mapped": 13, "access flags": 16}
_NON_BLOCKING = 1


class Raw:
    """CUDA's binding. Statuses are returned, not raised, where a check wants to know them.

    Calls need a current context: `use()` makes the device's primary context current for the calling thread.
    """

    def __init__(self, rig: Rig) -> None:
        if rig.driver.kind != "cuda":
            raise Skipped("it is written for CUDA's binding")
        self._binding = CudaBinding()
        self._api = self._binding.api
        self._device = self._binding.device(rig.driver.index, rig.driver.name)

    def _done(self, what: str, function: Any, *arguments: object) -> Any:
        status, value = self._binding.ask(function, *arguments)
        if status:
            raise Failed(f"{what}: {self._binding.status_name(status)} ({status})")
        return value

    def use(self) -> None:
        context = self._done("the primary context", self._api.cuDevicePrimaryCtxRetain, self._device)
        self._done("making the context current", self._api.cuCtxSetCurrent, context)

    def new_stream(self) -> int:
        return int(self._done("a stream", self._api.cuStreamCreate, _NON_BLOCKING))

    def memset(self, address: int, value: int, size: int, stream: int) -> int:
        """Launches it, or adds a memset node to the capture on the stream."""
        return self._binding.ask(self._api.cuMemsetD8Async, address, value, size, stream)[0]

    def begin_capture(self, stream: int, mode: str) -> None:
        number = self._api.CUstreamCaptureMode(CAPTURE_MODES.index(mode))
        self._done(f"beginning a {mode} capture", self._api.cuStreamBeginCapture, stream, number)

    def end_capture(self, stream: int) -> int:
        """Ends it, and launches the graph once: the first status that is not 0."""
        status, graph = self._binding.ask(self._api.cuStreamEndCapture, stream)
        if status:
            return status
        status, instance = self._binding.ask(self._api.cuGraphInstantiate, graph, 0)
        if not status:
            status = self._binding.ask(self._api.cuGraphLaunch, instance, stream)[0]
            drained = self._binding.ask(self._api.cuStreamSynchronize, stream)[0]
            status = status or drained
            self._binding.ask(self._api.cuGraphExecDestroy, instance)
        self._binding.ask(self._api.cuGraphDestroy, graph)
        return status

    def pointer(self, address: int) -> dict[str, int | str]:
        """What the driver says of an address: for each fact its value, or the status of asking for it."""
        told: dict[str, int | str] = {}
        for name, number in _POINTER_FACTS.items():
            attribute = self._api.CUpointer_attribute(number)
            status, value = self._binding.ask(self._api.cuPointerGetAttribute, attribute, address)
            told[name] = f"status {status}" if status else int(value)
        return told
