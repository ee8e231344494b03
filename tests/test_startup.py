"""The start-up of an engine on the host device: what it reads, how it sizes, what it grants, and what it reports."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from vmm_kv._native import DeviceModel
from vmm_kv.budget import BudgetError
from vmm_kv.cache import KVCache
from vmm_kv.device import Device, Graph, open_host
from vmm_kv.driver import Quirks
from vmm_kv.driver.host import HostDriver
from vmm_kv.errors import DriverError, LayoutError, OutOfPhysicalMemory, StateError
from vmm_kv.host import HostFramework
from vmm_kv.layout import TensorSpec
from vmm_kv.report import StartupReport
from vmm_kv.startup import Startup
from vmm_kv.state import State

G = 4096
MIB = 1 << 20
TOTAL = 64 * MIB
WEIGHTS, POOL, STEP = 8 * MIB, 2 * MIB, 4 * MIB
KV = TensorSpec("kv", (2, None, 16, 64), torch.bfloat16)
"""2 KiB a block in each of two segments: half a granule."""
BLOCK = KV.block_bytes
ODD = TensorSpec("odd", (3, None, 7, 100), torch.bfloat16)
BESIDE = TensorSpec("beside", (None, 3, 700), torch.bfloat16)
OUT_OF_MEMORY = 2


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    """A start-up collects garbage at each reading; what torch has imported need not be walked each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def device() -> Device:
    device = open_host(TOTAL, granule=G)
    model(device).poison = True
    return device


def model(device: Device) -> DeviceModel:
    assert isinstance(device.driver, HostDriver)
    return device.driver.model


def take(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)


def allocate(device: Device, nbytes: int) -> torch.Tensor:
    with device.active():
        return take(nbytes)


@dataclass
class Engine:
    """Weights, graphs that write a block, and a worst-case step; everything but the commit."""

    device: Device
    startup: Startup
    caches: list[KVCache]
    weights: torch.Tensor
    where: torch.Tensor = field(default_factory=lambda: torch.tensor([0]))
    graphs: list[Graph] = field(default_factory=list)

    def commit(self) -> StartupReport:
        return self.startup.commit()


def boot(
    device: Device,
    *,
    back: int | str | None = 4,
    specs: Sequence[TensorSpec] = (KV,),
    capacity: int | None = None,
    worst: bool = True,
    **options: Any,
) -> Engine:
    startup = Startup(device, **options)
    with startup.load():
        weights = take(WEIGHTS)
    caches = [startup.reserve([spec], capacity) for spec in specs]
    if back is not None:
        startup.back(None if back == "alias" else int(back), alias=back == "alias")
    with startup.profile():
        take(3 * MIB)
    engine = Engine(device, startup, caches, weights)
    if back is not None:
        pool = device.graph_pool()
        row = torch.ones(()).expand(caches[0].tensors[specs[0].name][:, :1].shape).to(torch.bfloat16)
        with startup.capture():
            for factor in (3, 2, 1):
                graph = device.new_graph()
                with device.capture(graph, pool):
                    caches[0].tensors[specs[0].name].index_copy_(1, engine.where, row * factor)
                engine.graphs.append(graph)
    if worst:
        with startup.worst_step():
            take(STEP)
    return engine


