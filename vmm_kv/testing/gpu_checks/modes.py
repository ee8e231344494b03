"""Calls of the driver while a stream is being captured: which are refused, and which break the capture.

A capture mode says which threads are kept from calls that a capture could be harmed by; `driver.scope()` exchanges the
calling thread's mode to relaxed, which lets it make them all the same.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext

import torch

from vmm_kv.testing.gpu_checks.graphs import Scene
from vmm_kv.testing.gpu_raw import CAPTURE_MODES, Raw
from vmm_kv.testing.gpu_registry import check
from vmm_kv.testing.gpu_rig import Rig, status_of

ACTIONS = (
    "reserve", "create", "map", "set_access", "get_access", "zero", "mem_info", "synchronize", "unmap", "release",
    "free_address",
)  # fmt: skip


class Life:
    """One chunk's life, an action at a time."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._size = rig.granule
        self._base = self._handle = 0

    def do(self, action: str) -> None:
        """Outside any scope of the driver: the caller says whether there is one."""
        driver, base, size = self._rig.driver, self._base, self._size
        if action == "reserve":
            self._base = driver.reserve(size)
        elif action == "create":
            self._handle = driver.create(size)
        elif action == "map":
            driver.map(base, size, self._handle)
        elif action == "zero":
            driver.zero([(base, base + size)])
        elif action == "release":
            driver.release(self._handle)
        elif action in ("mem_info", "synchronize"):
            getattr(driver, action)()
        elif action == "get_access":
            driver.get_access(base)
        else:
            getattr(driver, action)(base, size)


def in_another_thread(work: Callable[[], int]) -> int:
    """What it returns there. What it raises is raised here."""
    answers: list[int | BaseException] = []

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as error:
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(answers[0], BaseException):
        raise answers[0]
    return answers[0]


@check("modes.calls", "7 S1", alone=True, emulated=False, seconds=40)
def calls(rig: Rig) -> None:
    """Every call in every capture mode, from the capturing thread and another, as it is and relaxed."""
    raw = Raw(rig)
    raw.use()
    stream, target = raw.new_stream(), rig.reserve(rig.granule)
    rig.chunk(target, rig.granule)
    for mode, elsewhere, relaxed in itertools.product(CAPTURE_MODES, (False, True), (False, True)):
        life = Life(rig)
        refused: dict[str, int] = {}
        broken: dict[str, int] = {}
        for action in ACTIONS:
            raw.begin_capture(stream, mode)
            added = raw.memset(target, 1, rig.granule, stream)
            status = _call(rig, raw, life, action, elsewhere, relaxed)
            ended = raw.end_capture(stream)
            if status:
                refused[action] = status
                _make_up_for(rig, life, action)
            if added or ended:
                broken[action] = added or ended
        _tell(rig, f"{mode}, {'another' if elsewhere else 'same'} thread, {'relaxed' if relaxed else 'as it is'}",
              refused, broken, promised=elsewhere and relaxed)  # fmt: skip


def _call(rig: Rig, raw: Raw, life: Life, action: str, elsewhere: bool, relaxed: bool) -> int:
    def work() -> int:
        if elsewhere:
            raw.use()
        with rig.driver.scope() if relaxed else nullcontext():
            return status_of(lambda: life.do(action))

    return in_another_thread(work) if elsewhere else work()


def _make_up_for(rig: Rig, life: Life, action: str) -> None:
    """A call that was refused is made after the capture, so that the next has what it needs."""
    with rig.driver.scope():
        status = status_of(lambda: life.do(action))
    rig.require(status == 0, f"{action} is refused without a capture as well: {status}")


def _tell(rig: Rig, where: str, refused: dict[str, int], broken: dict[str, int], *, promised: bool) -> None:
    rig.findings.details[where] = {"refused": refused, "broken": broken}
    if refused or broken:
        parts = [f"refused {refused}"] * bool(refused) + [f"broken by {broken}"] * bool(broken)
        rig.say(f"{where}: {', '.join(parts)}".replace("'", ""))
    if promised:
        rig.expect(f"{where}: refused", refused, {})
        rig.expect(f"{where}: broken by", broken, {})


def _commit_elsewhere(rig: Rig, mode: str) -> None:
    """torch captures in this thread while another commits, grows and shrinks a second cache."""
    scene, other = Scene(rig), Scene(rig)
    scene.cache.back(64)
    graph = torch.cuda.CUDAGraph()
    outcome: list[str] = []

    def operate() -> int:
        for name, operation in (
            ("back", lambda: other.cache.back(64)),
            ("commit", lambda: other.cache.commit(512)),
            ("growth", lambda: other.cache.commit(other.blocks)),
            ("shrink", lambda: other.cache.shrink(100)),
            ("reading", lambda: rig.device.reading("meanwhile")),
        ):
            try:
                operation()
            except Exception as error:
                outcome.append(f"{name}: {type(error).__name__}: {error}")
        return 0

    broken = "no"
    try:
        with (
            rig.device.active(),
            torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode=mode),  # type: ignore[no-untyped-call]
        ):
            scene.step(scene.kv)
            in_another_thread(operate)
            scene.out.add_(0.0)
    except RuntimeError as error:
        broken = str(error).strip().splitlines()[0]
    rig.findings.details.update(broken=broken, operations=outcome)
    rig.say(f"operations that failed: {', '.join(outcome) or 'none'}; capture broken: {broken}")
    rig.expect("operations that failed", outcome, [])
    rig.expect("capture broken", broken, "no")
    if broken == "no":
        scene.cache.commit(scene.blocks)
        scene.replay(graph, scene.blocks - 1, 3.0)
        graph.reset()
        scene.close()
        other.close()


for _mode in CAPTURE_MODES:

    @check(f"modes.commit_{_mode}", "7 S1", needs="torch", alone=True, emulated=False)
    def commit_elsewhere(rig: Rig, mode: str = _mode) -> None:
        """Another thread commits, grows and shrinks a cache while torch captures."""
        _commit_elsewhere(rig, mode)
