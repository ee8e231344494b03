"""Ways of using torch that an engine may have: its allocators, and another current device."""

from __future__ import annotations

import torch

from vmm_kv.testing.gpu_checks.graphs import Scene
from vmm_kv.testing.gpu_registry import Skipped, check
from vmm_kv.testing.gpu_rig import MIB, Rig

_EXPANDABLE = "expandable_segments:True"


def _whole_life(scene: Scene) -> None:
    """Back, capture, commit, replay, grow, replay, shrink, replay."""
    scene.cache.back(64)
    graph = scene.capture()
    scene.cache.commit(512)
    scene.replay(graph, 511, 2.0)
    scene.cache.commit(scene.blocks)
    scene.replay(graph, scene.blocks - 1, 3.0)
    scene.cache.shrink(100)
    scene.replay(graph, 99, 4.0)
    graph.reset()
    scene.close()


@check(
    "torch.expandable_segments", "13", needs="torch", alone=True, emulated=False,
    environment={"PYTORCH_CUDA_ALLOC_CONF": _EXPANDABLE, "PYTORCH_ALLOC_CONF": _EXPANDABLE},
)  # fmt: skip
def expandable_segments(rig: Rig) -> None:
    """With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, whose memory is mapped by the same calls."""
    with rig.device.active():
        ballast = torch.ones(256 * MIB, dtype=torch.uint8, device=rig.device.torch_device)
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    expandable = sum(bool(segment.get("is_expandable")) for segment in segments)
    rig.say(f"{expandable} of {len(segments)} segments are expandable")
    rig.expect("some segment is expandable", expandable > 0, True)
    before = rig.device.reading("before")
    _whole_life(Scene(rig))
    rig.require(bool((ballast == 1).all().item()), "torch's own memory has changed")
    del ballast
    rig.device.memory.empty_cache()
    after = rig.device.reading("after")
    rig.findings.details.update(free_before=before.free, free_after=after.free, reserved_after=after.reserved)
    rig.say("a cache's whole life beside them is right")


@check("torch.use_mem_pool", "13", needs="torch", alone=True, emulated=False)
def use_mem_pool(rig: Rig) -> None:
    """Inside torch.cuda.use_mem_pool, and a capture into such a pool."""
    if not hasattr(torch.cuda, "use_mem_pool"):
        raise Skipped(f"torch {torch.__version__} has no torch.cuda.use_mem_pool")
    device, scene = rig.device, Scene(rig)
    scene.cache.back(64)
    graph = scene.capture()
    with device.active():
        pool = torch.cuda.MemPool()
        before = device.memory.reserved()
        with torch.cuda.use_mem_pool(pool):
            inside = torch.ones(64 * MIB, dtype=torch.uint8, device=device.torch_device)
            grown = device.memory.reserved() - before
            for blocks in (512, scene.blocks):
                scene.cache.commit(blocks)
                scene.replay(graph, blocks - 1, 2.0)
        rig.require(bool((inside == 1).all().item()), "the pool's memory has changed")
    graph.reset()
    scene.close()
    rig.findings.details["reserved_by_pool"] = grown
    rig.say(f"torch counts {grown / MIB:.0f} MiB for 64 MiB in the pool")
    rig.expect("the pool counts as reserved", grown >= 64 * MIB, True)
    rig.expect("a capture into such a pool", _capture_into(rig, pool.id), "right")


def _capture_into(rig: Rig, pool: object) -> str:
    scene = Scene(rig)
    scene.cache.back(64)
    try:
        graph = scene.capture(pool=pool)
    except RuntimeError as error:
        return f"torch refuses: {str(error).strip().splitlines()[0]}"
    scene.cache.commit(scene.blocks)
    scene.replay(graph, scene.blocks - 1, 6.0)
    graph.reset()
    scene.close()
    return "right"


@check("torch.other_device", "6", needs="torch", alone=True, emulated=False)
def other_device(rig: Rig) -> None:
    """A cache on a device that is not the current one, and what is current afterwards."""
    count = torch.cuda.device_count()
    if count < 2:
        raise Skipped(f"it needs two GPUs, torch sees {count}")
    own = rig.device.torch_device.index
    current = next(index for index in range(count) if index != own)
    torch.cuda.set_device(current)
    free = torch.cuda.mem_get_info(current)[0]
    _whole_life(Scene(rig))
    rig.require(torch.cuda.current_device() == current, "another device is current afterwards")
    taken = free - torch.cuda.mem_get_info(current)[0]
    rig.say(f"device {current} is current as before; {taken / MIB:.0f} MiB of it were taken")
    rig.expect("little of it was taken", taken < 64 * MIB, True)
