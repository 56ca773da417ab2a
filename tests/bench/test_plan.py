"""`kvbm plan` as a user sees it, its simulator against a plain LRU, and the limits of adaptive eviction."""

import json
import os
import shlex
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
from trace_pages import HEAD, ROOT, examples_in, stripped

from kvbm_cli.bench.trace.analysis import collect
from kvbm_cli.bench.trace.reader import TraceReader
from kvbm_cli.bench.trace.request import TraceFormat
from kvbm_cli.plan import command
from kvbm_cli.plan.simulator import ADAPTIVE, LRU, Sample, TimedUse, hit_rate

PAGE = (ROOT / "docs/guide/plan.md").read_text()
EXAMPLES = examples_in(PAGE)
WHOLE = Path(os.environ.get("KVBM_TRACE_DIR", "/nonexistent")) / "mooncake-conversation.jsonl.gz"

sys.path.insert(0, str(ROOT / "bench/eviction"))
import hit_rates  # noqa: E402


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_of_the_page_print_what_it_shows(kvbm, number):
    line, shown = EXAMPLES[number]
    code, out, _ = kvbm(*shlex.split(line))
    assert code == 0
    assert stripped(out) == stripped(shown)


def test_the_page_has_an_example():
    assert len(EXAMPLES) == 1


def plain_lru(capacity):
    """Hit blocks over all blocks of the fixture, with a cache that is an OrderedDict."""
    cache, found, asked = OrderedDict(), 0, 0
    for request in TraceReader(HEAD, TraceFormat()):
        ids = request.hash_ids
        asked += len(ids)
        hit = next((at for at, one in enumerate(ids) if one not in cache), len(ids))
        found += hit
        for one in [*ids[:hit][::-1], *ids[hit:capacity][::-1], *ids[:hit][::-1]]:
            cache[one] = None
            cache.move_to_end(one)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return found / asked


def test_lru_is_that_of_a_plain_cache(kvbm):
    code, out, _ = kvbm(
        *("plan", "--trace", HEAD, "--policy", "lru", "--capacity-blocks", "9000,600,3000", "--exact", "--json")
    )
    assert code == 0
    curve = json.loads(out)["curve"]
    assert [(one["policy"], one["capacity_blocks"]) for one in curve] == [("lru", 600), ("lru", 3000), ("lru", 9000)]
    for one in curve:
        assert one["hit_rate"] == pytest.approx(plain_lru(one["capacity_blocks"]))


def test_json_has_a_point_per_policy_and_capacity(kvbm):
    code, out, err = kvbm("plan", "--trace", HEAD, "--capacity-blocks", "600,3000", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert [(one["policy"], one["capacity_blocks"]) for one in data["curve"]] == [
        *(("lru", 600), ("lru", 3000)),
        *(("adaptive", 600), ("adaptive", 3000)),
    ]
    assert (data["requests"], data["unique_blocks"], data["simulated_blocks"]) == (400, 9821, 9821)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity-blocks", "0"], "must be numbers of blocks from 1 to 2147483648, not `0`"),
        (["--capacity-blocks", "1e5"], "not `1e5`"),
        (["--capacity-blocks", ",".join(map(str, range(1, 102)))], "has 101 capacities, and the limit is 100"),
        (["--policy", "arc"], "`--policy` must be `lru` or `adaptive`, not `arc`"),
        (["--turns", "all"], "`--turns` must be `added` or `whole`"),
    ],
)
def test_a_wrong_option_is_refused(kvbm, arguments, message):
    code, out, err = kvbm("plan", "--trace", HEAD, *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def test_a_trace_without_known_blocks_is_refused(kvbm, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"timestamp": 0, "text_input": "hello", "output_length": 1}\n')
    code, _, err = kvbm("plan", "--trace", tmp_path / "t.jsonl")
    assert code == 2
    assert "no request has `hash_ids`" in err


def test_a_sample_is_bounded_and_close():
    trace = collect(TraceReader(HEAD, TraceFormat()))
    uses = [TimedUse(launch_ms / 1000, use) for launch_ms, use in trace.in_order()]
    exact = Sample(trace.tree, len(trace.tree))
    sample = Sample(trace.tree, 3000)
    assert sum(sample.is_in) == 3000
    for capacity in (3000, 6000, 9000):
        whole, part = (hit_rate(trace.tree, uses, one, capacity, LRU) for one in (exact, sample))
        assert part == pytest.approx(whole, abs=0.02)


def test_sentences_say_what_more_memory_gains():
    request = command.PlanRequest(HEAD, TraceFormat(), (), (LRU, ADAPTIVE), is_exact=True, bytes_per_token=131072)
    plan = command.CapacityPlan((1000, 2000), {LRU: [0.1, 0.44], ADAPTIVE: [0.2, 0.45]}, 10, 9000, 9000)
    assert command.sentences(plan, request) == [
        "With 125.0 GiB instead of 62.5 GiB, 45% instead of 20% of the prompt blocks come from the cache (adaptive).",
        "`adaptive` gains most with 62.5 GiB: 20.0% instead of 10.0%.",
    ]
    even = command.CapacityPlan((1000,), {LRU: [0.1], ADAPTIVE: [0.1]}, 10, 9000, 9000)
    assert command.sentences(even, request) == ["`adaptive` gains nothing here, compared with `lru`."]


# Limits


def part_of(name, count, seed):
    requests = sorted(getattr(hit_rates, name)(hit_rates.random.Random(seed)))[:count]
    return hit_rates.made(requests)


@pytest.mark.parametrize("name", ["documents", "scans"])
def test_adaptive_gains_with_little_memory_and_loses_nothing_with_much(name):
    tree, uses = part_of(name, 1800, seed=7)
    sample = Sample(tree, len(tree))
    rates = {
        (policy, share): hit_rate(tree, uses, sample, round(share * len(tree)), policy)
        for policy in (LRU, ADAPTIVE)
        for share in (0.02, 0.2)
    }
    assert rates[ADAPTIVE, 0.02] >= rates[LRU, 0.02]
    assert rates[ADAPTIVE, 0.2] >= 0.99 * rates[LRU, 0.2]


@pytest.mark.soak
@pytest.mark.skipif(not WHOLE.exists(), reason="KVBM_TRACE_DIR names no directory with Mooncake's traces")
def test_hit_rates_of_the_conversation_trace_reach_the_limits():
    name, workload = "conversation", hit_rates.read(WHOLE)
    assert [*hit_rates.missed(name, workload, hit_rates.measure(name, workload))] == []


@pytest.mark.soak
def test_generated_workloads_reach_the_limits():
    for name, workload in hit_rates.workloads([], with_generated=True):
        assert [*hit_rates.missed(name, workload, hit_rates.measure(name, workload))] == []
