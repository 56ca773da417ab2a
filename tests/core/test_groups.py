"""The longest hit over several KV cache groups, against a definition that tries every length."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.core.groups import Group, StateGroup, longest_hit, needed_blocks


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
    st.builds(StateGroup, st.sampled_from([2, 4])),
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
    needed = set(needed_blocks(groups, chains, found))
    if found > start:
        first = [start // group.block_tokens for group in groups]
        assert {one for one in needed if one[1] >= first[one[0]]} <= present
    for absent_one in needed:
        assert by_trying(needed - {absent_one}, groups, 0, found) < found or found == 0
    assert by_trying(needed, groups, 0, found) == found or found % math.lcm(*(g.block_tokens for g in groups))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (1, 0, 2)], ids=["first", "last", "between"])
def test_a_hit_needs_the_snapshot_of_every_state_group_exactly_at_its_end(order):
    made = [Group(4), StateGroup(4), StateGroup(8)]
    groups = [made[i] for i in order]
    chains = chains_of(groups, 32)
    full, small, large = (order.index(i) for i in range(3))
    present = {*chains[full], name(small, 3), name(large, 1)}  # both at 16 tokens

    def hit(end):
        return longest_hit(present.__contains__, groups, chains, start=0, end=end)

    assert (hit(15), hit(16), hit(32)) == (0, 16, 16)
    present.add(name(small, 7))  # deeper, in one group only
    assert hit(32) == 16
    present.remove(name(full, 2))
    assert hit(32) == 0


def test_a_model_of_states_only_needs_one_block_per_group():
    groups = [StateGroup(4), StateGroup(4)]
    chains = chains_of(groups, 32)
    present = {name(0, 1), name(1, 1), name(0, 5)}
    assert longest_hit(present.__contains__, groups, chains, start=0, end=32) == 8
    assert longest_hit(present.__contains__, groups, chains, start=8, end=32) == 8
    assert needed_blocks(groups, chains, 8) == [name(0, 1), name(1, 1)]


def test_needed_blocks_go_from_the_head_to_the_tail_and_end_with_the_snapshots():
    groups = [StateGroup(8), Group(4), Group(4, window_tokens=5)]
    chains = chains_of(groups, 32)
    assert needed_blocks(groups, chains, 0) == []
    assert needed_blocks(groups, chains, 16) == [
        *(name(1, 0), name(1, 1), name(1, 2)),
        *(name(1, 3), name(2, 3)),
        name(0, 1),
    ]


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
        (StateGroup(128), 1024, 7),
    ],
)
def test_first_block_that_is_still_needed(group, end, block):
    assert group.first_needed_block(end) == block
