"""The demo: a whole start-up on real input, serving far beyond what backed the capture, and the proof."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vmm_kv.budget import BudgetError, exactly, readable
from vmm_kv.cache import KVCache
from vmm_kv.demo.config import ModelConfig
from vmm_kv.demo.engine import Engine, EngineConfig, Served
from vmm_kv.demo.model import Decoder
from vmm_kv.demo.requests import Request, read_text, requests_from
from vmm_kv.device import Device, open_device, open_host
from vmm_kv.layout import TensorSpec
from vmm_kv.report import StartupReport
from vmm_kv.startup import Startup

SERVING_MARGIN = 4 << 20
"""Bytes of headroom beside the measured transient: sampling and the engine's small buffers."""
_BEYOND = 11
"""Serving writes about this many times the blocks that backed the capture."""

Tell = Callable[[str, int, int], None]
"""Hears (phase, done, in all) while the demo works."""
OnStep = Callable[[Engine], None]


@dataclass(frozen=True)
class DemoOptions:
    """`config` and `prompts` None: the bundled ones. `backing`: `"prefix"` or `"alias"`."""

    device: str = "host:2GiB"
    backing: str = "prefix"
    config: Path | None = None
    prompts: Path | None = None
    utilization: float = 0.9


@dataclass(frozen=True)
class DemoResult:
    """What the run measured and proved. Bytes, blocks and seconds."""

    device: str
    device_name: str
    """The vendor's name of it."""
    emulated: bool
    """The driver was an emulation: the run says nothing about a GPU."""
    backing: str
    capacity_blocks: int
    profile_blocks: int
    final_blocks: int
    distinct_blocks_written: int
    highest_block_used: int
    graphs: int
    captures: int
    footprint_bytes: int
    footprint_raw_bytes: int
    requested_bytes: int
    used_bytes: int
    peak_used_bytes: int
    headroom_bytes: int
    leftover_bytes: int
    next_step_bytes: int
    bound_by: str
    addresses_stable: bool
    tokens_match: bool
    logits_match: bool
    logits_checksum: str
    distinct_tokens: int
    tokens_generated: int
    seconds: float

    def proof(self) -> tuple[tuple[bool, str], ...]:
        """Each thing that the run is to prove, and whether it did."""
        times = self.distinct_blocks_written / max(1, self.profile_blocks)
        written = (
            f"{self.distinct_blocks_written} blocks written, {times:.1f} times what backed the capture, "
            f"up to block {self.highest_block_used}"
        )
        return (
            (self.captures == self.graphs, f"{self.graphs} graphs captured, each once, before the size was known"),
            (self.distinct_blocks_written > self.profile_blocks, written),
            (self.addresses_stable, "every address is where it was when it was reserved"),
            (self.tokens_match, f"all {self.tokens_generated} tokens equal those on an ordinary cache"),
            (self.logits_match, f"so are the logits of every step (checksum {self.logits_checksum[:12]})"),
            (self.peak_used_bytes <= self.requested_bytes, f"never above the {readable(self.requested_bytes)} asked"),
        )

    @property
    def proved(self) -> bool:
        return all(good for good, _ in self.proof())

    @property
    def too_small(self) -> str | None:
        """Why this device cannot hold the proof, where it cannot."""
        if self.final_blocks - 1 > self.profile_blocks:  # block 0 is never handed out
            return None
        return (
            f"{self.device} is too small for the proof: {self.final_blocks} blocks were granted, and serving can write "
            f"no more than the {self.profile_blocks} that backed the capture. Take a larger device"
        )


@dataclass(frozen=True)
class DemoRun:
    """The result, with the report of the start-up that led to it and the seconds of each later phase."""

    result: DemoResult
    report: StartupReport
    later: dict[str, float]


@dataclass
class Started:
    """An engine whose graphs are captured, over a cache that is backed and not yet committed."""

    device: Device
    startup: Startup
    cache: KVCache
    engine: Engine
    model: Decoder
    profile_blocks: int
    addresses: tuple[int, ...]

    def addresses_stable(self) -> bool:
        """Whether every tensor, and the reservation, lies where it lay when it was reserved."""
        return self.addresses == _addresses(self.cache)


