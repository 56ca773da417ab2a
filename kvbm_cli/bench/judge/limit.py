"""The limits that a user names, such as `ttft_p90<800ms, itl_p90<60ms`, and the highest rate at which they hold.

`ttft_p90<800ms` holds if at least 90% of the requests have a TTFT below 800 ms. A probe is a sample, so the share that
it finds has a 95% interval: only an interval on one side of 90% is an answer. Token gaps of one
request are alike, so the interval of `itl` counts requests, not gaps. A failed request keeps no limit.

`find_limit` searches the rate. `judge` sends the requests. Rates double, or halve, until one holds and another fails.
Then the middle of both (of their logarithms) is judged, until they are PRECISION apart. A rate whose outcome stays
unclear divides the search: the limit is near it, and both of its sides are searched on their own. The result is the
highest rate that holds and the lowest that fails. At the end, a rate SURELY_ABOVE that one is judged: if it holds, the
machine was busy when the other one failed, and the search begins again from there.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from kvbm.errors import UsageError
from kvbm.text.outside import shown
from kvbm_cli.bench.result.arm_result import wilson_interval
from kvbm_cli.bench.result.results import RequestRecord

Z = NormalDist().inv_cdf(0.975)
EXAMPLE = "ttft_p90<800ms, itl_p90<60ms"
_CONDITION = re.compile(r"(ttft|itl|tpot|e2e)_p(\d{1,2}(?:\.\d{1,2})?)\s*<\s*(\d{1,9}(?:\.\d{1,6})?)\s*(ms|s)")
_TIMES: dict[str, Callable[[RequestRecord], Sequence[float | None]]] = {
    "ttft": lambda record: [record.ttft_ms],
    "itl": lambda record: record.token_gaps_ms,
    "tpot": lambda record: [record.tpot_ms],
    "e2e": lambda record: [record.end_to_end_ms],
}
PRECISION = 0.03
SURELY_ABOVE = 1.1  # a limit: this far from it, a rate does not hold by chance
MOST_SEARCHES = 3
FARTHEST = 1024.0  # times the rate of the start, above it
USELESS = 1.5  # the highest rate that holds and the lowest that fails are this far apart: noise hides the limit
# Two starts of one engine differ by about 3% (TYPICAL_RUN_DEVIATION); a limit comes from one start.
START_SPREAD = 1.06


class LimitOutcome(enum.StrEnum):
    HOLDS = "holds"
    FAILS = "fails"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Condition:
    """At least `percent` of 100 values of `metric` are below `limit_ms`."""

    metric: str
    percent: float
    limit_ms: float

    def __str__(self) -> str:
        return f"{self.metric}_p{self.percent:g}<{self.limit_ms:g}ms"

    @property
    def counts_from_launch(self) -> bool:
        """Whether a client that launches late exceeds the limit."""
        return self.metric in ("ttft", "e2e")

    @property
    def least_requests(self) -> int:
        """Requests from which a probe without any exceeded limit is clear."""
        share = 1 - self.percent / 100
        return math.ceil(Z * Z * (1 - share) / share)

    def outcome(self, records: Sequence[RequestRecord]) -> LimitOutcome:
        exceeded = self.exceeded_share(records)
        low, high = wilson_interval(round(exceeded * len(records)), len(records))
        allowed = 1 - self.percent / 100
        return LimitOutcome.HOLDS if high <= allowed else LimitOutcome.FAILS if low > allowed else LimitOutcome.UNCLEAR

    def exceeded_share(self, records: Sequence[RequestRecord]) -> float:
        """Return the share of values that are not below the limit: 1 for a failed request."""
        exceeded = total = 0.0
        for record in records:
            values = [one for one in _TIMES[self.metric](record) if one is not None] if record.is_ok else [math.inf]
            total += len(values)
            exceeded += sum(value >= self.limit_ms for value in values)
        return exceeded / total if total else 0.0


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """UsageError for anything but conditions with different metrics and percentiles, separated by commas."""
    found: list[Condition] = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part.strip())
        if match is None or not 0 < float(match[2]) < 100 or not float(match[3]) > 0:
            raise UsageError(
                f"`{shown(part.strip())}` is no limit of `--find-limit`",
                hint=f"limits of `ttft`, `itl`, `tpot` or `e2e` by percentile, such as `{EXAMPLE}`",
            )
        found.append(Condition(match[1], float(match[2]), float(match[3]) * (1000 if match[4] == "s" else 1)))
    names = [(one.metric, one.percent) for one in found]
    if len(set(names)) < len(names):
        raise UsageError("`--find-limit` has two limits of one percentile", hint="leave out the higher one")
    return tuple(found)


def outcome_of(conditions: Iterable[Condition], records: Sequence[RequestRecord]) -> LimitOutcome:
    """All must hold; one that fails decides."""
    found = {one.outcome(records) for one in conditions}
    return next(one for one in (LimitOutcome.FAILS, LimitOutcome.UNCLEAR, LimitOutcome.HOLDS) if one in found)


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


def ratio_of(measured: Bounds, reference: Bounds) -> Ratio:
    """Both must be known."""
    low, high = measured.low / reference.high, measured.high / reference.low
    return Ratio(measured.middle / reference.middle, low / START_SPREAD, high * START_SPREAD)


def find_limit(judge: Callable[[float], LimitOutcome], start: float, *, least: float) -> Bounds:
    """`judge` returns the outcome of a rate in requests per second; `start` is the first one. No rate below `least` is
    judged."""
    low, high = _search(judge, start, least)
    for _ in range(MOST_SEARCHES):
        above = high * SURELY_ABOVE
        if low == 0 or high == math.inf or judge(above) is not LimitOutcome.HOLDS:
            return Bounds(low, high)
        low, high = _search(judge, above, least)
    return Bounds(low, math.inf)


def _search(judge: Callable[[float], LimitOutcome], start: float, least: float) -> tuple[float, float]:
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
    return low, high


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
