"""HitCurve: the token hit rate of an LRU cache of any capacity, from one pass over the requests.

The cache keeps the blocks that were used last, up to its capacity in tokens. A request uses the blocks of its prompt
from the last to the first, so that a block is evicted before the prefix that it depends on. Its lookup comes before its
changes. A block is therefore found if and only if its stack distance is at most the capacity: the tokens of the blocks
that were used since its last use, with its own. The prefix of a found block has smaller distances, so it is found, too.
One pass yields all distances (Mattson et al., 1970). A Fenwick tree over the uses holds the tokens of uses that a later
use replaced, so that a distance takes O(log uses).

PrefixTree has all prompts of a trace as paths from the root. A node is one block after one prefix. Blocks with equal
ids share a cache entry only after equal prefixes, so a cache entry is a node. A prompt is its last node. Node 0 is the
root, which holds nothing. A block without an id is never equal to another one. The last block of a prompt may be
shorter; it equals only a block of the same length.


Simulation has the hit rate of the product's own block store, driven with the requests of a trace: of every eviction
policy, a capacity at a time. `kvbm/core/shadow_caches.py` says what a cache without bytes does. This hit rate is hit
blocks over all blocks; the last block of a prompt counts as one, also if it is partial. A sample has every block whose
digest is below a limit, so that at most `tracked` different blocks are simulated. A cache of a share of the blocks then
has the same share of the places. All blocks of a chain are evicted from its tail, so the sampled blocks of a chain are,
too.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate

from kvbm.core.shadow_caches import NAME_BYTES, TRACKED_BLOCKS, SimulatedCache

REPORT_EVERY = 1000
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of the blocks of a trace
PRECISION = 0.02

Report = Callable[[str], None]


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
        """Return the smallest capacity in tokens with this share of the ideal hit rate; None if nothing repeats."""
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
    """Return the curve. `uses` are in the order of the launches. `report` is called with the number of finished
    requests."""
    stack = _Stack(tree, sum(tree.depth[use.kept] for use in uses))
    found: Counter[int] = Counter()
    for number, use in enumerate(uses):
        path = tree.path(use.prompt)
        for distance, tokens in stack.distances(reversed(path)):
            found[distance] += tokens
        stack.use(path if use.kept == use.prompt else [use.kept, *path])
        if number % REPORT_EVERY == 0:
            report(number)
    distances = sorted(found)
    totals = list(accumulate(found[distance] for distance in distances))
    return HitCurve(distances, totals, sum(tree.depth_tokens[use.prompt] for use in uses))


class _Stack:
    """The blocks by their last use. A use has a slot; `_slot` and `_pushed` belong to the last use of a node.

    The blocks of a prompt were mostly used together before, so they are in adjacent slots (a run), the first block in
    the highest one. Nothing is between two adjacent slots, so the tree is needed only once per run.
    """

    def __init__(self, tree: PrefixTree, use_count: int) -> None:
        self._tokens = tree.tokens
        self._pushed_tokens = 0
        self._replaced_tokens = 0
        self._pushed = array("q", [-1]) * len(tree)  # tokens of all uses up to this one
        self._slot = array("q", bytes(8 * len(tree)))
        self._next_slot = 1
        self._fenwick = array("q", bytes(8 * (use_count + 1)))

    def distances(self, nodes: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Stack distance and tokens of each block from the first one, until one was not used before."""
        run_slot = distance = 0
        for node in nodes:
            if self._pushed[node] < 0:
                return
            slot, tokens = self._slot[node], self._tokens[node]
            distance = distance + tokens if slot == run_slot - 1 else self._newer_tokens(node) + tokens
            run_slot = slot
            yield distance, tokens

    def use(self, path: Sequence[int]) -> None:
        """Make the nodes the latest ones, from the last to the first of the prompt."""
        tokens, pushed, slots = self._tokens, self._pushed, self._slot
        run_slot = run_tokens = 0
        for node in path:
            if pushed[node] < 0:
                continue
            if slots[node] != run_slot + 1:
                self._replace(run_slot, run_tokens)
                run_tokens = 0
            run_slot = slots[node]
            run_tokens += tokens[node]
        self._replace(run_slot, run_tokens)
        for node in path:
            self._pushed_tokens += tokens[node]
            pushed[node] = self._pushed_tokens
            slots[node] = self._next_slot
            self._next_slot += 1

    def _newer_tokens(self, node: int) -> int:
        """Tokens of the blocks that were used after this one."""
        fenwick, slot, replaced_before = self._fenwick, self._slot[node], 0
        while slot:
            replaced_before += fenwick[slot]
            slot &= slot - 1
        return self._pushed_tokens - self._pushed[node] - (self._replaced_tokens - replaced_before)

    def _replace(self, slot: int, token_count: int) -> None:
        """Mark a run as replaced, at its last slot: no block that is still in the stack is within the run."""
        self._replaced_tokens += token_count
        fenwick, size = self._fenwick, len(self._fenwick)
        while 0 < slot < size:
            fenwick[slot] += token_count
            slot += slot & -slot


