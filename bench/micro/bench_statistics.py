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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from kvbm_cli.bench.judge.estimates import compare_percentiles, share_of_possible_gain
from kvbm_cli.bench.judge.paired import PairedRatio, is_tight, paired_ratio
from kvbm_cli.bench.judge.verdict import direction

Samples = dict[int, dict[int, list[float]]]
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


def simulate_arms(case: Case, speedups: Sequence[float], seed: int) -> list[Samples]:
    """Times of several arms, in ms, by run and session. Base times differ between requests by a factor of about 5.

    `case.effect_deviation` is the deviation of the effect of sessions on the second arm.
    """
    random = np.random.default_rng([seed, 20261123])
    shape = (case.sessions, case.turns)
    base = 200 * np.exp(random.normal(0, 0.3, (case.sessions, 1)) + random.normal(0, 0.3, shape))
    effect = random.normal(0, case.effect_deviation, (case.sessions, 1))
    arms: list[Samples] = [{} for _ in speedups]
    for run in range(1, case.runs + 1):
        for position, speedup in enumerate(speedups):
            logs = random.normal(0, case.run_deviation) + random.normal(0, case.session_deviation, (case.sessions, 1))
            logs = logs - math.log(speedup) - (effect if position == 1 else 0)
            times = base * np.exp(logs) * noise(case, random, shape)
            arms[position][run] = {session: times[session].tolist() for session in range(case.sessions)}
    return arms


def simulate(case: Case, seed: int) -> Pairs:
    """The reference and an arm that is `case.speedup` times as fast, as pairs of equal requests."""
    reference, measured = simulate_arms(case, (1.0, case.speedup), seed)
    return _zipped(reference, measured)


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


def stopped_early(case: Case, seed: int, most: int = 12) -> PairedRatio:
    """Add pairs until the interval is tight, at most `most`."""
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
        **{
            verdict: _share(one == verdict for one in verdicts)
            for verdict in ("faster", "same", "slower", "inconclusive")
        },
    }


def _share(flags: Iterable[bool]) -> float:
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


def percentile_row(case: Case, repetitions: int) -> dict[str, object]:
    """Coverage of the intervals of differences of percentiles between equal arms, and of the share of possible gain.

    The measured arm is twice as fast, the floor four times, so the share is 2/3.
    """
    held: dict[str, list[bool]] = {name: [] for name in ("p50", "p90", "p95", "p99", "share_of_possible_gain")}
    for seed in range(repetitions):
        arms = simulate_arms(case, (1.0, 2.0, 4.0, 1.0), seed)
        ratio = paired_ratio(_zipped(arms[0], arms[1]))
        assert ratio is not None
        found = compare_percentiles(arms[0], arms[3], run_deviation=ratio.run_deviation, draws=400)
        for percent, one in found.items():
            if one is not None and one.difference.low is not None and one.difference.high is not None:
                held[f"p{percent}"].append(one.difference.low <= 0 <= one.difference.high)
        share = share_of_possible_gain(*arms[:3], run_deviation=ratio.run_deviation, draws=400)
        assert share is not None
        assert share.low is not None
        assert share.high is not None
        held["share_of_possible_gain"].append(share.low <= 2 / 3 <= share.high)
    coverage = {name: _coverage(flags) for name, flags in held.items()}
    return {**asdict(case), "repetitions": repetitions, "coverage": coverage}


def _coverage(flags: Sequence[bool]) -> float | None:
    return _share(flags) if flags else None


def _zipped(reference: Samples, measured: Samples) -> Pairs:
    return {
        run: {session: list(zip(times, measured[run][session], strict=True)) for session, times in sessions.items()}
        for run, sessions in reference.items()
    }


def print_row(one: dict[str, object], case: Case) -> None:
    other = f"  effect sd {case.effect_deviation}" if case.effect_deviation else ""
    other += f"  slow {case.slow_share}" if case.slow_share else ""
    print(
        f"{case.speedup:8.2f} {case.runs:4} {case.sessions:8} x {case.turns:<5} {case.run_deviation:7.0%}"
        f" {one['coverage']:9.3f} {one['coverage_of_plain_bootstrap']:11.3f} {one['half_width']:12.3f}"
        f" {one['faster']:8.3f} {one['slower']:7.3f}{other}",
        flush=True,
    )


def stop_row(deviation: float, repetitions: int) -> dict[str, object]:
    """Early stopping with little noise of requests, so that most experiments end before the last pair."""
    case = Case(run_deviation=deviation, request_deviation=0.1)
    found = [stopped_early(case, seed) for seed in range(repetitions)]
    return {
        **asdict(case),
        "repetitions": repetitions,
        "coverage": _share(ratio.low <= 1 <= ratio.high for ratio in found),
        "mean_runs": round(float(np.mean([ratio.run_count for ratio in found])), 2),
        "false_alarms": _share(direction(ratio).value in ("faster", "slower") for ratio in found),
        "same": _share(direction(ratio).value == "same" for ratio in found),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    arguments = parser.parse_args()
    rows, stops, percentiles = [], [], []
    print("speed-up runs sessions x turns  run sd  coverage  (bootstrap)  half width  faster  slower")
    for case in cases():
        rows.append(row(case, arguments.repetitions))
        print_row(rows[-1], case)
    for deviation in (0.0, 0.01, 0.02, 0.03):
        stops.append(stop_row(deviation, arguments.repetitions))
        one = stops[-1]
        print(
            f"early stop, run sd {deviation:.0%}: coverage {one['coverage']}, runs {one['mean_runs']}, "
            f"false alarms {one['false_alarms']}",
            flush=True,
        )
    for sessions, runs, deviation in ((12, 1, 0.0), (12, 1, 0.02), (12, 3, 0.0), (12, 3, 0.02), (40, 3, 0.02)):
        case = Case(sessions=sessions, runs=runs, run_deviation=deviation)
        percentiles.append(percentile_row(case, max(1, arguments.repetitions // 4)))
        print(f"{sessions} sessions, {runs} runs, run sd {deviation:.0%}:", percentiles[-1]["coverage"], flush=True)
    if arguments.output:
        result = {"rows": rows, "early_stop": stops, "percentiles": percentiles}
        about = {"benchmark": "bench_statistics", "command": "python bench/micro/bench_statistics.py"}
        arguments.output.write_text(json.dumps({**about, **result}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
