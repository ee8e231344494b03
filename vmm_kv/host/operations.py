"""Torch operations as a dispatch mode sees them: which there are, and which storages they make."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations of one thread while entered, down to those that torch does not make of others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @abstractmethod
    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `func` and returns its result. Operations called in here are not seen."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_composite(func):
            return self.run(func, args, kwargs or {})
        with self:  # under no_grad a mode is shown the parts, in inference_mode the whole
            return func._op_dk(_COMPOSITE, *args, **(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's default costs 25 us an operation, and an import of more than a second at the first


def tensors(tree: object) -> list[torch.Tensor]:
    """The tensors among an operation's arguments or results, which nest in tuples, lists and dicts."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    found = []
    for item in items:  # most are no nests: a call for each would take most of the time
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list, dict)):
            found += tensors(item)
    return found


def mapped(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The same nest of arguments or results, each tensor changed. torch's own way takes several times as long."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, (tuple, list)):
        items = [mapped(change, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {key: mapped(change, value) for key, value in tree.items()}
    return tree


def new_storages(result: object, inputs: object) -> dict[int, torch.UntypedStorage]:
    """The storages of `result` that no tensor of `inputs` lies in, by their identity, if they have memory on the host.

    By storage and not by schema: `_unsafe_view` and its like are views although their schema says otherwise.
    """
    found = {s._cdata: s for s in (t.untyped_storage() for t in tensors(result) if t.is_cpu)}
    for tensor in tensors(inputs):
        found.pop(tensor.untyped_storage()._cdata, None)
    return {key: storage for key, storage in found.items() if storage.nbytes()}


@cache
def may_allocate(func: Any) -> bool:
    return any(value.alias_info is None for value in func._schema.returns)


@cache
def writes(func: Any) -> bool:
    """Whether it writes to an argument."""
    return any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments)


@cache
def out_overload(func: Any) -> tuple[Any, list[str]] | None:
    """The overload that writes to given outputs and else takes the same arguments, with the names of the outputs."""
    if writes(func) or any(a.name == "reduction" for a in func._schema.arguments):
        return None  # losses use the output as scratch of another shape
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    returns = [str(value.type) for value in func._schema.returns]
    for name in func._overloadpacket.overloads():
        overload = getattr(func._overloadpacket, name)
        outs = [a for a in overload._schema.arguments if a.is_out]
        inputs = [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]
        if outs and inputs == wanted and [str(a.type) for a in outs] == returns == ["Tensor"] * len(outs):
            return overload, [a.name for a in outs]
    return None


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
