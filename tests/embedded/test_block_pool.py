"""The block pool: age, references and misuse."""

import pytest
from pool_check import check_pool

from kvbm.engines.embedded.engine.block_pool import BlockPool
from kvbm.errors import InvariantError


def filled(count: int, *, of: int) -> tuple[BlockPool, list[int]]:
    """A pool with `count` blocks registered under b"0", b"1", ... and released in that order."""
    pool = BlockPool(of)
    block_ids = pool.allocate(count)
    for index, block_id in enumerate(block_ids):
        pool.register(block_id, b"%d" % index)
    pool.release(block_ids)
    check_pool(pool)
    return pool, block_ids


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    check_pool(pool)


def test_free_blocks_go_before_cached_ones_and_the_oldest_of_these_first():
    pool, block_ids = filled(3, of=5)
    assert not set(pool.allocate(2)) & set(block_ids)
    assert pool.allocate(1) == block_ids[:1]
    assert pool.match([b"0"]) == []
    assert pool.match([b"1", b"2", b"3"]) == block_ids[1:]
    check_pool(pool)


def test_use_makes_a_block_young_again():
    pool, block_ids = filled(3, of=3)
    pool.hold(block_ids[:1])
    pool.release(block_ids[:1])
    assert pool.allocate(1) == block_ids[1:2]


def test_a_match_ends_at_the_first_gap():
    pool, block_ids = filled(3, of=3)
    assert pool.match([b"0", b"x", b"2"]) == block_ids[:1]


def test_a_hash_keeps_its_first_block():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"same")
    pool.register(second, b"same")
    assert pool.match([b"same"]) == [first]
    pool.release([first, second])
    check_pool(pool)
    assert pool.available_count == 2


def test_a_held_block_is_neither_free_nor_evictable():
    pool, block_ids = filled(2, of=2)
    pool.hold(block_ids)
    pool.hold(block_ids)
    pool.release(block_ids)
    assert pool.allocate(1) is None
    assert pool.match([b"0", b"1"]) == block_ids
    pool.release(block_ids)
    assert pool.available_count == 2
    check_pool(pool)


def test_forgotten_blocks_are_not_found_and_stay_with_their_users():
    pool, block_ids = filled(2, of=2)
    pool.hold(block_ids[:1])
    pool.reset()
    assert pool.match([b"0"]) == []
    assert pool.available_count == 1
    check_pool(pool)
    pool.release(block_ids[:1])
    check_pool(pool)
    assert pool.available_count == 2


def test_misuse_is_named():
    pool = BlockPool(2)
    with pytest.raises(InvariantError, match="release of block 0"):
        pool.release([0])
    with pytest.raises(InvariantError, match="hold of block 1"):
        pool.hold([1])
    with pytest.raises(InvariantError, match="register of block 0"):
        pool.register(0, b"x")
