"""The KV block pool: whole blocks out and in, nothing lost, nothing twice."""

import random

import pytest

from attention_nodes.cache.block_pool import BlockPool


def test_random_traffic_conserves_blocks_and_never_hands_one_out_twice() -> None:
    pool, dice = BlockPool(blocks=23, block_size=4), random.Random(1)
    held: list[list[int]] = []
    for _ in range(2000):
        if held and dice.random() < 0.5:
            pool.release(held.pop(dice.randrange(len(held))))
        elif (blocks := pool.allocate(dice.randrange(6))) is not None:
            held.append(blocks)
        out = [block for blocks in held for block in blocks]
        assert len(set(out)) == len(out)
        assert set(out) <= set(range(pool.total))
        assert pool.free + len(out) == pool.total


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(blocks=3, block_size=1)
    assert pool.allocate(4) is None
    assert pool.free == 3
    assert sorted(pool.allocate(3) or []) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_block_that_is_not_held_cannot_be_released() -> None:
    pool = BlockPool(blocks=3, block_size=1)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match=f"block {blocks[0]} was released twice"):
        pool.release(blocks)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert BlockPool(blocks=1, block_size=4).blocks_for(tokens) == blocks


@pytest.mark.parametrize(("blocks", "block_size"), [(0, 16), (4, 0)])
def test_an_empty_pool_is_refused_with_its_size(blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"{blocks} blocks of {block_size} tokens"):
        BlockPool(blocks, block_size)
