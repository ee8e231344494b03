"""Checks of a real GPU by name: what each needs, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from vmm_kv.testing.gpu_rig import Rig

Needs = Literal["driver", "torch"]
Outcome = Literal["ok", "failed", "surprise", "skipped", "not run"]

SPOILED = "context spoiled on purpose"
"""Among a result's details: the process can do nothing with the device any more."""


class Failed(Exception):
    """What the library relies on does not hold on this device."""


class Skipped(Exception):
    """The check says nothing on this machine, for the reason given."""


@dataclass(frozen=True)
class Check:
    """One check. Registered by `check`.

    rule: the numbers of the rules or invariants that it looks at. needs: `"driver"`, the seam alone; `"torch"`, tensors
    and graphs on the device as well. alone: it may crash its process or spoil the device's context, so that it gets a
    process of its own. emulated: it can run on an emulated driver. seconds: it takes no longer, or it has hung.
    environment: variables of the process that it runs in.
    """

    name: str
    rule: str
    summary: str
    needs: Needs
    alone: bool
    emulated: bool
    seconds: float
    environment: Mapping[str, str]
    function: Callable[[Rig], None]


@dataclass(frozen=True)
class Result:
    """What a check found. A surprise is a fact that differs from what the emulation and the design assume."""

    name: str
    rule: str
    outcome: Outcome
    seconds: float
    facts: str
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Findings:
    """What one check has found so far: facts for a line, surprises, and details for the file."""

    def __init__(self) -> None:
        self.facts: list[str] = []
        self.surprises: list[str] = []
        self.details: dict[str, Any] = {}

    def say(self, fact: str) -> None:
        self.facts.append(fact)

    def expect(self, what: str, found: object, expected: object) -> None:
        """A surprise unless they are equal."""
        if found != expected:
            self.surprises.append(f"{what}: {found}, expected {expected}")

    def line(self) -> str:
        return "; ".join([*(f"! {surprise}" for surprise in self.surprises), *self.facts])


CHECKS: dict[str, Check] = {}
"""Every check that was registered, in the order in which they run."""


def check(
    name: str,
    rule: str,
    *,
    needs: Needs = "driver",
    alone: bool = False,
    emulated: bool = True,
    seconds: float = 20.0,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Callable[[Rig], None]], Callable[[Rig], None]]:
    """Registers the function below it; the first line of its docstring says what it checks. See `Check`."""

    def register(function: Callable[[Rig], None]) -> Callable[[Rig], None]:
        if name in CHECKS:
            raise ValueError(f"two checks are called {name!r}")
        summary = (function.__doc__ or name).strip().splitlines()[0]
        CHECKS[name] = Check(name, rule, summary, needs, alone, emulated, seconds, environment, function)
        return function

    return register


def all_checks() -> dict[str, Check]:
    """Every check there is, by name."""
    from vmm_kv.testing import gpu_checks  # registers them

    assert gpu_checks
    return CHECKS
