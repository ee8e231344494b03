"""A start-up that reproduces the size of an earlier one from its saved report, or says why it cannot."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vmm_kv._native import DeviceModel
from vmm_kv.budget import BudgetError, exactly
from vmm_kv.device import Device, open_host
from vmm_kv.driver.host import HostDriver
from vmm_kv.estimate import Descriptor, StartupPlan
from vmm_kv.fingerprint import Difference, Fingerprint, PinError
from vmm_kv.layout import TensorSpec
from vmm_kv.report import StartupReport
from vmm_kv.startup import Startup

G, MIB = 4096, 1 << 20
TOTAL, WEIGHTS, POOL, STEP = 64 * MIB, 8 * MIB, 2 * MIB, 4 * MIB
KV = TensorSpec("kv", (2, None, 16, 64), torch.bfloat16)
ODD = TensorSpec("odd", (3, None, 7, 100), torch.bfloat16)
MODEL = {"hidden_size": 64, "rope": {"theta": 10000.0}, "dtype": torch.bfloat16}
LADDER = [Descriptor("full", size) for size in (4, 2, 1)]


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()


def model(device: Device) -> DeviceModel:
    assert isinstance(device.driver, HostDriver)
    return device.driver.model


def take(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)


class Boot:
    """One start-up, up to the commit."""

    def __init__(
        self,
        device: Device | None = None,
        *,
        specs: tuple[TensorSpec, ...] = (KV, ODD),
        back: int = 4,
        weights: int = WEIGHTS,
        step: int | None = STEP,
        capacity: int | None = None,
        **options: Any,
    ) -> None:
        self.device = device or open_host(TOTAL, granule=G)
        self.startup = Startup(self.device, **options)
        with self.startup.load():
            self.weights = take(weights)
        self.caches = [self.startup.reserve([spec], capacity) for spec in specs]
        self.startup.back(back)
        self.graph, pool = self.device.new_graph(), self.device.graph_pool()
        where, row = torch.tensor([0]), torch.ones(2, 1, 16, 64, dtype=torch.bfloat16)
        with self.startup.capture(), self.device.capture(self.graph, pool):
            self.caches[0].tensors["kv"].index_copy_(1, where, row * 2)
        if step is not None:
            with self.startup.worst_step():
                take(step)

    def commit(self) -> StartupReport:
        return self.startup.commit()


@pytest.fixture
def saved(tmp_path: Path) -> StartupReport:
    path = tmp_path / "report.json"
    Boot(headroom={"sampler": MIB}).commit().save(path)
    return StartupReport.load(path)


@pytest.mark.parametrize("step", [None, STEP, STEP // 2])
def test_the_size_is_reproduced(saved: StartupReport, step: int | None) -> None:
    boot = Boot(pinned=saved, step=step)
    report = boot.commit()
    assert (report.blocks, report.capacity) == (saved.blocks, saved.capacity)
    assert report.reserved_bytes == saved.reserved_bytes
    assert report.mapped_bytes == saved.mapped_bytes
    assert report.caches == saved.caches
    assert {cache.blocks for cache in boot.caches} == {saved.blocks}
    assert report.plan.bound_by == "explicit blocks"
    assert dict(report.plan.terms.headroom) == {"transient": STEP if step is None else step, "sampler": MIB}
    assert boot.commit().blocks == saved.blocks


def test_the_size_is_that_of_then_also_where_more_is_free_now(saved: StartupReport) -> None:
    assert Boot(pinned=saved, weights=WEIGHTS - 4 * MIB).commit().blocks == saved.blocks
    assert Boot(weights=WEIGHTS - 4 * MIB).commit().blocks > saved.blocks


def test_the_report_of_a_pinned_start_is_a_pin_too(saved: StartupReport, tmp_path: Path) -> None:
    again = Boot(pinned=saved, step=None).commit()
    again.save(tmp_path / "again.json")
    third = Boot(pinned=StartupReport.load(tmp_path / "again.json"), step=None).commit()
    assert (third.blocks, third.caches) == (saved.blocks, saved.caches)
    assert third.plan.terms.headroom == saved.plan.terms.headroom


def test_headroom_that_is_given_takes_the_place_of_the_saved(saved: StartupReport) -> None:
    report = Boot(pinned=saved, headroom={"encoder": 5}).commit()
    assert dict(report.plan.terms.headroom) == {"transient": STEP, "encoder": 5}


def test_a_pin_is_not_given_beside_a_size(saved: StartupReport) -> None:
    for size in ({"utilization": 0.5}, {"kv_bytes": MIB}, {"blocks": 3}):
        with pytest.raises(ValueError, match="pinned reproduces a size"):
            Startup(open_host(TOTAL, granule=G), pinned=saved, **size)
    with pytest.raises(TypeError, match=r"pinned takes a StartupReport, which StartupReport\.load"):
        Startup(open_host(TOTAL, granule=G), pinned="report.json")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"blocks={saved.blocks} is below min_blocks="):
        Startup(open_host(TOTAL, granule=G), pinned=saved, min_blocks=saved.blocks + 1)


# What differs


def test_another_device_is_refused_before_anything_is_read(saved: StartupReport) -> None:
    device = open_host(TOTAL // 2, granule=2 * G)
    calls = model(device).calls()
    with pytest.raises(PinError, match="the pinned start-up is another one's") as caught:
        Startup(device, pinned=saved)
    assert caught.value.differences == (
        Difference("device memory", f"64.00 MiB ({TOTAL} bytes)", f"32.00 MiB ({TOTAL // 2} bytes)"),
        Difference("device granule", "4.00 KiB (4096 bytes)", "8.00 KiB (8192 bytes)"),
    )
    assert "device memory: 64.00 MiB (67108864 bytes) pinned, 32.00 MiB (33554432 bytes) now" in str(caught.value)
    assert "start without the pin once" in str(caught.value)
    assert model(device).calls() == calls


def test_model_ladder_and_versions_are_compared_item_by_item(tmp_path: Path) -> None:
    def of(device: Device, **changed: Any) -> Fingerprint:
        return Fingerprint.of(device, **{"model": MODEL, "ladder": LADDER, "versions": {"engine": "1"}, **changed})

    device = open_host(TOTAL, granule=G)
    Boot(device, fingerprint=of(device)).commit().save(tmp_path / "r.json")
    pinned = StartupReport.load(tmp_path / "r.json")
    device = open_host(TOTAL, granule=G)
    assert Boot(device, fingerprint=of(device), pinned=pinned).commit().blocks == pinned.blocks
    other = of(
        device,
        model={**MODEL, "rope": {"theta": 5.0}, "layers": 2},
        ladder=LADDER[1:],
        versions={"engine": "2"},
    )
    with pytest.raises(PinError) as caught:
        Startup(device, fingerprint=other, pinned=pinned)
    assert [str(difference) for difference in caught.value.differences] == [
        "model rope.theta: 10000.0 pinned, 5.0 now",
        "model layers: nothing pinned, 2 now",
        "versions engine: 1 pinned, 2 now",
        "ladder: 3 graphs (full 4, full 2, full 1) pinned, 2 graphs (full 2, full 1) now",
    ]
    with pytest.raises(PinError, match=r"ladder: 3 graphs .* pinned, nothing now"):
        Startup(device, pinned=pinned)  # who tells nothing of the model has not the same one


def test_memory_that_surely_does_not_suffice_is_refused_before_the_weights(saved: StartupReport) -> None:
    device = open_host(TOTAL, granule=G)
    needed = WEIGHTS + POOL + saved.mapped_bytes + MIB
    model(device).charge(0, TOTAL - needed)
    Startup(device, pinned=saved)  # just enough
    model(device).charge(0, G)
    with pytest.raises(PinError, match=rf"short by 4\.00 KiB \({G} bytes\)") as caught:
        Startup(device, pinned=saved)
    (difference,) = caught.value.differences
    assert difference.name == "free at the start" and f"({needed - G} bytes)" in str(difference.now)
    assert f"KV cache {exactly(saved.mapped_bytes)}" in str(caught.value)
    assert "headroom sampler 1.00 MiB" in str(caught.value)


def test_memory_that_went_since_is_refused_with_every_term(saved: StartupReport) -> None:
    boot = Boot(pinned=saved, weights=WEIGHTS + 7 * MIB)
    used = model(boot.device).used(0)
    with pytest.raises(PinError, match=f"{saved.blocks} blocks of the pinned start-up do not fit any more") as caught:
        boot.commit()
    error = caught.value
    assert error.plan is not None and error.plan.status == "refused"
    short = saved.mapped_bytes - error.plan.room
    assert 0 < short < 7 * MIB and f"short by {exactly(short)}" in str(error)
    differences = {difference.name: difference for difference in error.differences}
    assert set(differences) == {"allocator", "free", "room for the cache"}
    assert differences["allocator"].now == f"17.00 MiB ({WEIGHTS + 7 * MIB + POOL} bytes)"
    assert isinstance(error.__cause__, BudgetError)
    assert model(boot.device).used(0) == used
    assert boot.startup.report is None


def test_a_larger_worst_step_is_one_of_the_terms(saved: StartupReport) -> None:
    with pytest.raises(PinError, match=r"headroom transient: 4\.00 MiB .* pinned, 14\.00 MiB .* now"):
        Boot(pinned=saved, step=14 * MIB).commit()


def test_other_caches_are_refused_before_the_commit(saved: StartupReport) -> None:
    wider = TensorSpec("kv", (2, None, 16, 64), torch.float32)
    with pytest.raises(PinError, match="the caches are not those of the pinned start-up") as caught:
        _commit_reserved(saved, wider, ODD)
    (reservation, kv) = caught.value.differences
    assert reservation.name == "cache 0 reservation"
    assert kv.name == "cache 0 tensor kv"
    assert "bfloat16" in str(kv.pinned) and "float32" in str(kv.now)
    with pytest.raises(PinError, match="caches: 2 pinned, 1 now"):
        _commit_reserved(saved, KV)
    with pytest.raises(PinError, match="caches: 2 pinned, 3 now"):
        _commit_reserved(saved, KV, ODD, KV)
    with pytest.raises(PinError, match=r"cache 0 capacity: .* blocks pinned, 5 blocks now"):
        _commit_reserved(saved, KV, ODD, capacity=5)


def _commit_reserved(pinned: StartupReport, *specs: TensorSpec, capacity: int | None = None) -> None:
    startup = Startup(open_host(TOTAL, granule=G), pinned=pinned)
    for spec in specs:
        startup.reserve([spec], capacity)
    startup.commit()


def test_a_prefix_above_the_pinned_count_is_refused(saved: StartupReport) -> None:
    small = replace(saved, blocks=3)
    with pytest.raises(PinError, match="blocks backed: 3 in all pinned, 4 now"):
        Boot(pinned=small).commit()


def test_a_late_consumer_after_a_pinned_commit_is_told_as_ever(saved: StartupReport) -> None:
    boot = Boot(pinned=saved)
    boot.commit()
    with boot.device.active():
        late = take(8 * MIB)
    with pytest.raises(BudgetError, match="hold more than the budget allows now"):
        boot.commit()
    assert late.nbytes == 8 * MIB


# The strategy


def test_the_strategy_reuses_what_captures_kept(tmp_path: Path) -> None:
    device = open_host(TOTAL, granule=G)
    print_ = Fingerprint.of(device, model=MODEL, ladder=LADDER)
    report = Boot(device, fingerprint=print_).commit()
    report.save(tmp_path / "plan.json")
    plan = StartupPlan.load(tmp_path / "plan.json", print_)
    found = plan.estimate(None)  # type: ignore[arg-type]
    assert (found.bytes, found.raw, found.captures) == (POOL, POOL, 0)
    assert (plan.blocks, plan.after_capture, plan.name) == (report.blocks, False, "StartupPlan")
    other = StartupPlan(plan.report, replace(print_, ladder=()))
    with pytest.raises(PinError, match=r"another one's\n  ladder: 3 graphs"):
        other.estimate(None)  # type: ignore[arg-type]


def test_a_share_that_the_pinned_size_exceeds_is_noted(saved: StartupReport) -> None:
    above = 2 * MIB
    assert not any("kept to" in note for note in saved.plan.notes)
    report = Boot(pinned=saved, weights=WEIGHTS + above + saved.plan.leftover).commit()
    assert report.blocks == saved.blocks
    (note,) = [note for note in report.plan.notes if "kept to" in note]
    assert "a utilization of 0.9" in note and "this one takes 2.00 MiB" in note


def test_a_start_that_exceeded_its_share_is_reproduced_without_a_word() -> None:
    saved = Boot(utilization=0.2, back=400, capacity=1000, specs=(KV,)).commit()
    assert saved.plan.status == "over_budget"
    report = Boot(pinned=saved, back=400, specs=(KV,)).commit()
    assert report.blocks == saved.blocks and not any("kept to" in note for note in report.plan.notes)
