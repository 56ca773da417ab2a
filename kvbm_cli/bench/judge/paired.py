"""The paired comparison of two arms, its interval, and the noise of the machine. Pure.

Both arms send the same requests, so the comparison is paired: log(reference time / measured time) of each request.
Differences between requests, such as their length, cancel out. Two things remain, and the interval has a part for each:

    sessions   requests of one session are correlated, so a session counts as one sample (cluster-robust variance)
    runs       an engine is a few percent faster or slower each time it starts, for all requests of that run

Two or three runs estimate the second part badly: a bootstrap over runs is too narrow, and Student's t over runs is too
wide to be useful. The variance between runs is therefore the mean of what was measured and of a typical value, weighted
by degrees of freedom (an empirical Bayes or "moderated" variance; G. K. Smyth, 2004). `bench/micro/bench_statistics.py`
measures how often these intervals hold the truth.

Spreads, Student's t and the share of busy time, which others need too, are at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, variance

from kvbm_cli.bench.result.results import percentile

PairsBySession = Mapping[int, Sequence[tuple[float, float]]]  # (reference, measured) of each request
PairsByRun = Mapping[int, PairsBySession]

# Typical standard deviation of the log ratio of two runs, and the degrees of freedom that it counts for.
TYPICAL_RUN_DEVIATION = 0.03
TYPICAL_RUN_FREEDOM = 3
MARGIN = 0.05
MARGIN_OF_ONE_RUN = 0.10
# A narrow interval around a small difference is within the margin on both sides of 1.
TIGHT_HALF_WIDTH = MARGIN / 2
# A percentile is reported from this many values.
LEAST_COUNTS = {50: 5, 90: 20, 95: 72, 99: 368}
# Its 95% interval is reported from this many: the smallest n with max(p, 1 - p) ** n <= 0.025. All n values are on one
# side of the true percentile with at most that probability. With less, no two order statistics enclose it with 95%.
LEAST_COUNTS_FOR_INTERVAL = {50: 6, 90: 36, 95: 72, 99: 368}
# Student's t at 97.5 % by 1 / degrees of freedom.
_T_975 = (
    *((0.0, 1.960), (1 / 120, 1.980), (1 / 60, 2.000), (1 / 40, 2.021), (1 / 30, 2.042), (1 / 25, 2.060)),
    *((1 / 20, 2.086), (1 / 15, 2.131), (1 / 12, 2.179), (1 / 10, 2.228), (1 / 9, 2.262), (1 / 8, 2.306)),
    *((1 / 7, 2.365), (1 / 6, 2.447), (1 / 5, 2.571), (1 / 4, 2.776), (1 / 3, 3.182), (1 / 2, 4.303), (1.0, 12.71)),
)


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """How many times faster the measured arm is: the geometric mean over pairs of equal requests, 95% interval.

    `typical` is the median of the requests' ratios; a few extreme requests do not change it. `run_deviation` is the
    standard deviation of log ratios between runs that the interval assumes. It is `None` with one run, whose interval
    does not cover differences between runs.
    """

    ratio: float
    low: float
    high: float
    typical: float
    request_count: int
    session_count: int
    run_count: int
    run_deviation: float | None = None

    @property
    def covers_runs(self) -> bool:
        return self.run_deviation is not None


def paired_ratio(pairs_by_run: PairsByRun) -> PairedRatio | None:
    """Geometric mean of reference / measured: equal weight per request in a run, and per run.

    `None` without a pair. With one session, the interval is 0 to infinity: it says nothing about others.
    """
    logs = {
        run: {session: [math.log(first / second) for first, second in pairs] for session, pairs in by_session.items()}
        for run, by_session in pairs_by_run.items()
        if any(by_session.values())
    }
    if not logs:
        return None
    requests = sorted(value for by_session in logs.values() for values in by_session.values() for value in values)
    means = {
        run: fmean([value for session in sorted(by_session) for value in by_session[session]])
        for run, by_session in sorted(logs.items())
    }
    sessions = sorted({session for by_session in logs.values() for session, values in by_session.items() if values})
    centre = fmean(means.values())
    parts = [_influence(by_session, means[run], sessions) for run, by_session in sorted(logs.items())]
    half, deviation = _half_width(list(means.values()), parts)
    return PairedRatio(
        ratio=math.exp(centre),
        low=math.exp(centre - half),
        high=math.exp(centre + half) if half < 700 else math.inf,
        typical=math.exp(median(requests)),
        request_count=len(requests),
        session_count=len(sessions),
        run_count=len(means),
        run_deviation=deviation,
    )


def _influence(by_session: Mapping[int, Sequence[float]], mean: float, sessions: Sequence[int]) -> list[float]:
    """How far each session moves the mean of its run."""
    count = sum(map(len, by_session.values()))
    return [math.fsum(value - mean for value in by_session.get(session, ())) / count for session in sessions]


def _half_width(means: Sequence[float], parts: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Half width of the interval of the log, and the deviation between runs, `None` with one.

    `parts[run][session]` is the influence of a session on the mean of a run.
    """
    run_count, session_count = len(parts), len(parts[0])
    if session_count < 2:
        return math.inf, None
    correction = session_count / (session_count - 1)
    by_session = [math.fsum(column) / run_count for column in zip(*parts, strict=True)]
    of_sessions = correction * math.fsum(value**2 for value in by_session)
    freedom_of_sessions = session_count - 1
    if run_count == 1:
        return student_t(freedom_of_sessions) * math.sqrt(of_sessions), None
    explained = correction * math.fsum(variance(column) for column in zip(*parts, strict=True))
    measured = max(
        0.0, variance(means) - explained
    )  # part of the difference of runs that their requests do not explain
    freedom_of_runs = run_count - 1 + TYPICAL_RUN_FREEDOM
    between = ((run_count - 1) * measured + TYPICAL_RUN_FREEDOM * TYPICAL_RUN_DEVIATION**2) / freedom_of_runs
    of_runs = between / run_count
    total = of_sessions + of_runs
    freedom = total**2 / (of_sessions**2 / freedom_of_sessions + of_runs**2 / freedom_of_runs)  # Welch-Satterthwaite
    return student_t(freedom) * math.sqrt(total), math.sqrt(between)


