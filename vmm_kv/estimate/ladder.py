"""What a ladder of graphs needs and what memory allows of it, whatever sizes the cache. Bytes and blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vmm_kv.budget import exactly, readable
from vmm_kv.estimate.probe import Descriptor, by_mode
from vmm_kv.layout import most_blocks


@dataclass(frozen=True)
class Admitted:
    """The graphs that memory allows, and why the others run eagerly."""

    graphs: tuple[Descriptor, ...]
    rejected: tuple[tuple[Descriptor, str], ...]


def capture_order(ladder: Iterable[Descriptor]) -> tuple[Descriptor, ...]:
    """The largest first within a mode, the modes as they first come.

    In a shared pool each graph reuses what the ones before it freed: largest first costs about the largest, smallest
    first the sum (C27).
    """
    return tuple(graph for own in by_mode(tuple(ladder)).values() for graph in own)


def largest_size(footprint: Callable[[int], int], room: int, most: int) -> int:
    """The largest size up to `most` that leaves graphs within `room` bytes; 0 if none does.

    `footprint(size)` is what a ladder up to `size` keeps, captured largest first; it must not fall in `size`.
    """
    return most_blocks(footprint, room, most)


def admit(ladder: Sequence[Descriptor], footprint: Callable[[int], int], *, budget: int, kv_floor: int) -> Admitted:
    """Caps a ladder so that the KV cache keeps `kv_floor` of the `budget` for cache and graphs (vLLM #54418, C26)."""
    room = budget - kv_floor
    most = largest_size(footprint, room, max((graph.size for graph in ladder), default=0)) if room >= 0 else 0
    rejected = tuple(
        (graph, f"graphs up to {graph.size} keep {exactly(footprint(graph.size))}, {readable(room)} are left for them")
        for graph in ladder
        if graph.size > most
    )
    return Admitted(tuple(graph for graph in ladder if graph.size <= most), rejected)


def blocks_to_back(ladder: Iterable[Descriptor], sequences: int) -> int:
    """Blocks that must be backed for capture: one for each sequence of the largest graph, and the null block.

    Tokens do not count: a graph of 4096 tokens of 256 sequences needs 257 blocks (vLLM #48483, C28).
    """
    return 1 + min(sequences, max((graph.size for graph in ladder), default=0))


def check_state_slots(graph: Descriptor, slots: int, *, profiling: bool = False) -> None:
    """Refuses a full graph for which there are too few state blocks: each of its sequences needs one of its own.

    Graphs of other modes do not touch states, and a throw-away capture does not keep them (vLLM #38270, C29).
    """
    if graph.mode == "full" and not profiling and graph.size > slots:
        raise ValueError(
            f"a full graph of {graph.size} sequences needs {graph.size} state blocks, {slots} are backed: "
            f"back more, or capture up to {slots}"
        )


def eager_headroom(chunk: int, largest_prefill: int, eager_peak: int) -> tuple[int, str]:
    """Bytes to leave free for prefills that no graph covers, and why (SGLang #33427 and #33852, C30).

    A graph keeps its workspace, so a measurement after capture holds it; an eager prefill takes it on top. `chunk`: the
    most tokens of one prefill. Raises `ValueError` where there is no bound on it: then nothing can be covered.
    """
    if chunk <= 0:
        raise ValueError(f"a prefill chunk of {chunk} tokens is no bound: set one to size the cache after capture")
    if largest_prefill >= chunk:
        return 0, f"every prefill up to {chunk} tokens is captured (up to {largest_prefill}): nothing is kept for it"
    uncovered = f"prefills above {largest_prefill} and up to {chunk} tokens run eagerly"
    return eager_peak, f"{uncovered}: {readable(eager_peak)} are kept for it"
