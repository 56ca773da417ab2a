"""Every cause of a missing gain, from numbers that show it, and from numbers just below its limit.

An entry of `snapshots/bench/reasons.txt` has what is given, the verdict, its causes in their order, and the caveats.
"""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from experiments import BASELINE, CONVERSATIONS, KVBM, PROFILE, UNIQUE, plan_of, summary_of_arms
from rich.console import Console
from terminal import assert_said, given_in

from kvbm_cli.bench.show.terminal import show
from kvbm_cli.bench.why.facts import Reuse, reuse_of
from kvbm_cli.bench.workload.plan import Launches, Plan
from kvbm_cli.bench.workload.schema import Conversations, SharedPrefix

TEMPLATES = SharedPrefix(
    name="templates",
    kind="shared-prefix",
    groups=4,
    requests_per_group=8,
    prefix_tokens=15,
    question_tokens=100,
    answer_tokens=8,
    schedule=CONVERSATIONS.schedule,
)
WORKLOADS = {one.name: one for one in (UNIQUE, TEMPLATES)}
FILE = "bench/reasons"


def summary_of(name: str) -> dict[str, Any]:
    """Given are what differs in `baseline` from BASELINE, in `kvbm` from KVBM, in `profile` from the keys of PROFILE,
    and the other arguments."""
    given: dict[str, Any] = yaml.safe_load(given_in(FILE)[name]) or {}
    for arm, base in (("baseline", BASELINE), ("kvbm", KVBM), ("floor", BASELINE)):
        if arm in given:
            given[arm] = replace(base, **given[arm])
    if given.get("profile"):
        given["profile"] = PROFILE | {one: {**PROFILE.get(one, {}), **keys} for one, keys in given["profile"].items()}
    if "workload" in given:
        given["workload"] = WORKLOADS[given["workload"]]
    if "launches" in given:
        given["launches"] = Launches(**given["launches"])
    return summary_of_arms(**given)


@pytest.mark.parametrize("name", given_in(FILE))
def test_why_there_is_no_gain(name):
    summary = summary_of(name)
    (cell,) = summary["cells"]
    (comparison,) = cell["comparisons"]
    lines = [f"verdict: {summary['verdict']}"]
    lines += [f"{why['cause']} ({why['key']}): {why['text']}" for why in comparison["why_not"]]
    lines += [f"caveat: {caveat}" for caveat in cell["caveats"]]
    assert_said(FILE, name, "\n".join(lines))


def test_the_page_numbers_the_causes():
    summary = summary_of("G2 that evicts what it got names a capacity that would do")
    console = Console(file=io.StringIO(), width=80)
    show(summary, console, directory=Path("run"))
    assert "\nwhy kvbm was not faster than baseline:\n  1. G2 is too small: it holds 4,096" in console.file.getvalue()


@pytest.mark.parametrize("name", ["bench-demo", "bench-peers"])
def test_a_result_of_a_version_without_g4_is_shown(name):
    kept = Path(__file__).parents[2] / f"bench/results/2cpu-x86-64-no-gpu-{name}.json"
    console = Console(file=io.StringIO(), width=80)
    show(json.loads(kept.read_text()), console, directory=Path("run"))
    assert "prompt tokens from G2, all requests" in console.file.getvalue()
    assert "from G4" not in console.file.getvalue()


def test_reuse_is_counted_by_parts_and_in_whole_blocks():
    """Turn 1 has 64 system tokens in common with other users; turn 2 repeats turn 1, its answer and its question."""
    workload = Conversations(
        name="two",
        users=2,
        turns=2,
        system_tokens=40,
        history_tokens=100,
        question_tokens=10,
        answer_tokens=6,
        history="canned",
    )
    plan = plan_of(workload, Launches(interval_s=1.0))
    # prompts: 150, 150 (40 repeated), 166 (150 repeated), 166 (150 repeated); canned answers are new text
    assert reuse_of(plan, 16) == Reuse(632, 340, 32 + 144 + 144)
    assert reuse_of(Plan.from_json(json.loads(json.dumps(plan.to_json()))), 16) == reuse_of(plan, 16)


def test_the_guide_has_every_cause():
    root = Path(__file__).parents[2]
    code = "".join(path.read_text() for path in (root / "kvbm_cli/bench/why").glob("*.py"))
    guide = (root / "docs/guide/why-no-gain.md").read_text()
    listed = re.findall(r"^\| `([a-z0-9-]+)` \|", guide, re.MULTILINE)
    assert sorted(listed) == sorted(set(re.findall(r'Why\("([a-z0-9-]+)"', code)))
