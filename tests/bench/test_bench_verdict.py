"""The verdict from made-up evidence, so that every threshold is known exactly."""

import math
import random
from dataclasses import replace
from statistics import median

import pytest

from kvbm_cli.bench.judge.correctness import (
    AnswerDifference,
    OutputDifference,
    OutputJudgement,
    Transfers,
    judge_outputs,
)
from kvbm_cli.bench.judge.paired import PairedRatio, paired_ratio
from kvbm_cli.bench.judge.verdict import ClientLoad, Evidence, Verdict, VerdictLimits, judge, worst_of


def ratio(low: float, middle: float, high: float) -> PairedRatio:
    return PairedRatio(
        ratio=middle,
        low=low,
        high=high,
        typical=middle,
        request_count=18,
        session_count=6,
        run_count=2,
        run_deviation=0.03,
    )


def outputs(
    different: int = 0, *, without: int = 0, logprob: float | None = 1e-6, transfers: int = 800
) -> OutputJudgement:
    """Of 24 answers, this many differ with kvbm and without it."""

    def difference(count: int, probability: float | None) -> OutputDifference:
        return OutputDifference(24, tuple(AnswerDifference((one, 2), 3) for one in range(count)), probability)

    return judge_outputs(
        difference(different, logprob), {"small.1.baseline": difference(without, 1e-6)}, Transfers(g2_tokens=transfers)
    )


def client(lateness_ms: float = 2.0, cpu_share: float = 0.05) -> ClientLoad:
    return ClientLoad("small.1.kvbm", [lateness_ms] * 24, cpu_share)


GOOD = Evidence(
    measured="kvbm",
    reference="baseline",
    request_count=24,
    errors={"baseline": 0, "kvbm": 0, "floor": 0},
    outputs={"kvbm": outputs()},
    reference_ttft_ms=1000.0,
    measured_ttft_ms=50.0,
    ratio=ratio(18.0, 20.0, 22.0),
    has_loads=True,
    clients=(client(), client()),
    utilisation=0.5,
    queue_share=0.01,
    what="from turn 2 on, the first token",
)


def test_hint_of_an_overloaded_trace_is_its_time_scale_alone():
    judgement = judge(replace(GOOD, utilisation=1.0, is_trace=True))
    assert judgement.verdict is Verdict.INVALID
    assert judgement.hint == (
        "repeat the run on an idle machine; if that does not help, use a larger `time_scale` in the workload"
    )


def test_an_interval_above_one_is_faster():
    judgement = judge(GOOD)
    assert judgement.verdict is Verdict.FASTER
    assert judgement.sentence == (
        "from turn 2 on, the first token comes 20.0 times faster with kvbm than with baseline, same outputs (95% "
        "interval 18.0 to 22.0, 18 pairs of equal requests, 2 runs); the medians are 50.0 ms and 1000 ms"
    )
    assert judgement.reasons == ()
    assert judgement.caveats == ()


def test_an_interval_below_one_is_slower():
    judgement = judge(replace(GOOD, ratio=ratio(0.4, 0.5, 0.8), measured_ttft_ms=2000.0))
    assert judgement.verdict is Verdict.SLOWER
    assert "2.00 times slower with kvbm than with baseline" in judgement.sentence
    assert "1.25 to 2.50" in judgement.sentence


@pytest.mark.parametrize(
    "interval",
    [(0.9, 1.3, 1.6), (0.6, 0.8, 1.01), (1.01, 1.04, 1.07), (0.94, 0.96, 0.99)],
    ids=["holds one from above", "holds one from below", "too little above", "too little below"],
)
def test_an_interval_around_one_or_close_to_it_is_the_same(interval):
    judgement = judge(replace(GOOD, ratio=ratio(*interval)))
    assert judgement.verdict is Verdict.SAME
    assert "times as fast with kvbm as with baseline" in judgement.sentence


def test_one_answer_that_differs_with_kvbm_alone_is_wrong():
    judgement = judge(replace(GOOD, outputs={"kvbm": outputs(1)}))
    assert judgement.verdict is Verdict.WRONG
    assert "arm kvbm: 1 of 24 answers differ, and 0 of 24 without kvbm (small.1.baseline)" in judgement.sentence


