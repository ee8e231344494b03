"""The comparison as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from vmm_kv.bench import strategies
from vmm_kv.bench.compare import Comparison
from vmm_kv.bench.row import Known, Row
from vmm_kv.bench.scenario import Scenario
from vmm_kv.budget import readable

_HEAD = (
    "strategy", "outcome", "start, s", "capture, s", "tried out, s", "passes", "captures", "estimate, MiB", "kept, MiB",
    "error, MiB", "KV blocks", "KV tokens", "peak use", "stranded, MiB", "of the KV", "tokens/s", "steps", "preempted",
)  # fmt: skip


def markdown(found: Comparison) -> str:
    """The whole report."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Comparison) -> Iterator[str]:
    yield "# Start-up, every strategy side by side"
    yield ""
    yield f"{found.device}{' (EMULATED driver: no GPU took part)' if found.emulated else ''}. Machine: {found.machine}."
    yield ""
    yield from _explanation(found.scenarios[0], found.jobs)
    for scenario in found.scenarios:
        yield ""
        yield from _ladder(found, scenario)
    yield ""
    yield from _paired(found)
    yield from _negative(found)


def _explanation(scenario: Scenario, jobs: int) -> Iterator[str]:
    room, card = readable(scenario.room), readable(strategies.CARD_ROOM)
    yield (
        f"Each row is a fresh process with the same model, ladder and device of {scenario.device}. Weights, and a "
        f"block that stands for the rest of a larger model's, leave {room}. Memory is really taken from the device's "
        "budget: an out of memory happened, and says where. The oracle sizes before capture like a guess, but knows "
        f"what capture will keep and take. Margin: {readable(scenario.margin)}."
    )
    yield ""
    yield "- start: seconds of the whole start-up; the oracle's has no profile run, it is told what there is to know"
    yield "- capture, tried out: seconds of it for the graphs that stay, and for what is captured to find out"
    yield "- passes, captures: runs of a model during the start-up that were no replay; graphs captured, all counted"
    yield "- estimate: of what graphs will keep, as it came out; of a fixed headroom, all of it"
    yield "- kept: what capture really kept; in brackets by the measuring run, where this start did not get so far"
    yield "- error: what was set aside for graphs, which most ways count as 0 where it is negative, minus kept"
    yield "- peak use: of the requested share, at the worst moment, serving included"
    yield (
        "- stranded: KV cache that the oracle has and this does not, and what part of the oracle's that is; below 0: "
        "more than the oracle, which is too much where memory ran out"
    )
    at_once = f", with {jobs} ladders running at a time" if jobs > 1 else ""
    yield (
        f"- tokens/s: generated in serving the same {scenario.load.requests} requests, once{at_once}: rows of equal "
        "blocks, steps and preemptions show how far noise reaches"
    )
    yield "- steps: of decoding; on a GPU one takes about as long for few sequences as for many, on a CPU it does not"
    yield "- preempted: how often a running sequence lost its blocks to another and had to be computed again"
    yield ""
    yield (
        "An exact estimate may still run out: each capture runs its step once before, eagerly, beside the graphs that "
        "are there already. What is mapped after the last capture needs no room for that."
    )
    yield ""
    yield (
        f"Flat figures published for cards of 80 GB are taken in proportion to what the weights leave ({room} of "
        f"{card}), but no less than 1 MiB. A worst step is not smaller here in that proportion, so a fixed headroom "
        "runs out sooner than on a card. Floors for each graph are as published, so they weigh more here than on a "
        "card: compare bytes."
    )


def _ladder(found: Comparison, scenario: Scenario) -> Iterator[str]:
    name, known = scenario.ladder.name, found.known[scenario.ladder.name]
    yield f"## Ladder: {name}"
    yield ""
    sizes = len(scenario.ladder.descriptors())
    yield (
        f"{sizes} sizes, {known.graphs} graphs, which keep {_mib(known.kept)} MiB; a worst step takes "
        f"{_mib(known.transient)} MiB on top. ReserveThenMap maps steps of {_mib(known.granule)} MiB, so it may strand "
        "up to one of them."
    )
    yield ""
    yield "| " + " | ".join(_HEAD) + " |"
    yield "| --- | --- |" + " ---: |" * (len(_HEAD) - 2)
    for row in found.of(name):
        yield "| " + " | ".join(_cells(row, known)) + " |"
    for row in found.of(name):
        if row.outcome != "served":
            yield ""
            yield f"{row.strategy}: {row.outcome} at {row.where}. {row.error_text}"


def _cells(row: Row, known: Known) -> tuple[str, ...]:
    kept = _mib(row.kept) if row.kept_here else f"({_mib(known.kept)})"
    estimate = _mib(row.estimate_raw) if row.estimate_raw is not None else "-"
    return (
        row.strategy,
        row.outcome if row.outcome == "served" else f"**{row.outcome}**",
        f"{row.start_seconds:.2f}",
        _seconds(row.phases.get("capture")),
        _seconds(row.phases.get("estimate")),
        str(row.passes),
        f"{row.captures}",
        estimate,
        kept,
        _mib(row.error),
        _count(row.blocks),
        _count(row.tokens),
        f"{row.peak_used / row.requested:.1%}" if row.peak_used and row.requested else "-",
        _mib(row.stranded),
        f"{row.stranded_part:.1%}" if row.stranded_part is not None else "-",
        f"{row.tokens_per_second:.0f}" if row.tokens_per_second else "-",
        _count(row.steps),
        _count(row.preemptions),
    )


def _paired(found: Comparison) -> Iterator[str]:
    yield f"## Paired runs, ladder: {found.pair_ladder}"
    yield ""
    if found.ratio is None or found.whole_ratio is None:
        yield "None were run."
        return
    yield (
        "(capture + map) of ReserveThenMap over (profiling capture + capture) of FullProfile: "
        f"**{found.ratio:.3f}**, median of {len(found.pairs)} pairs run in turn. The whole start-ups: "
        f"{found.whole_ratio:.3f}."
    )
    yield ""
    yield (
        "| pair | capture + map, s | profile + capture, s | ratio "
        "| whole start, s | FullProfile's, s | ratio | profile run, s |"
    )
    yield "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for place, pair in enumerate(found.pairs, 1):
        ours, full = pair.ours, pair.full
        yield (
            f"| {place} | {ours['capture'] + ours['commit']:.2f} | {full['estimate'] + full['capture']:.2f} "
            f"| {pair.ratio:.3f} | {sum(ours.values()):.2f} | {sum(full.values()):.2f} | {pair.whole:.3f} "
            f"| {ours['profile']:.2f} and {full['profile']:.2f} |"
        )


def _negative(found: Comparison) -> Iterator[str]:
    rows = [row for row in found.rows if row.samples and row.strategy.startswith("Sampled")]
    if not rows:
        return
    yield ""
    yield "## Samples that come out negative"
    yield ""
    yield (
        "A capture empties the allocator's cache. A reading before it that counted cached bytes as used makes the "
        "first sample too small by them. Flushed before each reading, it is what the graph keeps. MiB:"
    )
    yield ""
    yield "| ladder | strategy | its first two samples | estimate | kept |"
    yield "| --- | --- | --- | ---: | ---: |"
    for row in rows:
        shown = ", ".join(_mib(sample) for sample in row.samples[:2])
        yield f"| {row.ladder} | {row.strategy} | {shown} | {_mib(row.estimate_raw)} | {_mib(row.kept)} |"


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / (1 << 20):.1f}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)
