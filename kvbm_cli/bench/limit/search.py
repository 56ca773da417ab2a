"""The search for the highest rate at which all conditions hold. Pure: `judge` sends the requests.

Rates double, or halve, until one holds and another fails. Then the middle of both (of their logarithms) is judged,
until they are PRECISION apart. A rate whose outcome stays unclear divides the search: the limit is near it, and both
of its sides are searched on their own. The result is the highest rate that holds and the lowest that fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvbm_cli.bench.limit.conditions import LimitOutcome

PRECISION = 0.03
FARTHEST = 1024.0  # times the rate of the start, above it
USELESS = 1.5  # the highest rate that holds and the lowest that fails are this far apart: noise hides the limit
# Two starts of one engine differ by about 3% (TYPICAL_RUN_DEVIATION); a limit comes from one start.
START_SPREAD = 1.06


@dataclass(frozen=True, slots=True)
class Bounds:
    """`low` requests per second hold and `high` fail. `low` is 0 if no rate holds, `high` infinite if none fails."""

    low: float
    high: float

    @property
    def is_known(self) -> bool:
        return self.low > 0 and self.high < math.inf and self.high / self.low < USELESS

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times the rate of the reference; the interval includes the difference of two starts."""

    value: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        return not self.low <= 1 <= self.high


def ratio_of(measured: Bounds, reference: Bounds) -> Ratio | None:
    """Return None if one of the limits is not known."""
    if not (measured.is_known and reference.is_known):
        return None
    low, high = measured.low / reference.high, measured.high / reference.low
    return Ratio(measured.middle / reference.middle, low / START_SPREAD, high * START_SPREAD)


def find_limit(judge: Callable[[float], LimitOutcome], start: float, *, least: float) -> Bounds:
    """`judge` returns the outcome of a rate in requests per second; `start` is the first one. No rate below `least` is
    judged."""
    low, high = _bracket(judge, start, least)
    unclear: list[float] = []
    while low > 0 and high < math.inf:
        sides = [(low, unclear[0]), (unclear[-1], high)] if unclear else [(low, high)]
        below, above = max(sides, key=lambda side: side[1] / side[0])
        if above / below <= 1 + PRECISION:
            break
        rate = math.sqrt(below * above)
        outcome = judge(rate)
        if outcome is LimitOutcome.HOLDS:
            low, unclear = rate, [one for one in unclear if one > rate]
        elif outcome is LimitOutcome.FAILS:
            high, unclear = rate, [one for one in unclear if one < rate]
        else:
            unclear = sorted([*unclear, rate])
    return Bounds(low, high)


def _bracket(judge: Callable[[float], LimitOutcome], start: float, least: float) -> tuple[float, float]:
    """Return a rate that holds and one that fails, a power of two apart; 0 or infinity where there is none."""
    low, high, rate = 0.0, math.inf, start
    while high == math.inf and rate <= start * FARTHEST:
        outcome = judge(rate)
        low, high = (rate if outcome is LimitOutcome.HOLDS else low), (rate if outcome is LimitOutcome.FAILS else high)
        rate *= 2
    rate = start / 2
    while low == 0.0 and rate >= least:
        outcome = judge(rate)
        low, high = (rate if outcome is LimitOutcome.HOLDS else low), (rate if outcome is LimitOutcome.FAILS else high)
        rate /= 2
    return low, high
