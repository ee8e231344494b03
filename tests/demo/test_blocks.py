from __future__ import annotations

import pytest

from vmm_kv.demo.blocks import BlockAllocator


def test_hands_out_every_block_but_the_null_block_once() -> None:
    blocks = BlockAllocator(50)
    assert sorted(blocks.take(49)) == list(range(1, 50))
    assert blocks.free == 0
    with pytest.raises(ValueError, match="1 blocks asked for, 0 of 49"):
        blocks.take(1)


def test_the_order_comes_from_the_whole_cache_and_is_fixed_by_the_seed() -> None:
    first = BlockAllocator(1000, seed=1).take(20)
    assert first == BlockAllocator(1000, seed=1).take(20)
    assert first != BlockAllocator(1000, seed=2).take(20)
    assert min(first) < 250 and max(first) > 750


def test_a_returned_block_waits_its_turn() -> None:
    blocks = BlockAllocator(6)
    first = blocks.take(2)
    blocks.give_back(first)
    assert blocks.take(5)[-2:] == first


def test_counts_what_was_written() -> None:
    blocks = BlockAllocator(10)
    assert (blocks.distinct_written, blocks.highest_written) == (0, 0)
    blocks.wrote([3, 7, 3])
    blocks.wrote([7])
    assert (blocks.distinct_written, blocks.highest_written) == (2, 7)


@pytest.mark.parametrize("block", [-1, 0, 10, 11])
def test_a_block_that_is_not_usable_is_refused(block: int) -> None:
    """cases.md C79: ids handed out and used are in [1, committed)."""
    blocks = BlockAllocator(10)
    for use in (blocks.check, blocks.wrote, blocks.give_back):
        with pytest.raises(ValueError, match=f"block {block} is not usable"):
            use([1, block])
    assert blocks.distinct_written == 0
    blocks.check(range(1, 10))


def test_too_few_blocks() -> None:
    with pytest.raises(ValueError, match="1 blocks"):
        BlockAllocator(1)
