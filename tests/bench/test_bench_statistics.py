import json
import math
import random
from dataclasses import replace
from pathlib import Path

import bench_statistics
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm_cli.bench.judge.estimates import (
    TtftModel,
    compare_percentiles,
    fit_ttft,
    share_of_possible_gain,
)
from kvbm_cli.bench.judge.paired import LEAST_COUNTS, LEAST_COUNTS_FOR_INTERVAL, busy_share, spread, student_t
from kvbm_cli.bench.result.arm_result import wilson_interval
from kvbm_cli.bench.result.results import RequestRecord, percentile


def test_percentiles_interpolate_between_the_two_nearest_ranks_as_numpy_does():
    assert percentile([4.0, 1.0, 3.0, 2.0], 25) == 1.75
    numpy = pytest.importorskip("numpy")
    for values in ([7.0], [1.0, 2.0], [math.sin(index) for index in range(37)]):
        for percent in (0, 1, 2.5, 33, 50, 90, 97.5, 99, 100):
            assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)))


def test_spread_of_nothing_is_nothing():
    assert spread([]) == {"p50": None, "p90": None, "p95": None, "p99": None, "mean": None, "count": 0}


@pytest.mark.parametrize("percent", LEAST_COUNTS)
def test_spread_leaves_out_a_percentile_of_too_few_values(percent):
    least = LEAST_COUNTS[percent]
    values = [float(value) for value in range(least)]
    assert spread(values)[f"p{percent}"] == pytest.approx(percent / 100 * (least - 1))
    assert spread(values[1:])[f"p{percent}"] is None
    assert spread(values[1:])["mean"] is not None


@pytest.mark.parametrize("percent", LEAST_COUNTS_FOR_INTERVAL)
def test_an_interval_needs_samples_on_both_sides_of_the_percentile(percent):
    """All n samples are below the percentile with probability p ** n; each side may have 2.5%."""
    least, share = LEAST_COUNTS_FOR_INTERVAL[percent], percent / 100
    assert max(share, 1 - share) ** least <= 0.025 < max(share, 1 - share) ** (least - 1)


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=400))
def test_percentiles_do_not_depend_on_order_and_grow(values):
    found = spread(values)
    assert found == spread(list(reversed(values)))
    known = [found[f"p{percent}"] for percent in LEAST_COUNTS if found[f"p{percent}"] is not None]
    assert known == sorted(known)
    assert all(min(values) <= value <= max(values) for value in known)


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (2, 4.303), (5, 2.571), (11, 2.201), (24, 2.064)])
def test_students_t_is_that_of_the_tables(freedom, expected):
    assert student_t(freedom) == pytest.approx(expected, rel=2e-3)


def test_students_t_ends_in_the_normal_distribution():
    assert student_t(0.5) == math.inf
    assert student_t(math.inf) == pytest.approx(1.96, rel=1e-3)


@given(st.floats(1, 1000), st.floats(1, 1000))
def test_students_t_falls_with_degrees_of_freedom(first, second):
    assert student_t(min(first, second)) >= student_t(max(first, second))


def test_wilsons_interval_is_that_of_a_worked_example():
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(st.integers(0, 300), st.integers(0, 300))
def test_wilsons_interval_holds_the_share_and_is_symmetric(good, bad):
    low, high = wilson_interval(good, good + bad)
    assert 0 <= low <= high <= 1
    assert good + bad == 0 or low <= good / (good + bad) <= high
    assert wilson_interval(bad, good + bad) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(
    ("spans", "window", "share"),
    [
        ([(0, 4), (2, 6), (8, 10)], (0, 10), 0.8),  # what overlaps counts once
        ([(-5, 1), (9, 50)], (0, 10), 0.2),
        ([], (0, 10), 0.0),
        ([(0, 1)], (3, 3), 0.0),
    ],
)
def test_busy_share_counts_each_moment_of_the_window_once(spans, window, share):
    assert busy_share(spans, *window) == pytest.approx(share)


ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/statistics.md").read_text()
RESULT = json.loads((ROOT / "bench/results/bench-statistics.json").read_text())
USUAL = {"sessions": 12, "turns": 5, "effect_deviation": 0.0, "slow_share": 0.0}


def row_of(**wanted):
    (found,) = [row for row in RESULT["rows"] if {**row, **wanted} == row]
    return found


def table_rows():
    for runs in (1, 2, 3, 5):
        for deviation in (0.01, 0.02, 0.03, 0.05):
            equal, faster = (row_of(speedup=one, runs=runs, run_deviation=deviation, **USUAL) for one in (1.0, 1.1))
            yield (
                f"| {runs} | {deviation:.0%} | {equal['coverage']:.1%} | {equal['coverage_of_plain_bootstrap']:.1%} "
                f"| {equal['faster'] + equal['slower']:.1%} | {faster['faster']:.1%} |"
            )
    for row in RESULT["early_stop"]:
        numbers = (row["run_deviation"], row["coverage"], row["mean_runs"], row["false_alarms"], row["same"])
        yield "| {:.0%} | {:.1%} | {:.1f} | {:.1%} | {:.1%} |".format(*numbers)
    for percent, least in LEAST_COUNTS.items():
        yield f"| p{percent} | {least} requests | {LEAST_COUNTS_FOR_INTERVAL[percent]} requests |"


