"""Rates: how fast this engine computes tokens and how fast its disk brings blocks, measured while both run.

From them follows whether blocks on disk are worth reading, how many of a chain, and when a read has become hopeless.
One thread owns it. Both rates are those of recent work: older work counts less, so that a disk that has become slow, or
an engine that has more to do, is noticed within some requests.

While nothing is known of the disk, or nothing new has been for long, reading is tried: what a trial can cost is bounded
by `is_hopeless`. What an engine has learnt is told to the next one (`Known`), which could not judge its first request
without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIN_STEP_TOKENS = 64  # a step that computes fewer is bound by its fixed cost
KEPT = 0.8  # weight of what was known before, per sample
TRIAL_INTERVAL_S = 30.0
GRACE = 0.06  # part of the time of computing that a read may lag behind it
GRACE_S = 0.005  # in less than that nobody can tell
BLIND_S = 0.2  # that a read may take while nothing is known of computing
KNOWN_S = 0.1  # of work are what an earlier engine has learnt, in weight


@dataclass(frozen=True, slots=True)
class Known:
    """Both rates; 0 blocks per second are a disk that brought nothing in time."""

    tokens_per_s: float
    blocks_per_s: float | None = None


class Rates:
    """See the module's text. `clock` gives seconds; `known` is what an earlier engine has learnt."""

    def __init__(self, *, block_tokens: int, clock: Callable[[], float], known: Known | None = None) -> None:
        self._block_tokens = block_tokens
        self._clock = clock
        self._tokens, self._computing_s = 0.0, 0.0
        self._blocks, self._reading_s = 0.0, 0.0
        self._sampled_s = float("-inf")
        if known is not None:
            self._tokens, self._computing_s = KNOWN_S * known.tokens_per_s, KNOWN_S
            if known.blocks_per_s is not None:
                self._blocks, self._reading_s = KNOWN_S * known.blocks_per_s, KNOWN_S

    def note_step(self, tokens: int, seconds: float) -> None:
        """The engine has computed so many tokens in one step."""
        if tokens >= MIN_STEP_TOKENS and seconds > 0:
            self._tokens = KEPT * self._tokens + tokens
            self._computing_s = KEPT * self._computing_s + seconds

    def note_read(self, blocks: int, seconds: float) -> None:
        """So many blocks have come from disk for one request, which waited this long for them."""
        self._blocks = KEPT * self._blocks + blocks
        self._reading_s = KEPT * self._reading_s + seconds
        self._sampled_s = self._clock()

    @property
    def tokens_per_s(self) -> float:
        """0 while it is not known."""
        return self._tokens / self._computing_s if self._computing_s else 0.0

    @property
    def blocks_per_s(self) -> float:
        """Of the disk; 0 while it is not known, or hopeless."""
        return self._blocks / self._reading_s if self._reading_s else 0.0

    def known(self) -> Known | None:
        """For the next engine; None while too little is known."""
        if not self.tokens_per_s:
            return None
        return Known(self.tokens_per_s, self.blocks_per_s if self._reading_s else None)

    def worthwhile(self, spans: Sequence[tuple[bool, int]]) -> int:
        """How many blocks of a chain to load: the beginning that saves most. Spans are (are on disk, blocks)."""
        total = sum(count for _, count in spans)
        if not any(is_on_disk for is_on_disk, _ in spans) or not self._is_known():
            return total
        read_s = self._reading_s / self._blocks if self._blocks else float("inf")
        compute_s = self._block_tokens / self.tokens_per_s
        best_s, best, saved_s, end = 0.0, 0, 0.0, 0
        for is_on_disk, count in spans:
            saved_s += count * (compute_s - read_s if is_on_disk else compute_s)
            end += count
            if saved_s > best_s:
                best_s, best = saved_s, end
        if best < total and self._clock() - self._sampled_s > TRIAL_INTERVAL_S:
            self._sampled_s = self._clock()  # one trial at a time
            return total
        return best

    def is_hopeless(self, *, waited_s: float, blocks: int, of_blocks: int) -> bool:
        """Whether a request that has waited so long, and has got the first `blocks` of its `of_blocks`, had better
        compute the others.

        Computing those it has would have taken as long as it has waited, but for GRACE. So whenever it stops waiting,
        it is no later than a request that computes everything, but for GRACE.
        """
        if not self._computing_s:
            return waited_s > BLIND_S
        compute_s = self._block_tokens / self.tokens_per_s
        return waited_s > blocks * compute_s + max(GRACE * of_blocks * compute_s, GRACE_S)

    def _is_known(self) -> bool:
        return self._computing_s > 0 and self._reading_s > 0
