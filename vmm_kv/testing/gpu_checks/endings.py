"""In which order things may go: caches, tensors, graphs, and the process with all of them alive.

How the process ends is part of the result: the runner looks at its exit code.
"""

from __future__ import annotations

from typing import Any

from vmm_kv.errors import DriverError
from vmm_kv.testing.gpu_checks.graphs import Scene
from vmm_kv.testing.gpu_registry import check
from vmm_kv.testing.gpu_rig import Rig

KEPT: list[Any] = []
"""What outlives the check, so that the end of the process meets it."""


def _started(rig: Rig) -> tuple[Scene, Any]:
    scene = Scene(rig)
    scene.cache.back(64)
    graph = scene.capture()
    scene.cache.commit(scene.blocks)
    scene.replay(graph, scene.blocks - 1, 2.0)
    return scene, graph


@check("endings.all_alive", "11", needs="torch", alone=True)
def all_alive(rig: Rig) -> None:
    """The process ends with an open cache, its tensors and a graph."""
    KEPT.append(_started(rig))
    rig.say("left open to the end of the process")


@check("endings.dropped", "11", needs="torch", alone=True)
def dropped(rig: Rig) -> None:
    """The cache is dropped without a close; a tensor and the graph live on."""
    scene, graph = _started(rig)
    KEPT.append((scene.kv[:4], graph))
    del scene
    free = rig.device.reading("the graveyard is emptied").free
    rig.findings.details["free"] = free
    rig.say("finalizer and graveyard, a tensor alive at the end of the process")


@check("endings.closed", "9 11", needs="torch", alone=True)
def closed(rig: Rig) -> None:
    """Closed while tensors and a graph are alive; then the graph goes, then the tensors."""
    scene, graph = _started(rig)
    kv, base, size = scene.kv, scene.cache.base, scene.cache.reserved_bytes
    before = rig.free()
    scene.close()
    returned = rig.free() - before
    rig.findings.details["returned"] = returned
    rig.expect("close returned the memory", returned >= 0.9 * scene.blocks * scene.kv[0].nbytes, True)
    taken = rig.reserve(size, hint=base)
    rig.require(taken != base, "the addresses went to somebody else under a live tensor")
    rig.free_address(taken)
    graph.reset()
    del scene, kv, graph
    rig.device.reading("the graveyard is emptied")
    again = rig.reserve(size, hint=base)
    rig.say(f"when the last tensor is gone the addresses {'are' if again == base else 'are not'} to be had again")
    rig.expect("addresses to be had again", again == base, True)
    rig.free_address(again)


@check("endings.graph_first", "9", needs="torch", alone=True)
def graph_first(rig: Rig) -> None:
    """The graph goes first, then the cache, then its tensors; memory is what it was."""
    before = rig.free()
    scene, graph = _started(rig)
    graph.reset()
    del graph
    scene.close()
    del scene
    rig.device.memory.empty_cache()
    after = rig.device.reading("after").free
    rig.findings.details["lost"] = before - after
    rig.say(f"{(before - after) / (1 << 20):.1f} MiB less are free than before")
    try:
        rig.release(rig.create(rig.granule))
    except DriverError as error:
        rig.require(False, f"the driver does not work any more: {error}")
