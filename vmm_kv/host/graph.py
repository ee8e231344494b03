"""Graphs on the CPU: torch operations recorded with the addresses they ran on, and replayed there.

While capturing, operations also run, so Python code sees values; on a GPU they are undefined until the first replay.
What an operation allocates lies in the graph's pool, and a block whose last tensor died is reused by what comes next,
within the capture too: operations replay in the order in which they were recorded, so that is as right as it was then.
Other tensors (weights, static inputs, a KV cache) are used in place and kept alive by the graph; a GPU's would not be.
`tolist()` and `numpy()` read memory without an operation, so they go unnoticed: a GPU refuses them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from vmm_kv.errors import StateError
from vmm_kv.host.memory import HostMemory
from vmm_kv.host.operations import OperationMode, mapped, new_storages, out_overload, tensors, writes
from vmm_kv.host.pool import GraphPool

aten = torch.ops.aten

_REFUSED = {
    torch.Tag.data_dependent_output: "it hands a value from the device to the host, which waits for the device",
    torch.Tag.dynamic_output_shape: "the shape of its result depends on the values of its inputs",
}
_MASKABLE = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
_UNWRITTEN = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)


class HostGraph:
    """A recorded sequence of operations, like `torch.cuda.CUDAGraph`. Made empty, and filled by `capture`.

    Keeps the pool of its capture: the recorded addresses lie there, whoever else lets go of pool and device.
    """

    def __init__(self) -> None:
        self._calls: Sequence[Callable[[], object]] | None = None
        self._pool: GraphPool | None = None
        self._leave_pool: Callable[[], object] | None = None

    @property
    def captured(self) -> bool:
        """Whether it holds a capture, which `replay` runs and `reset` drops."""
        return self._calls is not None

    def replay(self) -> None:
        """Runs the recorded operations on the same addresses: results appear in the tensors that the capture gave.

        Charges nothing. Raises `StateError` if nothing is captured, or inside a capture.
        """
        if self._calls is None:
            raise StateError("this graph holds no capture to replay")
        if _thread.capturing:
            raise StateError("replay inside a capture: the replayed operations would not be recorded")
        # inference_mode, since it may also write to tensors that were made in it, which no_grad may not
        with torch._C._DisableTorchDispatch(), torch.inference_mode():
            for call in self._calls:
                call()

    def reset(self) -> None:
        """Drops the record and leaves the pool. The graph may be captured again. Without a capture, nothing."""
        self._calls = None
        if self._leave_pool:
            self._leave_pool()
            self._leave_pool = None
        self._pool = None


@contextmanager
def capture(graph: HostGraph, pool: GraphPool, memory: HostMemory) -> Iterator[None]:
    """Records into `graph` what torch operations this thread runs in the block; what they allocate lies in `pool`.

    Empties the cache of `memory` first and collects no garbage, as `torch.cuda.graph` does, so a sample of free memory
    around the first capture may show a gain. If the block raises, the graph is as before and its blocks are free.

    Raises `StateError` inside another capture, for a graph that holds one, and for operations that a GPU could not
    capture; `torch.OutOfMemoryError` if the pool cannot grow; `ValueError` for a pool of another memory.
    """
    if pool.memory is not memory:
        raise ValueError("the pool belongs to another memory: make it with GraphPool(memory)")
    if _thread.capturing:
        raise StateError("a capture is already in progress on this thread")
    if graph.captured:
        raise StateError("this graph holds a capture already: reset() it, or use another")
    memory.empty_cache()
    recorder = _Recorder(pool)
    graph._pool, graph._leave_pool = pool, pool.join(graph)
    _thread.capturing = True
    try:
        with memory.paused(), recorder:
            yield
        graph._calls = recorder.calls
    finally:
        _thread.capturing = False
        if not graph.captured:
            recorder.calls.clear()  # the traceback may keep the recorder
            graph.reset()


class _Thread(threading.local):
    capturing = False


_thread = _Thread()


class _Recorder(OperationMode):  # type: ignore[no-untyped-call]
    def __init__(self, pool: GraphPool) -> None:
        super().__init__()
        self._pool = pool
        self.calls: list[Callable[[], object]] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C._DisableTorchDispatch():  # nothing is charged in here, so no mode need be asked
            return self._record(func, args, kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _refuse_uncapturable(func, args, kwargs)
        result = func(*args, **kwargs)
        homes = {}
        for key, storage in new_storages(result, (args, kwargs)).items():
            homes[key] = self._pool.allocate(storage.nbytes())
            homes[key].copy_(storage)
        args, kwargs = mapped(self._twin, (args, kwargs))
        if not homes:
            if writes(func):
                self.calls.append(partial(func._op, *args, **kwargs))
            return result  # of a view, or of an operation in place
        result = mapped(partial(_move, homes), result)
        if func._overloadpacket not in _UNWRITTEN:
            outputs = [self._twin(y) for y in tensors(result)]
            self.calls.append(_rerun(func, args, kwargs, outputs))
        return result

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes for the record, which must not keep a block of the pool from being reused."""
        storage = self._pool.twin(tensor.untyped_storage())
        return tensor if storage is None else _lay(storage, tensor)


def _move(homes: dict[int, torch.UntypedStorage], tensor: torch.Tensor) -> torch.Tensor:
    home = homes.get(tensor.untyped_storage()._cdata)
    return tensor if home is None else _lay(home, tensor)


def _lay(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    # never an inference tensor, not even in inference_mode: it may be written to from outside as well
    with torch.inference_mode(False):
        laid = torch.empty(0, dtype=like.dtype)
        laid.set_(storage, like.storage_offset(), like.size(), like.stride())
        laid = laid.conj() if like.is_conj() else laid
        return torch._neg_view(laid) if like.is_neg() else laid


def _rerun(func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> Callable[[], object]:
    """A call that computes `outputs` again, straight into their place where torch has a way to."""
    if func is aten._to_copy.default:
        return partial(outputs[0].copy_, args[0])
    out = out_overload(func)
    if out is not None:
        overload, names = out
        return partial(overload._op, *args, **kwargs, **dict(zip(names, outputs, strict=True)))

    def rerun_and_copy() -> None:
        for output, value in zip(outputs, tensors(func._op(*args, **kwargs)), strict=True):
            output.copy_(value)

    return rerun_and_copy


def _refuse_uncapturable(func: Any, args: Any, kwargs: Any) -> None:
    reason = next((why for tag, why in _REFUSED.items() if tag in func.tags), None)
    if func._overloadpacket in _MASKABLE:
        masked = any(index.dtype in (torch.bool, torch.uint8) for index in tensors(args[1]))
        reason = "a mask as an index makes the number of elements depend on its values" if masked else None
    elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        reason = None
    if reason:
        raise StateError(f"{func} cannot be captured: {reason}")
