"""Every cause of a missing gain, from numbers that show it, and from numbers just below its limit.

The verdict of a row, its causes in their order, and the caveats are an entry of `snapshots/bench/reasons.txt`.
"""

import io
import json
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from experiments import BASELINE, CONVERSATIONS, KVBM, PROFILE, UNIQUE, plan_of, summary_of_arms
from rich.console import Console
from terminal import assert_entry

from kvbm_cli.bench.show.terminal import show
from kvbm_cli.bench.why.facts import Reuse, reuse_of
from kvbm_cli.bench.workload.plan import Launches, Plan
from kvbm_cli.bench.workload.schema import Conversations, SharedPrefix


def counted(**counts: float) -> dict[str, float]:
    return {**KVBM.counters, **{f"kvbm_{name}": count for name, count in counts.items()}}


def changed_profile(**sections: dict[str, Any]) -> dict[str, Any]:
    profile = deepcopy(PROFILE)
    for name, keys in sections.items():
        profile[name] = {**(profile[name] or {}), **keys}
    return profile


# An arm with kvbm that is as slow as the baseline, and loads nothing.
IDLE = replace(KVBM, found=(0.0, 0.0, 0.0))


def idle(*, reference: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """An idle arm with these changes, against a baseline with those."""
    return {"baseline": replace(BASELINE, **(reference or {})), "kvbm": replace(IDLE, **changes)}


def lossy(**counts: float) -> dict[str, Any]:
    """An idle arm with these counters."""
    return idle(counters=counted(**counts))


def loading(**changes: Any) -> dict[str, Any]:
    """An arm with kvbm that loads everything, with these changes."""
    return {"kvbm": replace(KVBM, **changes)}


FITS, MOST = {"found": (0.98, 0.0, 0.0)}, {"found": (0.85, 0.0, 0.0)}
CHURN = counted(offload_blocks_d2h=1500, evicted_blocks=1244)
SMALL_G2 = {"g2_blocks": 256, "counters": CHURN}
SLOW = {"base_ms": 2000.0, "ms_per_token": 0.05}  # the prompts are a small part of it
LATE, SLOW_LOOP = {"lateness_ms": 120.0}, {"client": {"loop_lag_p99_ms": 150.0}}
OVERLOADED = {"end_ms": 1200.0, "queue_wait_ms": 400.0}
QUEUE = {"queue_wait_ms": 400.0}
CLOSED = {"launches": Launches(concurrency=4)}
NOISY = {"found": (0.0, 0.05, 0.0), "spread": 0.35}
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
CASES: dict[str, dict[str, Any]] = {
    "a working set that fits into G1": {
        "baseline": replace(BASELINE, **FITS, g1_blocks=600),
        "kvbm": replace(KVBM, **FITS),
    },
    "G1 that finds less than most is no reason": {**loading(**MOST), "baseline": replace(BASELINE, **MOST)},
    "a workload without repetition shows the cost of kvbm": {"workload": UNIQUE, **idle(ms_per_token=0.515)},
    "prefixes shorter than a block cannot be reused": {"workload": TEMPLATES, "kvbm": IDLE},
    "G2 that evicts what it got names a capacity that would do": {
        **idle(**SMALL_G2),
        "profile": changed_profile(tiers={"host": {"capacity": "16MiB", "blocks": None}}),
    },
    "G2 set in blocks gets blocks": {
        **idle(**SMALL_G2),
        "profile": changed_profile(tiers={"host": {"capacity": None, "blocks": 256}}),
    },
    "G2 is also blamed against another arm that loads everything": {
        **idle(**SMALL_G2),
        "baseline": replace(KVBM, g2_blocks=1024),
    },
    "a small G2 that pays is a caveat only": loading(g2_blocks=256),
    "G2 that holds the working set is not blamed": idle(g2_blocks=1024, counters=CHURN),
    "G2 that evicted less than half is not blamed": idle(
        g2_blocks=256, counters=counted(offload_blocks_d2h=1500, evicted_blocks=700)
    ),
    "G2 that loaded more than half of what it could is not blamed": idle(
        **SMALL_G2, found=(0.0, 0.6, 0.0), load_ms=340.0
    ),
    "blocks that the frequency filter rejected": lossy(
        evicted_blocks=600, disk_filter_rejected_blocks=700, disk_filter_admitted_blocks=20
    ),
    "a filter that admits most blocks is no reason": lossy(
        evicted_blocks=600, disk_filter_rejected_blocks=300, disk_filter_admitted_blocks=400
    ),
    "blocks that are below the priority": {
        **lossy(offload_blocks_d2h=12),
        "profile": changed_profile(offload={"min_priority": 50}),
    },
    "blocks that were skipped because copies were slow": lossy(offload_skipped_blocks=180, offload_failed_blocks=20),
    "G2 that lost more blocks than slow copies comes first": idle(
        g2_blocks=256, counters=counted(offload_blocks_d2h=900, evicted_blocks=700, offload_skipped_blocks=300)
    ),
    "slow copies that lost more blocks than G2 come first": idle(
        g2_blocks=256, counters=counted(offload_blocks_d2h=900, evicted_blocks=700, offload_skipped_blocks=800)
    ),
    "kvbm that turned itself off": idle(states={"kvbm_disabled": 1.0}),
    "a disk that was turned off": idle(states={"kvbm_disk_off": 1.0}, counters=counted(disk_failed_blocks=7)),
    "a shared tier that was turned off": idle(
        states={"kvbm_shared_off": 1.0}, counters=counted(shared_failed_requests=7)
    ),
    "blocks that kvbm left on a slow disk": lossy(disk_declined_blocks=300, disk_late_blocks=40, onboard_blocks_d2d=12),
    "few blocks left on disk are no reason": lossy(disk_declined_blocks=30, onboard_blocks_d2d=12),  # 2 %
    "loads from disk that take longer than computing": loading(found=(0.0, 0.0, 1.0), load_ms=600.0),
    "loads from disk that always happen and take longer": {
        **loading(found=(0.0, 0.0, 1.0), load_ms=600.0),
        "profile": changed_profile(onboard={"policy": "always"}),
    },
    "loads from host memory that take as long as computing": loading(load_ms=530.0),
    "a floor that gains nothing leaves nothing to gain": {
        "launches": Launches(interval_s=8.0),
        "baseline": replace(BASELINE, **SLOW),
        "kvbm": replace(KVBM, **SLOW, load_ms=45.0),
        "floor": replace(BASELINE, **SLOW, found=(1.0, 0.0, 0.0)),
    },
    "a floor with something to gain is no reason": {
        **loading(load_ms=530.0),
        "floor": replace(BASELINE, found=(1.0, 0.0, 0.0)),
    },
    "a late client comes first": idle(**LATE),
    "a client with a slow loop comes first": idle(**SLOW_LOOP),
    "a client without a free core comes first": idle(client={"cpu_share": 0.9}),
    "a late client with little to do names the busy machine": loading(**LATE),
    "lost blocks are named even if the client was late": idle(counters=counted(offload_skipped_blocks=400), **LATE),
    "an overloaded engine gets a rate that would do": idle(reference=OVERLOADED, **OVERLOADED),
    "queues of both arms count in a closed loop": {**idle(reference=QUEUE, **QUEUE), **CLOSED},
    "a queue of one arm does not count in a closed loop": {**idle(reference=QUEUE), **CLOSED},
    # One run of each arm counts from 10 % on, whatever its interval.
    "one run each cannot show a small gain": {**idle(ms_per_token=0.465, counters={}), "pairs": 1},
    "noise is reported if nothing else is found": {**loading(**NOISY, counters={}), "pairs": 3},
    "noise is not reported if something else is found": {
        **loading(**NOISY, counters=counted(offload_skipped_blocks=400)),
        "pairs": 3,
    },
    "no known cause is said with the main numbers": {**idle(counters={}), "pairs": 3},
    "a server without metrics gets no guess": {
        **idle(counters={}, states={}, g2_blocks=None),
        "profile": None,
        "pairs": 3,
    },
    "failed requests need no further reason": idle(error="HTTP 500"),
    "failed requests of an overloaded engine get the rate": idle(reference=OVERLOADED, **OVERLOADED, error="timeout"),
    # The verdict says that the gain has another cause; the reason says why no block came back.
    "a faster arm that loaded nothing says why it loaded nothing": {
        "baseline": replace(BASELINE, **FITS),
        **loading(**FITS, ms_per_token=0.2, base_ms=5.0, counters=counted(onboard_blocks_h2d=0)),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_why_there_is_no_gain(name):
    summary = summary_of_arms(**CASES[name])
    (cell,) = summary["cells"]
    (comparison,) = cell["comparisons"]
    lines = [f"verdict: {summary['verdict']}"]
    lines += [f"{why['cause']} ({why['key']}): {why['text']}" for why in comparison["why_not"]]
    lines += [f"caveat: {caveat}" for caveat in cell["caveats"]]
    assert_entry("bench/reasons", name, "".join(f"{line}\n" for line in lines), names=CASES)


def test_the_page_numbers_the_causes():
    summary = summary_of_arms(**CASES["G2 that evicts what it got names a capacity that would do"])
    console = Console(file=io.StringIO(), width=80)
    show(summary, console, directory=Path("run"))
    assert "\nwhy kvbm was not faster than baseline:\n  1. G2 is too small: it holds 4,096" in console.file.getvalue()


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
