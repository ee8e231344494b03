"""A Hugging Face config.json as fields: aliases, what may be assumed of a model type, and what transformers fills in.

Plain data: neither torch nor transformers is imported here. Where keys are missing, the configuration classes of
transformers are asked in a process of its own, in which torch cannot be imported: nothing of it stays in this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from reprlib import repr
from typing import Any

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "talker_config")
"""Where multimodal configs keep the decoder's fields."""
_DTYPES = ("dtype", "torch_dtype")
_MOST = 1 << 31
_FILL_LIMIT = 120
_FILL = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
sys.modules["torch"] = None
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
known = [fields for fields in json.load(sys.stdin) if fields["model_type"] in CONFIG_MAPPING]
if not known:
    print(json.dumps({"unknown": True}))
    raise SystemExit
fields = known[0]
config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
text = config.get_text_config(decoder=True)
filled = {**text.to_dict(), "model_type": text.model_type or fields["model_type"]}
for name in ("layer_types", "layers_block_type"):
    if isinstance(getattr(text, name, None), (list, tuple)):
        filled[name] = list(getattr(text, name))
print(json.dumps({"filled": filled}, default=str))
"""


class MissingKey(ValueError):
    """The config lacks a key that nothing else tells. `key` is its name."""

    def __init__(self, key: str, model_type: str) -> None:
        super().__init__(f"{key} is missing, and what else is there does not tell it for model type {model_type!r}")
        self.key = key


@dataclass
class Fields:
    """The decoder's fields. `assume`: rules that hold for most models are used, with a note, where nobody knows."""

    values: Mapping[str, Any]
    model_type: str
    assume: bool = False
    notes: list[str] = field(default_factory=list)

    def get(self, *names: str) -> Any:
        """The first of the aliases that is there and not null, `None` if none is."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def count(self, *names: str) -> int:
        """The same as a whole number of 1 or more. `MissingKey` with the first name; `ValueError` for anything else."""
        value = self.optional_count(*names)
        if value is None:
            raise MissingKey(names[0], self.model_type)
        return value

    def optional_count(self, *names: str, least: int = 1) -> int | None:
        name = next((name for name in names if self.values.get(name) is not None), None)
        return None if name is None else whole(name, self.values[name], least)

    def sequence(self, *names: str) -> list[Any] | None:
        name = next((name for name in names if self.values.get(name) is not None), None)
        if name is None:
            return None
        if not isinstance(self.values[name], list):
            raise ValueError(f"{name}: a list is expected, not {repr(self.values[name])}")
        return list(self.values[name])

    def implied(self, key: str, known: bool, what: str) -> None:
        """Passes where the model type is `known` to follow the rule `what` when `key` is missing, or where rules may be
        assumed, which is noted. `MissingKey` otherwise."""
        if known:
            return
        if not self.assume:
            raise MissingKey(key, self.model_type)
        note = f"{key} is not in the config: {what} assumed"
        if note not in self.notes:
            self.notes.append(note)


def whole(name: str, value: Any, least: int = 1) -> int:
    """`value` if it is a whole number from `least` to 2^31, else `ValueError` that names it."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        raise ValueError(f"{name}: a whole number from {least} to {_MOST} is expected, not {repr(value)}")
    return value


def read_config(path: str | Path) -> dict[str, Any]:
    """The decoded object. `ValueError` if it is no JSON object, `OSError` if there is no such file."""
    source = Path(path)
    if source.is_dir():
        source /= "config.json"
    try:
        values = json.loads(source.read_text(encoding="utf-8"), object_hook=_special_float)
    except ValueError as error:
        raise ValueError(f"{source}: no JSON: {error}") from error
    except RecursionError:
        raise ValueError(f"{source}: nested too deeply for a config.json") from None
    if not isinstance(values, dict):
        raise ValueError(f"{source}: a JSON object is expected, not {type(values).__name__}")
    return values


def _special_float(found: dict[str, Any]) -> Any:
    """transformers saves what JSON has no word for as `{"__float__": "Infinity"}`."""
    if found.keys() != {"__float__"}:
        return found
    try:
        return float(found["__float__"])
    except TypeError:
        raise ValueError(f"__float__: the name of a number is expected, not {repr(found['__float__'])}") from None


def decoder_fields(values: Mapping[str, Any]) -> Fields:
    """The fields of the text decoder, wherever a multimodal config keeps them; outer dtype and type fill its own."""
    levels = _levels(values)
    merged = dict(levels[-1])
    for name in ("model_type", "quantization_config"):
        for level in levels[::-1]:
            if merged.get(name) is None and level.get(name) is not None:
                merged[name] = level[name]
    dtypes = (level[name] for level in levels for name in _DTYPES if level.get(name) is not None)
    if (dtype := next(dtypes, None)) is not None:  # the outermost: what the model is loaded in
        merged = {**{name: value for name, value in merged.items() if name not in _DTYPES}, "dtype": dtype}
    model_type = merged.get("model_type")
    return Fields(merged, model_type if isinstance(model_type, str) else "")


def _levels(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The object, and the ones that hold the decoder in it, from the outside in."""
    levels = [values]
    while nested := next((levels[-1][name] for name in _NESTED if isinstance(levels[-1].get(name), Mapping)), None):
        levels.append(nested)
    return levels


def filled(values: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The decoder's fields with the defaults of its configuration class, or `None` and why there are none.

    `ValueError` where that class refuses the config: what it leaves out is not what a general rule would assume.
    """
    levels = [level for level in _levels(values) if isinstance(level.get("model_type"), str)]
    if not levels:
        return None, "model_type is missing, so no configuration class of transformers can fill it in"
    if find_spec("transformers") is None:
        return None, "transformers, whose configuration classes would fill it in, is not installed"
    call = [sys.executable, "-c", _FILL, json.dumps(sys.path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        child = subprocess.run(
            call, input=json.dumps(levels), capture_output=True, text=True, timeout=_FILL_LIMIT, env=environment
        )
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"transformers could not be asked: {error}"
    if child.returncode:
        last = child.stderr.strip().splitlines()[-1:] or [f"exit status {child.returncode}"]
        raise ValueError(f"transformers does not accept the config: {last[0].strip()[:300]}")
    answer = json.loads(child.stdout.strip().splitlines()[-1])
    if "filled" not in answer:
        return None, f"transformers does not know model type {levels[0]['model_type']!r}"
    found: dict[str, Any] = answer["filled"]
    return found, ""
