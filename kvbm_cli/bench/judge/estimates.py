"""What the times of a cell estimate: percentiles and the share of the possible gain, and where the time goes. Pure.

Intervals are by bootstrap, deterministic from a seed.

A percentile has no simple formula for its variance, so sessions are drawn with replacement: all requests of a session
in all runs and arms together. Two corrections make the interval wide enough:

    few sessions  the interval is the expanded percentile interval (T. C. Hesterberg, 2015): tails as thin as Student's
                  t with one degree of freedom less than there are sessions requires
    few runs      each draw multiplies the times of each run by a random factor, whose deviation is taken from the
                  paired comparison (`PairedRatio.run_deviation`); drawing among three runs would be too narrow

Where the time to first token goes is a linear model of TTFT over the tokens of a prompt by source:

    TTFT = base + load + computed * tokens computed + g2 * tokens from G2 + g3 * tokens from G3 + g4 * tokens from G4

`load` is added once to a request with any token from G2, G3 or G4. All coefficients are at least 0, because no token
takes negative time. Least squares with that limit has its minimum in one of the subsets of the columns, and there are
few, so each is tried. A model is returned only if the data identify every coefficient: see `fit_ttft`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from kvbm_cli.bench.judge.paired import (
    LEAST_COUNTS,
    LEAST_COUNTS_FOR_INTERVAL,
    TYPICAL_RUN_FREEDOM,
    student_t,
)
from kvbm_cli.bench.result.results import LOADED, RequestRecord, percentile

if TYPE_CHECKING:
    import numpy as np

Samples = Mapping[int, Mapping[int, Sequence[float]]]  # run, session: times of its requests
DRAWS = 1000
LEAST_SESSIONS = 5
LEAST_REQUESTS_PER_COEFFICIENT = 10
MOST_COLLINEAR = 0.95
LEAST_EXPLAINED = 0.5
SOURCES = ("computed", *LOADED)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95% interval; `low` and `high` are `None` if there are too few samples for an interval."""

    value: float
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "interval_95": None if self.low is None else [self.low, self.high]}


@dataclass(frozen=True, slots=True)
class PercentileComparison:
    """One percentile of two arms, and measured - reference: negative if the measured arm is faster."""

    reference: Estimate
    measured: Estimate
    difference: Estimate

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name).to_json() for name in ("reference", "measured", "difference")}


@dataclass(frozen=True, slots=True)
class ShareOfGain(Estimate):
    """The time that kvbm saves over the time that the floor saves, at most 1.

    `is_noise` marks a value that was above 1: the floor is the lower limit, so the excess is noise.
    """

    is_noise: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**Estimate.to_json(self), "is_noise": self.is_noise}


def compare_percentiles(
    reference: Samples, measured: Samples, *, run_deviation: float | None, seed: int = 0, draws: int = DRAWS
) -> dict[int, PercentileComparison | None]:
    """p50, p90, p95 and p99 of both arms over all runs; `None` if an arm has too few requests for it.

    Values have the unit of the samples. `run_deviation` comes from the paired ratio of the same requests.
    """
    arms = [_flat(reference), _flat(measured)]
    count = min(map(len, arms))
    percents = [percent for percent, least in LEAST_COUNTS.items() if count >= least]
    found = _draw([reference, measured], percents, run_deviation=run_deviation, seed=seed, draws=draws)
    result: dict[int, PercentileComparison | None] = dict.fromkeys(LEAST_COUNTS)
    for column, percent in enumerate(percents):
        first, second = (percentile(values, percent) for values in arms)
        if count < LEAST_COUNTS_FOR_INTERVAL[percent] or found is None:
            result[percent] = PercentileComparison(Estimate(first), Estimate(second), Estimate(second - first))
            continue
        drawn, tail = found
        one, other = drawn[:, 0, column], drawn[:, 1, column]
        result[percent] = PercentileComparison(
            _estimate(first, one, tail), _estimate(second, other, tail), _estimate(second - first, other - one, tail)
        )
    return result


