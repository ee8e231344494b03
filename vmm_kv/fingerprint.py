"""What a start-up's size depends on, so that a saved one is reused only where it fits. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vmm_kv.budget import Plan, exactly
from vmm_kv.errors import VmmError
from vmm_kv.installed import installed

if TYPE_CHECKING:
    from vmm_kv.device import Device

Facts = tuple[tuple[str, str], ...]
"""(name, what it is) pairs."""
_PACKAGES = {
    "host": ("vmm-kv", "torch"),
    "cuda": ("vmm-kv", "torch", "cuda-python"),
    "hip": ("vmm-kv", "torch", "hip-python"),
}


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it was. None for what is not there at all."""

    name: str
    pinned: str | None
    now: str | None

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.pinned)} pinned, {_shown(self.now)} now"


class PinError(VmmError):
    """A saved start-up does not fit this one. `differences` says why; `plan` is there where memory was sized."""

    def __init__(self, message: str, differences: Iterable[Difference], plan: Plan | None = None) -> None:
        self.differences = tuple(differences)
        self.plan = plan
        lines = [message, *(f"  {difference}" for difference in self.differences)]
        super().__init__("\n".join([*lines, "start without the pin once, and save that report"]))


@dataclass(frozen=True)
class Fingerprint:
    """Model, ladder, versions and device of a start-up, each as plain text that can be compared and shown."""

    model: Facts = ()
    ladder: tuple[str, ...] = ()
    """The graphs captured, in order."""
    versions: Facts = ()
    device: Facts = ()

    @classmethod
    def of(
        cls,
        device: Device,
        *,
        model: str | Mapping[str, Any] | None = None,
        ladder: Iterable[object] = (),
        versions: Mapping[str, str] | None = None,
    ) -> Fingerprint:
        """The device and the installed versions, with what the engine adds.

        model: a name, or whatever decides what the model takes: its config, dtypes, parallel sizes, the rank.
        ladder: the graphs to capture, such as `vmm_kv.estimate.Descriptor`. versions: of the engine and its kernels.
        """
        named = {"name": model} if isinstance(model, str) else model or {}
        packages = {name: installed(name) or "not installed" for name in _PACKAGES[device.driver.kind]}
        return cls(
            model=tuple(_flat("", named)),
            ladder=tuple(str(graph) for graph in ladder),
            versions=tuple(sorted({**packages, **(versions or {})}.items())),
            device=(
                ("kind", device.driver.kind + (" (emulated)" if device.emulated else "")),
                ("name", device.properties.name),
                ("memory", exactly(device.total_bytes)),
                ("granule", exactly(device.driver.granule)),
            ),
        )

    def differences(self, now: Fingerprint) -> tuple[Difference, ...]:
        """What `now` has otherwise, item after item; none if it is the same."""
        found = [
            difference
            for part in ("model", "versions", "device")
            for difference in compare(f"{part} ", getattr(self, part), getattr(now, part))
        ]
        if self.ladder != now.ladder:
            found.append(Difference("ladder", _listed(self.ladder), _listed(now.ladder)))
        return tuple(found)


def compare(prefix: str, pinned: Facts, now: Facts) -> list[Difference]:
    """The facts that differ, in the order of `pinned` and then of `now`."""
    before, after = dict(pinned), dict(now)
    return [
        Difference(prefix + name, before.get(name), after.get(name))
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]


def _flat(prefix: str, facts: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Nested mappings as dotted names, in order of name: the order in which an engine lists them means nothing."""
    for name in sorted(facts, key=str):
        value = facts[name]
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _listed(ladder: tuple[str, ...]) -> str | None:
    return f"{len(ladder)} graphs ({', '.join(ladder)})" if ladder else None


def _shown(text: str | None) -> str:
    return "nothing" if text is None else text
