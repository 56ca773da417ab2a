"""Rates: how fast this engine computes tokens and how fast its lower tiers deliver blocks, measured while both run.

They decide whether blocks on disk or in the shared tier are worth reading, how many of a chain, and when a read has
become hopeless. Older work counts less, so that a slower tier or a busier engine is noticed within a few requests.
While the rate of a tier is unknown, or has not been measured for long, one request tries to read; `is_hopeless` limits
what that can cost. A read from the shared tier takes at least as long as its first blocks take to arrive.

The disk process keeps the rates of computing and of the disk as KnownRates. The next engine with the same namespace
uses them to judge its first request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbm.types import Tier

if TYPE_CHECKING:
    from kvbm.metrics import Counters

MIN_STEP_TOKENS = 64  # the duration of a step with fewer tokens is a fixed cost
KEPT = 0.8  # weight of the older samples, per sample
TRIAL_INTERVAL_S = 30.0
GRACE = 0.06  # a read may take longer than computing by this part
GRACE_S = 0.005  # or by this time, which is too short to notice
BLIND_S = 0.2  # limit of a read while the rate of computing is unknown
KNOWN_S = 0.1  # weight of an earlier engine's rates, in seconds of work
WORTH_WRITING = 1.2  # a rate that changed by a smaller factor is not written


@dataclass(frozen=True, slots=True)
class KnownRates:
    """Rates of an engine. 0 blocks per second means that no block arrived in time, None that nothing was measured."""

    tokens_per_s: float
    blocks_per_s: float | None = None

    def differ(self, other: KnownRates) -> bool:
        """Whether one of the rates differs by more than WORTH_WRITING."""
        pairs = (self.tokens_per_s, other.tokens_per_s), (self.blocks_per_s or 0.0, other.blocks_per_s or 0.0)
        return any(max(pair) > WORTH_WRITING * min(pair) for pair in pairs)


class ReadRate:
    """How fast one tier delivers blocks. 0 blocks per second means that none arrived in time. `has_latency`: the first
    blocks of a read may take much longer than the others."""

    def __init__(self, *, has_latency: bool = False) -> None:
        self._has_latency = has_latency
        self.blocks, self.seconds = 0.0, 0.0
        self.first_s = 0.0  # until the first blocks of a read arrive
        self.sampled_s = float("-inf")

    def note(self, blocks: int, seconds: float, first_s: float, now_s: float) -> None:
        if self._has_latency:
            self.first_s = KEPT * self.first_s + (1 - KEPT) * first_s if self.first_s else first_s
        self.blocks = KEPT * self.blocks + blocks
        self.seconds = KEPT * self.seconds + seconds
        self.sampled_s = now_s

    @property
    def is_known(self) -> bool:
        return self.seconds > 0

    @property
    def blocks_per_s(self) -> float:
        return self.blocks / self.seconds if self.seconds else 0.0

    def seconds_for(self, blocks: int) -> float:
        """Return how long a read of so many blocks takes."""
        return max(self.first_s, blocks * self.seconds / self.blocks) if self.blocks else float("inf")


class Rates:
    """See the module's text. `clock` returns seconds. With `reads_always`, blocks are read even where computing them is
    faster."""

    def __init__(
        self, counters: Counters, *, block_tokens: int, clock: Callable[[], float], reads_always: bool = False
    ) -> None:
        self._counters = counters
        self._reads_always = reads_always
        self._block_tokens = block_tokens
        self._clock = clock
        self._tokens, self._computing_s = 0.0, 0.0
        self.reads = {Tier.DISK: ReadRate(), Tier.SHARED: ReadRate(has_latency=True)}

    def begin_with(self, known: KnownRates) -> None:
        """Begin with the rates of an earlier engine."""
        self._tokens, self._computing_s = KNOWN_S * known.tokens_per_s, KNOWN_S
        if known.blocks_per_s is not None:
            disk = self.reads[Tier.DISK]
            disk.blocks, disk.seconds = KNOWN_S * known.blocks_per_s, KNOWN_S

    def note_step(self, tokens: int, seconds: float) -> None:
        if tokens >= MIN_STEP_TOKENS and seconds > 0:
            self._tokens = KEPT * self._tokens + tokens
            self._computing_s = KEPT * self._computing_s + seconds

    def note_read(self, blocks: int, seconds: float, tier: Tier = Tier.DISK, *, first_s: float = 0.0) -> None:
        """Note that a request waited `seconds` for `blocks` blocks of a tier, and `first_s` for the first of them."""
        self.reads[tier].note(blocks, seconds, first_s, self._clock())

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the engine computes per second; 0 if unknown."""
        return self._tokens / self._computing_s if self._computing_s else 0.0

    @property
    def blocks_per_s(self) -> float:
        """Blocks that the disk delivers per second; 0 if unknown, or if none arrived in time."""
        return self.reads[Tier.DISK].blocks_per_s

    def known(self) -> KnownRates | None:
        """Return the rates for the next engine; None while the rate of computing is unknown."""
        if not self.tokens_per_s:
            return None
        return KnownRates(self.tokens_per_s, self.blocks_per_s if self.reads[Tier.DISK].is_known else None)

    def worthwhile(self, spans: Sequence[tuple[Tier, int]]) -> int:
        """Return how many blocks of a chain to load: the beginning that saves most time.

        `spans` are consecutive parts of the chain as (where they are, blocks). Blocks in host memory cost no time.
        """
        if self._reads_always or all(tier is Tier.HOST for tier, _ in spans):
            return sum(count for _, count in spans)
        wanted, begin = self._best(spans), 0
        for tier, count in spans:
            declined = max(0, begin + count - max(begin, wanted))
            if tier is not Tier.HOST:
                self._counters.of(tier).declined_blocks += declined
            begin += count
        return wanted

    def _best(self, spans: Sequence[tuple[Tier, int]]) -> int:
        total = sum(count for _, count in spans)
        used = {tier: self.reads[tier] for tier, count in spans if count and tier in self.reads}
        if not self._computing_s or not all(rate.is_known for rate in used.values()):
            return total
        compute_s = self._block_tokens / self.tokens_per_s
        best_s, best, end = 0.0, 0, 0
        read_blocks = dict.fromkeys(used, 0)
        for tier, count in spans:
            end += count
            if tier in used:
                read_blocks[tier] += count
            cost_s = sum(used[tier].seconds_for(blocks) for tier, blocks in read_blocks.items() if blocks)
            if end * compute_s - cost_s > best_s:
                best_s, best = end * compute_s - cost_s, end
        if best < total and any(self._is_trial_due(rate) for rate in used.values()):
            for rate in used.values():
                rate.sampled_s = self._clock()  # one trial at a time
            return total
        return best

    def may_pay(self, tier: Tier) -> bool:
        """Whether a read of many blocks from this tier may be faster than computing them, or should be tried again."""
        rate = self.reads[tier]
        if self._reads_always or not (self._computing_s and rate.is_known) or self._is_trial_due(rate):
            return True
        return rate.blocks_per_s * self._block_tokens > self.tokens_per_s

    def compute_s(self, blocks: int) -> float:
        """Return how long computing so many blocks takes; infinite if unknown."""
        return blocks * self._block_tokens / self.tokens_per_s if self._computing_s else float("inf")

    def is_hopeless(self, waited_s: float, blocks: int, of_blocks: int) -> bool:
        """Whether a request that has waited `waited_s` and got the first `blocks` of its `of_blocks` should compute the
        rest.

        True as soon as computing the blocks that have arrived would have taken less time than the wait, plus a grace.
        So a request that stops waiting is later than one that computes everything by at most the grace.
        """
        if self._reads_always:
            return False
        if not self._computing_s:
            return waited_s > BLIND_S
        compute_s = self._block_tokens / self.tokens_per_s
        return waited_s > blocks * compute_s + max(GRACE * of_blocks * compute_s, GRACE_S)

    def give_up(self, tier: Tier, blocks: int, missing: int, waited_s: float) -> None:
        """Note that a request gave up: it got `blocks` in `waited_s` and computes the `missing` ones."""
        self.note_read(blocks, waited_s, tier, first_s=waited_s / (blocks + 1))
        self._counters.of(tier).late_blocks += missing

    def _is_trial_due(self, rate: ReadRate) -> bool:
        return self._clock() - rate.sampled_s > TRIAL_INTERVAL_S
