"""Captured graphs over addresses whose memory changes: kernels, memsets and copies on the library's caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vmm_kv.cache import KVCache
from vmm_kv.layout import TensorSpec
from vmm_kv.testing.gpu_raw import Raw
from vmm_kv.testing.gpu_registry import check
from vmm_kv.testing.gpu_rig import MIB, Rig

_ROW = 16 * 1024
"""float32 numbers of a block: 64 KiB of them."""
_BLOCK = 4 * _ROW
_STALE = 9.0


class Scene:
    """A cache of `blocks` blocks, and a step that writes and reads it: kernels, a copy in, a copy out, and a memset.

    The step writes `row` to block `slot` by a kernel and to block 1 by a copy, and zeros to block 2 by a memset; it
    reads block `slot` through a kernel and block 1 by a copy.
    """

    def __init__(self, rig: Rig, *, blocks: int = 2048, **options: Any) -> None:
        self.rig, self.blocks = rig, blocks
        device = rig.device
        self.cache = KVCache.reserve(device, [TensorSpec("kv", (None, _ROW), torch.float32)], blocks, **options)
        self.kv = self.cache.tensors["kv"]
        self.address = self.kv.data_ptr()
        where = device.torch_device
        self._raw = Raw(rig) if rig.real and rig.driver.kind == "cuda" else None
        with device.active():
            self.slot = torch.zeros(1, dtype=torch.int64, device=where)
            self.row, self.out, self.copy = (torch.zeros(1, _ROW, device=where) for _ in range(3))
            self.step(torch.zeros(4, _ROW, device=where))  # warms up: libraries must not set up inside a capture
        rig.settle()

    def step(self, kv: torch.Tensor) -> None:
        kv.index_copy_(0, self.slot, self.row)
        kv[1:2].copy_(self.row)
        self.memset(kv[2:3])
        torch.mul(kv.index_select(0, self.slot), 2.0, out=self.out)
        self.copy.copy_(kv[1:2])

    def memset(self, part: torch.Tensor) -> None:
        """Zeros by a memset on the current stream; by a kernel where there is no way to ask for one."""
        if self._raw is None:
            part.zero_()
            return
        stream = torch.cuda.current_stream(self.rig.device.torch_device).cuda_stream
        status = self._raw.memset(part.data_ptr(), 0, part.nbytes, stream)
        self.rig.require(status == 0, f"a memset in the current stream answers {status}")

    def capture(self, work: Callable[[torch.Tensor], object] | None = None, pool: Any = None) -> Any:
        """The graph of `step`, or of other work on the cache."""
        device = self.rig.device
        graph = device.new_graph()
        with device.active(), torch.no_grad():
            pool = device.graph_pool() if pool is None else pool
            with device.capture(graph, pool):
                (work or self.step)(self.kv)
        return graph

    def replay(self, graph: Any, block: int, value: float) -> None:
        """Replays the graph of `step` on `block`, and looks at all that it should have done."""
        with self.rig.device.active():
            self.slot.fill_(block)
            self.row.fill_(value)
            self.kv[2].fill_(_STALE)
            graph.replay()
            found = {
                "the block": all_are(self.kv[block], value),
                "what was read of it": all_are(self.out, 2 * value),
                "the copy in": all_are(self.kv[1], value),
                "the copy out": all_are(self.copy, value),
                "the memset": all_are(self.kv[2], 0.0),
            }
        self.rig.settle()
        wrong = [name for name, right in found.items() if not right]
        self.rig.require(not wrong, f"after a replay on block {block} these are wrong: {', '.join(wrong)}")
        self.rig.require(self.kv.data_ptr() == self.address, "the address of the tensor has changed")

    def untouched(self, first: int, last: int) -> None:
        """The blocks from `first` up to `last` read as zeros."""
        with self.rig.device.active():
            dirty = int(self.kv[first:last].count_nonzero().item())
        self.rig.require(dirty == 0, f"blocks {first} to {last} hold {dirty} numbers that are not zero")

    def close(self) -> None:
        self.rig.settle()
        self.cache.close()


def all_are(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all().item())


@check("graphs.prefix", "1 S2", needs="torch", alone=True)
def prefix(rig: Rig) -> None:
    """Captured over a prefix backing, replayed far beyond it after a commit, and again after growth."""
    scene = Scene(rig)
    scene.cache.back(64)
    _capture_and_grow(rig, scene)


@check("graphs.alias", "1 S2 M5", needs="torch", alone=True)
def alias(rig: Rig) -> None:
    """Captured over an alias backing, replayed after all of it was mapped anew."""
    scene = Scene(rig)
    scene.cache.back(alias=True)
    _capture_and_grow(rig, scene)


def _capture_and_grow(rig: Rig, scene: Scene) -> None:
    half = scene.blocks // 2
    graph = scene.capture()
    scene.cache.commit(half)
    scene.untouched(3, half)
    scene.replay(graph, half - 1, 3.0)
    scene.cache.commit(scene.blocks)
    scene.untouched(half, scene.blocks)
    scene.replay(graph, scene.blocks - 1, 5.0)
    rig.require(all_are(scene.kv[half - 1], 3.0), "growth has changed a block that was in use")
    rig.say(f"captured on {scene.rig.driver.name}, replayed on {half} and {scene.blocks} blocks; fresh blocks are zero")
    graph.reset()
    scene.close()


@check("graphs.growth", "1 3 4 8", needs="torch", alone=True)
def growth(rig: Rig) -> None:
    """One graph replayed between three steps of growth, after a shrink and after growing again."""
    scene = Scene(rig)
    scene.cache.back(32)
    graph = scene.capture()
    for number, blocks in enumerate((256, 1024, 2048, -512, 2048), start=1):
        if blocks < 0:
            blocks = -blocks
            rig.findings.details["returned by a shrink"] = scene.cache.shrink(blocks)
        else:
            scene.cache.commit(blocks)
        scene.replay(graph, blocks - 1, float(number))
    rig.require(all_are(scene.kv[255], 1.0), "a block that stayed has lost its contents")
    rig.say(f"five sizes; a shrink of 96 MiB gave back {rig.findings.details['returned by a shrink'] / MIB:.0f} MiB")
    graph.reset()
    scene.close()


@check("graphs.pool", "13", needs="torch", alone=True)
def two_in_a_pool(rig: Rig) -> None:
    """Two graphs that share a pool, replayed in turn after a commit."""
    scene = Scene(rig)
    scene.cache.back(64)
    device = rig.device
    with device.active():
        pool = device.graph_pool()
    before = device.memory.reserved()
    first = scene.capture(pool=pool)
    between = device.memory.reserved()

    def and_one(kv: torch.Tensor) -> None:
        scene.step(kv)
        scene.out.add_(1.0)

    second = scene.capture(and_one, pool)
    after = device.memory.reserved()
    scene.cache.commit(scene.blocks)
    for block in (500, scene.blocks - 1):
        scene.replay(first, block, 2.0)
        with device.active():
            second.replay()
        rig.require(all_are(scene.out, 5.0), "the second graph of the pool reads wrong")
        scene.replay(first, block, 4.0)
    rig.findings.details.update(first=between - before, second=after - between)
    rig.say(f"the first kept {(between - before) / MIB:.1f} MiB, the second {(after - between) / MIB:.1f} MiB more")
    first.reset()
    second.reset()
    scene.close()


@check("graphs.several_chunks", "S2 P2", needs="torch", alone=True)
def several_chunks(rig: Rig) -> None:
    """Copies and kernels over 96 MiB that lie on many chunks, captured over an alias and over a prefix backing."""
    for backing in ("alias", "prefix"):
        _over_several_chunks(rig, backing)
    rig.say("right over both")


def _over_several_chunks(rig: Rig, backing: str) -> None:
    scene = Scene(rig, chunk=rig.granule if backing == "prefix" else "auto")
    first, last = 300, 1836
    with rig.device.active():
        source = torch.full((last - first, _ROW), 6.0, device=rig.device.torch_device)
        target = torch.zeros_like(source)

    def work(kv: torch.Tensor) -> None:
        kv[first:last].copy_(source)
        kv[first:last].add_(1.0)
        target.copy_(kv[first:last])

    if backing == "alias":
        scene.cache.back(alias=True)
    else:
        scene.cache.back(scene.blocks)
    graph = scene.capture(work)
    scene.cache.commit(scene.blocks)
    with rig.device.active():
        graph.replay()
        right = all_are(scene.kv[first:last], 7.0) and all_are(target, 7.0)
    rig.require(right, f"over {backing} backing the copies are wrong after the commit")
    scene.untouched(last, scene.blocks)
    graph.reset()
    scene.close()


@check("graphs.side_streams", "7 U2", needs="torch", alone=True, emulated=False)
def side_streams(rig: Rig) -> None:
    """A capture that forks to a side stream and joins; eager work on a side stream while the cache grows."""
    scene = Scene(rig)
    scene.cache.back(64)
    where = rig.device.torch_device
    with rig.device.active():
        side = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]
        other = torch.zeros(1, _ROW, device=where)

    def forked(kv: torch.Tensor) -> None:
        side.wait_stream(torch.cuda.current_stream(where))
        with torch.cuda.stream(side):
            torch.mul(kv[1:2], 1.0, out=other)
            kv[3:4].copy_(scene.row)
        torch.cuda.current_stream(where).wait_stream(side)
        torch.mul(kv.index_select(0, scene.slot), 2.0, out=scene.out)
        kv.index_copy_(0, scene.slot, scene.row)

    graph = scene.capture(forked)
    scene.cache.commit(512)
    with rig.device.active():
        with torch.cuda.stream(side):
            busy = scene.kv[100:500]
            for _ in range(200):
                busy.add_(1.0)
        scene.cache.commit(scene.blocks)  # while that runs
        scene.slot.fill_(scene.blocks - 1)
        scene.row.fill_(8.0)
        torch.cuda.synchronize(where)
        graph.replay()
        right = [
            all_are(scene.kv[100:500], 200.0), all_are(scene.kv[3], 8.0), all_are(scene.kv[scene.blocks - 1], 8.0)
        ]  # fmt: skip
    rig.require(all(right), f"side stream, forked copy, joined kernel: {right}")
    rig.say("a fork and join, and growth beside running work, are right")
    graph.reset()
    scene.close()


def _over_unmapped(rig: Rig, node: str) -> None:
    """Captures one node on addresses where nothing is mapped, commits, and replays."""
    scene = Scene(rig)
    block = scene.blocks - 1
    work: dict[str, Callable[[torch.Tensor], object]] = {
        "kernel": lambda kv: kv[block].add_(4.0),
        "memset": lambda kv: scene.memset(kv[block]),
        "copy_in": lambda kv: kv[block : block + 1].copy_(scene.row),
        "copy_out": lambda kv: scene.out.copy_(kv[block : block + 1]),
    }
    outcome = "right"
    try:
        graph = scene.capture(work[node])
    except Exception as error:
        outcome = f"capture refused: {str(error).strip().splitlines()[0]}"
    else:
        scene.cache.commit(scene.blocks)
        with rig.device.active():
            scene.row.fill_(4.0)
            if node in ("memset", "copy_out"):
                scene.kv[block].fill_(4.0)
            graph.replay()
            rig.settle()
            where, value = (
                (scene.out, 4.0) if node == "copy_out" else (scene.kv[block], 0.0 if node == "memset" else 4.0)
            )
            if not all_are(where, value):
                outcome = "wrong after the replay"
    rig.say(f"a {node} node: {outcome}")
    rig.expect(f"a {node} node captured where nothing is mapped", outcome, "right")


for _node in ("kernel", "memset", "copy_in", "copy_out"):

    @check(f"graphs.unmapped_{_node}", "S2", needs="torch", alone=True, emulated=False)
    def over_unmapped(rig: Rig, node: str = _node) -> None:
        """A node captured on addresses where nothing is mapped, replayed when memory is there."""
        _over_unmapped(rig, node)
