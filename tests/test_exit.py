"""Caches that nobody closed: at interpreter exit, in reference cycles, inside captures, in threads and forked children.

Every script runs in a process of its own with warnings as errors. A callback registered before vmm_kv is imported runs
after the library's own at exit; it seals the device, so that any driver call from then on aborts the process.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing

import pytest
from setups import QUIRKY, SETUPS, Children

FIRST = """
import atexit

def last_callback():
    print("live", sum(model.live().values()), flush=True)
    model.seal()

atexit.register(last_callback)
"""
PRELUDE = """
import gc, os, sys, threading, warnings
from vmm_kv import KVCache, State, StateError, TensorSpec
from vmm_kv.capture import capture_in_progress

def make(capacity=16):
    return KVCache.reserve(device, [TensorSpec("kv", (2, None, G), torch.uint8)], capacity, chunk=uniform(G))

def committed(value=7):
    cache = make()
    cache.back(2)
    cache.commit(16)
    cache.tensors["kv"].fill_(value)
    return cache

class Knot:
    def __init__(self, cache):
        self.cache, self.itself = cache, self
"""


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    with closing(Children(tmp_path_factory.mktemp("exit"))) as children:
        yield children


class Exits:
    """Runs scripts on one set-up."""

    def __init__(self, children: Children, setup: str) -> None:
        self.children, self.setup = children, setup

    def check(self, script: str, output: str) -> None:
        """The script ends well, says nothing on stderr and prints `output`; at the last callback so much is live."""
        done = self.children.run(self.setup, PRELUDE + script, first=FIRST)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.split("\n")[:-1] == output.split("; ")


@pytest.fixture(params=SETUPS)
def exits(children: Children, request: pytest.FixtureRequest) -> Exits:
    return Exits(children, request.param)


def test_the_seal_catches_a_driver_call_after_the_last_callback(exits: Exits) -> None:
    script = """
class Late:
    def __del__(self, driver=device.driver):
        with driver.scope():
            driver.mem_info()

late = Late()
"""
    done = exits.children.run(exits.setup, script, first=FIRST)
    assert done.returncode == -signal.SIGABRT
    assert "mem_info was called on a sealed device" in done.stderr


def test_caches_in_every_state_tensors_and_graphs_are_alive_at_exit(exits: Exits) -> None:
    exits.check(
        """
reserved, backed, aliased, full, prepared = make(), make(), make(), committed(), make()
backed.back(2)
aliased.back(alias=True)
step = prepared.prepare(4)
tensors = [aliased.tensors["kv"], full.tensors["kv"], full.view("kv"), full.view("kv")[:, 3:]]
pool, graph = device.graph_pool(), device.new_graph()
with device.active(), device.capture(graph, pool):
    out = full.view("kv").sum(dtype=torch.int64)
graph.replay()
print(out.item() == 7 * 2 * 16 * G)
before = model.calls()
atexit.register(lambda: print(model.calls() == before))
""",
        # Five reservations; chunks of the prefix, alias, commit and prepared step; mappings of the first three. An
        # alias chunk is eight granules (a 256th of the device), or one where all chunks are alike.
        f"True; True; live {5 + (4 + 1 + 32 + 8) + (4 + (32 if exits.setup == QUIRKY else 4) + 32)}",
    )


def test_a_cache_in_a_reference_cycle_is_left_to_the_end_of_the_process(exits: Exits) -> None:
    exits.check("gc.disable()\nKnot(committed())\nprint(model.live()['reservations'])", "1; live 65")


def test_a_cache_in_a_collected_reference_cycle_is_undone_at_exit(exits: Exits) -> None:
    exits.check(
        """
Knot(committed())
before = model.calls()
gc.collect()
print(model.calls() == before)
""",
        "True; live 0",
    )


def test_a_cache_dropped_inside_a_capture_is_undone_by_the_next_call_after_it(exits: Exits) -> None:
    exits.check(
        """
cache = committed()
live = model.live()
with capture_in_progress():
    before = model.calls()
    del cache
    gc.collect()
    print(model.calls() == before)
    try:
        make()
    except StateError as error:
        print("refused")
    device.reading("inside")
    print(model.live() == live)
before = model.calls()
print(model.live() == live)
other = make()
print(model.live() == {"reservations": 1, "handles": 0, "mappings": 0})
after = model.calls()
print({name: after[name] - before[name] for name in ("unmap", "release", "free_address")})
""",
        # 2 segments of 16 granules: two chunks of the prefix for each, and one for each granule beyond it
        "True; refused; True; True; True; {'unmap': 32, 'release': 32, 'free_address': 1}; live 1",
    )


def test_a_cache_dropped_inside_a_capture_that_never_ends_is_left_alone(exits: Exits) -> None:
    exits.check(
        """
cache = committed()
capture = capture_in_progress()
capture.__enter__()
del cache
before = model.calls()
atexit.register(lambda: print(model.calls() == before))
""",
        "True; live 65",
    )


def test_a_cache_whose_last_reference_another_thread_dropped(exits: Exits) -> None:
    exits.check(
        """
caches = [committed()]
calls = []
def drop():
    calls.append(model.calls())
    caches.clear()
    calls.append(model.calls())
thread = threading.Thread(target=drop)
thread.start()
thread.join()
print(calls[0] == calls[1], model.live()["reservations"])
""",
        "True 1; live 0",
    )


def test_close_twice_and_close_under_live_views(exits: Exits) -> None:
    exits.check(
        """
twice, viewed, kept = committed(), committed(), committed()
twice.close()
before = model.calls()
twice.close()
print(twice.state is State.CLOSED, model.calls() == before)
views = [viewed.tensors["kv"], viewed.view("kv")[0]]
at_exit = kept.view("kv")
viewed.close()
kept.close()
viewed.close()
print(model.live())
views.clear()
before = model.calls()
viewed.close()
print(model.live(), model.calls()["free_address"] - before["free_address"])
""",
        "True True; {'handles': 0, 'mappings': 0, 'reservations': 2}; "
        "{'handles': 0, 'mappings': 0, 'reservations': 1} 1; live 1",
    )


def test_a_forked_child_calls_no_driver_and_the_parent_keeps_its_memory(exits: Exits) -> None:
    exits.check(
        """
kept, closed, dropped, buried = committed(41), committed(42), committed(43), committed(44)
del buried  # in the graveyard while the process forks
live, calls = model.live(), model.calls()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch has threads, of which the child has no need
    child = os.fork()
if not child:
    model.seal()  # a driver call aborts the child
    closed.close()
    assert closed.state is State.CLOSED and closed.blocks == 0
    try:
        kept.shrink(3)
    except StateError as error:
        assert "forked child" in str(error)
    else:
        os._exit(5)
    del dropped
    gc.collect()
    sys.exit(0)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print(model.live() == live, model.calls() == calls)
for value, cache in ((41, kept), (42, closed), (43, dropped)):
    assert cache.view("kv")[..., ::64].eq(value).all()
    cache.close()
print(model.live())
""",
        # the child's last callback prints what it has copies of: four caches
        f"live {4 * 65}; child 0; True True; {{'handles': 0, 'mappings': 0, 'reservations': 0}}; live 0",
    )
