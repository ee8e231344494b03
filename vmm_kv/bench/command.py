"""`vmm-kv bench startup`: what it takes, and what it prints and writes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from vmm_kv.bench.ladder import LADDERS
from vmm_kv.bench.strategies import NAMES

_LADDERS = [ladder.name for ladder in LADDERS]


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmarks to the parser of `vmm-kv bench`. Imports nothing that is slow."""
    startup = parser.add_subparsers(dest="benchmark", required=True).add_parser(
        "startup",
        help="start the same engine with every strategy, each in a fresh process on the same device",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(
            ["ladders:", *(f"  {name}" for name in _LADDERS), "strategies:", *(f"  {name}" for name in NAMES)]
        ),
    )
    add = startup.add_argument
    add("--device", default="host:2GiB", help="host[:size], cuda[:index], hip[:index] (default: %(default)s)")
    add("--ladder", action="append", help="only this one; may be given again (default: all)")
    add("--strategy", action="append", help="only this one; may be given again (default: all)")
    add("--pairs", type=int, default=5, help="paired runs of ReserveThenMap and FullProfile (default: %(default)s)")
    add("--jobs", type=int, default=1, help="ladders run at a time; more disturb the times (default: %(default)s)")
    add("--room", help="what the weights leave for graphs and KV cache (default: 192MiB)")
    add("--utilization", type=float, default=1.0, help="share of the device (default: %(default)s)")
    add("--margin", default="0", help="what every guess, and ReserveThenMap, leaves free (default: none)")
    add("--output", type=Path, help="folder for startup_<device>.json, .md and .png")
    add("--json", action="store_true", help="print one JSON object instead of Markdown")


def run(options: argparse.Namespace) -> int:
    """0 if every row came to an end that is a result: served, out of memory, no room. Else 1.

    Raises `ValueError` for a ladder, strategy or device that there is not and a utilization that is none, `VmmError`
    where nothing can be measured.
    """
    from vmm_kv.bench.compare import compare
    from vmm_kv.bench.scenario import Scenario
    from vmm_kv.bench.table import markdown
    from vmm_kv.device import parse_name
    from vmm_kv.request import Request
    from vmm_kv.sizes import parse_bytes

    names = _chosen("strategy", options.strategy, NAMES)
    chosen = _chosen("ladder", options.ladder, _LADDERS)
    if options.jobs < 1 or options.pairs < 0:
        raise ValueError("jobs must be at least 1, and pairs at least 0")
    parse_name(options.device)  # what is wrong with it is seen before minutes go by
    Request(utilization=options.utilization)
    common = Scenario(LADDERS[0], device=options.device, utilization=options.utilization)
    if options.margin != "0":
        common = replace(common, margin=parse_bytes(options.margin))
    if options.room:
        common = replace(common, room=parse_bytes(options.room))
    scenarios = [replace(common, ladder=ladder) for ladder in LADDERS if ladder.name in chosen]
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)  # before the minutes that the runs take
    found = compare(scenarios, names, options.pairs, options.jobs, lambda text: print(text, file=sys.stderr))
    print(json.dumps(found.to_dict()) if options.json else markdown(found))
    if options.output:
        from vmm_kv.bench.picture import draw

        stem = options.output / f"startup_{options.device.partition(':')[0]}"
        stem.with_suffix(".json").write_text(json.dumps(found.to_dict(), indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(found))
        draw(found, stem.with_suffix(".png"))
    return 1 if any(row.outcome == "failed" for row in found.rows) else 0


def _chosen(what: str, asked: list[str] | None, known: list[str] | tuple[str, ...]) -> list[str]:
    """What was asked for in the order of `known`, or all of it."""
    unknown = [name for name in asked or () if name not in known]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no {what}: {'; '.join(known)}")
    return [name for name in known if not asked or name in asked]
