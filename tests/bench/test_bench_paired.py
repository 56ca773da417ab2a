"""The paired comparison: hand-computed values, properties, and simulations of known truth.

The simulations are those of bench/micro/bench_statistics.py, with its first seeds.
"""

import math
import random
import time
from collections import Counter
from contextlib import closing, contextmanager
from pathlib import Path

import bench_statistics
import pytest
from bench_rig import PATIENT, MockEngines, SilentProgress, launched, setup_of, without_sampler  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from mock_engine import MockEngine, Options

from kvbm_cli.bench.experiment import run_experiment
from kvbm_cli.bench.judge.paired import (
    MARGIN,
    TYPICAL_RUN_DEVIATION,
    PairedRatio,
    is_tight,
    noise_of,
    paired_ratio,
)
from kvbm_cli.bench.judge.verdict import direction
from kvbm_cli.bench.load.drive import DriveResult
from kvbm_cli.bench.load.process import ClientHealth
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import Results
from kvbm_cli.bench.summary import summarise
from kvbm_cli.bench.workload.schema import Conversations, Schedule

REPETITIONS = 20
times = st.floats(0.1, 1e5)
experiments = st.dictionaries(
    st.integers(1, 4),
    st.dictionaries(st.integers(0, 6), st.lists(st.tuples(times, times), max_size=4), min_size=1, max_size=6),
    max_size=4,
)


def compare(pairs) -> PairedRatio:
    ratio = paired_ratio(pairs)
    assert ratio is not None
    return ratio


def test_ratio_is_the_geometric_mean_over_all_requests():
    ratio = compare({1: {0: [(8.0, 1.0), (2.0, 1.0)], 1: [(4.0, 1.0)]}})
    assert ratio.ratio == pytest.approx(4.0)
    assert (ratio.request_count, ratio.session_count, ratio.run_count) == (3, 2, 1)


def test_runs_have_equal_weight():
    ratio = compare({1: {0: [(8.0, 1.0)] * 10}, 2: {0: [(2.0, 1.0)]}})
    assert ratio.ratio == pytest.approx(4.0)
    assert ratio.typical == pytest.approx(8.0)


def test_interval_has_no_width_when_all_sessions_of_one_run_agree():
    ratio = compare({1: {session: [(3.0, 1.0), (3.0, 1.0)] for session in range(5)}})
    assert (ratio.low, ratio.ratio, ratio.high) == pytest.approx((3.0, 3.0, 3.0))
    assert not ratio.covers_runs


def test_interval_is_of_sessions_not_of_requests():
    """Two sessions, one at ratio 2 and one at 8: ten requests each say no more about other sessions than one would."""
    ratio = compare({1: {0: [(2.0, 1.0)] * 10, 1: [(8.0, 1.0)] * 10}})
    assert ratio.ratio == pytest.approx(4.0)
    assert (ratio.low, ratio.high) == pytest.approx((4 * 2**-12.71, 4 * 2**12.71))


def test_interval_of_one_run_is_students_t_over_the_means_of_sessions():
    """The expected numbers are mean and standard deviation of six logs, times t at 5 degrees of freedom, by hand."""
    ratio = compare({1: {user: [(10.0 + user + turn, 2.0 + 0.1 * user) for turn in range(3)] for user in range(6)}})
    assert ratio.ratio == pytest.approx(5.95727126)
    assert (ratio.low, ratio.high) == pytest.approx((5.61002195, 6.32601462))


def test_interval_of_equal_runs_has_the_width_of_typical_differences_between_runs():
    """Three runs without any variation: variance 3 * 0.03**2 / 5 / 3, and t at 5 degrees of freedom, by hand."""
    ratio = compare({run: {session: [(2.0, 1.0)] for session in range(6)} for run in (1, 2, 3)})
    half = 2.571 * math.sqrt(3 * TYPICAL_RUN_DEVIATION**2 / 5 / 3)
    assert ratio.covers_runs
    assert (ratio.low, ratio.high) == pytest.approx((2 * math.exp(-half), 2 * math.exp(half)))


