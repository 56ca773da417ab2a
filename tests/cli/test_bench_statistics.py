from __future__ import annotations

import math

import pytest

from kvbm_cli.bench.statistics import busy_share, paired_ratio, percentile, spread


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, None),
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
    assert percentile(values, percent) == (pytest.approx(expected) if expected is not None else None)


def test_percentile_agrees_with_numpy():
    numpy = pytest.importorskip("numpy")
    values = [math.sin(index) for index in range(37)]
    for percent in (1, 2.5, 33, 50, 90, 97.5, 99):
        assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)))


def test_spread_of_nothing_is_nothing():
    assert spread([]) == {"p50": None, "p90": None, "p99": None, "mean": None}


def test_spread_has_three_percentiles_and_the_mean():
    result = spread([1.0, 2.0, 3.0, 4.0])
    assert result == pytest.approx({"p50": 2.5, "p90": 3.7, "p99": 3.97, "mean": 2.5})


def test_ratio_is_the_geometric_mean_over_all_pairs():
    ratio = paired_ratio({0: [(8.0, 1.0), (2.0, 1.0)], 1: [(4.0, 1.0)]})
    assert ratio is not None
    assert ratio.ratio == pytest.approx(4.0)
    assert (ratio.pair_count, ratio.user_count) == (3, 2)


def test_interval_has_no_width_when_all_users_agree():
    ratio = paired_ratio({user: [(3.0, 1.0), (3.0, 1.0)] for user in range(5)})
    assert ratio is not None
    assert (ratio.low, ratio.ratio, ratio.high) == pytest.approx((3.0, 3.0, 3.0))


def test_interval_is_of_users_not_of_requests():
    """Two users, one at ratio 2 and one at 8: ten requests each say no more about other users than one would."""
    ratio = paired_ratio({0: [(2.0, 1.0)] * 10, 1: [(8.0, 1.0)] * 10})
    assert ratio is not None
    assert ratio.ratio == pytest.approx(4.0)
    assert (ratio.low, ratio.high) == pytest.approx((4 * 2**-12.71, 4 * 2**12.71))


def test_interval_is_students_t_over_the_means_of_users():
    """The expected numbers are mean and standard deviation of six logs, times t at 5 degrees of freedom, by hand."""
    pairs = {user: [(10.0 + user + turn, 2.0 + 0.1 * user) for turn in range(3)] for user in range(6)}
    ratio = paired_ratio(pairs)
    assert ratio is not None
    assert ratio.ratio == pytest.approx(5.95727126)
    assert (ratio.low, ratio.high) == pytest.approx((5.61002195, 6.32601462))


def test_one_user_says_nothing_about_others():
    ratio = paired_ratio({0: [(2.0, 1.0)] * 10})
    assert ratio is not None
    assert (ratio.low, ratio.ratio, ratio.high) == (0.0, pytest.approx(2.0), float("inf"))


def test_ratio_of_no_pairs_is_none():
    assert paired_ratio({}) is None
    assert paired_ratio({0: [], 1: []}) is None


def test_busy_share_counts_overlapping_requests_once():
    assert busy_share([(0, 4), (2, 6), (8, 10)], 0, 10) == pytest.approx(0.8)


def test_busy_share_ignores_what_lies_outside_the_window():
    assert busy_share([(-5, 1), (9, 50)], 0, 10) == pytest.approx(0.2)
    assert busy_share([], 0, 10) == 0.0
    assert busy_share([(0, 1)], 3, 3) == 0.0
