"""The hit-rate curve of one pass equals direct simulations of LRU caches, one per capacity."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm_cli.bench.trace.command import plot_lines
from kvbm_cli.bench.trace.hit_curve import HitCurve, PrefixTree, Use, hit_curve

BLOCK = 4


def simulated(tree, uses, capacity):
    """Tokens found by an LRU cache that evicts block by block; a hit ends at the first block that is missing."""
    cache, held, found = OrderedDict(), 0, 0
    for use in uses:
        path = tree.path(use.prompt)
        for node in reversed(path):
            if node not in cache:
                break
            found += tree.tokens[node]
        for node in tree.path(use.kept):
            if node not in cache:
                held += tree.tokens[node]
            cache[node] = True
            cache.move_to_end(node)
        while held > capacity:
            held -= tree.tokens[cache.popitem(last=False)[0]]
    return found


def built(prompts):
    """`prompts` are lists of ids with the tokens of the last block, and the tokens of an answer, 0 for none."""
    tree, uses = PrefixTree(), []
    for ids, last, answer in prompts:
        prompt = tree.add(0, tuple(ids), token_count=(len(ids) - 1) * BLOCK + last, block_tokens=BLOCK)
        uses.append(Use(prompt, tree.append(prompt, answer) if answer else prompt))
    return tree, uses


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, BLOCK), st.sampled_from([0, 0, 3])),
    min_size=1,
    max_size=25,
)


@given(PROMPTS)
def test_curve_equals_the_simulation_at_every_capacity(prompts):
    tree, uses = built(prompts)
    curve = hit_curve(tree, uses)
    total = sum(tree.depth_tokens[use.prompt] for use in uses)
    for capacity in range(sum(tree.tokens) + 2):
        assert curve.hit_rate(capacity) == simulated(tree, uses, capacity) / total
    assert curve.ideal == simulated(tree, uses, 10**9) / total


@given(PROMPTS, st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_capacity_for_a_share_is_the_smallest_one(prompts, share):
    curve = hit_curve(*built(prompts))
    capacity = curve.capacity_for(share)
    if capacity is None:
        assert curve.ideal == 0
    else:
        assert curve.hit_rate(capacity) >= share * curve.ideal - 1e-12
        assert curve.hit_rate(capacity - 1) < share * curve.ideal


def test_a_block_after_another_prefix_is_another_block():
    tree, uses = built([([1, 2], 4, 0), ([3, 2], 4, 0), ([2], 4, 0)])
    assert hit_curve(tree, uses).ideal == 0
    assert len(tree) == 1 + 5


def test_a_shorter_last_block_is_another_block():
    assert hit_curve(*built([([1], 4, 0), ([1], 3, 0)])).ideal == 0
    assert hit_curve(*built([([1], 3, 0), ([1], 3, 0)])).ideal == 0.5


def test_an_answer_takes_room():
    prompts = [([1], 4, 3), ([2], 4, 3), ([1], 4, 3)]
    curve = hit_curve(*built(prompts))
    assert (curve.hit_rate(4 + 3 + 3), curve.hit_rate(4 + 4 + 3)) == (0, pytest.approx(1 / 3))


def test_use_counts_are_the_requests_of_each_prefix():
    tree, uses = built([([1, 2], 4, 0), ([1, 3], 4, 0), ([1, 2], 4, 0)])
    assert list(tree.use_counts(use.prompt for use in uses)) == [3, 3, 2, 1]


def test_plot_is_80_wide_and_ends_at_the_ideal():
    curve = HitCurve([100, 10_000, 1_000_000, 2_000_000], [1, 30, 60, 80], 100)
    lines = plot_lines(curve, bytes_per_token=131072)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("  80.0% │")
    assert lines[0].endswith("█")
    assert "16 GiB" in lines[-2]
    assert "1M" in plot_lines(curve, bytes_per_token=None)[-2]
    heights = [sum(line.ljust(80)[column] != " " for line in lines[:10]) for column in range(9, 77)]
    assert heights == sorted(heights)


@pytest.mark.parametrize("distance", [1, 512, 10**15])
@pytest.mark.parametrize("unit", [None, 1, 10**6])
def test_plot_of_a_single_step(distance, unit):
    lines = plot_lines(HitCurve([distance], [5], 10), bytes_per_token=unit)
    assert len(lines) == 13
    assert max(map(len, lines)) <= 80


def test_nothing_is_plotted_if_nothing_repeats():
    assert plot_lines(HitCurve([], [], 10), bytes_per_token=None) == []
