"""Names of the arms, and how two arms with a block manager are judged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_bench_verdict import GOOD

from kvbm_cli.bench.comparison import AGAINST_BASELINE, Comparison
from kvbm_cli.bench.verdict import Verdict, judge

DISK = Comparison.of_profiles("demo", "demo-disk", {"tiers.disk.blocks": (None, 8)})
ENGINE = Comparison.of_profiles("demo", "demo-64", {"engine.arguments.dtype": ("float32", "bfloat16")})


def evidence(comparison: Comparison, **changes):
    arms = comparison.arms
    good = replace(
        GOOD,
        comparison=comparison,
        different_answers=dict.fromkeys(arms, 0),
        logprob_differences=dict.fromkeys(arms, 1e-6),
        transfers_proven=dict.fromkeys(comparison.arms_with_kvbm, True),
    )
    return replace(good, **changes)


@pytest.mark.parametrize(
    ("measured", "reference", "names"),
    [
        ("demo", "demo-disk", ("demo", "demo-disk")),
        ("demo", "demo", ("demo", "demo-2")),
        ("floor", "baseline", ("floor-2", "baseline-2")),
        ("demo-2", "demo-2", ("demo-2", "demo-2-2")),
        ("a b\n", "..", ("a-b", "profile")),
    ],
)
def test_arms_are_named_after_profiles_and_never_equal(measured, reference, names):
    comparison = Comparison.of_profiles(measured, reference, {})
    assert (comparison.measured, comparison.reference) == names
    assert comparison.arms == (names[1], names[0], "floor")
    assert comparison.arms_with_kvbm == (names[1], names[0])


def test_the_baseline_runs_without_kvbm():
    assert AGAINST_BASELINE.arms == ("baseline", "kvbm", "floor")
    assert AGAINST_BASELINE.arms_with_kvbm == AGAINST_BASELINE.judged_arms == ("kvbm",)


@pytest.mark.parametrize(
    ("middle", "words"),
    [(20.0, "faster with demo than with demo-disk"), (1.01, "as fast with demo as with demo-disk")],
)
def test_the_sentence_names_both_profiles(middle, words):
    ratio = replace(GOOD.ratio, ratio=middle, low=middle * 0.9, high=middle * 1.1)
    assert words in judge(evidence(DISK, ratio=ratio)).sentence


@pytest.mark.parametrize("arm", ["demo", "demo-disk"])
def test_a_different_answer_in_either_arm_is_wrong(arm):
    judgement = judge(evidence(DISK, different_answers={"demo": 0, "demo-disk": 0, "floor": 0, arm: 1}))
    assert judgement.verdict is Verdict.WRONG
    assert f"arm {arm} answered 1 of 24 requests differently" in judgement.sentence


def test_other_log_probabilities_in_the_reference_are_wrong():
    judgement = judge(evidence(DISK, logprob_differences={"demo": 0.0, "demo-disk": 0.5, "floor": 0.0}))
    assert judgement.verdict is Verdict.WRONG
    assert "arm demo-disk computed different log-probabilities" in judgement.sentence


def test_a_reference_with_another_engine_may_answer_otherwise_and_the_keys_are_named():
    differing = evidence(
        ENGINE,
        different_answers={"demo": 0, "demo-64": 3, "floor": 0},
        logprob_differences={"demo": 0.0, "demo-64": 0.5, "floor": 0.0},
    )
    judgement = judge(differing)
    assert judgement.verdict is Verdict.FASTER
    assert [one for one in judgement.caveats if "`engine.arguments.dtype`" in one and "3 of 24 differ" in one]
    wrong = judge(replace(differing, different_answers={"demo": 1, "demo-64": 3, "floor": 0}))
    assert wrong.verdict is Verdict.WRONG


def test_one_arm_without_transfers_is_a_caveat_and_two_are_invalid():
    one = judge(evidence(DISK, transfers_proven={"demo": True, "demo-disk": False}))
    assert one.verdict is Verdict.FASTER
    assert "no prompt token came from G2 in arm demo-disk" in one.caveats
    assert judge(evidence(DISK, transfers_proven={"demo": False, "demo-disk": False})).verdict is Verdict.INVALID
