"""`kvbm plan` as a user sees it, its simulator against a plain LRU, and the limits of adaptive eviction."""

import json
import os
from pathlib import Path

import hit_rates
import pytest
from metric_pages import FakeLeader, serving
from trace_pages import HEAD

from kvbm.core.shadow_caches import ADAPTIVE, LRU
from kvbm_cli.bench.trace.analysis import collect
from kvbm_cli.bench.trace.hit_rates import Sample, hit_curve, hit_rate
from kvbm_cli.bench.trace.reader import TraceReader
from kvbm_cli.bench.trace.request import TraceFormat
from kvbm_cli.plan import advice, command

WHOLE = Path(os.environ.get("KVBM_TRACE_DIR", "/nonexistent")) / "mooncake-conversation.jsonl.gz"


@pytest.fixture(autouse=True)
def no_progress(monkeypatch):
    """It would appear on a busy machine only."""
    monkeypatch.setattr(command, "PROGRESS_AFTER_S", 3600.0)


def test_the_curve_of_bench_trace_is_the_one_of_the_simulator():
    """`kvbm bench trace` has all capacities from one pass over the trace; `kvbm plan` has kvbm's own block store."""
    tree, uses = part_of("documents", 600, seed=3)
    sample = Sample(tree, len(tree))
    curve = hit_curve(tree, [one.use for one in uses])
    for capacity in (200, 1000, 4000, len(tree)):
        assert hit_rate(tree, uses, sample, capacity, LRU) == pytest.approx(curve.hit_rate(512 * capacity))


def test_a_sample_is_bounded_and_close():
    trace = collect(TraceReader(HEAD, TraceFormat()))
    uses = trace.timed_uses()
    exact = Sample(trace.tree, len(trace.tree))
    sample = Sample(trace.tree, 3000)
    assert sample.block_count == 3000
    for capacity in (3000, 6000, 9000):
        whole, part = (hit_rate(trace.tree, uses, one, capacity, LRU) for one in (exact, sample))
        assert part == pytest.approx(whole, abs=0.02)


def advised(capacities, rates, *, prefill=None, prices=None):
    curve = command.curve_of(capacities, rates, 512 * 131072)
    return advice.sentences(curve, advice.Prompts(12_000, prefill), prices)


def test_sentences_say_what_more_memory_gains():
    assert advised((1000, 2000), {LRU: [0.1, 0.44], ADAPTIVE: [0.2, 0.45]}) == [
        "With 125.0 GiB instead of 62.5 GiB, 45% instead of 20% of the prompt tokens come from the cache (adaptive).",
        "`adaptive` gains most with 62.5 GiB: 20.0% instead of 10.0%.",
    ]
    even = {LRU: [0.1], ADAPTIVE: [0.1]}
    assert advised((1000,), even) == ["`adaptive` gains nothing here, compared with `lru`."]


def test_sentences_say_what_the_gain_saves_and_when_it_pays():
    rates = {LRU: [0.2, 0.45]}
    (line,) = advised((1000, 2000), rates, prefill=6000)
    assert line.endswith("come from the cache (lru): 500 ms less prefill per request on average.")
    # 62.5 GiB are 67.1 GB, 0.276 an hour at 3 a month; half a second of the engine costs 0.000347 at 2.5 an hour
    prices = advice.Prices(memory_gb_month=3, engine_hour=2.5)
    (line,) = advised((1000, 2000), rates, prefill=6000, prices=prices)
    assert line.endswith("on average, which pays from 794 requests per hour.")


# For a running engine


def live_leader():
    leader = FakeLeader(
        prompt_computed_tokens=6000,
        prompt_host_tokens=4000,
        saved_prefill_s=2.0,
        matches_whole=5,
        matches_none=5,
    )
    leader.counters.hit_rates_at = {
        **{(LRU, size): rate for size, rate in ((0.25, 0.1), (1.0, 0.4), (4.0, 0.9))},
        **{(ADAPTIVE, size): rate for size, rate in ((0.25, 0.2), (1.0, 0.4), (4.0, 0.9))},
    }
    return leader


def test_a_running_engine_shows_what_it_has_measured(kvbm):
    with serving(live_leader()) as port:
        code, out, err = kvbm("plan", "--url", f"http://127.0.0.1:{port}")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"127.0.0.1:{port}: hit rates for its last requests; 40.0% of its prompt tokens came from caches so far",
        "",
        "host memory    lru  adaptive",
        "   24.4 KiB  10.0%     20.0%",
        "   97.7 KiB  40.0%     40.0%",
        "  390.6 KiB  90.0%     90.0%",
        "",
        "With 97.7 KiB instead of 24.4 KiB, 40% instead of 20% of the prompt tokens come from the cache (adaptive): "
        "100 ms less prefill per request on average.",
        "With 390.6 KiB instead of 97.7 KiB, 90% instead of 40% of the prompt tokens come from the cache (adaptive): "
        "250 ms less prefill per request on average.",
        "`adaptive` gains most with 24.4 KiB: 20.0% instead of 10.0%.",
    ]


def test_json_of_a_running_engine_has_its_points(kvbm):
    with serving(live_leader()) as port:
        code, out, _ = kvbm("plan", "--url", f"http://127.0.0.1:{port}", "--json")
    (one,) = json.loads(out)
    assert code == 0
    assert one["curve"][0] == {"policy": "lru", "capacity_bytes": 25_000, "hit_rate": 0.1}
    assert len(one["curve"]) == 6
    assert one["hit_rate"] == 0.4
    assert one["prefill_tokens_per_s"] == 2000


def test_an_engine_that_measures_nothing_is_named_with_the_key(kvbm):
    with serving(FakeLeader()) as port:
        code, out, err = kvbm("plan", "--url", f"127.0.0.1:{port}")
    assert (code, out) == (1, "")
    assert "no engine has measured the hit rates of other capacities" in err
    assert "`metrics.capacities: true`" in err


def test_a_page_shows_the_curves_of_an_engine_and_of_a_trace(kvbm, tmp_path):
    live, trace = tmp_path / "live.html", tmp_path / "trace.html"
    with serving(live_leader()) as port:
        assert kvbm("plan", "--url", f"http://127.0.0.1:{port}", "--html", live)[0] == 0
    assert kvbm("plan", "--trace", HEAD, "--capacity-blocks", "600,9821", "--html", trace)[0] == 0
    for path, name, rate in ((live, "97.7 KiB", "40.0%"), (trace, "9,821 blocks", "13.5%")):
        page = path.read_text()
        assert page.count("<path ") == 2
        assert f"<title>adaptive, {name}: {rate}</title>" in page
        assert "<script" not in page
        assert "of the prompt tokens come from the cache" in page
    code, _, err = kvbm("plan", "--trace", HEAD, "--capacity-blocks", "600", "--html", tmp_path / "none" / "page.html")
    assert code == 1
    assert "no such file or directory" in err


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
