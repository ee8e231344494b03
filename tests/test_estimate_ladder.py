"""What a ladder of graphs needs, and what memory allows of it."""

from __future__ import annotations

import pytest

from vmm_kv.estimate import (
    Descriptor,
    admit,
    blocks_to_back,
    capture_order,
    check_state_slots,
    eager_headroom,
    largest_size,
)

MIB, GIB = 1 << 20, 1 << 30


def test_c26_a_ladder_is_capped_by_what_the_cache_must_keep() -> None:
    """C26: 0.8 MiB x the largest size, 5.12 of 6.0 GiB for KV: up to 1126 (901 MiB); 2176 and 6400 say why not."""

    def footprint(size: int) -> int:
        return size * 8 * MIB // 10

    room = 6 * GIB - round(5.12 * GIB)
    assert largest_size(footprint, room, 6400) == 1126
    assert round(footprint(1126) / MIB) == 901
    graphs = [Descriptor("full", size) for size in (6400, 2176, 1126, 512, 1)]
    found = admit(graphs, footprint, budget=6 * GIB, kv_floor=round(5.12 * GIB))
    assert [graph.size for graph in found.graphs] == [1126, 512, 1]
    assert [graph.size for graph, _ in found.rejected] == [6400, 2176]
    assert found.rejected[1][1].startswith("graphs up to 2176 keep 1.70 GiB (")
    assert found.rejected[1][1].endswith("901.12 MiB are left for them")


def test_no_graph_is_admitted_where_the_cache_needs_it_all() -> None:
    graphs = [Descriptor("full", 8)]
    assert admit(graphs, lambda size: size, budget=100, kv_floor=101).graphs == ()
    assert admit(graphs, lambda size: size, budget=100, kv_floor=92).graphs == (graphs[0],)
    assert admit([], lambda size: size, budget=100, kv_floor=0).graphs == ()


def test_c27_largest_first() -> None:
    """C27: a pool that reuses needs 800 MiB for 100, 200, 400, 800 in falling order, 1500 in rising order."""
    rising = [Descriptor("full", size) for size in (100, 200, 400, 800)]

    def pool(graphs: list[Descriptor]) -> int:
        """A block serves the next graph if it is large enough; one that is too small stays and is not merged."""
        blocks: list[int] = []
        for graph in graphs:
            if not any(block >= graph.size for block in blocks):
                blocks.append(graph.size)
        return sum(blocks)

    assert pool(rising) == 1500
    assert pool(list(capture_order(rising))) == 800
    mixed = [*rising, Descriptor("draft", 1), Descriptor("draft", 2)]
    assert [str(graph) for graph in capture_order(mixed)][-3:] == ["full 100", "draft 2", "draft 1"]


def test_c28_backing_follows_sequences_and_not_tokens() -> None:
    """C28: up to 4096 tokens of 256 sequences: 257 blocks (514 MiB of 2 MiB each), not 4096 (8 GiB)."""
    graphs = [Descriptor("full", size) for size in (4096, 256, 1)]
    assert blocks_to_back(graphs, sequences=256) == 257
    assert blocks_to_back(graphs, sequences=256) * 2 * MIB == 514 * MIB
    assert blocks_to_back(graphs[1:], sequences=1024) == 257
    assert blocks_to_back([], sequences=256) == 1


def test_c29_full_graphs_need_a_state_block_for_each_sequence() -> None:
    """C29: 512 committed, 1024 sequences."""
    with pytest.raises(ValueError, match="1024 sequences needs 1024 state blocks, 512 are backed"):
        check_state_slots(Descriptor("full", 1024), 512)
    check_state_slots(Descriptor("piecewise", 1024), 512)
    check_state_slots(Descriptor("full", 1024), 512, profiling=True)
    check_state_slots(Descriptor("full", 512), 512)


def test_c30_an_eager_prefill_is_not_in_the_measurement() -> None:
    """C30: covered up to the chunk of 8192, nothing is kept; covered up to 2048, the eager peak is, and why."""
    assert eager_headroom(8192, 8192, 5)[0] == 0
    kept, told = eager_headroom(8192, 2048, round(1.8 * GIB))
    assert kept == round(1.8 * GIB)
    assert told == "prefills above 2048 and up to 8192 tokens run eagerly: 1.80 GiB are kept for it"
    for chunk in (0, -1):
        with pytest.raises(ValueError, match=f"chunk of {chunk} tokens is no bound"):
            eager_headroom(chunk, 8192, 5)