def test_the_page_has_every_row_of_the_simulation_and_the_sample_sizes():
    assert [row for row in table_rows() if row not in PAGE] == []


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


def timed(ttft_ms: float, computed: int, g2_tokens: int, g3_tokens: int = 0) -> RequestRecord:
    """An answered request without tokens from G1 or G4."""
    cached = g2_tokens + g3_tokens
    return RequestRecord(
        *("run", "arm", "cell", 1, 0, 0, 1, "steady"),
        launched_ms=0.0,
        first_token_ms=ttft_ms,
        prompt_tokens=computed + cached,
        cached_tokens=cached,
        g2_tokens=g2_tokens,
        g3_tokens=g3_tokens,
    )


def requests(
    count: int = 200, *, noise_ms: float = 0.0, g3: bool = True, load_ms: float = 12.0, seed: int = 1
) -> list[RequestRecord]:
    """A third of the requests each: computed, with tokens from G2, with tokens from G3 (or G2)."""
    generator = random.Random(seed)
    found = []
    for index in range(count):
        computed = generator.randint(50, 4000)
        loaded = generator.randint(500, 8000) if index % 3 else 0
        g3_tokens = loaded if g3 and index % 3 == 2 else 0
        g2_tokens = loaded - g3_tokens
        time_ms = 8 + (load_ms if loaded else 0) + 0.1 * computed + 0.01 * g2_tokens + 0.03 * g3_tokens
        found.append(timed(time_ms + generator.gauss(0, noise_ms), computed, g2_tokens, g3_tokens))
    return found


def model_of(samples: list[RequestRecord]) -> TtftModel:
    model = fit_ttft(samples)
    assert isinstance(model, TtftModel), model
    return model


def test_costs_are_found_again():
    model = model_of(requests())
    assert (model.base_ms, model.load_ms) == pytest.approx((8, 12))
    assert model.ms_per_token["computed"] == pytest.approx(0.1)
    assert (model.ms_per_token["g2"], model.ms_per_token["g3"]) == pytest.approx((0.01, 0.03))
    assert model.explained == pytest.approx(1)
    assert model.break_even_tokens("g2") == pytest.approx(12 / 0.09)
    assert model.break_even_tokens("g3") == pytest.approx(12 / 0.07)


def test_costs_are_found_through_noise():
    model = model_of(requests(600, noise_ms=20))
    assert model.ms_per_token["computed"] == pytest.approx(0.1, rel=0.1)
    assert model.ms_per_token["g2"] == pytest.approx(0.01, rel=0.4)
    assert 0.9 < model.explained < 1


def test_no_cost_is_negative():
    """Loads that take no time, with noise: plain least squares gives a negative cost for some seeds."""
    models = [model_of(requests(100, noise_ms=30, load_ms=0.0, seed=seed)) for seed in range(20)]
    assert all(
        min(m.base_ms, m.load_ms or 0, m.ms_per_token["g2"] or 0, m.ms_per_token["g3"] or 0) >= 0 for m in models
    )
    assert any(model.load_ms == 0 for model in models)


def test_order_does_not_matter():
    samples = requests(noise_ms=5)
    assert model_of(samples).ms_per_token["g2"] == pytest.approx(model_of(samples[::-1]).ms_per_token["g2"])


def test_what_no_request_shows_has_no_cost():
    without_g3 = requests(300, g3=False)
    model = model_of(without_g3)
    assert (model.ms_per_token["g3"], model.break_even_tokens("g3")) == (None, None)
    assert model.ms_per_token["g2"] == pytest.approx(0.01)
    slow = [timed(one.first_token_ms + 0.2 * one.g2_tokens, one.computed_tokens, one.g2_tokens) for one in without_g3]
    assert model_of(slow).break_even_tokens("g2") is None, "loading is slower than computing"
    model = model_of([one for one in without_g3 if one.g2_tokens])
    assert (model.load_ms, model.break_even_tokens("g2")) == (None, None), "every request loads something"
    assert model.base_ms == pytest.approx(20)


NOISE = random.Random(3)


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([], "0 requests are too few for 1 coefficients, 10 are needed"),
        (requests(20), "20 requests are too few for 5 coefficients, 50 are needed"),
        ([timed(5, 100, 0)] * 50, "all requests computed the same number of tokens"),
        (
            [timed(10 + index, 4000 - 16 * index, 16 * index) for index in range(1, 100)],
            "computed and g2 change together, so their costs cannot be separated",
        ),
        ([timed(NOISE.gauss(100, 10), NOISE.randint(1, 4000), 0) for _ in range(100)], "explain only"),
    ],
)
def test_reasons_of_no_model(samples, reason):
    found = fit_ttft(samples)
    assert isinstance(found, str)
    assert reason in found


def test_requests_that_failed_or_whose_tiers_are_not_known_are_left_out():
    known = requests()
    others = [
        replace(known[0], error="HTTP 500"),
        replace(known[1], g2_tokens=None),
        replace(known[2], launched_ms=None),
    ]
    assert fit_ttft([*others, *known]) == fit_ttft(known)