def test_runs_that_differ_more_than_typical_widen_the_interval():
    steady = {run: {session: [(2.0, 1.0)] for session in range(6)} for run in (1, 2, 3)}
    shaken = {run: {session: [(2.0 * 1.2**run, 1.2**2)] for session in range(6)} for run in (1, 2, 3)}
    assert compare(shaken).ratio == pytest.approx(2.0)
    assert compare(shaken).high / compare(shaken).low > 1.2 * compare(steady).high / compare(steady).low


def test_one_session_says_nothing_about_others():
    ratio = compare({1: {0: [(2.0, 1.0)] * 10}})
    assert (ratio.low, ratio.ratio, ratio.high) == (0.0, pytest.approx(2.0), math.inf)
    assert direction(ratio) == "inconclusive"


def test_ratio_of_no_pairs_is_none():
    assert paired_ratio({}) is None
    assert paired_ratio({1: {}, 2: {0: [], 1: []}}) is None


@given(experiments)
def test_ratio_is_inverted_when_the_arms_are_swapped(pairs):
    swapped = {run: {s: [(b, a) for a, b in some] for s, some in sessions.items()} for run, sessions in pairs.items()}
    ratio, inverse = paired_ratio(pairs), paired_ratio(swapped)
    assert (ratio is None) == (inverse is None)
    if ratio and inverse:
        assert ratio.ratio * inverse.ratio == pytest.approx(1)
        assert ratio.typical * inverse.typical == pytest.approx(1)
        assert math.isinf(ratio.high) == (inverse.low == 0)
        assert math.isinf(ratio.high) or ratio.high * inverse.low == pytest.approx(1)
        opposite = {"faster": "slower", "slower": "faster"}
        found = direction(ratio)
        assert direction(inverse) == opposite.get(found, found)


@given(experiments, st.randoms())
def test_ratio_does_not_depend_on_order(pairs, random):
    def shuffled(items):
        return random.sample(list(items), len(items))

    other = {run: {s: shuffled(pairs[run][s]) for s in shuffled(pairs[run])} for run in shuffled(pairs)}
    ratio, again = paired_ratio(pairs), paired_ratio(other)
    assert (ratio is None) == (again is None)
    if ratio and again:
        assert again.ratio == pytest.approx(ratio.ratio)
        assert (again.low, again.high) == pytest.approx((ratio.low, ratio.high), rel=1e-6)


@given(experiments, st.floats(0.5, 20))
def test_a_faster_measured_arm_shifts_the_interval_and_keeps_its_width(pairs, factor):
    faster = {run: {s: [(a, b / factor) for a, b in some] for s, some in arms.items()} for run, arms in pairs.items()}
    ratio, shifted = paired_ratio(pairs), paired_ratio(faster)
    if ratio and shifted and math.isfinite(ratio.high):
        assert (shifted.low, shifted.ratio, shifted.high) == pytest.approx(
            (ratio.low * factor, ratio.ratio * factor, ratio.high * factor), rel=1e-6
        )


def ratio_of(low: float, middle: float, high: float, *, runs: int = 3, typical: float | None = None) -> PairedRatio:
    deviation = 0.03 if runs > 1 else None
    return PairedRatio(middle, low, high, typical or middle, 60, 12, runs, run_deviation=deviation)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (ratio_of(1.02, 1.08, 1.14), "faster"),
        (ratio_of(0.99, 1.08, 1.17), "inconclusive"),
        (ratio_of(1.01, 1.04, 1.07), "inconclusive"),
        (ratio_of(0.93, 0.96, 0.99), "inconclusive"),
        (ratio_of(0.96, 1.0, 1.04), "same"),
        (ratio_of(1.01, 1.03, 1.045), "same"),
        (ratio_of(0.0, 1.0, math.inf), "inconclusive"),
        (ratio_of(1.02, 1.08, 1.14, typical=0.99), "inconclusive"),
        (ratio_of(1.02, 1.08, 1.14, runs=1), "inconclusive"),
        (ratio_of(1.02, 1.12, 1.22, runs=1), "faster"),
        (ratio_of(0.88, 0.93, 0.98), "slower"),
        (ratio_of(0.88, 0.93, 0.98, runs=1), "inconclusive"),
        (ratio_of(0.88, 0.93, 0.98, typical=1.01), "inconclusive"),
    ],
)
def test_direction_needs_interval_mean_and_typical_request(ratio, expected):
    assert direction(ratio, MARGIN) == expected


