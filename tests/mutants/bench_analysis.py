"""Bugs in the statistics of `kvbm bench` and in its judgement of answers."""

from __future__ import annotations

from mutant import Mutant

PAIRED = "kvbm_cli/bench/judge/paired.py"
CORRECTNESS = "kvbm_cli/bench/judge/correctness.py"
RESAMPLING = "kvbm_cli/bench/judge/estimates.py"

MUTANTS = (
    Mutant(
        name="bench-interval-without-runs",
        bug="The interval of the speed-up does not cover differences between runs.",
        file=PAIRED,
        old="    total = of_sessions + of_runs\n",
        new="    total = of_sessions + 1e-12 * of_runs\n",
        fails="tests/bench/test_bench_paired.py",
    ),
    Mutant(
        name="bench-sessions-are-independent-requests",
        bug="The influence of a session is not summed over runs before it is squared.",
        file=PAIRED,
        old="correction * math.fsum(value**2 for value in by_session)",
        new="correction * math.fsum(fmean(v**2 for v in column) / run_count for column in zip(*parts, strict=True))",
        fails="tests/bench/test_bench_paired.py -k hold_the_truth",
    ),
    Mutant(
        name="bench-extreme-requests-decide",
        bug="A few extreme requests make an arm faster.",
        file="kvbm_cli/bench/judge/verdict.py",
        old="ratio.ratio > 1 + least and ratio.typical > 1:",
        new="ratio.ratio > 1 + least:",
        fails="tests/bench/test_bench_paired.py -k direction",
    ),
    Mutant(
        name="bench-stops-after-one-pair",
        bug="The experiment stops after one pair.",
        file=PAIRED,
        old="        and ratio.covers_runs\n",
        new="",
        fails="tests/bench/test_bench_paired.py -k not_tight",
    ),
    Mutant(
        name="bench-bootstrap-is-too-narrow",
        bug="The bootstrap interval leaves out 20% of the draws on each side.",
        file=RESAMPLING,
        old="    tail = NormalDist().cdf(-math.sqrt(count / (count - 1)) * student_t(count - 1))",
        new="    tail = 0.2",
        fails="tests/bench/test_bench_statistics.py",
    ),
    Mutant(
        name="bench-cut-answer-is-equal",
        bug="An answer that is the beginning of the reference answer counts as equal.",
        file=CORRECTNESS,
        old="if first[position] != second[position]), shorter)",
        new="if first[position] != second[position]), None)",
        fails="tests/bench/test_bench_answers.py -k first_difference",
    ),
    Mutant(
        name="bench-untested-answers-are-equal",
        bug="Answers count as equal although no block was transferred.",
        file=CORRECTNESS,
        old="    if not evidence.transfers.are_proven:\n",
        new="    if False:\n",
        fails="tests/bench/test_bench_answers.py -k transfer",
    ),
    Mutant(
        name="bench-one-sided-test-is-turned",
        bug="Fewer differences than in the control are significant, and more are not.",
        file=CORRECTNESS,
        old="for count in range(measured, min(measured_count, differences) + 1)",
        new="for count in range(max(0, differences - control_count), measured + 1)",
        fails="tests/bench/test_bench_answers.py",
    ),
)
