"""The block pool: every block is held once or free, whatever is asked in whatever order."""

import random

import numpy as np
import pytest

from kvferry.engines.reference.blocks import BlockPool
from kvferry.errors import BusyError, ConfigError


def test_random_use_never_hands_out_a_block_twice():
    pool, held, draw = BlockPool(50), [], random.Random(7)
    for _ in range(500):
        if held and draw.random() < 0.5:
            pool.free(held.pop(draw.randrange(len(held))))
        else:
            count = draw.randint(0, 9)
            if count <= pool.free_count:
                held.append(pool.allocate(count))
            else:
                with pytest.raises(BusyError):
                    pool.allocate(count)
        taken = [int(block) for blocks in held for block in blocks]
        assert len(set(taken)) == len(taken) == 50 - pool.free_count
        assert all(0 <= block < 50 for block in taken)
    for blocks in held:
        pool.free(blocks)
    assert sorted(pool.allocate(50)) == list(range(50))


@pytest.mark.parametrize("bad", [[0, 0], [3], [-1], [99], [0, 3]])
def test_bad_free_is_a_bug_and_changes_nothing(bad):
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="not taken"):
        pool.free(np.array(bad))
    assert pool.free_count == 2


def test_freed_blocks_are_used_again_and_nothing_is_a_fine_number_of_blocks():
    pool = BlockPool(2)
    first = pool.allocate(1)
    pool.free(first)
    assert pool.allocate(1) == first
    pool.free(pool.allocate(0))
    assert pool.free_count == 1


def test_an_empty_pool_is_refused():
    with pytest.raises(ConfigError):
        BlockPool(0)