@pytest.mark.parametrize("with_kvbm", [1, 2])
def test_an_engine_that_does_not_repeat_its_answers_without_kvbm_is_no_error_of_kvbm(with_kvbm):
    judgement = judge(replace(GOOD, outputs={"kvbm": outputs(with_kvbm, without=2)}))
    assert judgement.verdict is Verdict.FASTER
    assert "same outputs" not in judgement.sentence
    expected = f"not distinguishable: {with_kvbm} of 24 answers differ, and 2 of 24 without kvbm (small.1.baseline)"
    assert [caveat for caveat in judgement.caveats if expected in caveat]


def test_an_engine_that_does_not_repeat_its_answers_is_still_wrong_where_probabilities_are():
    judgement = judge(replace(GOOD, outputs={"kvbm": outputs(2, without=2, logprob=0.9)}))
    assert judgement.verdict is Verdict.WRONG
    assert "log-probabilities of equal tokens differ by up to 0.9" in judgement.sentence


def test_a_cache_that_was_not_empty_at_the_start_is_invalid():
    judgement = judge(replace(GOOD, warm_starts=("the cache was not empty at the start of small.1.baseline",)))
    assert judgement.verdict is Verdict.INVALID
    assert judgement.reasons == ("the cache was not empty at the start of small.1.baseline",)


def test_wrong_outputs_outrank_an_invalid_run():
    judgement = judge(replace(GOOD, outputs={"kvbm": outputs(2)}, errors={"kvbm": 3}, has_loads=False))
    assert judgement.verdict is Verdict.WRONG


def test_a_wrong_reference_with_kvbm_counts_too_and_is_named():
    judgement = judge(replace(GOOD, reference="demo-disk", outputs={"kvbm": outputs(), "demo-disk": outputs(1)}))
    assert judgement.verdict is Verdict.WRONG
    assert [one.partition(":")[0] for one in judgement.reasons] == ["arm demo-disk"]


INVALID = [
    ({"errors": {"baseline": 2}}, "2 of 24 requests of arm baseline failed", False),
    ({"errors": {"floor": 1}}, "1 of 24 requests of arm floor failed", False),
    ({"ratio": None}, "no request was answered in both arms", False),
    (
        {"clients": (client(), client(101.0))},
        "the client launched requests late in small.1.kvbm: 101 ms at p90, the limit is 100 ms",
        True,
    ),
    ({"clients": (client(cpu_share=0.71),)}, "the client used 71% of a core in small.1.kvbm, the limit is 70%", True),
    ({"utilisation": 0.96}, "arm baseline was overloaded: busy 96% of the time", True),
    ({"queue_share": 0.51}, "arm baseline was overloaded: 51% of its TTFT was spent in its queue", True),
    ({"has_loads": False}, "kvbm was faster although it loaded no block", True),
]


@pytest.mark.parametrize(("change", "reason", "is_of_load"), INVALID)
def test_a_run_that_measured_something_else_is_invalid(change, reason, is_of_load):
    judgement = judge(replace(GOOD, **change))
    assert judgement.verdict is Verdict.INVALID
    assert judgement.sentence.startswith("the result cannot be used: ")
    assert any(reason in one for one in judgement.reasons)
    assert (judgement.hint or "").startswith("repeat the run on an idle machine") == is_of_load


def test_an_arm_that_loaded_nothing_may_be_the_same_or_slower():
    for found, verdict in ((ratio(0.97, 1.0, 1.03), Verdict.SAME), (ratio(0.7, 0.8, 0.9), Verdict.SLOWER)):
        assert judge(replace(GOOD, ratio=found, has_loads=False)).verdict is verdict


def test_a_closed_loop_may_be_busy_all_the_time():
    busy = replace(GOOD, utilisation=1.0, queue_share=0.9, is_closed_loop=True)
    assert judge(busy).verdict is Verdict.FASTER
    assert judge(replace(busy, is_closed_loop=False)).verdict is Verdict.INVALID


def test_lateness_is_allowed_up_to_a_share_of_the_reference_or_a_fixed_time():
    late = replace(GOOD, reference_ttft_ms=100.0, clients=(client(24.0),))
    assert judge(late).verdict is Verdict.FASTER
    later = replace(late, clients=(client(26.0),))
    assert judge(later).verdict is Verdict.INVALID
    assert judge(later, VerdictLimits(lateness_ms=30.0)).verdict is Verdict.FASTER