def run_demo(options: DemoOptions, tell: Tell | None = None) -> DemoRun:
    """Runs everything. Raises `ValueError` for a bad file, `BudgetError` or `OutOfPhysicalMemory` where memory does not
    suffice."""
    begin = time.perf_counter()
    tell = tell or (lambda phase, done, total: None)
    try:
        with _one_thread():
            return _run(options, tell, begin)
    except RuntimeError as error:
        if shortage := _shortage(options.device, error):
            raise shortage from error
        raise


def _shortage(device: str, error: RuntimeError) -> BudgetError | None:
    """What torch's errors come to where memory is short. The CPU's own allocator has no class for it."""
    reason = str(error).partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError):
        return BudgetError(f"{device} is too small for the demo: {reason} Take a larger device")
    if "can't allocate memory" in reason:
        return BudgetError(f"this machine has too little memory for the demo on {device}: {reason}. Take a smaller one")
    return None


@contextmanager
def _one_thread() -> Iterator[None]:
    """The operations are small: threads that wait for each other in every one crawl when a core is busy elsewhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(options: DemoOptions, tell: Tell, begin: float) -> DemoRun:
    started = start(options, tell)
    with started.cache as cache:
        report = started.startup.commit()
        requests = requests_for(started, options)
        driver = started.device.driver
        driver.peak_used(reset=True)
        mark = time.perf_counter()
        served = serve(started, cache.blocks, requests, tell)
        later = {"serve": time.perf_counter() - mark}
        peak = driver.peak_used()
        free, total = started.device.reading("served", cache.physical_bytes).free, started.device.total_bytes
        stable = started.addresses_stable()
        blocks = started.engine.blocks
        assert blocks is not None
    # After the cache is closed: on a GPU there is no room for both.
    mark = time.perf_counter()
    twin = serve_ordinary(started, report.blocks, requests, tell)
    later["same on an ordinary cache"] = time.perf_counter() - mark
    plan = report.plan
    result = DemoResult(
        device=report.device,
        device_name=started.device.properties.name,
        emulated=started.device.emulated,
        backing=report.backing,
        capacity_blocks=report.capacity,
        profile_blocks=started.profile_blocks,
        final_blocks=report.blocks,
        distinct_blocks_written=blocks.distinct_written,
        highest_block_used=blocks.highest_written,
        graphs=started.engine.graphs,
        captures=report.captures,
        footprint_bytes=report.footprint,
        footprint_raw_bytes=report.footprint_raw,
        requested_bytes=plan.requested,
        used_bytes=total - free,
        peak_used_bytes=total - free if peak is None else peak,
        headroom_bytes=report.headroom,
        leftover_bytes=plan.leftover,
        next_step_bytes=plan.next_step or 0,
        bound_by=plan.bound_by,
        addresses_stable=stable,
        tokens_match=served.tokens == twin.tokens,
        logits_match=served.checksums == twin.checksums,
        logits_checksum=hashlib.blake2b("".join(served.checksums).encode(), digest_size=16).hexdigest(),
        distinct_tokens=len({token for tokens in served.tokens for token in tokens}),
        tokens_generated=sum(map(len, served.tokens)),
        seconds=time.perf_counter() - begin,
    )
    return DemoRun(result, report, later)


def start(options: DemoOptions, tell: Tell | None = None) -> Started:
    """The start-up up to, and without, the commit."""
    tell = tell or (lambda phase, done, total: None)
    shape = ModelConfig.from_json(options.config)
    settings = _settings(shape)
    device = open_device(options.device)
    startup = Startup(
        device,
        utilization=options.utilization,
        headroom={"serving margin": SERVING_MARGIN},
        min_blocks=1 + settings.table_width,
    )
    if shape.weight_bytes > device.total_bytes:
        # Seen before they are made: on the CPU they would be, and the machine might not have the memory either.
        raise BudgetError(
            f"the model's weights take {exactly(shape.weight_bytes)}, {device.name} has {exactly(device.total_bytes)}: "
            "take a larger device or a smaller model"
        )
    tell("load", 0, 0)
    with startup.load():
        model = Decoder(shape, device.torch_device)
    cache = startup.reserve(_specs(shape, settings.block_size))
    if options.backing == "alias":
        startup.back(alias=True)
    else:
        startup.back(min(settings.profile_blocks, cache.capacity))
    addresses = _addresses(cache)
    with device.active():
        engine = Engine(model, _kv(cache, shape), device, settings)
    tell("profile", 0, 0)
    with startup.profile(), torch.no_grad():
        engine.profile()
    tell("capture", 0, 0)
    with startup.capture(), torch.no_grad():
        engine.capture()
    tell("worst step", 0, 0)
    with startup.worst_step(), torch.no_grad():
        engine.worst_step()
    return Started(device, startup, cache, engine, model, _blocks_of_memory(cache), addresses)


def requests_for(started: Started, options: DemoOptions) -> list[Request]:
    """Enough requests to write far more blocks than backed the capture."""
    settings = started.engine.config
    tokens = _BEYOND * started.profile_blocks * settings.block_size
    return requests_from(read_text(options.prompts), settings.longest, tokens)


def serve(
    started: Started, blocks: int, requests: list[Request], tell: Tell | None = None, on_step: OnStep | None = None
) -> Served:
    """Serves on the cache of `started`, its first `blocks` blocks."""
    with started.device.active():
        return _serve(started.engine, blocks, requests, "serve", tell, on_step)


def serve_ordinary(started: Started, blocks: int, requests: list[Request], tell: Tell | None = None) -> Served:
    """Serves the same with the same engine on `torch.zeros` caches of `blocks` blocks."""
    device = _reference_device(started.device)
    where = device.torch_device
    kv = [torch.zeros((blocks, *t.shape[1:]), dtype=t.dtype, device=where) for t in started.engine.kv]
    engine = Engine(started.model, kv, device, started.engine.config)
    with device.active(), torch.no_grad():
        engine.capture()
        return _serve(engine, blocks, requests, "same on an ordinary cache", tell, None)


def _reference_device(device: Device) -> Device:
    """A GPU serves for both. On the CPU a budget of its own: the first one's is the KV cache's.

    A host device beside an emulated one, of which there is one at a time.
    """
    return device if device.torch_device.type != "cpu" else open_host(device.total_bytes)


def _serve(
    engine: Engine, blocks: int, requests: list[Request], phase: str, tell: Tell | None, on_step: OnStep | None
) -> Served:
    engine.open(blocks)
    total = sum(request.new_tokens for request in requests)
    finished = 0

    def step(engine: Engine) -> None:
        nonlocal finished
        finished += len(engine.running)
        if tell:
            tell(phase, min(finished, total), total)
        if on_step:
            on_step(engine)

    with torch.no_grad():
        return engine.serve(requests, step)


def _settings(shape: ModelConfig) -> EngineConfig:
    return EngineConfig(longest=min(EngineConfig.longest, shape.max_position_embeddings))


def _specs(shape: ModelConfig, block_size: int) -> list[TensorSpec]:
    """One block-first tensor a layer, keys and values side by side in a block."""
    page = (None, 2, block_size, shape.num_key_value_heads, shape.head_dim)
    return [TensorSpec(f"layers.{i}.kv", page, shape.dtype) for i in range(shape.num_hidden_layers)]


def _kv(cache: KVCache, shape: ModelConfig) -> list[Tensor]:
    return [cache.tensors[f"layers.{i}.kv"] for i in range(shape.num_hidden_layers)]


def _blocks_of_memory(cache: KVCache) -> int:
    """The blocks that the memory behind the cache would hold: under an alias fewer than there are usable ids."""
    return cache.physical_bytes // sum(placement.spec.block_bytes for placement in cache.layout.placements)


def _addresses(cache: KVCache) -> tuple[int, ...]:
    return (cache.base, *(tensor.data_ptr() for tensor in cache.tensors.values()))
