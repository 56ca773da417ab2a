"""How often the intervals and verdicts of kvbm bench are right, on simulated measurements whose truth is known.

    python bench/micro/bench_statistics.py      # --output bench/results/bench-statistics.json, about 3 minutes

Times are base time x true speed-up x effect of the run x effect of the session in that run x noise of the request. The
noise of the log of a time is Student's t with 4 degrees of freedom, which has heavy tails, with a deviation of 20 %, in
each arm on its own. Cases with slow requests add factors of 1.5 to 4.
Prints for each case: coverage of the 95% interval, false alarms without a difference, and detections of planted ones.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from kvbm_cli.bench.analysis.paired import PairedRatio, direction, is_tight, paired_ratio

Pairs = dict[int, dict[int, list[tuple[float, float]]]]


@dataclass(frozen=True)
class Case:
    """One kind of experiment. Deviations are of logs; those of runs are per arm."""

    speedup: float = 1.0
    runs: int = 3
    sessions: int = 12
    turns: int = 5
    run_deviation: float = 0.02
    session_deviation: float = 0.03
    effect_deviation: float = 0.0
    request_deviation: float = 0.20
    slow_share: float = 0.0


def simulate(case: Case, seed: int) -> Pairs:
    """Times of both arms, in ms, by run and session. Base times differ between requests by a factor of about 5."""
    random = np.random.default_rng([seed, 20261123])
    shape = (case.sessions, case.turns)
    base = 200 * np.exp(random.normal(0, 0.3, (case.sessions, 1)) + random.normal(0, 0.3, shape))
    effect = random.normal(0, case.effect_deviation, (case.sessions, 1))
    pairs: Pairs = {}
    for run in range(1, case.runs + 1):
        arms = []
        for speedup in (0.0, math.log(case.speedup)):
            logs = random.normal(0, case.run_deviation) + random.normal(0, case.session_deviation, (case.sessions, 1))
            arms.append(base * np.exp(logs - speedup * np.ones(shape)) * noise(case, random, shape))
        arms[1] = arms[1] * np.exp(-effect)
        pairs[run] = {
            session: list(zip(arms[0][session].tolist(), arms[1][session].tolist(), strict=True))
            for session in range(case.sessions)
        }
    return pairs


def noise(case: Case, random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Heavy-tailed noise of deviation `request_deviation`, and a share of slow requests."""
    slow = np.where(random.random(shape) < case.slow_share, random.uniform(1.5, 4, shape), 1.0)
    return np.exp(case.request_deviation * random.standard_t(4, shape) / math.sqrt(2)) * slow


def ratios(case: Case, repetitions: int) -> Iterator[PairedRatio]:
    for seed in range(repetitions):
        ratio = paired_ratio(simulate(case, seed))
        assert ratio is not None
        yield ratio


def bootstrap_interval(pairs: Pairs, seed: int, draws: int = 300) -> tuple[float, float]:
    """The plain hierarchical bootstrap, for comparison: runs with replacement, then sessions in each."""
    random = np.random.default_rng(seed)
    sums = np.array([[sum(math.log(a / b) for a, b in pairs[r][s]) for s in sorted(pairs[r])] for r in sorted(pairs)])
    runs, sessions = sums.shape
    turns = len(pairs[1][0])
    drawn_runs = random.integers(0, runs, (draws, runs, 1))
    drawn_sessions = random.integers(0, sessions, (draws, runs, sessions))
    means = sums[drawn_runs, drawn_sessions].mean(axis=(1, 2)) / turns
    low, high = np.quantile(means, [0.025, 0.975])
    return math.exp(low), math.exp(high)


def stopped_early(case: Case, seed: int, most: int = 6) -> PairedRatio:
    """Add pairs until the interval is tight, at most six."""
    pairs = simulate(replace(case, runs=most), seed)
    for count in range(2, most + 1):
        ratio = paired_ratio({run: pairs[run] for run in range(1, count + 1)})
        if is_tight(ratio):
            break
    assert ratio is not None
    return ratio


def row(case: Case, repetitions: int) -> dict[str, object]:
    found = list(ratios(case, repetitions))
    verdicts = [direction(ratio).value for ratio in found]
    plain = [bootstrap_interval(simulate(case, seed), seed) for seed in range(min(repetitions, 300))]
    return {
        **asdict(case),
        "repetitions": repetitions,
        "coverage": _share(ratio.low <= case.speedup <= ratio.high for ratio in found),
        "coverage_of_plain_bootstrap": _share(low <= case.speedup <= high for low, high in plain),
        "half_width": round(float(np.median([math.log(ratio.high / ratio.low) / 2 for ratio in found])), 4),
        **{verdict: _share(one == verdict for one in verdicts) for verdict in ("faster", "same", "slower")},
    }


def _share(flags: Iterator[bool]) -> float:
    values = list(flags)
    return round(sum(values) / len(values), 4)


def cases() -> Iterator[Case]:
    for speedup in (1.0, 1.1):
        for runs in (1, 2, 3, 5):
            for deviation in (0.0, 0.01, 0.02, 0.03, 0.05):
                yield Case(speedup, runs=runs, run_deviation=deviation)
        for sessions, turns in ((8, 5), (20, 5), (60, 1), (100, 1), (6, 16), (60, 5)):
            yield Case(speedup, sessions=sessions, turns=turns)
        yield Case(speedup, effect_deviation=0.1)
        yield Case(speedup, slow_share=0.03)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    arguments = parser.parse_args()
    rows = []
    print("speed-up runs sessions x turns  run sd  coverage  (bootstrap)  half width  faster  slower")
    for case in cases():
        one = row(case, arguments.repetitions)
        rows.append(one)
        print(
            f"{case.speedup:8.2f} {case.runs:4} {case.sessions:8} x {case.turns:<5} {case.run_deviation:7.0%}"
            f" {one['coverage']:9.3f} {one['coverage_of_plain_bootstrap']:11.3f} {one['half_width']:12.3f}"
            f" {one['faster']:8.3f} {one['slower']:7.3f}"
            + (f"  effect sd {case.effect_deviation}" if case.effect_deviation else "")
            + (f"  slow {case.slow_share}" if case.slow_share else ""),
            flush=True,
        )
    stops = []
    for deviation in (0.0, 0.01, 0.02, 0.03):
        case = Case(run_deviation=deviation, request_deviation=0.1)
        found = [stopped_early(case, seed) for seed in range(arguments.repetitions)]
        stop = {
            "run_deviation": deviation,
            "request_deviation": case.request_deviation,
            "coverage": _share(ratio.low <= 1 <= ratio.high for ratio in found),
            "mean_runs": round(float(np.mean([ratio.run_count for ratio in found])), 2),
            "false_alarms": _share(direction(ratio).value != "same" for ratio in found),
        }
        stops.append(stop)
        print("early stop:", stop, flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps({"rows": rows, "early_stop": stops}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
