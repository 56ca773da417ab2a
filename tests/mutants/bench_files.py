"""Bugs in what `kvbm bench` compares and reports from the files of a run."""

from __future__ import annotations

from mutant import Mutant

DIFF = "kvbm_cli/bench/diff.py"
ANSWERS = "kvbm_cli/bench/judge/answers.py"
SUMMARY = "kvbm_cli/bench/summary.py"

MUTANTS = (
    Mutant(
        name="bench-diff-compares-different-requests",
        bug="Experiments with different requests are compared.",
        file=DIFF,
        old="if any(theirs.get(file, digest) != digest for",
        new="if any(theirs.get(file, digest) is None for",
        fails="tests/bench/test_bench_diff.py -k different",
    ),
    Mutant(
        name="bench-diff-judges-the-machine",
        bug="A slower floor or baseline decides the exit code of a comparison.",
        file=DIFF,
        old="    return measured or common\n",
        new="    return common\n",
        fails="tests/bench/test_bench_diff.py -k measured",
    ),
    Mutant(
        name="bench-diff-forgets-wrong-outputs",
        bug="A comparison with an experiment whose outputs were wrong ends with 0.",
        file=DIFF,
        old="    if Verdict.WRONG in (one.summary",
        new="    if Verdict.INVALID in (one.summary",
        fails="tests/bench/test_bench_diff.py -k wrong",
    ),
    Mutant(
        name="bench-diff-mixes-pairs",
        bug="Answers of the second experiment are taken from any pair.",
        file=DIFF,
        old="others.get(run.pair, {})) for run",
        new="list(others.values())[-1]) for run",
        fails="tests/bench/test_bench_diff.py -k pairs",
    ),
    Mutant(
        name="bench-answers-of-another-engine-are-judged",
        bug="Different answers of a profile with another engine count as wrong.",
        file=ANSWERS,
        old='any(key.startswith("engine.") for',
        new='any(key.startswith("engines.") for',
        fails="tests/bench/test_bench_answers.py",
    ),
    Mutant(
        name="bench-controls-have-kvbm",
        bug="Two runs of an arm with kvbm are the control although the floor has run.",
        file=ANSWERS,
        old="    if not runs and others:",
        new="    if others:",
        fails="tests/bench/test_bench_answers.py",
    ),
    Mutant(
        name="bench-unfinished-is-complete",
        bug="An interrupted experiment counts as complete if the interval of its runs is tight.",
        file="kvbm_cli/bench/setup.py",
        old="first == cell.pairs_done + 1 > SMALLEST_PAIRS and",
        new="first <= cell.pairs_done + 1 and",
        fails="tests/bench/test_bench_report_again.py -k whatever_the_interval",
    ),
    Mutant(
        name="bench-incomplete-hides-wrong-outputs",
        bug="Wrong outputs of an interrupted experiment end with 11, as every interruption does.",
        file=SUMMARY,
        old='    verdict = Verdict.WRONG if summary["verdict"] == Verdict.WRONG else Verdict.INVALID\n',
        new="    verdict = Verdict.INVALID\n",
        fails="tests/bench/test_bench_report_again.py -k wrong",
    ),
)
