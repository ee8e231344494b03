"""Plain JSON data back into dataclasses, by their annotations. Strict: what does not fit is named by its place."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")


def decode(kind: type[T], data: object, where: str = "") -> T:
    """A `kind` with the fields of `data`, as `dataclasses.asdict` and JSON left them.

    Knows dataclasses, tuples, dicts by name, unions, literals and plain values. `ValueError` names the field.
    """
    found: T = _decode(kind, data, where or kind.__name__)
    return found


def _decode(kind: Any, data: object, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _record(kind, data, where)
    if origin in (Union, types.UnionType):
        return _union(args, data, where)
    if origin is tuple:
        return _tuple(args, data, where)
    if origin is dict:
        return {name: _decode(args[1], item, f"{where}.{name}") for name, item in _object(data, where).items()}
    if origin is Literal:
        fits = data in args and isinstance(data, str)
    elif kind is float:
        fits = isinstance(data, int | float) and not isinstance(data, bool)
        data = _float(data) if fits else data
    else:
        fits = kind in (int, str, bool, type(None)) and type(data) is kind
    if not fits:
        names = " or ".join(map(repr, args)) if origin is Literal else getattr(kind, "__name__", str(kind))
        raise ValueError(f"{where}: {_short(data)} is no {names}")
    return data


def _record(kind: Any, data: object, where: str) -> Any:
    given, hints = _object(data, where), _hints(kind)
    names = [field.name for field in fields(kind) if field.init]
    if missing := [name for name in names if name not in given]:
        raise ValueError(f"{where}: {', '.join(missing)} missing")
    if unknown := [name for name in given if name not in names]:
        raise ValueError(f"{where}: {', '.join(map(_short, unknown))} not known")
    values = {name: _decode(hints[name], given[name], f"{where}.{name}") for name in names}
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _union(kinds: Sequence[Any], data: object, where: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    rest = [kind for kind in kinds if kind is not type(None)]
    for kind in rest[:-1]:
        try:
            return _decode(kind, data, where)
        except ValueError:
            continue
    return _decode(rest[-1], data, where)


def _tuple(kinds: Sequence[Any], data: object, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise ValueError(f"{where}: {_short(data)} is no list")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = [kinds[0]] * len(data)
    if len(kinds) != len(data):
        raise ValueError(f"{where}: {len(data)} items, not {len(kinds)}")
    return tuple(_decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, data, strict=True)))


def _object(data: object, where: str) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: {_short(data)} is no object")
    return data


def _float(data: Any) -> Any:
    try:
        return float(data)
    except OverflowError:
        raise ValueError(f"{_short(data)} is too large for a float") from None


def _short(data: object) -> str:
    text = repr(data)
    return text if len(text) <= 60 else f"{text[:57]}..."
