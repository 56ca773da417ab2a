"""LoadChoice: how many blocks of a chain are loaded, and when a load gives up, from measured rates.

Blocks in lower tiers are not read where computing them is faster. The leader's thread owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbm.types import Tier

if TYPE_CHECKING:
    from kvbm.leader.rates import Rates
    from kvbm.metrics import Counters


class LoadChoice:
    """With `reads_always`, blocks are read even where computing them is faster."""

    def __init__(self, rates: Rates, counters: Counters, *, reads_always: bool) -> None:
        self.rates = rates
        self._counters = counters
        self._reads_always = reads_always

    def worthwhile(self, spans: Sequence[tuple[Tier, int]]) -> int:
        """Return how many blocks of a chain are loaded faster than computed. `spans` are (where, blocks)."""
        found = sum(count for _, count in spans)
        if self._reads_always or all(tier is Tier.HOST for tier, _ in spans):
            return found
        wanted, begin = self.rates.worthwhile(spans), 0
        for tier, count in spans:
            declined = max(0, begin + count - max(begin, wanted))
            if tier is not Tier.HOST:
                self._counters.add("{}_declined_blocks", tier, declined)
            begin += count
        return wanted

    def may_pay(self, tier: Tier) -> bool:
        """Whether reading blocks of this tier may be faster than computing them."""
        return self._reads_always or self.rates.may_pay(tier)

    def is_hopeless(self, waited_s: float, blocks: int, of_blocks: int) -> bool:
        """Whether a request that has waited `waited_s` and got `blocks` of its `of_blocks` should compute the rest."""
        return not self._reads_always and self.rates.is_hopeless(waited_s=waited_s, blocks=blocks, of_blocks=of_blocks)

    def give_up(self, tier: Tier, blocks: int, missing: int, waited_s: float) -> None:
        """Note that a request gave up: it got `blocks` in `waited_s` and computes the `missing` ones."""
        self.rates.note_read(blocks, waited_s, tier, first_s=waited_s / (blocks + 1))
        self._counters.add("{}_late_blocks", tier, missing)