def share_of_possible_gain(
    reference: Samples,
    measured: Samples,
    floor: Samples,
    *,
    run_deviation: float | None,
    seed: int = 0,
    draws: int = DRAWS,
) -> ShareOfGain | None:
    """Return (reference - measured) / (reference - floor) of the medians.

    `None` if an arm has too few requests, or if the floor is not clearly faster than the reference: then there is
    nothing to gain, and the share is noise over noise.
    """
    arms = [reference, measured, floor]
    flat = [_flat(arm) for arm in arms]
    if min(map(len, flat)) < LEAST_COUNTS[50]:
        return None
    first, second, least = (percentile(values, 50) for values in flat)
    if first <= least:
        return None
    value = (first - second) / (first - least)
    found = _draw(arms, [50], run_deviation=run_deviation, seed=seed, draws=draws)
    if found is None or min(map(len, flat)) < LEAST_COUNTS_FOR_INTERVAL[50]:
        return ShareOfGain(min(value, 1.0), None, None, value > 1)
    drawn, tail = found
    gains = drawn[:, 0, 0] - drawn[:, 2, 0]
    if (gains <= 0).mean() > tail:
        return None
    shares = ((drawn[:, 0, 0] - drawn[:, 1, 0]) / gains)[gains > 0]
    interval = _estimate(value, shares, tail)
    assert interval.low is not None
    assert interval.high is not None
    return ShareOfGain(min(value, 1.0), min(interval.low, 1.0), min(interval.high, 1.0), value > 1)


def _flat(samples: Samples) -> list[float]:
    return [value for run in sorted(samples) for session in sorted(samples[run]) for value in samples[run][session]]


def _estimate(value: float, drawn: np.ndarray[Any, Any], tail: float) -> Estimate:
    import numpy as np

    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Estimate(value, min(float(low), value), max(float(high), value))


def _draw(
    arms: Sequence[Samples], percents: Sequence[int], *, run_deviation: float | None, seed: int, draws: int
) -> tuple[np.ndarray[Any, Any], float] | None:
    """Return the percentiles of each draw, as an array of draws x arms x percents, and the share of draws outside the
    interval on each side: 2.5% for many sessions, less for few. `None` with too few sessions."""
    import numpy as np

    sessions = sorted({session for arm in arms for run in arm.values() for session, values in run.items() if values})
    runs, count = sorted({run for arm in arms for run in arm}), len(sessions)
    if count < LEAST_SESSIONS or not percents:
        return None
    tail = NormalDist().cdf(-math.sqrt(count / (count - 1)) * student_t(count - 1))
    random = np.random.default_rng(seed)
    draw_arms = [_arm_sampler(arm, sessions, runs, percents) for arm in arms]
    freedom = len(runs) - 1 + TYPICAL_RUN_FREEDOM
    result = np.empty((draws, len(arms), len(percents)))
    for draw in range(draws):
        while True:
            weights = np.bincount(random.integers(0, count, count), minlength=count)
            factors = np.ones((len(arms), len(runs)))
            if run_deviation is not None:  # a deviation of two arms, estimated with few degrees of freedom
                deviation = run_deviation / math.sqrt(2) * math.sqrt(freedom / random.chisquare(freedom))
                factors = np.exp(random.normal(0, deviation, factors.shape))
            found = [sample(weights, factors[index]) for index, sample in enumerate(draw_arms)]
            if all(values is not None for values in found):  # an arm may lack the drawn sessions, if requests failed
                result[draw] = np.array(found)
                break
    return result, tail


def _arm_sampler(
    samples: Samples, sessions: Sequence[int], runs: Sequence[int], percents: Sequence[int]
) -> Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], list[float] | None]:
    import numpy as np

    rows = [
        (value, runs.index(run), position)
        for run in sorted(samples)
        for position, session in enumerate(sessions)
        for value in samples[run].get(session, ())
    ]
    values = np.array([row[0] for row in rows])
    run_of, session_of = (np.array([row[column] for row in rows], dtype=int) for column in (1, 2))

    def sample(weights: np.ndarray[Any, Any], factors: np.ndarray[Any, Any]) -> list[float] | None:
        drawn = np.repeat(values * factors[run_of], weights[session_of])
        return [float(found) for found in np.percentile(drawn, percents)] if len(drawn) else None

    return sample


