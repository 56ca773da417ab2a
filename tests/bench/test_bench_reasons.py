"""Every cause of a missing gain, from numbers that show it, and from numbers just below its limit."""

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

from kvbm_cli.bench.show.terminal import show
from kvbm_cli.bench.why.facts import Reuse, reuse_of
from kvbm_cli.bench.workload.plan import Launches, Plan
from kvbm_cli.bench.workload.schema import Conversations, SharedPrefix

# An arm with kvbm that is as slow as the baseline, and loads nothing.
IDLE = replace(KVBM, found=(0.0, 0.0, 0.0))


def causes(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The causes of the only comparison, by name and in order."""
    (cell,) = summary["cells"]
    (comparison,) = cell["comparisons"]
    return {why["cause"]: why for why in comparison["why_not"]}


def counted(**counts: float) -> dict[str, float]:
    return {**KVBM.counters, **{f"kvbm_{name}": count for name, count in counts.items()}}


def changed_profile(**sections: dict[str, Any]) -> dict[str, Any]:
    profile = deepcopy(PROFILE)
    for name, keys in sections.items():
        profile[name] = {**(profile[name] or {}), **keys}
    return profile


def test_a_working_set_that_fits_into_g1():
    found = (0.98, 0.0, 0.0)
    arms = {"baseline": replace(BASELINE, found=found, g1_blocks=600), "kvbm": replace(KVBM, found=found)}
    summary = summary_of_arms(**arms)
    assert summary["verdict"] == "same"
    (why,) = causes(summary).values()
    assert (why["cause"], why["key"]) == ("fits-g1", "--pressure")
    assert "baseline found 72% of all prompt tokens in its own G1, and only 75% repeat" in why["text"]
    assert "the working set of 6,976 tokens fits into G1 (9,600 tokens)" in why["text"]
    assert "`--pressure 2` raises `users`" in why["text"]


def test_g1_that_finds_less_than_most_is_no_reason():
    found = (0.85, 0.0, 0.0)
    arms = {"baseline": replace(BASELINE, found=found), "kvbm": replace(KVBM, found=found)}
    assert "fits-g1" not in causes(summary_of_arms(**arms))


def test_a_workload_without_repetition_shows_the_cost_of_kvbm():
    summary = summary_of_arms(workload=UNIQUE, kvbm=replace(IDLE, ms_per_token=0.515))
    assert summary["verdict"] == "same"
    (why,) = causes(summary).values()
    assert (why["cause"], why["key"]) == ("no-reuse", "--workload")
    assert "prompts repeat 0% of their tokens (0 of 24,576)" in why["text"]
    assert "With kvbm, TTFT changed by +2.9% (95% interval " in why["text"]


def test_prefixes_shorter_than_a_block_cannot_be_reused():
    workload = SharedPrefix(
        name="templates",
        kind="shared-prefix",
        groups=4,
        requests_per_group=8,
        prefix_tokens=15,
        question_tokens=100,
        answer_tokens=8,
        schedule=CONVERSATIONS.schedule,
    )
    (why,) = causes(summary_of_arms(workload=workload, kvbm=IDLE)).values()
    assert why["cause"] == "short-prefixes"
    assert "prompts repeat 11% of their tokens, but only 0% in whole blocks of 16 tokens" in why["text"]


def test_g2_that_evicts_what_it_got_names_a_capacity_that_would_do():
    kvbm = replace(IDLE, g2_blocks=256, counters=counted(offload_blocks_d2h=1500, evicted_blocks=1244))
    profile = changed_profile(tiers={"host": {"capacity": "16MiB", "blocks": None}})
    summary = summary_of_arms(kvbm=kvbm, profile=profile)
    (why,) = causes(summary).values()
    assert (why["cause"], why["key"]) == ("g2-too-small", "tiers.host.capacity")
    assert "it holds 4,096 tokens, G1 3,200, and the working set is 6,976" in why["text"]
    assert "It evicted 2,488 of the 3,000 blocks that it got" in why["text"]  # in two runs
    assert "`tiers.host.capacity: 35MiB` would hold them" in why["text"]  # 16 MiB / 4096 * 6976 * 1.25
    assert not any("G2 holds" in caveat for caveat in summary["cells"][0]["caveats"])
    console = Console(file=io.StringIO(), width=80)
    show(summary, console, directory=Path("run"))
    assert "\nwhy kvbm was not faster than baseline:\n  1. G2 is too small: it holds 4,096" in console.file.getvalue()


def test_g2_set_in_blocks_gets_blocks():
    kvbm = replace(IDLE, g2_blocks=256, counters=counted(offload_blocks_d2h=1500, evicted_blocks=1244))
    profile = changed_profile(tiers={"host": {"capacity": None, "blocks": 256}})
    (why,) = causes(summary_of_arms(kvbm=kvbm, profile=profile)).values()
    assert why["key"] == "tiers.host.blocks"
    assert "`tiers.host.blocks: 545`" in why["text"]  # 6976 * 1.25 / 16


def test_g2_is_also_blamed_against_another_arm_with_kvbm():
    """The reference loads everything; the measured arm could have, too."""
    other = replace(KVBM, g2_blocks=1024)
    kvbm = replace(IDLE, g2_blocks=256, counters=counted(offload_blocks_d2h=1500, evicted_blocks=1244))
    summary = summary_of_arms(baseline=other, kvbm=kvbm)
    assert summary["verdict"] == "slower"
    assert list(causes(summary)) == ["g2-too-small"]


def test_a_small_g2_that_pays_is_a_caveat_only():
    summary = summary_of_arms(kvbm=replace(KVBM, g2_blocks=256))
    assert summary["verdict"] == "faster"
    assert causes(summary) == {}
    assert "G2 holds 4,096 tokens, less than the working set of 6,976" in summary["cells"][0]["caveats"]


@pytest.mark.parametrize(
    "changes",
    [
        {"g2_blocks": 1024},  # holds the working set
        {"counters": counted(offload_blocks_d2h=1500, evicted_blocks=700)},  # evicted less than half
        {"found": (0.0, 0.6, 0.0), "load_ms": 340.0},  # loaded more than half of what it could
    ],
)
def test_g2_is_not_blamed_without_churn(changes):
    churn = counted(offload_blocks_d2h=1500, evicted_blocks=1244)
    kvbm = replace(IDLE, **{"g2_blocks": 256, "counters": churn, **changes})
    summary = summary_of_arms(kvbm=kvbm)
    assert summary["verdict"] != "faster"
    assert "g2-too-small" not in causes(summary)


def test_blocks_that_the_frequency_filter_rejected():
    counters = counted(evicted_blocks=600, disk_filter_rejected_blocks=700, disk_filter_admitted_blocks=20)
    (why,) = causes(summary_of_arms(kvbm=replace(IDLE, counters=counters))).values()
    assert (why["cause"], why["key"]) == ("filtered", "offload.to_disk")
    assert "it rejected 1,400 and admitted 40, and G2 evicted 1,200" in why["text"]


def test_a_filter_that_admits_most_blocks_is_no_reason():
    counters = counted(evicted_blocks=600, disk_filter_rejected_blocks=300, disk_filter_admitted_blocks=400)
    assert "filtered" not in causes(summary_of_arms(kvbm=replace(IDLE, counters=counters)))


def test_blocks_that_are_below_the_priority():
    profile = changed_profile(offload={"min_priority": 50})
    counters = counted(offload_blocks_d2h=12)
    (why,) = causes(summary_of_arms(kvbm=replace(IDLE, counters=counters), profile=profile)).values()
    assert (why["cause"], why["key"]) == ("filtered", "offload.min_priority")
    assert "kvbm copied 24 of the " in why["text"]


def test_blocks_that_were_skipped_because_copies_were_slow():
    counters = counted(offload_skipped_blocks=180, offload_failed_blocks=20)
    (why,) = causes(summary_of_arms(kvbm=replace(IDLE, counters=counters))).values()
    assert (why["cause"], why["key"]) == ("offload-skipped", "transfer.max_concurrent")
    assert "400 of 1,200 computed blocks were not copied to host memory: 360 because" in why["text"]
    assert "(now 4)" in why["text"]


def test_the_cause_that_lost_more_blocks_comes_first():
    for skipped, first in ((300, "g2-too-small"), (800, "offload-skipped")):
        counters = counted(offload_blocks_d2h=900, evicted_blocks=700, offload_skipped_blocks=skipped)
        found = causes(summary_of_arms(kvbm=replace(IDLE, g2_blocks=256, counters=counters)))
        assert (len(found), next(iter(found))) == (2, first)


def test_kvbm_that_turned_itself_off():
    (why,) = causes(summary_of_arms(kvbm=replace(IDLE, states={"kvbm_disabled": 1.0}))).values()
    assert (why["cause"], why["key"]) == ("kvbm-off", None)
    assert "runs/talk.1.kvbm/engine.log" in why["text"]


def test_a_disk_that_was_turned_off():
    kvbm = replace(IDLE, states={"kvbm_disk_off": 1.0}, counters=counted(disk_failed_blocks=7))
    (why,) = causes(summary_of_arms(kvbm=kvbm)).values()
    assert (why["cause"], why["key"]) == ("disk-off", "tiers.disk.directory")
    assert "14 blocks could not be written or read" in why["text"]


def test_a_shared_tier_that_was_turned_off():
    kvbm = replace(IDLE, states={"kvbm_shared_off": 1.0}, counters=counted(shared_failed_requests=7))
    (why,) = causes(summary_of_arms(kvbm=kvbm)).values()
    assert (why["cause"], why["key"]) == ("shared-off", "tiers.shared.url")
    assert "14 requests to its store failed" in why["text"]
    assert "runs/talk.1.kvbm/engine.log has the cause" in why["text"]


def test_blocks_that_kvbm_left_on_a_slow_disk():
    counters = counted(disk_declined_blocks=300, disk_late_blocks=40, onboard_blocks_d2d=12)
    (why,) = causes(summary_of_arms(kvbm=replace(IDLE, counters=counters))).values()
    assert (why["cause"], why["key"]) == ("disk-slower", "tiers.disk.directory")
    assert "loaded 24 blocks from it and left others there. It predicted 600 times" in why["text"]
    assert "and 80 reads took too long" in why["text"]


def test_few_blocks_left_on_disk_are_no_reason():
    counters = counted(disk_declined_blocks=30, onboard_blocks_d2d=12)  # 2 % of the prompt tokens
    assert "disk-slower" not in causes(summary_of_arms(kvbm=replace(IDLE, counters=counters)))


@pytest.mark.parametrize(("policy", "key"), [("always", "onboard.policy"), ("auto", "tiers.disk.directory")])
def test_loads_from_disk_that_take_longer_than_computing(policy, key):
    kvbm = replace(KVBM, found=(0.0, 0.0, 1.0), load_ms=600.0)
    summary = summary_of_arms(kvbm=kvbm, profile=changed_profile(onboard={"policy": policy}))
    assert summary["verdict"] == "slower"
    (why,) = causes(summary).values()
    assert (why["cause"], why["key"]) == ("disk-slower", key)
    assert "(medians)" in why["text"]


def test_loads_from_host_memory_that_take_as_long_as_computing():
    summary = summary_of_arms(kvbm=replace(KVBM, load_ms=530.0))
    assert summary["verdict"] == "same"
    (why,) = causes(summary).values()
    assert (why["cause"], why["key"]) == ("host-slower", "--workload")


def test_a_floor_that_gains_nothing_leaves_nothing_to_gain():
    """Base of 2 s: the prompts are a small part of it."""
    slow = {"base_ms": 2000.0, "ms_per_token": 0.05}
    arms = {
        "baseline": replace(BASELINE, **slow),
        "kvbm": replace(KVBM, **slow, load_ms=45.0),
        "floor": replace(BASELINE, **slow, found=(1.0, 0.0, 0.0)),
    }
    summary = summary_of_arms(launches=Launches(interval_s=8.0), **arms)
    assert summary["verdict"] == "same"
    found = causes(summary)
    assert list(found) == ["host-slower", "small-prefill"]
    assert "the median TTFT is 2002 ms instead of 2058 ms" in found["small-prefill"]["text"]


def test_a_floor_with_something_to_gain_is_no_reason():
    floor = replace(BASELINE, found=(1.0, 0.0, 0.0))
    assert list(causes(summary_of_arms(kvbm=replace(KVBM, load_ms=530.0), floor=floor))) == ["host-slower"]


LATE, SLOW_LOOP = {"lateness_ms": 120.0}, {"client": {"loop_lag_p99_ms": 150.0}}


@pytest.mark.parametrize(
    ("change", "cause"),
    [(LATE, "machine-busy"), (SLOW_LOOP, "machine-busy"), ({"client": {"cpu_share": 0.9}}, "client-limited")],
)
def test_a_client_that_is_the_limit_or_gets_no_core_comes_first(change, cause):
    summary = summary_of_arms(kvbm=replace(IDLE, **change))
    assert next(iter(causes(summary))) == cause


def test_a_late_client_with_little_to_do_names_the_busy_machine():
    summary = summary_of_arms(kvbm=replace(KVBM, **LATE))
    assert summary["verdict"] == "invalid"
    (why,) = causes(summary).values()
    assert (why["cause"], why["key"]) == ("machine-busy", None)
    assert "120 ms late" in why["text"]
    assert "used only 10% of a core" in why["text"]


def test_lost_blocks_are_named_even_if_the_client_was_late():
    """Counters do not depend on the times that make the run invalid."""
    counters = counted(offload_skipped_blocks=400)
    summary = summary_of_arms(kvbm=replace(IDLE, counters=counters, **LATE))
    assert summary["verdict"] == "invalid"
    assert list(causes(summary)) == ["machine-busy", "offload-skipped"]


def test_an_overloaded_engine_gets_a_rate_that_would_do():
    late = {"end_ms": 1200.0, "queue_wait_ms": 400.0}
    summary = summary_of_arms(baseline=replace(BASELINE, **late), kvbm=replace(IDLE, **late))
    assert summary["verdict"] == "invalid"
    (why,) = causes(summary).values()
    assert (why["cause"], why["key"]) == ("overloaded", "--rate")
    assert "baseline answered 0.97 requests per second, so `--rate 0.48`" in why["text"]


def test_queues_in_a_closed_loop_count_in_both_arms():
    closed = Launches(concurrency=4)
    queue = {"queue_wait_ms": 400.0}
    both = summary_of_arms(baseline=replace(BASELINE, **queue), kvbm=replace(IDLE, **queue), launches=closed)
    assert causes(both)["overloaded"]["key"] == "--concurrency"
    one = summary_of_arms(baseline=replace(BASELINE, **queue), kvbm=IDLE, launches=closed)
    assert "overloaded" not in causes(one)


def test_one_run_each_cannot_show_a_small_gain():
    """One run of each arm counts from 10 % on, whatever its interval."""
    (why,) = causes(summary_of_arms(kvbm=replace(IDLE, ms_per_token=0.465, counters={}), pairs=1)).values()
    assert why["cause"] == "noise"
    assert "after 1 run of each arm; raise `--pairs`" in why["text"]


def test_noise_is_reported_only_if_nothing_else_is_found():
    noisy = replace(KVBM, found=(0.0, 0.05, 0.0), spread=0.35, counters=counted())
    lossless = replace(noisy, counters={})
    (why,) = causes(summary_of_arms(kvbm=lossless, pairs=3)).values()
    assert (why["cause"], why["key"]) == ("noise", "--pairs")
    skipping = replace(noisy, counters=counted(offload_skipped_blocks=400))
    assert list(causes(summary_of_arms(kvbm=skipping, pairs=3))) == ["offload-skipped"]


def test_no_known_cause_is_said_with_the_main_numbers():
    (why,) = causes(summary_of_arms(kvbm=replace(IDLE, counters={}), pairs=3)).values()
    assert (why["cause"], why["key"]) == ("unknown", None)
    assert "baseline found 0% in G1, 0% in G2, 0% in G3 of its prompt tokens" in why["text"]
    assert "75% of the prompt tokens repeat" in why["text"]


def test_a_server_without_metrics_gets_no_guess():
    """Tokens by source, counters and sizes are unknown."""
    unknown = replace(IDLE, counters={}, states={}, g2_blocks=None)
    summary = summary_of_arms(kvbm=unknown, profile=None, pairs=3)
    assert list(causes(summary)) == ["unknown"]


def test_failed_requests_need_no_further_reason():
    summary = summary_of_arms(kvbm=replace(IDLE, error="HTTP 500"))
    assert summary["verdict"] == "invalid"
    assert causes(summary) == {}


def test_failed_requests_of_an_overloaded_engine_get_the_rate():
    late = {"end_ms": 1200.0, "queue_wait_ms": 400.0}
    kvbm = replace(IDLE, **late, error="timeout")
    assert list(causes(summary_of_arms(baseline=replace(BASELINE, **late), kvbm=kvbm))) == ["overloaded"]


def test_a_faster_arm_that_loaded_nothing_says_why_it_loaded_nothing():
    """The verdict says that the gain has another cause; the reasons say why no block came back."""
    found = (0.98, 0.0, 0.0)
    kvbm = replace(KVBM, found=found, ms_per_token=0.2, base_ms=5.0, counters={**KVBM.counters})
    kvbm = replace(kvbm, counters=counted(onboard_blocks_h2d=0))
    summary = summary_of_arms(baseline=replace(BASELINE, found=found), kvbm=kvbm)
    assert summary["verdict"] == "invalid"
    assert list(causes(summary)) == ["fits-g1"]


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
