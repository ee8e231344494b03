"""What a replayed graph meets at blocks with no memory behind them: a segmentation fault, in a child process.

A test's child prints what it found and flushes before each step that may end it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing

import pytest
from setups import QUIRKY, SETUPS, Children

PRELUDE = """
import resource
from vmm_kv import KVCache, TensorSpec
from vmm_kv.spans import touches

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
CAPACITY = 64
model.poison = True
alias_chunk = 4 * G if uniform(G) == "auto" else G  # a 256th of the device, or like all others

def say(*words):
    print(*words, flush=True)

def first_beyond(cache, blocks):
    # The first block of which every byte lies in granules that a backing of `blocks` does not touch.
    held = cache.layout.granules(blocks, cache.unit)
    for block in range(blocks, CAPACITY):
        starts = (block * size, segment + block * size)
        if not any(touches((start, start + size), held) for start in starts):
            return block
    raise AssertionError("every block touches what is backed")

size = 3 * G // 8  # bytes of a block in one segment, so that blocks straddle granules
segment = CAPACITY * size
cache = KVCache.reserve(device, [TensorSpec("kv", (2, None, size), torch.uint8)], CAPACITY, chunk=uniform(G))
kv = cache.tensors["kv"]

where = torch.tensor([0])
source = torch.full((2, 1, size), 9, dtype=torch.uint8)
pool, graph = device.graph_pool(), device.new_graph()

def capture_a_write():
    # Writes the block whose number stands in `where`, as an engine's slot mapping does.
    with device.active(), device.capture(graph, pool):
        kv.index_copy_(1, where, source + 1)

def replay(block):
    where.fill_(block)
    graph.replay()

def right(block):
    block_is_right = bool(kv[:, block].eq(10).all())
    others = torch.arange(cache.blocks) != block
    return block_is_right and bool(cache.view("kv")[:, others].eq(0).all())
"""


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    with closing(Children(tmp_path_factory.mktemp("faults"))) as children:
        yield children


class Runner:
    """Runs scripts on one set-up."""

    def __init__(self, children: Children, setup: str) -> None:
        self.children, self.setup = children, setup

    def __call__(self, script: str) -> tuple[int, str, str]:
        done = self.children.run(self.setup, PRELUDE + script, granules=1024)
        return done.returncode, done.stdout, done.stderr


@pytest.fixture(params=SETUPS)
def run(children: Children, request: pytest.FixtureRequest) -> Runner:
    return Runner(children, request.param)


PREFIX = """
cache.back(3)
capture_a_write()
block = first_beyond(cache, 3)
assert cache.backed < block
replay(0)
say("backed", kv[:, 0].eq(10).all().item())
"""


def test_a_replay_beyond_a_prefix_backing_is_a_fault(run: Runner) -> None:
    assert run(PREFIX + "replay(block)\nsay('alive')") == (-signal.SIGSEGV, "backed True\n", "")


def test_the_same_replay_is_right_after_the_commit(run: Runner) -> None:
    assert run(
        PREFIX
        + """
address = kv.data_ptr()
cache.commit(CAPACITY)
replay(block)
say("right", right(block), kv.data_ptr() == address)
"""
    ) == (0, "backed True\nright True True\n", "")


ALIAS = """
before = model.used(0)
cache.back(alias=True)
capture_a_write()
pooled = device.memory.reserved()
replay(CAPACITY - 1)
kv.zero_()
assert cache.reserved_bytes > alias_chunk == cache.physical_bytes
say("one chunk", model.used(0) - before - pooled == alias_chunk)
count = 5
cache.commit(count)
block = first_beyond(cache, count)
"""


def test_over_an_alias_backing_any_block_may_be_written_and_costs_one_chunk(run: Runner) -> None:
    assert run(ALIAS + "replay(count - 1)\nsay('right', right(count - 1))") == (
        0,
        "one chunk True\nright True\n",
        "",
    )


@pytest.mark.parametrize("last", [False, True])
def test_a_block_beyond_the_commit_from_an_alias_backing_is_a_fault(run: Runner, last: bool) -> None:
    """The addresses that the alias covered have nothing behind them any more."""
    found = run(ALIAS + f"replay(CAPACITY - 1 if {last} else block)\nsay('alive')")
    assert found == (-signal.SIGSEGV, "one chunk True\n", "")


def test_a_read_of_a_block_with_no_memory_is_a_fault_too(run: Runner) -> None:
    assert run(PREFIX + "say(kv[:, block].sum().item())") == (-signal.SIGSEGV, "backed True\n", "")


def test_after_a_shrink_a_replay_of_a_block_that_went_is_a_fault(run: Runner) -> None:
    """Where memory returns only with its addresses (B4) the chunks stay with the cache, unmapped all the same."""
    keeps = run.setup == QUIRKY
    script = f"""
cache.commit(CAPACITY)
assert (cache.shrink(5) == 0) == (cache.spare_bytes > 0) == {keeps}
block = first_beyond(cache, cache.backed)
replay(block)
say("alive")
"""
    returncode, stdout, stderr = run(PREFIX + script)
    assert (returncode, stdout) == (-signal.SIGSEGV, "backed True\n")
    assert ("returns memory only with its addresses" in stderr) == keeps