def test_every_term_of_a_start_up_with_a_prefix_backing(device: Device) -> None:
    engine = boot(device, headroom={"safety": MIB, "encoder": 512 << 10})
    backed = engine.caches[0].mapped_bytes
    report = engine.commit()
    plan, requested = report.plan, -(-TOTAL * 9 // 10)
    assert plan.terms.total == TOTAL
    assert plan.requested == requested
    assert plan.own_parts == (("context", 0), ("allocator", WEIGHTS + POOL), ("other", 0))
    assert plan.terms.headroom == (("transient", STEP), ("safety", MIB), ("encoder", 512 << 10))
    assert report.headroom == STEP + MIB + (512 << 10)
    assert plan.share == plan.kv_bytes == requested - WEIGHTS - POOL - report.headroom
    assert plan.terms.in_place == backed >= 4 * BLOCK
    assert (plan.status, plan.bound_by) == ("ok", "request")
    assert report.blocks == report.planned_blocks == plan.blocks == engine.caches[0].blocks
    assert plan.cost == report.mapped_bytes == engine.caches[0].physical_bytes
    assert [reading.label for reading in report.readings] == [
        *("start", "loaded", "reserving", "profiled", "before capture", "captured", "sized", "committed"),
    ]
    assert list(report.phases) == ["load", "reserve", "back", "profile", "capture", "worst step", "commit"]
    assert all(seconds >= 0 for seconds in report.phases.values())
    assert (report.backing, report.profile_blocks, report.captures) == ("prefix", 4, 3)
    assert report.footprint == report.footprint_raw == POOL
    assert report.plan.terms.footprint == report.plan.terms.graph_pool == POOL
    assert report.reserved_bytes == engine.caches[0].reserved_bytes
    assert report.device == device.name


@pytest.mark.parametrize("back", [None, 4, 64, "alias"])
def test_what_is_used_after_the_commit_and_in_the_worst_step_stays_within_the_request(
    device: Device, back: int | str | None
) -> None:
    engine = boot(device, back=back)
    report = engine.commit()
    requested = report.plan.requested
    used = model(device).used(0)
    assert used + STEP <= requested
    assert requested - used - STEP < 2 * G  # and what was asked for is used
    assert engine.caches[0].state is State.COMMITTED
    model(device).reset_peak(0)
    step = allocate(device, STEP)
    assert model(device).peak_used(0) == used + step.nbytes <= requested
    assert report.backing == ("none" if back is None else "alias" if back == "alias" else "prefix")


@pytest.mark.parametrize("back", [4, "alias"])
def test_graphs_replay_on_blocks_that_only_the_commit_backed(device: Device, back: int | str) -> None:
    engine = boot(device, back=back)
    (cache,) = engine.caches
    address = cache.tensors["kv"].data_ptr()
    blocks = engine.commit().blocks
    assert cache.tensors["kv"].data_ptr() == address  # invariant 1
    assert cache.view("kv").eq(0).all()
    for block, graph, value in zip((blocks - 1, blocks // 2, 0), engine.graphs, (3, 2, 1), strict=True):
        engine.where.fill_(block)
        graph.replay()
        assert cache.view("kv")[:, block].eq(value).all()
    assert cache.view("kv").count_nonzero() == 3 * BLOCK // 2


def test_both_backings_come_to_the_same_count() -> None:
    reports = [boot(open_host(TOTAL, granule=G), back=back).commit() for back in (None, 4, "alias")]
    assert reports[1].blocks == reports[2].blocks
    assert reports[0].blocks > reports[1].blocks  # no graphs, no pool
    assert reports[2].plan.terms.in_place == 0
    assert reports[2].plan.terms.kv == 64 * G  # the alias chunk counts once
    assert reports[2].profile_blocks == reports[2].capacity


@pytest.mark.parametrize("spec", [KV, ODD])
@pytest.mark.parametrize("back", [1, 33, "alias"])
@pytest.mark.parametrize("utilization", [0.31, 0.5, 0.777, 1.0])
def test_what_is_left_over_is_less_than_one_more_block(
    device: Device, spec: TensorSpec, back: int | str, utilization: float
) -> None:
    engine = boot(device, specs=[spec], back=back, utilization=utilization)
    report = engine.commit()
    plan = report.plan
    assert plan.next_step is not None and 0 <= plan.leftover < plan.next_step
    assert plan.own + report.headroom + plan.cost <= plan.requested
    assert model(device).used(0) + report.headroom <= plan.requested
    assert plan.cost == engine.caches[0].mapped_bytes


def test_the_capacity_is_what_could_be_there_after_the_weights(device: Device) -> None:
    startup = Startup(device, utilization=0.5)
    with startup.load():
        weights = take(WEIGHTS)
    cache = startup.reserve([KV])
    assert cache.capacity == (TOTAL // 2 - weights.nbytes) // BLOCK
    assert model(device).used(0) == weights.nbytes  # addresses are no memory
    report = startup.commit()
    assert report.capacity == report.blocks == cache.capacity


def test_no_memory_for_a_cache_after_the_weights_is_an_error_with_the_figures(device: Device) -> None:
    startup = Startup(device, utilization=0.1)
    with startup.load():
        weights = take(WEIGHTS)
    with pytest.raises(BudgetError, match=rf"this process holds .*\({weights.nbytes} bytes\)"):
        startup.reserve([KV])
    assert startup.caches == []


def test_a_small_capacity_binds(device: Device) -> None:
    report = boot(device, capacity=100).commit()
    assert (report.blocks, report.capacity, report.plan.bound_by) == (100, 100, "capacity")
    assert report.plan.next_step is None
    assert report.plan.leftover > 0
    assert "reserve more than 100 blocks" in report.table()


def test_free_memory_binds_where_a_neighbour_was_there_before(device: Device) -> None:
    model(device).charge(0, 40 * MIB)
    engine = boot(device)
    report = engine.commit()
    assert report.plan.bound_by == "free memory"
    assert report.plan.kv_bytes == report.plan.room < report.plan.share
    assert report.plan.next_step is not None and report.plan.leftover < report.plan.next_step
    assert model(device).used(0) + STEP <= TOTAL


def test_a_target_and_a_draft_share_one_budget_and_one_count(device: Device) -> None:
    draft = TensorSpec("draft", (None, 2, 16, 24), torch.bfloat16)
    engine = boot(device, specs=[KV, draft, ODD])
    report = engine.commit()
    assert {cache.blocks for cache in engine.caches} == {report.blocks}
    assert report.capacity == min(cache.capacity for cache in engine.caches)
    assert report.mapped_bytes == sum(cache.physical_bytes for cache in engine.caches) == report.plan.cost
    assert report.plan.next_step is not None and 0 <= report.plan.leftover < report.plan.next_step
    assert model(device).used(0) + report.headroom <= report.plan.requested
    for cache in engine.caches:
        assert all(cache.view(name).eq(0).all() for name in cache.tensors)


def test_explicit_bytes_are_an_upper_bound_on_the_cache_alone(device: Device) -> None:
    engine = boot(device, kv_bytes=5 * MIB + 100, capacity=2000)
    report = engine.commit()
    assert report.blocks == 5 * MIB // BLOCK
    assert report.plan.bound_by == "explicit bytes"
    assert engine.caches[0].physical_bytes == 5 * MIB <= report.plan.kv_bytes == 5 * MIB + 100


def test_explicit_blocks_are_granted_exactly(device: Device) -> None:
    engine = boot(device, blocks=77)
    report = engine.commit()
    assert (report.blocks, report.capacity, report.plan.bound_by) == (77, 77, "explicit blocks")
    assert engine.caches[0].view("kv").shape == (2, 77, 16, 64)


@pytest.mark.parametrize("size", ["blocks", "bytes"])
def test_an_explicit_request_that_does_not_fit_is_refused_and_nothing_changes(device: Device, size: str) -> None:
    engine = boot(device, blocks=TOTAL // BLOCK) if size == "blocks" else boot(device, kv_bytes=TOTAL)
    used = model(device).used(0)
    with pytest.raises(BudgetError, match="the explicit request needs") as caught:
        engine.commit()
    assert caught.value.plan is not None and caught.value.plan.status == "refused"
    assert model(device).used(0) == used
    assert engine.caches[0].state is State.BACKED


def test_too_few_blocks_for_a_request_itemises_where_the_memory_went(device: Device) -> None:
    engine = boot(device, utilization=0.3, min_blocks=2000, headroom={"safety": MIB}, capacity=4000)
    with pytest.raises(BudgetError) as caught:
        engine.commit()
    text, plan = str(caught.value), caught.value.plan
    assert plan is not None and plan.status == "too_small"
    assert f"comes to {plan.blocks} blocks, one longest request needs 2000" in text
    assert "raise utilization to" in text
    names = ("requested", "context", "allocator", "other", "headroom transient", "headroom safety", "share", "room")
    for name in names:
        assert f" {name} " in text
    for size in (WEIGHTS + POOL, STEP, MIB):
        assert f"({size} bytes)" in text
    assert engine.caches[0].state is State.BACKED
    assert engine.startup.report is None


def test_no_blocks_at_all_is_an_error(device: Device) -> None:
    with pytest.raises(BudgetError, match="comes to 0 blocks, one longest request needs 1"):
        boot(device, back="alias", capacity=100, utilization=0.1).commit()
    with pytest.raises(BudgetError, match="comes to 0 blocks"):
        boot(open_host(TOTAL), back=None, kv_bytes=1).commit()


def test_a_prefix_above_the_budget_is_kept_and_told(device: Device) -> None:
    engine = boot(device, back=600, kv_bytes=MIB, capacity=1000)
    report = engine.commit()
    assert report.plan.status == "over_budget"
    assert report.blocks == 600 == report.profile_blocks
    assert report.plan.excess == 600 * BLOCK - MIB == sum(size for _, size in report.plan.excess_items)
    assert dict(report.plan.excess_items)["graph pool"] > 0
    assert "shrink the cache" in report.table() and "excess" in report.table()
    with pytest.raises(BudgetError, match="hold more than the budget allows"):
        engine.commit()
    assert engine.caches[0].blocks == 600


def test_a_second_commit_with_nothing_changed_changes_nothing(device: Device) -> None:
    engine = boot(device)
    first = engine.commit()
    calls = model(device).calls()
    second = engine.commit()
    assert second.blocks == first.blocks
    assert {name for name, count in model(device).calls().items() if count != calls[name]} == {"mem_info"}
    assert [r.label for r in second.readings] == [r.label for r in first.readings]
    assert second.plan.terms.in_place == first.plan.cost
    assert (second.profile_blocks, second.captures) == (4, 3)


@pytest.mark.parametrize("worst", [True, False])
def test_a_second_commit_grows_by_what_was_freed(device: Device, worst: bool) -> None:
    engine = boot(device, worst=worst, capacity=TOTAL // BLOCK)
    scratch = allocate(device, 6 * MIB)
    first = engine.commit()
    (cache,) = engine.caches
    cache.view("kv").fill_(5)
    del scratch
    second = engine.commit()
    assert second.blocks == first.blocks + 6 * MIB // BLOCK == cache.blocks
    assert second.headroom == first.headroom
    assert cache.view("kv")[:, : first.blocks].eq(5).all()
    assert cache.view("kv")[:, first.blocks :].eq(0).all()
    assert model(device).used(0) + second.headroom <= second.plan.requested


@pytest.mark.parametrize("worst", [True, False])
def test_a_second_commit_after_a_late_consumer_came_raises_with_the_excess(device: Device, worst: bool) -> None:
    engine = boot(device, worst=worst)
    first = engine.commit()
    slack = first.plan.leftover
    late = allocate(device, 3 * MIB)
    with pytest.raises(BudgetError, match="hold more than the budget allows now") as caught:
        engine.commit()
    plan = caught.value.plan
    assert plan is not None and plan.status == "over_budget"
    assert plan.excess == late.nbytes - slack
    assert f"({plan.excess} bytes)" in str(caught.value)
    assert engine.caches[0].blocks == first.blocks
    assert engine.startup.report is first
    del late
    assert engine.commit().blocks == first.blocks


def test_the_excess_comes_with_how_far_to_shrink(device: Device) -> None:
    """Whole chunks stay mapped, so the count at which a commit succeeds may be below the one that was planned."""
    engine = boot(device, capacity=TOTAL // BLOCK)
    first = engine.commit()
    (cache,) = engine.caches
    cache.commit(first.blocks + 900)  # beyond the share: nobody but the device's memory stops that
    with pytest.raises(BudgetError, match=r"shrink to at most (\d+) blocks first") as caught:
        engine.commit()
    (fits,) = map(int, re.findall(r"shrink to at most (\d+) blocks", str(caught.value)))
    assert 0 < fits <= first.blocks
    assert f"{cache.blocks} blocks are backed and stay" in str(caught.value)
    cache.shrink(fits + 1)
    with pytest.raises(BudgetError, match="hold more than the budget allows"):
        engine.commit()
    cache.shrink(fits)
    assert engine.commit().blocks >= fits


def test_a_late_consumer_that_is_known_before_the_commit_is_taken_off_the_cache(device: Device) -> None:
    before = boot(open_host(TOTAL, granule=G)).commit()
    engine = boot(device)
    late = allocate(device, 3 * MIB)
    report = engine.commit()
    assert report.headroom == before.headroom == STEP  # the step's own peak, whatever came after it
    assert report.blocks == before.blocks - late.nbytes // BLOCK


@pytest.mark.parametrize("back", [None, 4, "alias"])
@pytest.mark.parametrize("failures", [1, 2])
def test_memory_that_went_between_the_reading_and_the_create_is_tried_again_smaller(
    device: Device, back: int | str | None, failures: int
) -> None:
    engine = boot(device, back=back)
    for nth in range(1, failures + 1):
        model(device).fail("create", nth, OUT_OF_MEMORY)
    report = engine.commit()
    counts = [attempt.blocks for attempt in report.tries]
    assert len(counts) == failures + 1
    assert counts == sorted(set(counts), reverse=True)
    assert counts[0] == report.planned_blocks == report.plan.blocks
    assert counts[-1] == report.blocks == engine.caches[0].blocks
    assert all("create on host:0 failed: out of memory" in str(attempt.error) for attempt in report.tries[:-1])
    assert report.tries[-1].error is None
    table = report.table()
    assert f"{counts[0]} planned, {counts[-1]} granted" in table
    assert f"{counts[-1]} blocks: granted" in table
    assert model(device).used(0) == WEIGHTS + (0 if back is None else POOL) + engine.caches[0].physical_bytes
    assert engine.commit().blocks == counts[0]  # once the cause is gone it grows


@pytest.mark.parametrize("back", [4, "alias"])
def test_after_three_tries_it_gives_up_and_the_backing_stays(device: Device, back: int | str) -> None:
    engine = boot(device, back=back)
    used, tables = model(device).used(0), [cache.chunk_table() for cache in engine.caches]
    for nth in (1, 2, 3, 4):
        model(device).fail("create", nth, OUT_OF_MEMORY)
    creates = model(device).calls()["create"]
    with pytest.raises(OutOfPhysicalMemory):
        engine.commit()
    assert model(device).calls()["create"] == creates + 3
    assert model(device).used(0) == used
    assert [cache.chunk_table() for cache in engine.caches] == tables
    assert engine.caches[0].state is State.BACKED
    model(device).clear_faults()
    report = engine.commit()
    assert len(report.tries) == 1 and report.blocks == report.planned_blocks


def test_a_neighbour_that_takes_memory_meanwhile_is_seen_by_the_next_try(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = boot(device)
    create = device.driver.create
    taken: list[int] = []

    def create_after_the_neighbour(size: int) -> int:
        if not taken:
            taken.append(model(device).budget(0) - model(device).used(0) - 20 * MIB)
            assert model(device).charge(0, taken[0]) == 0
        return create(size)

    monkeypatch.setattr(device.driver, "create", create_after_the_neighbour)
    report = engine.commit()
    assert len(report.tries) == 2
    assert dict(report.plan.own_parts)["other"] == taken[0]
    assert report.blocks == report.plan.blocks < report.planned_blocks
    assert model(device).used(0) + STEP <= report.plan.requested


def test_explicit_blocks_are_not_tried_smaller(device: Device) -> None:
    engine = boot(device, blocks=500)
    model(device).fail("create", 2, OUT_OF_MEMORY)
    used = model(device).used(0)
    with pytest.raises(OutOfPhysicalMemory):
        engine.commit()
    assert model(device).used(0) == used
    assert engine.commit().blocks == 500


def test_a_try_is_never_below_what_one_request_needs(device: Device) -> None:
    probe = boot(open_host(TOTAL, granule=G)).commit().blocks
    engine = boot(device, min_blocks=probe)
    model(device).fail("create", 1, OUT_OF_MEMORY)
    with pytest.raises(OutOfPhysicalMemory):
        engine.commit()
    assert engine.commit().blocks == probe


def test_no_cache_is_mapped_before_there_is_memory_for_all(device: Device) -> None:
    engine = boot(device, specs=[KV, ODD])
    target, draft = engine.caches
    probe = boot(open_host(TOTAL, granule=G), specs=[KV, ODD])
    calls = model(probe.device).calls()["create"]
    probe.commit()
    model(device).fail("create", model(probe.device).calls()["create"] - calls, OUT_OF_MEMORY)  # the draft's last
    maps = model(device).calls()["map"]
    listener = _Recorder(lambda: model(device).calls()["map"] - maps)
    target.add_listener(listener)
    report = engine.commit()
    assert len(report.tries) == 2
    assert target.blocks == draft.blocks == report.blocks
    assert len(listener.seen) == 1  # one map of the target in all: none for the try that failed
    assert report.mapped_bytes == target.physical_bytes + draft.physical_bytes


class _Recorder:
    def __init__(self, look: Any) -> None:
        self.look = look
        self.seen: list[Any] = []

    def before_unmap(self, spans: Any, generation: int) -> None:
        raise AssertionError("nothing is unmapped")

    def after_map(self, spans: Any, generation: int) -> None:
        self.seen.append(self.look())


def test_a_map_that_fails_for_the_second_cache_leaves_no_memory_behind_and_is_made_up_for(device: Device) -> None:
    engine = boot(device, specs=[KV, ODD])
    target, draft = engine.caches
    before = draft.chunk_table()
    model(device).fail("set_access", 2, 999)
    with pytest.raises(DriverError, match="set_access"):
        engine.commit()
    assert draft.chunk_table() == before and draft.state is State.BACKED
    assert model(device).used(0) == WEIGHTS + POOL + target.physical_bytes + draft.mapped_bytes
    report = engine.commit()
    assert target.blocks == draft.blocks == report.blocks


def test_the_report_as_json_is_the_report(device: Device) -> None:
    report = boot(device, headroom={"safety": MIB}).commit()
    loaded = json.loads(report.to_json())
    assert loaded == json.loads(json.dumps(report.to_dict()))
    assert loaded["blocks"] == report.blocks
    assert loaded["plan"]["terms"]["headroom"] == [["transient", STEP], ["safety", MIB]]
    assert loaded["readings"][-1]["label"] == "committed"
    assert (loaded["footprint"], loaded["headroom"]) == (report.footprint, STEP + MIB)
    assert loaded["tries"] == [{"blocks": report.blocks, "error": None}]
    assert loaded["driver_calls"]["create"] == model(device).calls()["create"] > 0


def test_the_table_names_every_phase_and_term(device: Device) -> None:
    report = boot(device, headroom={"safety": MIB}).commit()
    table = report.table()
    for words in (
        *report.phases,
        *(name for name, _ in report.plan.itemised()),
        f"4 while capturing, {report.blocks} planned, {report.blocks} granted, {report.capacity} reserved",
        "start-up on host:0, prefix backing",
        "captures kept (in own)",
        "bound by request (ok)",
        "3 graphs captured",
    ):
        assert words in table


def test_captures_and_calls_of_before_are_not_counted(device: Device) -> None:
    boot(device, kv_bytes=MIB).commit()
    calls = model(device).calls()
    second = boot(device, kv_bytes=MIB).commit()
    assert second.captures == 3
    assert second.driver_calls["create"] == model(device).calls()["create"] - calls["create"]


def test_what_came_before_the_start_up_is_charged_from_the_engines_own_first_reading(device: Device) -> None:
    first = device.reading("before communicators")
    model(device).charge(0, 3 * MIB)
    report = boot(device, first=first).commit()
    assert report.readings[0] is first
    assert dict(report.plan.own_parts)["other"] == 3 * MIB


def test_a_step_that_was_not_measured_is_told(device: Device) -> None:
    report = boot(device, worst=False).commit()
    assert report.headroom == 0
    assert any("transient not charged" in note for note in report.plan.notes)


def test_the_largest_of_several_steps_is_kept_free(device: Device) -> None:
    engine = boot(device)
    for size in (6 * MIB, MIB):
        with engine.startup.worst_step():
            take(size)
    assert engine.commit().headroom == 6 * MIB


def test_a_transient_in_the_headroom_as_well_is_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="transient is given twice"):
        boot(device, headroom={"transient": MIB}).commit()
    assert boot(open_host(TOTAL), headroom={"transient": MIB}, worst=False).commit().headroom == MIB


def test_calls_out_of_order_are_refused(device: Device) -> None:
    startup = Startup(device)
    for call in (startup.commit, lambda: startup.back(1)):
        with pytest.raises(StateError, match="before any cache was reserved"):
            call()
    with pytest.raises(ValueError, match="another device"):
        startup.add(KVCache.reserve(open_host(TOTAL), [KV], 4))
    with pytest.raises(ValueError, match="exactly one of"):
        Startup(device, utilization=0.5, blocks=3)
    with pytest.raises(ValueError, match="blocks must be above 0"):
        Startup(device, blocks=0)


def test_nothing_is_remapped_inside_a_capture_phase(device: Device) -> None:
    """Invariant 7."""
    engine = boot(device)
    calls: dict[str, int] = {}
    with pytest.raises(StateError, match="while a graph is being captured"), engine.startup.capture():
        calls = model(device).calls()
        engine.caches[0].back(10)
    changed = {name for name, count in model(device).calls().items() if count != calls[name]}
    assert changed <= {"mem_info"}
    assert engine.commit().captures == 3


def test_a_cache_with_the_engines_own_layout_takes_part(device: Device) -> None:
    engine = boot(device)
    own = engine.startup.add(KVCache.reserve(device, [BESIDE], 200, outermost="block"))
    report = engine.commit()
    assert own.blocks == report.blocks == 200 == engine.caches[0].blocks


def test_backing_several_caches_goes_on_where_it_failed(device: Device) -> None:
    startup = Startup(device)
    first, second = startup.reserve([KV], 64), startup.reserve([ODD], 64)
    model(device).fail("create", 2, 999)
    with pytest.raises(DriverError):
        startup.back(alias=True)
    assert (first.state, second.state) == (State.BACKED, State.RESERVED)
    startup.back(alias=True)
    assert startup.commit().backing == "alias"


@pytest.mark.parametrize("label", ["sized", "committed"])
def test_a_first_reading_of_any_name_is_kept(device: Device, label: str) -> None:
    startup = Startup(device, first=device.reading(label))
    startup.reserve([KV], 64)
    assert startup.commit().readings[0].label == label


def test_what_cannot_be_started_is_refused_at_once(device: Device) -> None:
    with pytest.raises(LayoutError, match="at least one tensor"):
        Startup(device).reserve([])
    with pytest.raises(ValueError, match="'sampler' must not be negative"):
        Startup(device, headroom={"sampler": -1})
    for wrong in ({"headroom": {"sampler": 0.5}}, {"blocks": 2.5}, {"kv_bytes": 1e6}):
        with pytest.raises(TypeError):
            Startup(device, **wrong)
    startup = Startup(device)
    cache = startup.reserve([KV], 64)
    with pytest.raises(ValueError, match="was added before"):
        startup.add(cache)
    cache.close()
    with pytest.raises(StateError, match="commit with a cache that is closed"):
        startup.commit()


def test_numbers_of_other_types_become_plain_ones(device: Device) -> None:
    startup = Startup(device, blocks=np.int64(8))
    cache = startup.reserve([KV], np.int32(64))
    startup.commit()
    assert (cache.blocks, cache.capacity) == (8, 64)
    assert type(cache.capacity) is int
    share = Startup(device, utilization=np.float32(0.9))
    share.add(KVCache.reserve(device, [ODD], 64))
    assert json.loads(share.commit().to_json())["plan"]["request"]["utilization"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"min_blocks": 0}, ValueError, "min_blocks must be at least 1, got 0"),
        ({"min_blocks": 2.0}, TypeError, "min_blocks must be a whole number, got 2.0"),
        ({"min_blocks": 9, "blocks": 8}, ValueError, "blocks=8 is below min_blocks=9"),
        ({"headroom": 4096}, TypeError, "headroom is a mapping of names to bytes.*got 4096"),
        ({"headroom": [("sampler", 1)]}, TypeError, "headroom is a mapping"),
        ({"headroom": {"sampler": "1"}}, TypeError, "headroom 'sampler' must be a whole number, got '1'"),
    ],
)
def test_a_wrong_argument_is_named_at_once(
    device: Device, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    calls = model(device).calls()
    with pytest.raises(error, match=said):
        Startup(device, **options)
    assert model(device).calls() == calls  # before the first reading


def test_what_is_no_device_is_told_how_to_get_one() -> None:
    with pytest.raises(TypeError, match=r"Startup takes a Device, which open_device\(name\) gives; got 'host:1GiB'"):
        Startup("host:1GiB")  # type: ignore[arg-type]


def test_the_cache_of_another_device_is_told_apart(device: Device) -> None:
    other = open_host(TOTAL, granule=G)  # the same name, the same size
    with pytest.raises(ValueError, match="another device") as caught:
        Startup(device).add(KVCache.reserve(other, [KV], 4))
    assert f"{id(other):#x}" in str(caught.value) and f"{id(device):#x}" in str(caught.value)


@pytest.mark.parametrize("request_", [{"utilization": 0.5}, {"kv_bytes": TOTAL // 4}])
def test_memory_for_too_few_blocks_is_told_when_addresses_are_reserved(
    device: Device, request_: dict[str, Any]
) -> None:
    """The capacity came from memory: to reserve more is no advice."""
    need = TOTAL // BLOCK
    with pytest.raises(BudgetError, match=f"one longest request needs {need}: they take") as caught:
        Startup(device, min_blocks=need, **request_).reserve([KV])
    assert f"({need * BLOCK} bytes)" in str(caught.value)
    assert "reserve more" not in str(caught.value)


# The quirk memory_with_addresses: spares are held, and are used again


def keeping(quirk: bool) -> Device:
    """A device that gives memory back only with the addresses it was mapped at (B4), or one that behaves."""
    driver = HostDriver(DeviceModel([TOTAL], G), quirks=Quirks(memory_with_addresses=quirk))
    driver.model.quirk_memory_with_addresses = quirk
    return Device(driver, torch.device("cpu"), HostFramework(driver.model))


@pytest.mark.parametrize("back", [4, None])
def test_a_commit_after_a_shrink_comes_to_the_same_count_with_spares(back: int | None) -> None:
    counts = []
    for quirk in (False, True):
        device = keeping(quirk)
        startup = Startup(device, utilization=1.0)
        with startup.load():
            weights = take(WEIGHTS)
        cache = startup.reserve([KV], chunk=G)
        if back:
            startup.back(back)
        first = startup.commit()
        cache.shrink(first.blocks // 4)
        assert bool(cache.spare_bytes) is quirk
        again = startup.commit()
        terms = again.plan.terms
        assert again.plan.status == "ok" and terms.in_place <= terms.kv
        assert terms.in_place == (first.plan.cost if quirk else -(-first.blocks // 4) * BLOCK // (2 * G) * 2 * G)
        assert cache.spare_bytes == 0 and model(device).used(0) == weights.nbytes + cache.mapped_bytes
        counts.append((first.blocks, again.blocks))
    assert counts[0] == counts[1] and counts[0][0] == counts[0][1]


def test_an_alias_chunk_that_becomes_a_spare_is_charged() -> None:
    device = keeping(True)
    startup = Startup(device, utilization=0.5)
    cache = startup.reserve([KV], chunk=256 * G)
    startup.back(alias=True)
    report = startup.commit()
    assert cache.spare_bytes == 256 * G
    assert report.plan.cost == cache.physical_bytes == model(device).used(0) <= report.plan.requested
    assert startup.commit().plan.status == "ok"
    assert model(device).used(0) <= report.plan.requested


def test_one_caches_spares_are_not_anothers() -> None:
    device = keeping(True)
    startup = Startup(device, utilization=1.0)
    one, two = startup.reserve([KV], chunk=G), startup.reserve([KV], chunk=G)
    first = startup.commit()
    one.shrink(first.blocks // 4)
    two.shrink(0)  # all of it returns
    taken = allocate(device, 20 * MIB)
    again = startup.commit()
    assert len(again.tries) == 1 and one.blocks == two.blocks == again.blocks < first.blocks
    assert again.plan.cost == one.physical_bytes + two.physical_bytes <= TOTAL - taken.nbytes


def test_a_faulted_cache_is_told_before_anything_is_sized(monkeypatch: pytest.MonkeyPatch) -> None:
    startup = Startup(open_host(64 << 20), blocks=4)
    cache = startup.reserve([ODD], 4)
    monkeypatch.setattr(cache, "_state", State.FAULTED)
    with pytest.raises(StateError, match="commit with a cache that is faulted"):
        startup.commit()