@dataclass(frozen=True, slots=True)
class TtftModel:
    """Milliseconds per request (`base_ms`, `load_ms`) and per token of each source.

    A coefficient is `None` if the number of its tokens was the same in all requests. `load_ms` is also `None` if hits
    and their tokens change together. `explained` is R squared.
    """

    base_ms: float
    load_ms: float | None
    ms_per_token: Mapping[str, float | None]
    explained: float
    request_count: int

    def break_even_tokens(self, source: str) -> float | None:
        """Tokens from which loading takes less time than computing; `None` if loading is never faster, or unknown."""
        loaded_ms, computed_ms = self.ms_per_token[source], self.ms_per_token["computed"]
        if loaded_ms is None or computed_ms is None or self.load_ms is None or loaded_ms >= computed_ms:
            return None
        return self.load_ms / (computed_ms - loaded_ms)

    def to_json(self) -> dict[str, Any]:
        return {
            "base_ms": self.base_ms,
            "load_ms": self.load_ms,
            **{f"{source}_ms_per_token": cost for source, cost in self.ms_per_token.items()},
            "explained": self.explained,
            "request_count": self.request_count,
            **{f"{tier}_break_even_tokens": self.break_even_tokens(tier) for tier in LOADED},
        }


def fit_ttft(records: Iterable[RequestRecord]) -> TtftModel | str:
    """Fit the model to the answered requests whose tokens are known by tier. Returns why there is none if there are too
    few requests, if the tokens computed are always the same, if two columns grow together, or if the model explains
    less than half of the variance."""
    import numpy as np

    requests = [
        one
        for one in records
        if one.is_ok and None not in (one.ttft_from_launch_ms, one.computed_tokens, one.g2_tokens)
    ]
    columns = _columns(requests)
    needed = LEAST_REQUESTS_PER_COEFFICIENT * (len(columns) + 1)
    if len(requests) < needed:
        return f"{len(requests)} requests are too few for {len(columns) + 1} coefficients, {needed} are needed"
    if "computed" not in columns:
        return "all requests computed the same number of tokens"
    if "load" in columns and _collinear(columns):
        del columns["load"]  # the cost per request is the least of the unknowns; break-even lengths are then unknown
    if collinear := _collinear(columns):
        return f"{collinear[0]} and {collinear[1]} change together, so their costs cannot be separated"
    times = np.array([one.ttft_from_launch_ms for one in requests])
    coefficients, explained = _least_squares(columns, times)
    if explained < LEAST_EXPLAINED:
        return f"the tokens of the prompts explain only {explained:.0%} of the variance of TTFT"
    return TtftModel(
        base_ms=coefficients["base"],
        load_ms=coefficients.get("load"),
        ms_per_token={source: coefficients.get(source) for source in SOURCES},
        explained=explained,
        request_count=len(requests),
    )


def _columns(requests: Sequence[RequestRecord]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the columns that vary. The constant column of the base is not among them."""
    import numpy as np

    columns = {
        source: np.array([getattr(one, f"{source}_tokens") or 0 for one in requests], dtype=float) for source in SOURCES
    }
    columns["load"] = (np.sum([columns[tier] for tier in LOADED], axis=0) > 0).astype(float)
    return {name: column for name, column in columns.items() if len(column) and np.ptp(column) > 0}


def _collinear(columns: dict[str, np.ndarray[Any, Any]]) -> tuple[str, str] | None:
    """Return the column that the others predict best and the one it follows most, if they predict it nearly
    completely."""
    import numpy as np

    for name, column in columns.items():
        others = {other: values for other, values in columns.items() if other != name}
        if not others:
            continue
        design = np.column_stack([np.ones(len(column)), *others.values()])
        residual = column - design @ np.linalg.lstsq(design, column, rcond=None)[0]
        if 1 - residual.var() / column.var() > MOST_COLLINEAR:
            closest = max(others, key=lambda other: abs(np.corrcoef(column, others[other])[0, 1]))
            return name, closest
    return None


def _least_squares(
    columns: dict[str, np.ndarray[Any, Any]], times: np.ndarray[Any, Any]
) -> tuple[dict[str, float], float]:
    """Coefficients, none negative, and the share of the variance that they explain."""
    import numpy as np

    all_columns = {"base": np.ones(len(times)), **columns}
    best, least = dict.fromkeys(all_columns, 0.0), float(times @ times)
    for size in range(1, len(all_columns) + 1):
        for names in combinations(all_columns, size):
            design = np.column_stack([all_columns[name] for name in names])
            found = np.linalg.lstsq(design, times, rcond=None)[0]
            left = float(((times - design @ found) ** 2).sum())
            if found.min() >= 0 and left < least:
                best = {**dict.fromkeys(all_columns, 0.0), **dict(zip(names, map(float, found), strict=True))}
                least = left
    total = float(((times - times.mean()) ** 2).sum())
    return best, max(0.0, 1 - least / total) if total else 0.0
