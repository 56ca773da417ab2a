"""The longest hit over several KV cache groups, against a definition that tries every length."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.core.groups import Group, longest_hit


def name(group, block):
    return bytes([group, block])


def chains_of(groups, tokens):
    return [[name(g, block) for block in range(tokens // group.block_tokens)] for g, group in enumerate(groups)]


def serves(group, index, present, start, end):
    """By the definition: each block that a token at `end` looks into is present, or lies before `start`."""
    needed = range(group.first_needed_block(end), end // group.block_tokens)
    return all(name(index, b) in present for b in needed if b >= start // group.block_tokens)


def by_trying(present, groups, start, end):
    unit = math.lcm(*(group.block_tokens for group in groups))
    fitting = [
        reach
        for reach in range(unit, end + 1, unit)
        if reach > start and all(serves(group, i, present, start, reach) for i, group in enumerate(groups))
    ]
    return max(fitting, default=start)


GROUPS = st.one_of(
    st.builds(Group, st.sampled_from([2, 4])),
    st.builds(Group, st.sampled_from([2, 4]), window_tokens=st.integers(1, 12)),
    st.builds(Group, st.sampled_from([2, 4]), chunk_tokens=st.sampled_from([4, 8])),
)


@given(
    groups=st.lists(GROUPS, min_size=1, max_size=3),
    start=st.integers(0, 4).map(lambda units: 4 * units),
    end=st.integers(0, 40),
    absent=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 19)), max_size=12),
)
def test_the_longest_hit_is_what_trying_every_length_finds(groups, start, end, absent):
    chains = chains_of(groups, 40)
    present = {h for chain in chains for h in chain} - {name(g, block) for g, block in absent}
    found = longest_hit(present.__contains__, groups, chains, start=start, end=end)
    assert found == by_trying(present, groups, start, end)


def test_a_window_needs_only_the_blocks_that_the_next_token_sees():
    groups = [Group(4), Group(4, window_tokens=6)]
    chains = chains_of(groups, 32)
    present = set(chains[0]) | {name(1, 6), name(1, 7)}
    assert longest_hit(present.__contains__, groups, chains, start=0, end=32) == 32
    present.remove(name(1, 6))
    assert longest_hit(present.__contains__, groups, chains, start=0, end=32) == 0


def test_without_any_block_of_a_window_the_search_looks_at_each_block_once():
    looked = []
    group = Group(16, window_tokens=4096)
    chain = [block.to_bytes(4, "big") for block in range(8000)]

    def is_present(block_hash):
        looked.append(block_hash)
        return False

    assert longest_hit(is_present, [group], [chain], start=0, end=128_000) == 0
    assert len(looked) <= len(chain)


@pytest.mark.parametrize(
    ("group", "end", "block"),
    [
        (Group(128), 1024, 0),
        (Group(128, window_tokens=512), 1024, 4),
        (Group(128, window_tokens=512), 500, 0),
        (Group(128, chunk_tokens=512), 1024, 8),
        (Group(128, chunk_tokens=512), 1023, 4),
    ],
)
def test_first_block_that_is_still_needed(group, end, block):
    assert group.first_needed_block(end) == block
