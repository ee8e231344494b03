"""The comparison as a picture: where the device's memory goes, and what the start-up spends its time on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vmm_kv.bench.compare import Comparison
from vmm_kv.bench.row import Known, Row
from vmm_kv.bench.scenario import Scenario
from vmm_kv.budget import requested_bytes

MIB = 1 << 20
KV, GRAPHS, STEP, STRANDED, OVER = "#2f6db3", "#e08a1e", "#8a63b3", "#d9d9d9", "#c62f2f"
BUFFERS, WARM_UP = "#6b6b6b", "#cbb3e0"
_PHASES = {
    "load": ("#b0b0b0", "load weights"),
    "profile": ("#5a9e6f", "profile run"),
    "estimate": ("#7a4b2a", "captures thrown away"),
    "capture": ("#e08a1e", "captures kept"),
    "worst step": ("#8a63b3", "measured worst step"),
    "kv": ("#2f6db3", "allocate or map the KV cache"),
}
_SHOWN = 1.16
"""Of the memory beside the weights."""
_CACHE_FIRST = "allocate KV"
_MAPPING = (_CACHE_FIRST, "reserve", "back", "commit")


def draw(found: Comparison, path: Path) -> None:
    """Writes a PNG. Raises `ImportError` without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(found.scenarios)
    figure, axes = pyplot.subplots(
        count,
        2,
        figsize=(17, 1.2 + 4.2 * count),
        squeeze=False,
        gridspec_kw={"width_ratios": (5, 4)},
        layout="constrained",
    )
    for (memory, time), scenario in zip(axes, found.scenarios, strict=True):
        _memory(memory, found, scenario)
        _time(time, found, scenario)
    handles = _legend(pyplot)
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=10, frameon=False)
    emulated = " (EMULATED driver)" if found.emulated else ""
    figure.suptitle(
        "How the KV cache is sized around graphs: every strategy on the same engine, "
        f"{found.scenarios[0].device}{emulated}\n"
        "left: memory beside the weights, at the worst moment of serving; right: seconds of the start-up",
        fontsize=13,
    )
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _memory(axis: Any, found: Comparison, scenario: Scenario) -> None:
    known, rows = found.known[scenario.ladder.name], found.of(scenario.ladder.name)
    room = scenario.room / MIB
    for place, row in enumerate(rows):
        for start, length, colour, hatch in (parts := bar(row, known, scenario)):
            axis.barh(place, length, left=start, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
        if (end := sum(parts[-1][:2])) > room * _SHOWN:
            axis.text(room * _SHOWN, place, f"to {end:.0f} > ", ha="right", va="center", fontsize=8, color="white",
                      bbox={"facecolor": OVER, "edgecolor": "none", "pad": 1})  # fmt: skip
        axis.text(1.01, place, _verdict(row), transform=axis.get_yaxis_transform(), va="center", fontsize=9,
                  color="black" if row.outcome == "served" else OVER)  # fmt: skip
    axis.axvline(room, color="black", linewidth=1.5)
    axis.annotate("end of the device", (room, -1.1), ha="right", va="bottom", fontsize=8, annotation_clip=False)
    axis.set_yticks(range(len(rows)), [row.strategy for row in rows], fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, room * _SHOWN)
    axis.set_xlabel("MiB")
    axis.set_title(
        f"{scenario.ladder.name}: {known.graphs} graphs keep {known.kept / MIB:.0f} MiB",
        loc="left",
        fontsize=11,
        pad=14,
    )


def bar(row: Row, known: Known, scenario: Scenario) -> list[tuple[float, float, str, str]]:
    """(start, length, colour, hatch) of each part, MiB: what is needed at the worst moment, whether it is there or not.

    What lies beyond the end of the device is what runs out; what is missing up to it is stranded.
    """
    room = scenario.room / MIB
    if row.outcome == "no room" or row.blocks is None:
        return [(0.0, room, STRANDED, "xx")]
    kept = max(0, row.kept if row.kept is not None else known.kept)
    parts = [
        (known.weights - requested_bytes(row.total, scenario.utilization) + scenario.room, BUFFERS),
        (row.blocks * row.block_bytes, KV),
        (kept, GRAPHS),
        (known.transient, STEP),
    ]
    if _CACHE_FIRST in row.phases:
        parts.append((max(0, known.capture_peak - kept - known.transient), WARM_UP))
    placed: list[tuple[float, float, str, str]] = []
    start = 0.0
    for size, colour in parts:
        length = size / MIB
        inside = max(0.0, min(length, room - start))
        placed += [(start, inside, colour, ""), (start + inside, length - inside, OVER, "//")]
        start += length
    placed.append((start, max(0.0, room - start), STRANDED, ""))
    return [part for part in placed if part[1] > 0]


def _verdict(row: Row) -> str:
    if row.outcome != "served":
        where = (row.where or "").partition(":")[0]
        return f"{row.outcome.upper()} in {where}"
    tokens = f"{row.tokens_per_second:.0f} tokens/s" if row.tokens_per_second else ""
    return f"{tokens}, {_stranded(row.stranded_part)}"


def _stranded(part: float | None) -> str:
    if part is None:
        return ""
    return f"{part:.1%} stranded" if part >= 0 else f"{-part:.1%} above the oracle"


def _time(axis: Any, found: Comparison, scenario: Scenario) -> None:
    rows = found.of(scenario.ladder.name)
    for place, row in enumerate(rows):
        start = 0.0
        for name, seconds in row.phases.items():
            kind = "kv" if name in _MAPPING else name
            if kind in _PHASES:
                axis.barh(place, seconds, left=start, color=_PHASES[kind][0], edgecolor="white", linewidth=0.3)
                start += seconds
        captures = f"{row.captures} captures" if row.outcome == "served" else f"{row.where}"
        axis.text(start, place, f" {captures}", va="center", fontsize=8,
                  color="black" if row.outcome == "served" else OVER)  # fmt: skip
    axis.set_yticks(range(len(rows)), [""] * len(rows))
    axis.invert_yaxis()
    axis.set_xlabel("seconds since the process was ready")
    axis.set_xlim(0, 1.75 * max((row.start_seconds for row in rows), default=1.0))
    graphs, sizes = found.known[scenario.ladder.name].graphs, len(scenario.ladder.descriptors())
    axis.set_title(f"start-up; {sizes} sizes need {graphs} captures", loc="left", fontsize=11, pad=14)


def _legend(pyplot: Any) -> Sequence[Any]:
    memory = [
        (KV, "", "KV cache"), (GRAPHS, "", "kept by graphs"), (STEP, "", "worst step outside graphs"),
        (WARM_UP, "", "more for a warm-up in capture"), (BUFFERS, "", "the engine's buffers"),
        (STRANDED, "", "stranded"), (OVER, "//", "needed, and not there"),
    ]  # fmt: skip
    patches = [pyplot.Rectangle((0, 0), 1, 1, facecolor=c, hatch=h, label=f"memory: {n}") for c, h, n in memory]
    return [*patches, *(pyplot.Rectangle((0, 0), 1, 1, facecolor=c, label=f"time: {n}") for c, n in _PHASES.values())]
