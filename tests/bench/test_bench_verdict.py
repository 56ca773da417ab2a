"""The verdict from made-up evidence, so that every threshold is known exactly: `snapshots/bench/verdicts.txt`."""

import math
import random
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from terminal import assert_entry

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


ONE_RUN = replace(GOOD.ratio, run_count=1, run_deviation=None)
BUSY = {"utilisation": 1.0, "queue_share": 0.9}
LATE = {"reference_ttft_ms": 100.0, "clients": (client(26.0),)}
STALLED = ClientLoad("small.1.floor", [1.0] * 22 + [150.0, 400.0], 0.01)
# What differs from GOOD. `limits` are those of the verdict.
CASES: dict[str, dict[str, Any]] = {
    "an interval above one is faster": {},
    "an interval below one is slower": {"ratio": ratio(0.4, 0.5, 0.8), "measured_ttft_ms": 2000.0},
    "an interval that holds one from above is the same": {"ratio": ratio(0.9, 1.3, 1.6)},
    "an interval that holds one from below is the same": {"ratio": ratio(0.6, 0.8, 1.01)},
    "an interval that is too little above one is the same": {"ratio": ratio(1.01, 1.04, 1.07)},
    "an interval that is too little below one is the same": {"ratio": ratio(0.94, 0.96, 0.99)},
    "one answer that differs with kvbm alone is wrong": {"outputs": {"kvbm": outputs(1)}},
    "fewer differences than without kvbm are no error of kvbm": {"outputs": {"kvbm": outputs(1, without=2)}},
    "as many differences as without kvbm are no error of kvbm": {"outputs": {"kvbm": outputs(2, without=2)}},
    "other probabilities are wrong although answers differ without kvbm too": {
        "outputs": {"kvbm": outputs(2, without=2, logprob=0.9)}
    },
    "wrong outputs outrank an invalid run": {
        "outputs": {"kvbm": outputs(2)},
        "errors": {"kvbm": 3},
        "has_loads": False,
    },
    "a wrong reference with kvbm counts too and is named": {
        "reference": "demo-disk",
        "outputs": {"kvbm": outputs(), "demo-disk": outputs(1)},
    },
    "a cache that was not empty is invalid": {
        "warm_starts": ("the cache was not empty at the start of small.1.baseline",)
    },
    "failed requests of the reference are invalid": {"errors": {"baseline": 2}},
    "failed requests of the floor are invalid": {"errors": {"floor": 1}},
    "no request that both arms answered is invalid": {"ratio": None},
    "a late client is invalid": {"clients": (client(), client(101.0))},
    "a busy client is invalid": {"clients": (client(cpu_share=0.71),)},
    "an engine without pauses is invalid": {"utilisation": 0.96},
    "an engine whose requests queue is invalid": {"queue_share": 0.51},
    "the hint of an overloaded trace is its time scale alone": {"utilisation": 1.0, "is_trace": True},
    "a gain without a loaded block is invalid": {"has_loads": False},
    "an arm that loaded nothing may be the same": {"ratio": ratio(0.97, 1.0, 1.03), "has_loads": False},
    "an arm that loaded nothing may be slower": {"ratio": ratio(0.7, 0.8, 0.9), "has_loads": False},
    "a closed loop may be busy all the time": {**BUSY, "is_closed_loop": True},
    "an open loop may not be busy all the time": BUSY,
    "lateness up to a share of the reference is allowed": {**LATE, "clients": (client(24.0),)},
    "lateness above this share is invalid": LATE,
    "lateness up to a limit is allowed": {**LATE, "limits": VerdictLimits(lateness_ms=30.0)},
    # The interval includes them. More than a tenth of late requests make a run invalid.
    "single late requests are pointed out": {"clients": (client(), STALLED)},
    "more late requests are invalid": {"clients": (replace(STALLED, lateness_ms=[1.0] * 20 + [150.0] * 4),)},
    "a busy reference is pointed out": {"utilisation": 0.75, "queue_share": 0.25},
    "outputs that were not tested are pointed out": {"outputs": {"kvbm": outputs(transfers=0)}},
    "outputs that were tested weakly are pointed out": {"outputs": {"kvbm": outputs(logprob=None)}},
    "one run does not cover differences between runs": {"ratio": ONE_RUN},
}


@pytest.mark.parametrize("name", CASES)
def test_verdict(name):
    changes = dict(CASES[name])
    limits = changes.pop("limits", VerdictLimits())
    found = judge(replace(GOOD, **changes), limits)
    lines = [f"{found.verdict.value}: {found.sentence}"]
    lines += [f"reason: {one}" for one in found.reasons] + [f"caveat: {one}" for one in found.caveats]
    lines += [f"hint: {found.hint}"] if found.hint else []
    assert_entry("bench/verdicts", name, "".join(f"{line}\n" for line in lines), names=CASES)


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
