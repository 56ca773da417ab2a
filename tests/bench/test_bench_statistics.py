import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm_cli.bench.judge.paired import LEAST_COUNTS, LEAST_COUNTS_FOR_INTERVAL, busy_share, spread, student_t
from kvbm_cli.bench.result.arm_result import wilson_interval
from kvbm_cli.bench.result.results import percentile


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 99, 7.0),
        ([1.0, 2.0], 50, 1.5),
        ([4.0, 1.0, 3.0, 2.0], 25, 1.75),
        ([10.0, 20.0, 30.0, 40.0, 50.0], 90, 46.0),
        ([float(value) for value in range(101)], 99, 99.0),
        ([3.0, 1.0, 2.0], 0, 1.0),
        ([3.0, 1.0, 2.0], 100, 3.0),
    ],
)
def test_percentiles_interpolate_between_the_two_nearest_ranks(values, percent, expected):
    assert percentile(values, percent) == pytest.approx(expected)


def test_percentile_agrees_with_numpy():
    numpy = pytest.importorskip("numpy")
    values = [math.sin(index) for index in range(37)]
    for percent in (1, 2.5, 33, 50, 90, 97.5, 99):
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


def test_busy_share_counts_overlapping_requests_once():
    assert busy_share([(0, 4), (2, 6), (8, 10)], 0, 10) == pytest.approx(0.8)


def test_busy_share_ignores_what_lies_outside_the_window():
    assert busy_share([(-5, 1), (9, 50)], 0, 10) == pytest.approx(0.2)
    assert busy_share([], 0, 10) == 0.0
    assert busy_share([(0, 1)], 3, 3) == 0.0
