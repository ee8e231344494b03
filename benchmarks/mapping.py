"""What the library itself costs when it maps a cache: `KVCache.commit` against the same driver calls from a C++ loop.

Both map the same bytes in chunks of the same size on the host device, in turn, and only the mapping is timed. The
difference is Python's and the bookkeeping's share. It says nothing about how long a GPU's driver takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from vmm_kv import Device, KVCache, TensorSpec
from vmm_kv.device import open_host
from vmm_kv.driver.host import HostDriver

TARGET = 10.0
"""Microseconds a chunk that the library may add."""
_BLOCK = 32 << 10
"""Bytes of one block in one segment: 16 tokens of 8 heads of 128 in bfloat16."""
_COUNTED = ("create", "map", "set_access")


@dataclass(frozen=True)
class Result:
    """Microseconds a chunk, medians over the pairs unless said otherwise."""

    bytes: int
    chunk_bytes: int
    chunks: int
    segments: int
    pairs: int
    library: float
    loop: float
    own: float
    """Median of the pairs' differences: what the library adds."""
    own_lowest: float
    own_highest: float
    ratio: float
    calls: dict[str, float]
    """Driver calls a chunk in a commit, by name, and `all` of them."""


def measure(nbytes: int, chunk: int, layers: int, pairs: int) -> Result:
    """Raises `ValueError` unless every K and V of a layer is a whole number of chunks."""
    segments = 2 * layers
    if nbytes <= 0 or chunk % _BLOCK or nbytes % (segments * chunk):
        raise ValueError(f"{nbytes} bytes are not {segments} segments of whole chunks of {chunk} bytes")
    device = open_host(nbytes)
    specs = [TensorSpec(f"layers.{i}.kv", (2, None, _BLOCK), torch.uint8) for i in range(layers)]
    blocks, chunks = nbytes // (segments * _BLOCK), nbytes // chunk
    library: list[float] = []
    loop: list[float] = []
    calls: dict[str, float] = {}
    for pair in range(-1, pairs):  # the first pair warms up and is not counted
        if pair % 2:
            seconds, calls = _time_library(device, specs, blocks, chunk)
            library.append(seconds)
            loop.append(_time_loop(device, nbytes, chunk))
        else:
            loop.append(_time_loop(device, nbytes, chunk))
            seconds, calls = _time_library(device, specs, blocks, chunk)
            library.append(seconds)
    micro = 1e6 / chunks
    library, loop = [s * micro for s in library[1:]], [s * micro for s in loop[1:]]
    own = [ours - theirs for ours, theirs in zip(library, loop, strict=True)]
    middle = statistics.median
    return Result(
        bytes=nbytes,
        chunk_bytes=chunk,
        chunks=chunks,
        segments=segments,
        pairs=pairs,
        library=middle(library),
        loop=middle(loop),
        own=middle(own),
        own_lowest=min(own),
        own_highest=max(own),
        ratio=middle([ours / theirs for ours, theirs in zip(library, loop, strict=True)]),
        calls={name: count / chunks for name, count in calls.items()},
    )


def _time_library(
    device: Device, specs: Sequence[TensorSpec], blocks: int, chunk: int
) -> tuple[float, dict[str, float]]:
    """Seconds of the commit alone, and how often it called each primitive."""
    cache = KVCache.reserve(device, specs, blocks, chunk=chunk, zero=False)
    gc.collect()
    before = dict(device.driver.calls())
    start = time.perf_counter()
    cache.commit(blocks)
    seconds = time.perf_counter() - start
    made = {name: float(count - before[name]) for name, count in device.driver.calls().items()}
    cache.close()
    return seconds, {**{name: made[name] for name in _COUNTED}, "all": sum(made.values())}


def _time_loop(device: Device, nbytes: int, chunk: int) -> float:
    """Seconds of the same calls from C++."""
    assert isinstance(device.driver, HostDriver)
    model, index = device.driver.model, device.driver.index
    base = device.driver.reserve(nbytes)
    gc.collect()
    start = time.perf_counter()
    status, handles = model.map_chunks(base, chunk, nbytes // chunk, index)
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"the C++ loop ended with status {status} after {len(handles)} chunks")
    for place, handle in enumerate(handles):
        device.driver.unmap(base + place * chunk, chunk)
        device.driver.release(handle)
    device.driver.free_address(base, nbytes)
    return seconds


def table(result: Result) -> str:
    calls = ", ".join(f"{name} {result.calls[name]:.3f}" for name in (*_COUNTED, "all"))
    verdict = "within" if result.own <= TARGET else "above"
    return "\n".join(
        [
            f"{result.bytes / (1 << 30):g} GiB in {result.chunks} chunks of {result.chunk_bytes / (1 << 20):g} MiB, "
            f"{result.segments} segments, {result.pairs} pairs; microseconds a chunk",
            f"  KVCache.commit     {result.library:8.2f}",
            f"  C++ loop           {result.loop:8.2f}",
            f"  the library's own  {result.own:8.2f}   from {result.own_lowest:.2f} to {result.own_highest:.2f}, "
            f"{verdict} the target of {TARGET:g}",
            f"  ratio              {result.ratio:8.2f}",
            f"driver calls a chunk: {calls}",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=64, help="addresses to map (default: %(default)s)")
    parser.add_argument("--chunk-mib", type=int, default=64, help="size of a chunk (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=32, help="each has a K and a V segment (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=25, help="alternating pairs of runs (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = parser.parse_args(arguments)
    if min(options.gib, options.chunk_mib, options.layers, options.pairs) < 1:
        parser.error("every number must be at least 1")
    try:
        result = measure(options.gib << 30, options.chunk_mib << 20, options.layers, options.pairs)
    except ValueError as error:
        parser.error(str(error))
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    described = {"device": "host", "times": "microseconds a chunk", "machine": machine, **asdict(result)}
    print(json.dumps(described, indent=2) if options.json else table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
