"""`vmm-kv plan`: what a model's KV cache takes and how much of it fits, from its config.json. No torch, no device.

One rank stands for all tensor-parallel ranks of a pipeline stage, which are alike. How layers with a window, layers
without one and states share blocks is in `vmm_kv.stage_groups`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vmm_kv.budget import exactly, readable
from vmm_kv.model_shape import KvGroup, ModelShape, read, stage_layers
from vmm_kv.rank_plan import RankBudgetError, plan_ranks
from vmm_kv.rank_terms import Rank, Term, TermKind
from vmm_kv.request import Request
from vmm_kv.sizes import parse_bytes
from vmm_kv.stage_groups import StageGroups, stage_groups


def configure(parser: argparse.ArgumentParser) -> None:
    """The options. Sizes are bytes with a binary unit."""
    add = parser.add_argument
    add("--config", type=Path, required=True, help="a Hugging Face config.json, or the folder it is in")
    add("--memory", type=_size, required=True, metavar="SIZE", help="memory of one device, for example 80GiB")
    add("--free", type=_size, metavar="SIZE", help="what of it is free at the start (default: all)")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--utilization", type=float, help="share of the memory for this process (default: 0.9)")
    asked.add_argument("--kv-bytes", type=_size, metavar="SIZE", help="bytes of the KV cache on each rank instead")
    asked.add_argument("--blocks", type=int, help="blocks of the KV cache instead")
    add("--weights", type=_size, metavar="SIZE", help="weights on each rank")
    for kind, what in (("term", "other memory that stays, such as graphs=0.65GiB"), ("transient", "memory of a step")):
        add(f"--{kind}", type=_named, action="append", default=[], metavar="NAME=SIZE", help=f"{what}; repeatable")
    add("--tp", type=int, default=1, help="tensor-parallel ranks of a stage (default: %(default)s)")
    add("--pp", type=int, default=1, help="pipeline stages (default: %(default)s)")
    add("--dtype", help="what the model computes in (default: as the config says)")
    add("--kv-dtype", default="auto", help="auto, bfloat16, fp8, ..., or the bytes of a packed slot, such as 584B")
    add("--state-dtype", default="auto", help="what recurrent states are kept in (default: %(default)s)")
    add("--block-size", type=int, default=16, help="tokens in a block (default: %(default)s)")
    add("--max-model-len", type=int, help="tokens of the longest request (default: as the config says)")
    add("--step-tokens", type=int, default=0, help="tokens in flight that windows hold as well (default: %(default)s)")
    add("--granule", type=_size, default=1, metavar="SIZE", help="round the cache up to it (default: no rounding)")
    add("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints the shape and the plan. 1 where the request does not fit, with what is short; `ValueError` for wrong
    options and configs, `OSError` where there is no config: then nothing is printed."""
    for name, least in (("tp", 1), ("pp", 1), ("block_size", 1), ("step_tokens", 0)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    shape = read(options.config, dtype=options.dtype)
    stages = [
        shape.groups(kv=options.kv_dtype, tp=options.tp, layers=layers, recurrent=options.state_dtype)
        for layers in stage_layers(len(shape.layers), options.pp)
    ]
    shared = stage_groups(stages, options.block_size, options.step_tokens)
    told = _shape(shape, stages, shared, options)
    if empty := [str(i) for i, groups in enumerate(stages) if not groups]:
        raise ValueError(f"no layer of pipeline stage {', '.join(empty)} caches anything: nothing to plan there")
    try:
        plan = plan_ranks(_ranks(shared, options), _request(options), max_model_len=told["max_model_len"])
    except RankBudgetError as error:
        failed = {"model": told, "error": str(error), "plan": error.ranked.to_dict()}
        print(json.dumps(failed) if options.json else _text(told))
        print(f"vmm-kv plan: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"model": told, "plan": plan.to_dict()}) if options.json else f"{_text(told)}\n\n{plan}")
    return 0


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _named(text: str) -> tuple[str, int]:
    name, equals, size = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text[:50]!r}: NAME=SIZE is expected, for example graphs=0.65GiB")
    return name, _size(size)


def _request(options: argparse.Namespace) -> Request:
    if options.kv_bytes is not None:
        return Request(kv_bytes=options.kv_bytes)
    if options.blocks is not None:
        return Request(blocks=options.blocks)
    return Request(utilization=0.9 if options.utilization is None else options.utilization)


def _ranks(stages: Sequence[StageGroups], options: argparse.Namespace) -> list[Rank]:
    weights = [Term("weights", options.weights)] if options.weights is not None else []
    kinds: tuple[tuple[list[tuple[str, int]], TermKind], ...] = (
        (options.term, "permanent"),
        (options.transient, "transient"),
    )
    terms = (*weights, *(Term(name, size, kind) for given, kind in kinds for name, size in given))
    return [
        Rank(
            options.memory,
            terms,
            own.groups,
            free=options.free,
            name=_rank_name(stage, options.tp),
            granule=options.granule,
        )
        for stage, own in enumerate(stages)
    ]


def _rank_name(stage: int, tp: int) -> str:
    return f"rank {stage}" if tp == 1 else f"ranks {stage * tp} to {stage * tp + tp - 1}"


def _shape(
    shape: ModelShape,
    stages: Sequence[Sequence[KvGroup]],
    shared: Sequence[StageGroups],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """JSON-ready: what the model keeps for a token, a block and a request on a rank of each stage."""
    length = options.max_model_len if options.max_model_len is not None else shape.max_tokens
    ranks: list[dict[str, Any]] = []
    for stage, groups in enumerate(stages):
        ranks.append({
            "name": _rank_name(stage, options.tp),
            "bytes_per_token": sum(group.bytes_per_token for group in groups),
            "bytes_per_token_beyond_windows": sum(group.bytes_per_token for group in groups if group.window is None),
            "bytes_per_block": sum(group.bytes_per_block(options.block_size) for group in groups),
            "bytes_per_request": sum(group.bytes_per_request for group in groups),
            "padding_layers": shared[stage].padding_layers,
            "groups": [
                {**asdict(group), "bytes_per_block": group.bytes_per_block(options.block_size)} for group in groups
            ],
        })  # fmt: skip
    return {
        "model_type": shape.model_type,
        "layers": len(shape.layers),
        "tp": options.tp,
        "pp": options.pp,
        "dtype": shape.dtype,
        "kv_dtype": shape.dtype if options.kv_dtype == "auto" else options.kv_dtype,
        "block_size": options.block_size,
        "max_model_len": length,
        "bytes_per_token": max(rank["bytes_per_token"] for rank in ranks),
        "ranks": ranks,
        "notes": [*shape.notes, *_on_windows(stages, options.step_tokens)],
    }


def _on_windows(stages: Sequence[Sequence[KvGroup]], step_tokens: int) -> tuple[str, ...]:
    if step_tokens or not any(group.kind == "window" for groups in stages for group in groups):
        return ()
    return ("windows are planned without tokens in flight: --step-tokens takes the most that one step computes",)


def _text(told: dict[str, Any]) -> str:
    parallel = f", tensor parallel {told['tp']}, pipeline parallel {told['pp']}" if told["tp"] * told["pp"] > 1 else ""
    lines = [f"{told['model_type']}: {told['layers']} layers, KV in {told['kv_dtype']}{parallel}"]
    for rank in told["ranks"]:
        lines.append(rank["name"])
        lines.append(f"  {'bytes per token':<28} {rank['bytes_per_token']}")
        if rank["bytes_per_token_beyond_windows"] != rank["bytes_per_token"]:
            lines.append(f"  {'beyond the windows':<28} {rank['bytes_per_token_beyond_windows']}")
        if rank["bytes_per_token"]:
            what = f"block of {told['block_size']} tokens"
            lines.append(f"  {what:<28} {exactly(rank['bytes_per_block'])}")
        if rank["bytes_per_request"]:
            lines.append(f"  {'bytes per request':<28} {exactly(rank['bytes_per_request'])}")
        for group in rank["groups"]:
            size = f"{group['bytes_per_token']} a token"
            if group["kind"] == "state":
                size = f"{readable(group['bytes_per_request'])} a request"
            lines.append(f"  {group['name'] + ', layers':<28} {len(group['layers'])}: {size}")
        if rank["padding_layers"]:
            lines.append(f"  {'padding layers':<28} {rank['padding_layers']}, so that groups share one pool of blocks")
    return "\n".join([*lines, *(f"note: {note}" for note in told["notes"])])
