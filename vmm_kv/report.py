"""What a start-up did and found, as data, as JSON and as a table."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from vmm_kv.budget import Plan, readable
from vmm_kv.decode import decode
from vmm_kv.fingerprint import Facts, Fingerprint
from vmm_kv.measure import Footprint, MemoryReading

_FORMAT, _VERSION = "vmm_kv start-up report", 1


@dataclass(frozen=True)
class CommitTry:
    """One attempt to take the memory. `error` is None for the one that succeeded."""

    blocks: int
    error: str | None


@dataclass(frozen=True)
class CacheRecord:
    """One cache as it was reserved: what a later start has to do alike to come to the same addresses."""

    capacity: int
    """Blocks that there are addresses for."""
    reserved_bytes: int
    unit: int
    """Bytes that mapped memory is rounded outward to."""
    tensors: Facts
    """Each tensor's shape, dtype and place, as text."""

    def __post_init__(self) -> None:
        _at_least(self, capacity=1, reserved_bytes=1, unit=1)


@dataclass(frozen=True)
class StartupReport:
    """The result of `Startup.commit`. Bytes and seconds unless said otherwise; what is negative is shown so."""

    device: str
    fingerprint: Fingerprint
    """What the size depends on."""
    caches: tuple[CacheRecord, ...]
    backing: str
    """`"prefix"`, `"alias"`, or `"none"` for a cache committed from its bare reservation."""
    plan: Plan
    """Every term of the sizing of the last try."""
    planned_blocks: int
    """What the first sizing, before any retry, came to."""
    blocks: int
    """What was granted: the usable count."""
    capacity: int
    """Blocks that there are addresses for."""
    profile_blocks: int
    """Blocks backed while graphs were captured. With an alias every one is."""
    reserved_bytes: int
    mapped_bytes: int
    readings: tuple[MemoryReading, ...]
    footprints: tuple[Footprint, ...]
    """One for each `capture()` block."""
    captures: int
    """Graphs captured, counted."""
    tries: tuple[CommitTry, ...]
    phases: dict[str, float]
    """Seconds of each phase."""
    driver_calls: dict[str, int]
    """Calls of each driver primitive from the first reading to the end of the commit."""

    def __post_init__(self) -> None:
        """Raises `ValueError` for what no start-up comes to: a file may have been edited."""
        _at_least(self, blocks=1, capacity=1, profile_blocks=0, reserved_bytes=1, mapped_bytes=1, captures=0)
        if self.blocks > self.capacity:
            raise ValueError(f"{self.blocks} blocks granted, there are addresses for {self.capacity}")
        if self.backing not in ("prefix", "alias", "none"):
            raise ValueError(f"backing {self.backing!r} is none: prefix, alias, none")
        for name in ("caches", "readings", "tries"):
            if not getattr(self, name):
                raise ValueError(f"{name}: at least one is expected")
        items = [name for name, _ in self.plan.terms.headroom]
        if len(set(items)) < len(items):
            raise ValueError(f"plan.terms.headroom: two items have one name: {', '.join(items)}")

    @property
    def footprint_raw(self) -> int:
        """Bytes that all captures kept, signed. In `plan.own` already."""
        return sum(footprint.raw for footprint in self.footprints)

    @property
    def footprint(self) -> int:
        """`footprint_raw`, counted as 0 where it is negative."""
        return max(0, self.footprint_raw)

    @property
    def headroom(self) -> int:
        """Bytes left free on purpose, all items."""
        return sum(size for _, size in self.plan.terms.headroom)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, the derived figures included."""
        derived = {"footprint": self.footprint, "footprint_raw": self.footprint_raw, "headroom": self.headroom}
        return {**asdict(self), **derived}

    def to_json(self) -> str:
        """`to_dict` as JSON text, indented."""
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: str | Path) -> None:
        """Writes it as JSON that `load` reads, for `Startup(pinned=...)`. Whoever reads meanwhile sees old or new.

        Raises `OSError` that names the file if it cannot be written; what was there stays.
        """
        path = Path(path)
        text = json.dumps({"format": _FORMAT, "version": _VERSION, "report": asdict(self)}, indent=2, allow_nan=False)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> StartupReport:
        """What `save` wrote, equal to what it was.

        Raises `OSError` if it cannot be read, `ValueError` that says what is wrong with it: no JSON, not a start-up
        report, of a version that this one does not read, or a field that is missing or makes no sense.
        """
        try:
            return cls._from_saved(json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_no_number))
        except RecursionError:
            raise ValueError(f"{path}: nested too deeply for a start-up report") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: no JSON, perhaps cut short: {error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def _from_saved(cls, data: object) -> StartupReport:
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ValueError("not a saved start-up report, which StartupReport.save writes")
        if data.get("version") != _VERSION or isinstance(data["version"], bool):
            raise ValueError(
                f"a start-up report of version {data.get('version')!r}, this vmm_kv reads version {_VERSION}: "
                "start without the pin once, and save that report"
            )
        return decode(cls, data.get("report"), "report")

    def table(self) -> str:
        """For people: phases, every term of the sizing, and the counts, as plain text."""
        plan = self.plan
        phases = [f"  {name:<28} {seconds:9.3f} s" for name, seconds in self.phases.items()]
        terms = [f"  {name:<28} {readable(size):>14}" for name, size in plan.itemised()]
        tries = [f"  {t.blocks} blocks: {t.error or 'granted'}" for t in self.tries]
        step = "at capacity" if plan.next_step is None else f"the next block costs {readable(plan.next_step)}"
        lines = [
            f"start-up on {self.device}, {self.backing} backing",
            *phases,
            "memory",
            *terms,
            f"  {'captures kept (in own)':<28} {readable(self.footprint_raw):>14}",
            f"blocks: {self.profile_blocks} while capturing, {self.planned_blocks} planned, {self.blocks} granted, "
            f"{self.capacity} reserved",
            f"bytes: {readable(self.reserved_bytes)} reserved, {readable(self.mapped_bytes)} mapped",
            f"bound by {plan.bound_by} ({plan.status}); {readable(plan.leftover)} left over, {step}",
            f"{self.captures} graphs captured, {sum(self.driver_calls.values())} driver calls",
            *(tries if len(tries) > 1 else ()),
            *(f"note: {note}" for note in plan.notes),
            *(f"advice: {line}" for line in plan.advice),
        ]
        return "\n".join(lines)


def _at_least(record: object, **least: int) -> None:
    for name, bound in least.items():
        if (number := getattr(record, name)) < bound:
            raise ValueError(f"{name} must be at least {bound}, got {number}")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} stands where a number is expected")