@pytest.mark.parametrize("deviation", [0.01, 0.02, 0.03])
@pytest.mark.parametrize(("sessions", "turns"), [(8, 5), (12, 5), (20, 5)])
def test_equal_arms_are_rarely_called_different(sessions, turns, deviation):
    case = bench_statistics.Case(sessions=sessions, turns=turns, run_deviation=deviation)
    found = [direction(ratio) for ratio in bench_statistics.ratios(case, REPETITIONS)]
    assert len([one for one in found if one in ("faster", "slower")]) <= 2


@pytest.mark.parametrize(("sessions", "turns", "deviation"), [(12, 5, 0.01), (20, 5, 0.01), (20, 5, 0.02)])
def test_ten_percent_is_detected(sessions, turns, deviation):
    case = bench_statistics.Case(1.1, sessions=sessions, turns=turns, run_deviation=deviation)
    assert [direction(ratio) for ratio in bench_statistics.ratios(case, REPETITIONS)].count("faster") >= 18


@pytest.mark.parametrize("speedup", [1.0, 1.1, 3.0])
@pytest.mark.parametrize("runs", [2, 3, 5])
def test_intervals_hold_the_truth(runs, speedup):
    case = bench_statistics.Case(speedup, runs=runs, effect_deviation=0.1)
    found = list(bench_statistics.ratios(case, 200))
    assert sum(ratio.low <= speedup <= ratio.high for ratio in found) >= 0.92 * 200


def test_stopping_when_the_interval_is_tight_keeps_its_coverage():
    case = bench_statistics.Case(request_deviation=0.1)
    found = [bench_statistics.stopped_early(case, seed) for seed in range(200)]
    assert min(ratio.run_count for ratio in found) < 12
    assert sum(ratio.low <= 1 <= ratio.high for ratio in found) >= 0.92 * 200


def test_one_run_or_a_wide_interval_is_not_tight():
    assert is_tight(ratio_of(0.98, 1.0, 1.02))
    assert not is_tight(ratio_of(0.98, 1.0, 1.02, runs=1))
    assert not is_tight(ratio_of(0.97, 1.0, 1.03))
    assert not is_tight(ratio_of(0.0, 1.0, math.inf))
    assert not is_tight(None)


def test_noise_is_the_largest_difference_between_runs_of_one_arm():
    def pairs(factor: float) -> dict[int, list[tuple[float, float]]]:
        return {session: [(100.0 + session, factor * (100.0 + session))] * 2 for session in range(4)}

    noise = noise_of({(1, 2): pairs(1.02), (1, 3): pairs(1.1), (2, 3): pairs(1.1 / 1.02)})
    assert noise.source == "baseline, pair 3 against pair 1"
    assert (noise.low, noise.ratio, noise.high) == pytest.approx((1.1, 1.1, 1.1))


def test_noise_of_runs_without_a_request_in_common_is_unknown():
    assert noise_of({}) is None
    assert noise_of({(1, 2): {}}) is None


