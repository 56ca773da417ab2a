"""Invariants of the engine's block pool, which hold between any two calls."""

from kvbm.engines.embedded.engine.block_pool import BlockPool


def check_pool(pool: BlockPool) -> None:
    """Every block is in exactly one state, and the index is a bijection."""
    in_use = [block_id for block_id, count in enumerate(pool._references) if count]
    assert sorted([*pool._free, *pool._evictable, *in_use]) == list(range(pool.block_count))
    assert {hash_: block_id for block_id, hash_ in enumerate(pool._hash_of) if hash_} == pool._block_of
    assert not any(pool._hash_of[block_id] for block_id in pool._free)
    assert all(pool._hash_of[block_id] for block_id in pool._evictable)
