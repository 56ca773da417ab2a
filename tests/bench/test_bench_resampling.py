import sys
from pathlib import Path

import pytest

from kvbm_cli.bench.judge.estimates import compare_percentiles, share_of_possible_gain

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "micro"))

import bench_statistics


def side(pairs, index):
    return {
        run: {session: [one[index] for one in some] for session, some in sessions.items()}
        for run, sessions in pairs.items()
    }


def arms(case: bench_statistics.Case, seed: int = 0):
    pairs = bench_statistics.simulate(case, seed)
    return side(pairs, 0), side(pairs, 1)


def scaled(samples, factor):
    return {run: {s: [factor * v for v in some] for s, some in sessions.items()} for run, sessions in samples.items()}


CASE = bench_statistics.Case(2.0)


def test_percentiles_of_both_arms_and_their_difference():
    reference, measured = arms(CASE)
    found = compare_percentiles(reference, measured, run_deviation=0.03)
    median = found[50]
    assert median.difference.value == pytest.approx(median.measured.value - median.reference.value)
    for estimate in (median.reference, median.measured, median.difference):
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low < estimate.value < estimate.high
    assert median.difference.high < 0
    assert found[95] is not None  # 180 requests
    assert found[99] is None


def test_equal_seeds_give_equal_intervals_and_order_does_not_matter():
    reference, measured = arms(CASE)
    found = compare_percentiles(reference, measured, run_deviation=0.03, seed=4)
    assert found == compare_percentiles(reference, measured, run_deviation=0.03, seed=4)
    assert found != compare_percentiles(reference, measured, run_deviation=0.03, seed=5)
    turned = {run: dict(reversed(reference[run].items())) for run in reversed(reference)}
    assert found == compare_percentiles(turned, measured, run_deviation=0.03, seed=4)


def test_swapped_arms_swap_the_sign():
    reference, measured = arms(CASE)
    there, back = (
        compare_percentiles(*pair, run_deviation=None)[50] for pair in ((reference, measured), (measured, reference))
    )
    assert there.difference.low == pytest.approx(-back.difference.high)


def test_differences_between_runs_widen_the_interval():
    reference, measured = arms(CASE)

    def width(run_deviation):
        one = compare_percentiles(reference, measured, run_deviation=run_deviation)[50].measured
        return one.high - one.low

    assert width(None) < width(0.03) < width(0.2)


def test_too_few_samples_have_no_percentile_or_no_interval():
    few = {1: {session: [100.0 + session] for session in range(5)}}
    found = compare_percentiles(few, few, run_deviation=None)
    assert found[50] is not None
    assert (found[50].reference.value, found[50].reference.low) == (102.0, None)
    assert found[90] is None
    assert compare_percentiles({1: {0: [1.0]}}, few, run_deviation=None)[50] is None
    assert compare_percentiles({}, {}, run_deviation=None)[50] is None
    two_sessions = {1: {session: [100.0 + turn for turn in range(50)] for session in range(2)}}
    found = compare_percentiles(two_sessions, two_sessions, run_deviation=None)
    assert found[90] is not None
    assert found[90].difference.low is None


def test_share_of_the_possible_gain():
    reference, _ = arms(CASE)
    share = share_of_possible_gain(reference, scaled(reference, 0.4), scaled(reference, 0.2), run_deviation=0.02)
    assert share.value == pytest.approx(0.75)
    assert share.low < 0.75 < share.high < 1
    assert not share.is_noise


def test_without_a_possible_gain_there_is_no_share():
    reference, measured = arms(CASE)
    assert share_of_possible_gain(reference, measured, scaled(reference, 1.1), run_deviation=None) is None
    assert share_of_possible_gain(reference, measured, scaled(reference, 0.99), run_deviation=0.02) is None
    assert share_of_possible_gain(reference, measured, {1: {0: [5.0]}}, run_deviation=None) is None


@pytest.mark.parametrize("percent", [50, 90])
def test_intervals_of_differences_hold_zero_for_equal_arms(percent):
    held = 0
    for seed in range(60):
        reference, measured = arms(bench_statistics.Case(), seed)
        one = compare_percentiles(reference, measured, run_deviation=0.03, draws=200)[percent]
        held += one.difference.low <= 0 <= one.difference.high
    assert held >= 54
