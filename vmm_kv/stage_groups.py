"""How the layers of a model's pipeline stages share block ids: the groups of each stage, as a plan takes them. Pure.

All stages count the same ids, so a request takes as many of them on each. Where kinds of layers differ (windows, full
attention), every kind is cut into groups of about equally many layers, over the whole model, and an id serves one group
at a time: on a stage its bytes are those of the group with the most layers there. A state takes whole ids. This is how
vLLM lays out hybrid models (`_get_kv_cache_groups_uniform_page_size`), its pipeline stages included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vmm_kv.kv_groups import Group
from vmm_kv.model_shape import KvGroup

Cuts = dict[str, tuple[tuple[int, ...], ...]]
"""Of each kind of attention, the layers of each of its groups, over the whole model."""


@dataclass(frozen=True)
class StageGroups:
    """The groups of one stage, on one pool of blocks."""

    groups: tuple[Group, ...]
    padding_layers: int
    """Layers' worth of memory that no layer uses, so that an id serves any group (`cases.md` C64)."""


def stage_groups(stages: Sequence[Sequence[KvGroup]], block_size: int, step_tokens: int = 0) -> tuple[StageGroups, ...]:
    """The groups of a rank of each stage, for blocks of `block_size` tokens. A stage without any has none.

    `stages`: what `ModelShape.groups` says of each stage's layers. `step_tokens`: tokens in flight, which a window
    holds as well.
    """
    kinds: dict[str, KvGroup] = {}
    layers: dict[str, list[int]] = {}
    for group in (group for groups in stages for group in groups):
        kinds.setdefault(group.name, group)
        layers.setdefault(group.name, []).extend(group.layers)
    drawing = [name for name, group in kinds.items() if group.kind != "state"]
    size = group_size([len(layers[name]) for name in drawing])
    cuts = {name: cut(layers[name], size) for name in drawing}
    ids = _state_ids(stages, cuts, block_size)
    return tuple(_stage(groups, kinds, cuts, ids, block_size, step_tokens) if groups else StageGroups((), 0)
                 for groups in stages)  # fmt: skip


def group_size(counts: Sequence[int]) -> int:
    """Layers of a group when kinds of layers of these counts share one pool: the least of them, or the most where that
    is less than half more, which wastes little (vLLM's rule; `cases.md` C64)."""
    if not counts:
        return 1
    return max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)


def cut(layers: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """The layers in groups of at most `size`, in turn, so that a pipeline stage holds about as many of every group."""
    count = -(-len(layers) // size)
    return tuple(tuple(layers[i::count]) for i in range(count))


def padding_layers(counts: Sequence[int]) -> int:
    """What is missing where groups of so many layers each have the memory of the largest (`cases.md` C64)."""
    return sum(max(counts, default=0) - count for count in counts)


def _held(groups: Sequence[KvGroup], cuts: Cuts) -> dict[str, list[int]]:
    """Of each kind, how many layers of each of its groups the stage holds."""
    own = {index for group in groups for index in group.layers}
    return {name: [sum(index in own for index in part) for part in parts] for name, parts in cuts.items()}


def _block_bytes(groups: Sequence[KvGroup], cuts: Cuts, block_size: int) -> int:
    """Bytes of a block id on the stage: those of the group with the most; 0 without attention."""
    layers = {
        group.name: dict(zip(group.layers, group.layer_bytes, strict=True)) for group in groups if group.kind != "state"
    }
    sizes = [sum(own.get(index, 0) for index in part) for name, own in layers.items() for part in cuts[name]]
    return max(sizes, default=0) * block_size


def _state_ids(stages: Sequence[Sequence[KvGroup]], cuts: Cuts, block_size: int) -> int:
    """Block ids that a request's state takes: whole blocks of the stage that needs the most of them.

    Where no stage has both, the largest state in the largest blocks. 0 without attention or without states.
    """
    sizes = [(_block_bytes(groups, cuts, block_size), sum(g.bytes_per_request for g in groups)) for groups in stages]
    both = [-(-state // block) for block, state in sizes if block and state]
    most_block, most_state = max(block for block, _ in sizes), max(state for _, state in sizes)
    return max(both) if both else -(-most_state // most_block) if most_block else 0


def _stage(
    groups: Sequence[KvGroup],
    kinds: dict[str, KvGroup],
    cuts: Cuts,
    ids: int,
    block_size: int,
    step_tokens: int,
) -> StageGroups:
    state = sum(group.bytes_per_request for group in groups)
    # Without attention on the stage only the state gives an id its bytes; without any in the model it is the block.
    block = _block_bytes(groups, cuts, block_size) or (-(-state // ids) if ids else 0)
    found = []
    for name, kind in kinds.items():
        if kind.kind == "state":
            fits = not block or -(-state // block) == ids
            found.append(Group(name, kind="state", bytes_per_request=state if fits else ids * block))
            continue
        window = None if kind.window is None else kind.window + step_tokens
        count = len(cuts[name])
        names = [name] if count == 1 else [f"{name}, {i + 1} of {count}" for i in range(count)]
        found += [Group(one, block, block_size, kind.kind, window) for one in names]
    counts = [count for counts in _held(groups, cuts).values() for count in counts]
    return StageGroups(tuple(found), padding_layers(counts))
