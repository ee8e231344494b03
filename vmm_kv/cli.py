"""The command `vmm-kv`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import vmm_kv
from vmm_kv.errors import VmmError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand. Exit status 0; 1 where the demo leaves something unproved or cannot run, or where not even
    the host device works for the doctor; 2 for misuse."""
    options = _parser().parse_args(argv)
    try:
        return _doctor(options) if options.command == "doctor" else _demo(options)
    except (VmmError, ValueError, OSError) as error:
        print(f"vmm-kv {options.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vmm-kv", description="Reserve-then-map KV cache memory.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {vmm_kv.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="run the whole start-up of a small engine, serve, and compare with an ordinary cache",
    )
    demo.add_argument(
        "--device", default="host:2GiB", help="auto, host[:size], cuda[:index], hip[:index] (default: %(default)s)"
    )
    demo.add_argument("--backing", choices=("prefix", "alias"), default="prefix", help="what backs the capture")
    demo.add_argument("--config", type=Path, help="a Hugging Face config.json (default: a small bundled one)")
    demo.add_argument("--prompts", type=Path, help="a text file, tokenised as bytes (default: a bundled one)")
    demo.add_argument("--utilization", type=float, default=0.9, help="share of the device (default: %(default)s)")
    demo.add_argument("--json", action="store_true", help="print one JSON object")
    doctor = commands.add_parser(
        "doctor", help="what can be used on this machine, why the rest cannot, and what to do about it"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from vmm_kv.doctor import diagnose

    diagnosis = diagnose()
    if options.json:
        print(json.dumps(diagnosis.to_dict()))
    else:
        from vmm_kv.doctor_show import show

        show(diagnosis)
    return 0 if diagnosis.works else 1


def _demo(options: argparse.Namespace) -> int:
    from vmm_kv.demo.run import DemoOptions, run_demo  # torch is slow to import: --help need not wait for it
    from vmm_kv.demo.show import progress, show

    chosen = DemoOptions(
        device=options.device,
        backing=options.backing,
        config=options.config,
        prompts=options.prompts,
        utilization=options.utilization,
    )
    if options.json:
        result = run_demo(chosen).result
        print(json.dumps({**asdict(result), "proved": result.proved}))
    else:
        with progress() as tell:
            run = run_demo(chosen, tell)
        show(run)
        result = run.result
    return 0 if result.proved else 1