COMMANDS = 20
LEAST_FOUND = 18
SLOWER = 1.10
RUN_DEVIATION, REQUEST_DEVIATION = 0.015, 0.08
WORKLOAD = Conversations(
    name="even",
    users=8,
    turns=4,
    system_tokens=16,
    history_tokens=64,
    question_tokens=8,
    answer_tokens=3,
    history="canned",
    schedule=Schedule(interval_s=1.0, pairs=5),
)
HEALTH = ClientHealth((0.05,), 0.1, 0.2, 0.5, 0.1, 0.2, 0)


def simulated_drive(seed: int, slower: float):
    """A client whose records follow from the seed: the arm `kvbm` takes `slower` times as long as the others."""
    noise = random.Random(seed)

    async def drive(plan, targets, *, on_record):
        records = {}
        for target in targets:
            factor = math.exp(noise.gauss(0, RUN_DEVIATION)) * (slower if target.arm == "kvbm" else 1.0)
            found = []
            for request in plan.requests:
                record = target.record_of(request)
                record.intended_ms = record.launched_ms = 1e3 * request.intended_s
                ttft_ms = (40 + 0.5 * request.prompt_tokens) * factor * math.exp(noise.gauss(0, REQUEST_DEVIATION))
                record.first_token_ms = record.intended_ms + ttft_ms
                record.last_token_ms = record.end_ms = record.first_token_ms + 20
                record.token_ids, record.logprobs = [1, 2, 3], [-0.5] * 3
                record.first_chunk_tokens, record.token_gaps_ms = 1, [10.0, 10.0]
                record.prompt_tokens, record.output_tokens = request.prompt_tokens, 3
                found.append(record)
                on_record(record)
            records[target.run] = tuple(found)
        return DriveResult(records, HEALTH, time.time(), time.perf_counter_ns(), plan.duration_s)

    return drive


def verdict_of(directory: Path, engines, workload: Conversations) -> str:
    with closing(BenchDirectory.create(directory)) as opened:
        run_experiment(setup_of(workload), engines, opened, SilentProgress())
        summary = summarise(Results.read(opened), surroundings={}, limits=PATIENT)
    return str(summary["verdict"])


@pytest.mark.usefixtures("without_sampler")
@pytest.mark.parametrize(
    ("slower", "expected", "least"),
    [(1.0, ("same", "inconclusive"), 18), pytest.param(SLOWER, ("slower",), LEAST_FOUND, marks=pytest.mark.soak)],
)
def test_verdicts_with_a_simulated_client(tmp_path, monkeypatch, slower, expected, least):
    with MockEngine(Options()) as engine:

        @contextmanager
        def shared(arm, log, room):
            yield launched(engine)

        found: Counter[str] = Counter()
        for seed in range(COMMANDS):
            monkeypatch.setattr("kvbm_cli.bench.experiment.drive", simulated_drive(seed, slower))
            workload = WORKLOAD.model_copy(update={"seed": seed})
            found[verdict_of(tmp_path / str(seed), shared, workload)] += 1
    assert sum(found[one] for one in expected) >= least, found


@pytest.mark.soak
@pytest.mark.usefixtures("without_sampler")
@pytest.mark.parametrize(
    ("slower", "expected", "least"), [(1.0, ("same", "inconclusive"), 18), (SLOWER, ("slower",), LEAST_FOUND)]
)
def test_verdicts_with_mock_engines(tmp_path, slower, expected, least):
    """Every request takes 40 ms and more; the planted engine takes 10 % longer in everything."""
    found: Counter[str] = Counter()
    for seed in range(COMMANDS):
        even = Options(base_ms=40.0, computed_token_ms=0.2)
        kvbm = Options(base_ms=40.0 * slower, computed_token_ms=0.2 * slower)
        engines = MockEngines(recording=even, baseline=even, floor=even, kvbm=kvbm)
        workload = WORKLOAD.model_copy(update={"seed": seed, "schedule": Schedule(interval_s=0.12, pairs=3)})
        found[verdict_of(tmp_path / str(seed), engines, workload)] += 1
    assert sum(found[one] for one in expected) >= least, found