def is_tight(ratio: PairedRatio | None, limit: float = TIGHT_HALF_WIDTH) -> bool:
    """Whether no further pair is needed: at least two runs, and half the interval of the log is below `limit`.

    The rule looks at the width and never at the ratio, so it does not stop because of a result that pleases.
    """
    return (
        ratio is not None
        and ratio.covers_runs
        and ratio.low > 0
        and (math.log(ratio.high) - math.log(ratio.low)) / 2 < limit
    )


@dataclass(frozen=True, slots=True)
class Noise:
    """The largest difference between two runs of the same arm: what a comparison shows although nothing changed.

    `ratio` is at least 1. The interval is over sessions. `source` names the two runs.
    """

    ratio: float
    low: float
    high: float
    source: str


def noise_of(pairs_of_runs: Mapping[tuple[int, int], PairsBySession], arm: str = "baseline") -> Noise | None:
    """Compare repeated runs of one arm, by their numbers; `None` if no two runs have a request in common."""
    ratios = {runs: paired_ratio({1: pairs}) for runs, pairs in pairs_of_runs.items()}
    found = [_oriented(ratio, arm, *runs) for runs, ratio in ratios.items() if ratio is not None]
    return max(found, key=lambda noise: noise.ratio, default=None)


def _oriented(ratio: PairedRatio, arm: str, first: int, second: int) -> Noise:
    if ratio.ratio >= 1:
        return Noise(ratio.ratio, ratio.low, ratio.high, f"{arm}, pair {first} against pair {second}")
    high = 1 / ratio.low if ratio.low > 0 else math.inf
    return Noise(1 / ratio.ratio, 1 / ratio.high, high, f"{arm}, pair {second} against pair {first}")


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p95, p99, mean and count. A percentile is `None` if there are too few values for it."""
    ordered = sorted(values)
    percentiles = {
        f"p{percent}": percentile(ordered, percent) if len(ordered) >= least else None
        for percent, least in LEAST_COUNTS.items()
    }
    return {**percentiles, "mean": math.fsum(ordered) / len(ordered) if ordered else None, "count": len(ordered)}


def student_t(degrees_of_freedom: float) -> float:
    """Student's t at 97.5 %: infinite below one degree of freedom, else interpolated in 1 / degrees of freedom.

    t is convex in that variable, so an interpolated value is slightly too large, never too small.
    """
    if degrees_of_freedom < 1:
        return math.inf
    inverse = 1 / degrees_of_freedom
    (left, low), (right, high) = next((below, above) for below, above in pairwise(_T_975) if inverse <= above[0])
    return low + (high - low) * (inverse - left) / (right - left)


def busy_share(intervals: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Share of [start, end] that the union of the intervals covers; 0 for an empty window."""
    if end <= start:
        return 0.0
    covered, reached = 0.0, start
    for begin, finish in sorted(intervals):
        begin, finish = max(begin, reached), min(finish, end)
        if finish > begin:
            covered += finish - begin
            reached = finish
    return covered / (end - start)