class PrefixTree:
    def __init__(self) -> None:
        self.parent = array("q", [0])
        self.tokens = array("q", [0])  # of the block of a node
        self.depth_tokens = array("q", [0])  # of the path from the root
        self.depth = array("q", [0])  # blocks of the path from the root
        self._children: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self.parent)

    def add(self, start: int, hash_ids: tuple[int, ...], *, token_count: int, block_tokens: int) -> int:
        """Return the node of the last block. The ids cover `token_count` tokens after the path of `start`."""
        children, node = self._children, start
        last_tokens = token_count - (len(hash_ids) - 1) * block_tokens
        whole, partial = (hash_ids, ()) if last_tokens == block_tokens else (hash_ids[:-1], hash_ids[-1:])
        for one in whole:
            child = children.get((node, one))
            if child is None:
                children[node, one] = child = self.append(node, block_tokens)
            node = child
        for one in partial:
            child = children.get((node, one, last_tokens))
            if child is None:
                children[node, one, last_tokens] = child = self.append(node, last_tokens)
            node = child
        return node

    def append(self, parent: int, token_count: int) -> int:
        """Return a new node that no other prompt shares, unless it continues this one."""
        node = len(self.parent)
        self.parent.append(parent)
        self.tokens.append(token_count)
        self.depth_tokens.append(self.depth_tokens[parent] + token_count)
        self.depth.append(self.depth[parent] + 1)
        return node

    def path(self, node: int) -> list[int]:
        """Return the nodes from this one up to the first block."""
        nodes, parent = [], self.parent
        while node:
            nodes.append(node)
            node = parent[node]
        return nodes

    def use_counts(self, leaves: Iterable[int]) -> array[int]:
        """How many of the paths to `leaves` each node is on. A leaf counts as often as it is named."""
        counts = array("q", bytes(8 * len(self)))
        for leaf in leaves:
            counts[leaf] += 1
        for node in range(len(self) - 1, 0, -1):  # a parent is older than its children
            counts[self.parent[node]] += counts[node]
        return counts


@dataclass(frozen=True, slots=True)
class TimedUse:
    """A request of a trace: its use of the tree, and when it arrives."""

    at_s: float
    use: Use


class Sample:
    """Which nodes of a tree are simulated: those that have a name. They are `block_count`, a `share` of all nodes."""

    def __init__(self, tree: PrefixTree, tracked: int, *, seed: int = 0) -> None:
        key = seed.to_bytes(8, "big")
        digests = array("Q", [0])
        for node in range(1, len(tree)):
            digest = blake2b(node.to_bytes(8, "big"), digest_size=8, key=key).digest()
            digests.append(int.from_bytes(digest, "big"))
        count = len(digests) - 1
        limit = 1 << 64 if count <= tracked else sorted(digests[1:])[tracked]
        self.names = [name_of(node) if digest < limit else b"" for node, digest in enumerate(digests)]
        self.names[0] = b""  # the root has no block
        self.block_count = len(self.names) - self.names.count(b"")
        self.share = self.block_count / count if count else 1.0

    def chain(self, path: Sequence[int]) -> list[bytes]:
        """Return the names of the sampled blocks of a path, which begins with its last node."""
        names = self.names
        return [name for node in reversed(path) if (name := names[node])]


