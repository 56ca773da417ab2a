from __future__ import annotations

from dataclasses import replace

import pytest

from kvbm_cli.bench.analysis.paired import PairedRatio
from kvbm_cli.bench.verdict import Evidence, Verdict, VerdictLimits, judge

ARMS = ("baseline", "kvbm", "floor")


def ratio(low: float, middle: float, high: float) -> PairedRatio:
    return PairedRatio(ratio=middle, low=low, high=high, typical=middle, request_count=18, session_count=6, run_count=1)


GOOD = Evidence(
    request_count=24,
    compared_count=24,
    errors=dict.fromkeys(ARMS, 0),
    different_answers=dict.fromkeys(ARMS, 0),
    logprob_differences=dict.fromkeys(ARMS, 1e-6),
    reference_ttft_ms=1000.0,
    measured_ttft_ms=50.0,
    ratio=ratio(18.0, 20.0, 22.0),
    transfers_proven={"kvbm": True},
    lateness_p99_ms=dict.fromkeys(ARMS, 2.0),
    client_cpu_share=dict.fromkeys(ARMS, 0.05),
    utilisation=0.5,
    queue_share=0.01,
)


def test_an_interval_above_one_is_faster():
    judgement = judge(GOOD)
    assert judgement.verdict is Verdict.FASTER
    assert judgement.sentence == (
        "from turn 2 on, the first token comes 20.0 times faster with kvbm, same outputs (geometric mean over pairs of "
        "equal requests; 95% interval 18.0 to 22.0 over the users of this run, which does not cover differences "
        "between runs); the medians are 50 ms and 1000 ms"
    )
    assert judgement.reasons == ()
    assert judgement.caveats == ()


def test_an_interval_below_one_is_slower():
    judgement = judge(replace(GOOD, ratio=ratio(0.4, 0.5, 0.8), measured_ttft_ms=2000.0))
    assert judgement.verdict is Verdict.SLOWER
    assert "2.00 times slower" in judgement.sentence
    assert "1.25 to 2.50" in judgement.sentence


@pytest.mark.parametrize(
    "interval",
    [(0.9, 1.3, 1.6), (0.6, 0.8, 1.01), (1.01, 1.04, 1.07), (0.94, 0.96, 0.99)],
    ids=["holds one from above", "holds one from below", "too little above", "too little below"],
)
def test_an_interval_around_one_or_close_to_it_is_the_same(interval):
    assert judge(replace(GOOD, ratio=ratio(*interval))).verdict is Verdict.SAME


def test_one_answer_that_differs_with_kvbm_alone_is_wrong():
    judgement = judge(replace(GOOD, different_answers={**GOOD.different_answers, "kvbm": 1}))
    assert judgement.verdict is Verdict.WRONG
    assert "arm kvbm answered 1 of 24 requests differently" in judgement.sentence


@pytest.mark.parametrize("with_kvbm", [0, 1])
def test_an_engine_that_does_not_repeat_its_answers_without_kvbm_says_nothing_of_kvbm(with_kvbm):
    different = {"baseline": 2, "kvbm": with_kvbm, "floor": 0}
    judgement = judge(replace(GOOD, different_answers=different))
    assert judgement.verdict is Verdict.FASTER
    assert "same outputs" not in judgement.sentence
    reported = f"of 24 answers, {with_kvbm} in arm kvbm and 2 in arm baseline without kvbm differ from the recording"
    assert [caveat for caveat in judgement.caveats if reported in caveat]


def test_an_engine_that_does_not_repeat_its_answers_is_still_wrong_where_probabilities_are():
    different = {"baseline": 2, "kvbm": 2, "floor": 0}
    evidence = replace(GOOD, different_answers=different, logprob_differences={"kvbm": 0.9, "baseline": 0.02})
    assert judge(evidence).verdict is Verdict.WRONG


@pytest.mark.parametrize(
    ("with_kvbm", "without", "verdict"),
    [(9e-4, 0.0, "faster"), (2e-3, 0.0, "wrong"), (2e-3, 3e-4, "faster"), (0.02, 1e-3, "wrong"), (None, 0.0, "faster")],
)
def test_probabilities_may_differ_as_much_as_without_kvbm_and_a_little(with_kvbm, without, verdict):
    evidence = replace(GOOD, logprob_differences={"kvbm": with_kvbm, "floor": without})
    assert judge(evidence).verdict == verdict


def test_wrong_outputs_outrank_an_invalid_run():
    judgement = judge(
        replace(GOOD, different_answers={"kvbm": 2}, errors={"kvbm": 3}, transfers_proven={"kvbm": False})
    )
    assert judgement.verdict is Verdict.WRONG


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"errors": {"baseline": 2}}, "2 of 24 requests of arm baseline failed"),
        ({"compared_count": 0}, "no answer could be compared"),
        ({"transfers_proven": {"kvbm": False}}, "no prompt token came from G2"),
        ({"ratio": None}, "no request of turn 2 or later"),
        (
            {"lateness_p99_ms": {"kvbm": 101.0}},
            "the client launched requests late in arm kvbm: 101 ms at p99, the limit is 100 ms",
        ),
        ({"client_cpu_share": {"floor": 0.71}}, "the client used 71% of a core in arm floor, the limit is 70%"),
        ({"utilisation": 0.96}, "arm baseline was overloaded: busy 96% of the time"),
        ({"queue_share": 0.51}, "arm baseline was overloaded: 51% of its TTFT was spent in its queue"),
    ],
)
def test_a_run_that_measured_something_else_is_invalid(change, reason):
    judgement = judge(replace(GOOD, **change))
    assert judgement.verdict is Verdict.INVALID
    assert any(reason in one for one in judgement.reasons)


@pytest.mark.parametrize(
    ("change", "is_of_load"),
    [
        ({"utilisation": 0.96}, True),
        ({"queue_share": 0.51}, True),
        ({"lateness_p99_ms": {"kvbm": 101.0}}, True),
        ({"client_cpu_share": {"floor": 0.71}}, True),
        ({"errors": {"baseline": 2}}, False),
        ({"transfers_proven": {"kvbm": False}}, False),
    ],
)
def test_a_run_on_a_busy_machine_has_a_hint(change, is_of_load):
    judgement = judge(replace(GOOD, **change))
    assert (judgement.hint or "").startswith("repeat the run on an idle machine") == is_of_load
    assert judgement.caveats == ()  # the verdict reports it


def test_lateness_is_allowed_up_to_a_share_of_the_baseline_or_a_fixed_time():
    late = replace(GOOD, reference_ttft_ms=100.0, lateness_p99_ms={"kvbm": 24.0})
    assert judge(late).verdict is Verdict.FASTER
    assert judge(replace(late, lateness_p99_ms={"kvbm": 26.0})).verdict is Verdict.INVALID
    assert (
        judge(replace(late, lateness_p99_ms={"kvbm": 26.0}), VerdictLimits(lateness_ms=30.0)).verdict is Verdict.FASTER
    )


def test_a_busy_baseline_is_pointed_out():
    judgement = judge(replace(GOOD, utilisation=0.75, queue_share=0.25))
    assert judgement.verdict is Verdict.FASTER
    assert len(judgement.caveats) == 2


def test_exit_codes_are_the_documented_ones():
    assert {verdict.value: verdict.exit_code for verdict in Verdict} == {
        "faster": 0,
        "same": 0,
        "slower": 10,
        "invalid": 11,
        "wrong": 12,
    }
