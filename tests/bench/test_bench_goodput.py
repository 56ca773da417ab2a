import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.errors import UsageError
from kvbm_cli.bench.result.arm_result import RequestTimes, Slo, goodput


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft:500", Slo(ttft_ms=500)),
        ("ttft:500,tpot:50", Slo(ttft_ms=500, tpot_ms=50)),
        (" e2e: 3000 , ttft: 0.5 ", Slo(ttft_ms=0.5, e2e_ms=3000)),
    ],
)
def test_slo_is_read_from_text(text, slo):
    assert Slo.parse(text) == slo


@given(st.builds(Slo, *[st.integers(1, 99999)] * 3))
def test_slo_reads_what_it_writes(slo):
    assert Slo.parse(str(slo)) == slo


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not a limit"),
        ("ttft", "'ttft' is not a limit"),
        ("ttft:500,", "'' is not a limit"),
        ("itl:5", "'itl:5' is not a limit"),
        ("ttft:fast", "`ttft` is 'fast', which is not a number of milliseconds"),
        ("ttft:0", "`ttft` is 0, but it must be more than 0 ms"),
        ("ttft:-5", "more than 0 ms"),
        ("ttft:nan", "more than 0 ms"),
        ("ttft:inf", "more than 0 ms"),
        ("ttft:1,ttft:2", "`ttft` is given twice"),
    ],
)
def test_a_wrong_slo_is_the_users_mistake(text, words):
    with pytest.raises(UsageError) as caught:
        Slo.parse(text)
    assert words in caught.value.message
    assert caught.value.hint is not None


def test_goodput_counts_requests_that_meet_all_limits():
    requests = [
        RequestTimes(400, 40, 1000),
        RequestTimes(600, 40, 1000),
        RequestTimes(400, 60, 1000),
        RequestTimes(400, None, 400),  # one token
        RequestTimes(None, None, None),  # failed
    ]
    found = goodput(requests, Slo(ttft_ms=500, tpot_ms=50), duration_s=4)
    assert (found.good_count, found.request_count, found.share, found.requests_per_s) == (2, 5, 0.4, 0.5)
    assert (found.low, found.high) == pytest.approx((0.1176, 0.7693), abs=1e-4)


def test_a_request_that_failed_after_its_first_token_is_not_good():
    found = goodput([RequestTimes(10, 5, None)], Slo(ttft_ms=500), duration_s=1)
    assert found.good_count == 0


def test_goodput_of_nothing_is_nothing():
    assert goodput([], Slo(ttft_ms=500), duration_s=1) is None
    found = goodput([RequestTimes(10, 5, 20)], Slo(e2e_ms=500), duration_s=0)
    assert found.requests_per_s is None
