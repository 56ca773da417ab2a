"""The verdict from made-up evidence, so that every threshold is known exactly: `snapshots/bench/verdicts.txt`."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import yaml
from terminal import assert_said, given_in

from kvbm_cli.bench.judge.correctness import (
    AnswerDifference,
    OutputDifference,
    OutputJudgement,
    Transfers,
    judge_outputs,
)
from kvbm_cli.bench.judge.paired import PairedRatio, paired_ratio
from kvbm_cli.bench.judge.verdict import ClientLoad, Evidence, Verdict, VerdictLimits, judge, worst_of


def ratio(low: float, middle: float, high: float, runs: int = 2) -> PairedRatio:
    deviation = 0.03 if runs > 1 else None
    return PairedRatio(middle, low, high, middle, 18, 6, run_count=runs, run_deviation=deviation)


def outputs(
    different: int = 0, *, without: int = 0, logprob: float | None = 1e-6, transfers: int = 800
) -> OutputJudgement:
    """Of 24 answers, this many differ with kvbm and without it."""

    def difference(count: int, probability: float | None) -> OutputDifference:
        return OutputDifference(24, tuple(AnswerDifference((one, 2), 3) for one in range(count)), probability)

    return judge_outputs(
        difference(different, logprob),
        {"small.1.baseline": difference(without, 1e-6)},
        Transfers(loaded_tokens=transfers),
    )


def client(lateness_ms: float | list[float] = 2.0, cpu_share: float = 0.05, run: str = "small.1.kvbm") -> ClientLoad:
    return ClientLoad(run, lateness_ms if isinstance(lateness_ms, list) else [lateness_ms] * 24, cpu_share)


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


def evidence_of(given: dict[str, Any]) -> Evidence:
    """Given is what differs from GOOD."""
    makers: dict[str, Callable[[Any], Any]] = {
        "ratio": lambda one: ratio(*one) if one else None,
        "outputs": lambda arms: {arm: outputs(**one) for arm, one in arms.items()},
        "clients": lambda clients: tuple(client(**one) for one in clients),
    }
    return replace(GOOD, **{key: makers.get(key, lambda one: one)(value) for key, value in given.items()})


@pytest.mark.parametrize("name", given_in("bench/verdicts"))
def test_verdict(name):
    given = yaml.safe_load(given_in("bench/verdicts")[name]) or {}
    limits = VerdictLimits(**given.pop("limits", {}))
    found = judge(evidence_of(given), limits)
    lines = [f"{found.verdict.value}: {found.sentence}"]
    lines += [f"reason: {one}" for one in found.reasons] + [f"caveat: {one}" for one in found.caveats]
    lines += [f"hint: {found.hint}"] if found.hint else []
    assert_said("bench/verdicts", name, "\n".join(lines))


def test_the_verdict_of_several_comparisons_is_the_worst():
    assert worst_of([]) is Verdict.MEASURED
    assert worst_of([Verdict.SAME, Verdict.INCONCLUSIVE]) is Verdict.INCONCLUSIVE
    assert worst_of([Verdict.SAME, Verdict.INCONCLUSIVE, Verdict.FASTER]) is Verdict.FASTER
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
        "inconclusive": 13,
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
    judgement = judge(replace(GOOD, ratio=found, reference_ttft_ms=100.0, measured_ttft_ms=110.0))
    assert judgement.verdict is Verdict.INCONCLUSIVE