def name_of(node: int) -> bytes:
    """Return a name whose bytes are distributed as those of a block's hash: stores choose samples by them."""
    return blake2b(node.to_bytes(8, "big"), digest_size=NAME_BYTES).digest()


def hit_rate(
    tree: PrefixTree,
    uses: Iterable[TimedUse],
    sample: Sample,
    capacity_blocks: int,
    policy: str,
    *,
    report: Callable[[int], None] = lambda done: None,
) -> float:
    """Return the hit rate of a cache of `capacity_blocks`. `uses` are in the order of the arrivals.

    With a sample, the misses are counted and the uses are known: a block that nearly all requests use has few misses,
    whether it is in the sample or not, but many hits.
    """
    all_blocks = 0
    cache = SimulatedCache(max(1, round(capacity_blocks * sample.share)), policy)
    for number, one in enumerate(uses):
        all_blocks += tree.depth[one.use.prompt]
        chain, asked = _request(tree, one.use, sample)
        if chain:
            cache.use(one.at_s, chain, asked=asked)
        if number % REPORT_EVERY == 0:
            report(number)
    misses = cache.asked_blocks - cache.hit_blocks
    return max(0.0, 1 - misses / (sample.share * all_blocks)) if sample.share and all_blocks else 0.0


class Simulation:
    """Caches of other capacities, all with the same requests and one sample of `tracked` blocks."""

    def __init__(
        self,
        tree: PrefixTree,
        uses: Sequence[TimedUse],
        *,
        tracked: int = TRACKED_BLOCKS,
        report: Report = lambda phase: None,
    ) -> None:
        self._tree, self._uses, self._report = tree, uses, report
        self._sample = Sample(tree, tracked)
        self.simulated_blocks = self._sample.block_count

    def capacities(self) -> tuple[int, ...]:
        """Return SHARES of the blocks of the trace."""
        unique = len(self._tree) - 1
        return tuple(sorted({max(1, round(share * unique)) for share in SHARES}))

    def rate(self, policy: str, capacity: int) -> float:
        def report(done: int) -> None:
            self._report(f"simulating {policy} with {capacity:,} blocks, {done} of {len(self._uses)} requests")

        return hit_rate(self._tree, self._uses, self._sample, capacity, policy, report=report)

    def rates(self, policies: Iterable[str], capacities: Sequence[int]) -> dict[str, list[float]]:
        return {policy: [self.rate(policy, one) for one in capacities] for policy in policies}

    def capacity_for(self, wanted: float, policy: str, capacities: Sequence[int], rates: Sequence[float]) -> int:
        """Return the least capacity with this hit rate, at most PRECISION too large, by bisection between two of
        `capacities`. The last of their `rates` is high enough."""
        index = next(index for index, found in enumerate(rates) if found >= wanted)
        low, high = capacities[index - 1] if index else 0, capacities[index]
        while high - low > max(1, PRECISION * high):
            middle = (low + high) // 2
            low, high = (low, middle) if self.rate(policy, middle) >= wanted else (middle, high)
        return high


def _request(tree: PrefixTree, use: Use, sample: Sample) -> tuple[list[bytes], int]:
    """Return the sampled blocks that a request leaves in the cache, and how many of them are its prompt."""
    chain = sample.chain(tree.path(use.prompt))
    asked = len(chain)
    if use.kept != use.prompt and (name := sample.names[use.kept]):
        chain.append(name)
    return chain, asked
