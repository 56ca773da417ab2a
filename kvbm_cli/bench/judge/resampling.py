"""Intervals of percentiles and of the share of the possible gain, by bootstrap. Deterministic from a seed.

A percentile has no simple formula for its variance, so sessions are drawn with replacement: all requests of a session
in all runs and arms together. Two corrections make the interval wide enough:

    few sessions  the interval is the expanded percentile interval (T. C. Hesterberg, 2015): tails as thin as Student's
                  t with one degree of freedom less than there are sessions requires
    few runs      each draw multiplies the times of each run by a random factor, whose deviation is taken from the
                  paired comparison (`PairedRatio.run_deviation`); drawing among three runs would be too narrow
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from kvbm_cli.bench.judge.paired import (
    LEAST_COUNTS,
    LEAST_COUNTS_FOR_INTERVAL,
    TYPICAL_RUN_FREEDOM,
    percentile,
    student_t,
)

if TYPE_CHECKING:
    import numpy as np

Samples = Mapping[int, Mapping[int, Sequence[float]]]  # run, session: times of its requests
DRAWS = 1000
LEAST_SESSIONS = 5


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95% interval; `low` and `high` are `None` if there are too few samples for an interval."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class PercentileComparison:
    """One percentile of two arms, and measured - reference: negative if the measured arm is faster."""

    reference: Estimate
    measured: Estimate
    difference: Estimate


@dataclass(frozen=True, slots=True)
class ShareOfGain:
    """The time that kvbm saves over the time that the floor saves, at most 1.

    `is_noise` marks a value that was above 1: the floor is the lower limit, so the excess is noise.
    """

    value: float
    low: float | None
    high: float | None
    is_noise: bool


def compare_percentiles(
    reference: Samples, measured: Samples, *, run_deviation: float | None, seed: int = 0, draws: int = DRAWS
) -> dict[int, PercentileComparison | None]:
    """p50, p90, p95 and p99 of both arms over all runs; `None` if an arm has too few requests for it.

    Values have the unit of the samples. `run_deviation` comes from the paired ratio of the same requests.
    """
    arms = [_flat(reference), _flat(measured)]
    count = min(map(len, arms))
    percents = [percent for percent, least in LEAST_COUNTS.items() if count >= least]
    drawn = _draw([reference, measured], percents, run_deviation=run_deviation, seed=seed, draws=draws)
    tail = _tail(_sessions([reference, measured]))
    result: dict[int, PercentileComparison | None] = dict.fromkeys(LEAST_COUNTS)
    for column, percent in enumerate(percents):
        first, second = (_percentile(values, percent) for values in arms)
        if count < LEAST_COUNTS_FOR_INTERVAL[percent] or drawn is None or tail is None:
            result[percent] = PercentileComparison(Estimate(first), Estimate(second), Estimate(second - first))
            continue
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
    first, second, least = (_percentile(values, 50) for values in flat)
    if first <= least:
        return None
    value = (first - second) / (first - least)
    drawn = _draw(arms, [50], run_deviation=run_deviation, seed=seed, draws=draws)
    tail = _tail(_sessions(arms))
    if drawn is None or tail is None or min(map(len, flat)) < LEAST_COUNTS_FOR_INTERVAL[50]:
        return ShareOfGain(min(value, 1.0), None, None, value > 1)
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


def _sessions(arms: Sequence[Samples]) -> list[int]:
    return sorted({session for arm in arms for run in arm.values() for session, values in run.items() if values})


def _percentile(values: Sequence[float], percent: float) -> float:
    found = percentile(values, percent)
    assert found is not None
    return found


def _tail(sessions: Sequence[int]) -> float | None:
    """Share of draws outside the interval on each side: 2.5% for many sessions, less for few."""
    count = len(sessions)
    if count < LEAST_SESSIONS:
        return None
    return NormalDist().cdf(-math.sqrt(count / (count - 1)) * student_t(count - 1))


def _estimate(value: float, drawn: np.ndarray[Any, Any], tail: float) -> Estimate:
    import numpy as np

    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Estimate(value, min(float(low), value), max(float(high), value))


def _draw(
    arms: Sequence[Samples], percents: Sequence[int], *, run_deviation: float | None, seed: int, draws: int
) -> np.ndarray[Any, Any] | None:
    """Percentiles of each draw, as an array of draws x arms x percents; `None` with too few sessions."""
    import numpy as np

    sessions, runs = _sessions(arms), sorted({run for arm in arms for run in arm})
    if len(sessions) < LEAST_SESSIONS or not percents:
        return None
    random = np.random.default_rng(seed)
    draw_arms = [_arm_sampler(arm, sessions, runs, percents) for arm in arms]
    freedom = len(runs) - 1 + TYPICAL_RUN_FREEDOM
    result = np.empty((draws, len(arms), len(percents)))
    for draw in range(draws):
        while True:
            weights = np.bincount(random.integers(0, len(sessions), len(sessions)), minlength=len(sessions))
            factors = np.ones((len(arms), len(runs)))
            if run_deviation is not None:  # a deviation of two arms, estimated with few degrees of freedom
                deviation = run_deviation / math.sqrt(2) * math.sqrt(freedom / random.chisquare(freedom))
                factors = np.exp(random.normal(0, deviation, factors.shape))
            found = [sample(weights, factors[index]) for index, sample in enumerate(draw_arms)]
            if all(values is not None for values in found):  # an arm may lack the drawn sessions, if requests failed
                result[draw] = np.array(found)
                break
    return result


def _arm_sampler(
    samples: Samples, sessions: Sequence[int], runs: Sequence[int], percents: Sequence[int]
) -> Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], np.ndarray[Any, Any] | None]:
    import numpy as np

    rows = [
        (value, runs.index(run), position)
        for run in sorted(samples)
        for position, session in enumerate(sessions)
        for value in samples[run].get(session, ())
    ]
    values = np.array([row[0] for row in rows])
    run_of, session_of = (np.array([row[column] for row in rows], dtype=int) for column in (1, 2))

    def sample(weights: np.ndarray[Any, Any], factors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
        drawn = np.repeat(values * factors[run_of], weights[session_of])
        return np.percentile(drawn, percents) if len(drawn) else None

    return sample
