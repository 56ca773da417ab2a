"""Simulator: the hit rate of a cache, from the product's own block store driven with the requests of a trace.

`kvbm/core/shadow_caches.py` says what a cache without bytes does. The hit rate is hit blocks over all blocks; the last
block of a prompt counts as one, also if it is partial.

A sample has every block whose digest is below a limit, so that at most `tracked` different blocks are simulated. A
cache of a share of the blocks then has the same share of the places. All blocks of a chain are evicted from its tail,
so the sampled blocks of a chain are, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvbm.core.shadow_caches import NAME_BYTES, TRACKED_BLOCKS, SimulatedCache
from kvbm_cli.bench.trace.hit_curve import PrefixTree, Use

REPORT_EVERY = 1000
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of the blocks of a trace
PRECISION = 0.02

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TimedUse:
    """A request of a trace: its use of the tree, and when it arrives."""

    at_s: float
    use: Use


class Sample:
    """Which nodes of a tree are simulated. `share` of all nodes are."""

    def __init__(self, tree: PrefixTree, tracked: int, *, seed: int = 0) -> None:
        key = seed.to_bytes(8, "big")
        digests = array("Q", [0])
        for node in range(1, len(tree)):
            digest = blake2b(node.to_bytes(8, "big"), digest_size=8, key=key).digest()
            digests.append(int.from_bytes(digest, "big"))
        count = len(digests) - 1
        limit = 1 << 64 if count <= tracked else sorted(digests[1:])[tracked]
        self.is_in = bytearray(1 if digest < limit else 0 for digest in digests)
        self.is_in[0] = 0  # the root has no block
        self.share = sum(self.is_in) / count if count else 1.0

    def chain(self, path: Sequence[int]) -> list[bytes]:
        """Return the names of the sampled blocks of a path, which begins with its last node."""
        is_in = self.is_in
        return [name_of(node) for node in reversed(path) if is_in[node]]


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
        self.simulated_blocks = sum(self._sample.is_in)

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
    if use.kept != use.prompt and sample.is_in[use.kept]:
        chain.append(name_of(use.kept))
    return chain, asked
