"""Bugs in how `kvbm bench` runs an experiment."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = (
    Mutant(
        name="bench-profile-without-kvbm",
        bug="A profile to compare with runs without its block manager.",
        file="kvbm_cli/bench/arms.py",
        old='return self.kind in ("kvbm", "profile")',
        new='return self.kind == "kvbm"',
        fails="tests/bench/test_bench_comparison.py tests/bench/test_bench_arms.py",
    ),
    Mutant(
        name="bench-profiles-share-a-metrics-port",
        bug="Two profiles with one metrics port run at the same time.",
        file="kvbm_cli/bench/engines.py",
        old="profile = with_free_metrics_port(profile)",
        new="pass",
        fails="tests/bench/test_bench_arms.py -k metrics_port",
    ),
    Mutant(
        name="bench-other-engine-is-wrong",
        bug="Answers of a profile with another engine are judged as wrong.",
        file="kvbm_cli/bench/arms.py",
        old='return tuple(key for key in self.differences if key.startswith("engine."))',
        new="return ()",
        fails="tests/bench/test_bench_comparison.py",
    ),
    Mutant(
        name="bench-order-never-alternates",
        bug="The measured arm always runs last, so a machine that gets slower makes it slower.",
        file="kvbm_cli/bench/arms.py",
        old="        is_reversed = not is_reversed\n",
        new="",
        fails="tests/bench/test_bench_comparison.py -k turn",
    ),
    Mutant(
        name="bench-resume-keeps-partial-records",
        bug="Records of an interrupted run stay, and the run is made again.",
        file="kvbm_cli/bench/result/directory.py",
        old='(line for line in self.lines(REQUESTS) if line.get("run") in ended)',
        new="self.lines(REQUESTS)",
        fails="tests/bench/test_bench_resume.py -k within_a_run",
    ),
    Mutant(
        name="bench-resume-accepts-other-options",
        bug="An experiment continues with the options of another command.",
        file="kvbm_cli/bench/experiment.py",
        old="    if old != new:",
        new='    if old.get("format") != new["format"]:',
        fails="tests/bench/test_bench_resume.py -k changed_option",
    ),
    Mutant(
        name="bench-ramp-with-linear-launches",
        bug="The rate of a ramp is linear in the launches, not in time.",
        file="kvbm_cli/bench/workload/plan.py",
        old="math.sqrt(first**2 + (final**2 - first**2) * min(place / last, 1.0))",
        new="first + (final - first) * min(place / last, 1.0)",
        fails="tests/bench/test_bench_plan.py -k ramp",
    ),
    Mutant(
        name="bench-open-loop-waits",
        bug="A slow engine slows down its own load.",
        file="kvbm_cli/bench/workload/plan.py",
        old="after = () if launches.interval_s is not None and one.at_s is None else one.after",
        new="after = one.after",
        fails="tests/bench/test_bench_plan.py -k loop",
    ),
    Mutant(
        name="bench-warm-prompts-of-a-server",
        bug="The prompts of the recording are in the cache of a server that cannot be emptied.",
        file="kvbm_cli/bench/preparation.py",
        old="        seed += self.salt\n",
        new="",
        fails="tests/bench/test_bench_servers.py -k cannot_be_emptied",
    ),
    Mutant(
        name="bench-text-and-ids-in-one-prompt",
        bug="A prompt loses its token ids because a recorded answer in it is text.",
        file="kvbm_cli/bench/preparation.py",
        old="tuple(record.token_ids) or self.capabilities.writer.encoded(record.text)",
        new="tuple(record.token_ids) or record.text",
        fails="tests/bench/test_bench_servers.py -k poor",
    ),
    Mutant(
        name="bench-agent-does-not-wait",
        bug="An agent goes on before its subagent has ended.",
        file="kvbm_cli/bench/workload/build.py",
        old="                agent.own.previous = context.previous\n",
        new="",
        fails="tests/bench/test_bench_scripts.py -k subagent",
    ),
    Mutant(
        name="bench-failed-requests-are-left-out",
        bug="A run with failed requests is valid.",
        file="kvbm_cli/bench/judge/verdict.py",
        old="        if count\n    ]\n",
        new="        if count > 10**6\n    ]\n",
        fails="tests/bench/test_bench_verdict.py",
    ),
)