def test_single_late_requests_are_pointed_out_because_the_interval_includes_them():
    """More than a tenth of late requests make a run invalid."""
    stalled = ClientLoad("small.1.floor", [1.0] * 22 + [150.0, 400.0], 0.01)
    judgement = judge(replace(GOOD, clients=(client(), stalled)))
    assert judgement.verdict is Verdict.FASTER
    (caveat,) = (one for one in judgement.caveats if "late" in one)
    words = "launched 2 of 24 requests more than 100 ms late in small.1.floor, by up to 400 ms"
    assert caveat == f"the client {words}; their times include it"
    often = replace(stalled, lateness_ms=[1.0] * 20 + [150.0] * 4)
    assert judge(replace(GOOD, clients=(often,))).verdict is Verdict.INVALID


def test_a_busy_reference_is_pointed_out():
    judgement = judge(replace(GOOD, utilisation=0.75, queue_share=0.25))
    assert judgement.verdict is Verdict.FASTER
    assert len(judgement.caveats) == 2


def test_outputs_that_were_not_tested_or_tested_weakly_are_pointed_out():
    untested = judge(replace(GOOD, outputs={"kvbm": outputs(transfers=0)}))
    assert any("not tested: no block came from G2, G3 or G4" in caveat for caveat in untested.caveats)
    assert "same outputs" not in untested.sentence
    weak = judge(replace(GOOD, outputs={"kvbm": outputs(logprob=None)}))
    assert any("sends no logprobs" in caveat for caveat in weak.caveats)
    assert "same outputs" in weak.sentence


def test_one_run_does_not_cover_differences_between_runs():
    judgement = judge(replace(GOOD, ratio=replace(GOOD.ratio, run_count=1, run_deviation=None)))
    assert any("`--pairs 3` repeats" in caveat for caveat in judgement.caveats)
    assert "1 run)" in judgement.sentence


def test_the_verdict_of_several_comparisons_is_the_worst():
    assert worst_of([]) is Verdict.MEASURED
    assert worst_of([Verdict.SAME, Verdict.FASTER]) is Verdict.FASTER
    assert worst_of([Verdict.FASTER, Verdict.SLOWER]) is Verdict.SLOWER
    assert worst_of([Verdict.SLOWER, Verdict.INVALID]) is Verdict.INVALID
    assert worst_of([Verdict.INVALID, Verdict.WRONG, Verdict.SAME]) is Verdict.WRONG


def test_exit_codes_are_the_documented_ones():
    assert {verdict.value: verdict.exit_code for verdict in Verdict} == {
        "faster": 0,
        "same": 0,
        "measured": 0,
        "slower": 10,
        "invalid": 11,
        "wrong": 12,
    }
    assert {verdict for verdict in Verdict if not verdict.is_usable} == {Verdict.WRONG, Verdict.INVALID}


@pytest.mark.parametrize(("users", "turns"), [(1, 2), (1, 4), (2, 4), (6, 4)])
def test_noise_alone_is_hardly_ever_called_faster(users, turns):
    said = 0
    for seed in range(300):
        noise = random.Random(seed).gauss
        pairs = {
            user: [(100 * math.exp(noise(0, 0.2)), 100 * math.exp(noise(0, 0.2))) for _ in range(turns - 1)]
            for user in range(users)
        }
        ours, theirs = (median(pair[side] for user in pairs.values() for pair in user) for side in (1, 0))
        evidence = replace(GOOD, ratio=paired_ratio({1: pairs}), reference_ttft_ms=theirs, measured_ttft_ms=ours)
        said += judge(evidence).verdict is Verdict.FASTER
    assert said <= 0.05 * 300


def test_slower_by_its_median_is_never_faster():
    found = paired_ratio({1: {user: [(100.0, 110.0), (100.0, 110.0), (3000.0, 100.0)] for user in range(6)}})
    assert judge(replace(GOOD, ratio=found, reference_ttft_ms=100.0, measured_ttft_ms=110.0)).verdict is Verdict.SAME
