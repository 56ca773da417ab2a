"""HitCurve: the token hit rate of an LRU cache of any capacity, from one pass over the requests.

The cache keeps the blocks that were used last, up to its capacity in tokens. A request uses the blocks of its prompt
from the last to the first, so that a block is evicted before the prefix that it depends on. Its lookup comes before its
changes. A block is therefore found if and only if its stack distance is at most the capacity: the tokens of the blocks
that were used since its last use, with its own. The prefix of a found block has smaller distances, so it is found, too.
One pass yields all distances (Mattson et al., 1970). A Fenwick tree over the uses holds the tokens of uses that a later
use replaced, so that a distance takes O(log uses).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvbm_cli.bench.trace.prefix_tree import PrefixTree

REPORT_EVERY = 1000


@dataclass(frozen=True, slots=True)
class HitCurve:
    """`distances` ascend; `found_tokens[i]` are the tokens found with a capacity of `distances[i]`."""

    distances: Sequence[int]
    found_tokens: Sequence[int]
    prompt_tokens: int

    @property
    def ideal(self) -> float:
        """The hit rate of a cache of unlimited size."""
        return self.found_tokens[-1] / self.prompt_tokens if self.found_tokens else 0.0

    def hit_rate(self, capacity_tokens: float) -> float:
        index = bisect_right(self.distances, capacity_tokens)
        return self.found_tokens[index - 1] / self.prompt_tokens if index else 0.0

    def capacity_for(self, share: float) -> int | None:
        """The smallest capacity in tokens with this share of the ideal hit rate; None if nothing repeats."""
        if not self.found_tokens:
            return None
        index = bisect_left(self.found_tokens, share * self.found_tokens[-1])
        return self.distances[min(index, len(self.distances) - 1)]


@dataclass(frozen=True, slots=True)
class Use:
    """A request: the last node of its prompt, and of what it leaves in the cache: the prompt or one answer after it."""

    prompt: int
    kept: int


def hit_curve(tree: PrefixTree, uses: Sequence[Use], *, report: Callable[[int], None] = lambda done: None) -> HitCurve:
    """`uses` are in the order of the launches. `report` is called with the number of finished requests."""
    stack = _Stack(tree, sum(tree.depth[use.kept] for use in uses))
    found: Counter[int] = Counter()
    for number, use in enumerate(uses):
        path = tree.path(use.prompt)
        for node in reversed(path):
            distance = stack.distance(node)
            if distance is None:
                break
            found[distance] += tree.tokens[node]
        stack.use(path if use.kept == use.prompt else [use.kept, *path])
        if number % REPORT_EVERY == 0:
            report(number)
    distances = sorted(found)
    totals = list(accumulate(found[distance] for distance in distances))
    return HitCurve(distances, totals, sum(tree.depth_tokens[use.prompt] for use in uses))


class _Stack:
    """The blocks by their last use. `_slot` and `_pushed` belong to the last use of a node."""

    def __init__(self, tree: PrefixTree, use_count: int) -> None:
        self._tree = tree
        self._pushed_tokens = 0
        self._replaced_tokens = 0
        self._pushed = array("q", [-1]) * len(tree)  # tokens of all uses up to this one
        self._slot = array("q", bytes(8 * len(tree)))
        self._next_slot = 1
        self._fenwick = array("q", bytes(8 * (use_count + 1)))

    def distance(self, node: int) -> int | None:
        """None before the first use."""
        pushed = self._pushed[node]
        if pushed < 0:
            return None
        fenwick, slot, replaced_before = self._fenwick, self._slot[node], 0
        while slot:
            replaced_before += fenwick[slot]
            slot &= slot - 1
        newer = self._pushed_tokens - pushed - (self._replaced_tokens - replaced_before)
        return newer + self._tree.tokens[node]

    def use(self, path: Sequence[int]) -> None:
        """Makes the nodes the latest ones, from the last to the first of the prompt."""
        tokens, pushed, slots = self._tree.tokens, self._pushed, self._slot
        for node in path:
            if pushed[node] >= 0:
                self._replace(slots[node], tokens[node])
        for node in path:
            self._pushed_tokens += tokens[node]
            pushed[node] = self._pushed_tokens
            slots[node] = self._next_slot
            self._next_slot += 1

    def _replace(self, slot: int, token_count: int) -> None:
        self._replaced_tokens += token_count
        fenwick, size = self._fenwick, len(self._fenwick)
        while slot < size:
            fenwick[slot] += token_count
            slot += slot & -slot
