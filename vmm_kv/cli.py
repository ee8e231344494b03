"""The command `vmm-kv`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import vmm_kv
from vmm_kv.errors import VmmError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand. Exit status 0; 1 where the demo leaves something unproved or cannot run, where not even the
    host device works for the doctor, where a plan does not fit, or where a benchmark fails; 2 for misuse: wrong
    options, and files that cannot be read or written."""
    given = sys.argv[1:] if argv is None else list(argv)
    options = _parser(given).parse_args(given)
    commands = {"demo": _demo, "doctor": _doctor, "plan": _plan, "bench": _bench}
    try:
        status = commands[options.command](options)
        if sys.stdout is not None:  # closed from the start
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read has enough: what is left goes nowhere, also at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (VmmError, ValueError, OSError) as error:
        print(f"vmm-kv {options.command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, VmmError) else 2


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """With the options of `plan` and `bench` only where one of them is asked for: their modules are not needed else."""
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
    plan = commands.add_parser(
        "plan", help="what a model's KV cache takes and how much of it fits, from its config.json"
    )
    bench = commands.add_parser("bench", help="run every way to size the KV cache side by side on the same engine")
    if given[:1] == ["plan"]:
        from vmm_kv import plan_command

        plan_command.configure(plan)
    elif given[:1] == ["bench"]:
        from vmm_kv.bench import command

        command.configure(bench)
    return parser


def _plan(options: argparse.Namespace) -> int:
    from vmm_kv import plan_command

    return plan_command.run(options)


def _bench(options: argparse.Namespace) -> int:
    from vmm_kv.bench import command

    return command.run(options)


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
