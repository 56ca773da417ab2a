"""Readers on pages of real engines, and the summary of samples.

The pages in data/ were saved from a vLLM 0.32 with kvbm (profile vllm-cpu-demo with a disk tier) and from the embedded
engine (profile demo-disk) before and after requests; most buckets of histograms are removed. vllm-tiering.txt was
written by the metrics classes of vLLM 0.32 for its own offloading, which refuses to run on a CPU.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvbm.errors import UsageError
from kvbm.metrics import COUNTERS as KVBM_METRICS
from kvbm_cli.bench.metrics.engine_metrics import (
    COUNTERS,
    NAMES,
    SampleLine,
    prompt_tokens_by_tier,
    read_counters,
    read_facts,
    read_gauges,
    started_s,
)
from kvbm_cli.bench.metrics.summary import summarise, summary_of
from kvbm_cli.system.metrics_page import MetricsPage

DATA = Path(__file__).with_name("data")


def parsed(text: str) -> MetricsPage:
    return MetricsPage.parse(text, NAMES)


def sample(text: str, t_ms: float = 0.0, **fields) -> SampleLine:
    page = parsed(text)
    known = {"counters": read_counters(page), "gauges": read_gauges(page), "facts": read_facts(page)}
    return SampleLine(**{"t_ms": t_ms, "took_ms": 1.0, "started_s": started_s(page), **known, **fields})


def saved(name: str) -> str:
    return (DATA / f"{name}.txt").read_text()


def test_vllm_with_kvbm():
    summary = summary_of([sample(saved("vllm-kvbm-start")), sample(saved("vllm-kvbm-end"), 60_000)])
    assert summary.requests == 75  # 1500 tokens each
    assert summary.prompt_tokens == {"g1": 0, "g2": 21120, "g3": 12672, "g4": 0, "computed": 78708}
    assert sum(filter(None, summary.prompt_tokens.values())) == 75 * 1500
    assert summary.prompt_tokens_by_source() == {"g1": 0, "g2": 33792, "computed": 78708}
    assert summary.hit_shares == pytest.approx({"g1": 0, "g2": 21120 / 112500, "g3": 12672 / 112500, "g4": 0})
    assert summary.external_hit_share == pytest.approx(35200 / 114000)
    assert summary.transfers["g2_to_g1"] == {"blocks": 264, "bytes": 830472192, "seconds": None, "gb_per_s": None}
    assert summary.transfers["g1_to_g2"]["bytes"] == 1755316224
    assert summary.transfers["g2_to_g3"]["blocks"] == 55
    assert summary.transfers["g3_to_g2"] == {"blocks": 110, "bytes": None, "seconds": None, "gb_per_s": None}
    assert summary.evictions == 575
    assert summary.preemptions == 0
    assert summary.queue_wait_ms == pytest.approx(1e3 * 4.79949 / 75, rel=1e-4)
    assert summary.kvbm_counters["kvbm_onboard_failed_blocks"] == 11
    assert summary.kvbm_states["kvbm_disabled"] == 0
    sizes = {"block_size": 128, "g1_blocks": 34, "g1_tokens": 4352, "g2_blocks": 85, "g3_blocks": 341}
    assert summary.engine == sizes
    assert summary.caveats == ()


def test_embedded_engine():
    summary = summary_of([sample(saved("embedded-start")), sample(saved("embedded-end"), 60_000)])
    assert summary.requests == 48
    assert summary.prompt_tokens == {
        "g1": 0,
        "g2": 0,
        "g3": 39328,
        "g4": 0,
        "computed": 9824,
    }  # as the answers' `usage` said
    assert summary.transfers["g3_to_g2"]["blocks"] == 2458
    assert summary.engine["g1_tokens"] == 560 * 16
    assert summary.peaks["running"] == 0
    assert summary.queue_wait_ms == pytest.approx(13.4, rel=0.01)


def test_every_counter_of_kvbm_is_summarised():
    summary = summary_of([sample(saved("vllm-kvbm-start")), sample(saved("vllm-kvbm-end"))])
    later = {"kvbm_lost_state_tokens", *(name for name in KVBM_METRICS if "shared" in name or name[-3:] == "d2o")}
    later |= {"kvbm_disk_unnamed", "kvbm_disk_silent"}
    later |= {"kvbm_eviction_order", "kvbm_eviction_gain_percent", "kvbm_offload_declined_blocks"}
    later |= {"kvbm_disk_eviction_order", "kvbm_disk_eviction_gain_percent"}
    later |= {"kvbm_hinted_requests", "kvbm_invalid_hints", "kvbm_hints_off"}
    later |= {"kvbm_disk_eviction_order", "kvbm_disk_eviction_gain_percent"}
    later |= {"kvbm_hinted_requests", "kvbm_invalid_hints", "kvbm_hints_off"}
    later -= {"kvbm_onboard_shared_requests", "kvbm_offload_blocks_d2o"}  # which the saved pages have
    assert {*summary.kvbm_counters, *summary.kvbm_states} == {*KVBM_METRICS, "kvbm_disk_write_amplification"} - later


def test_tiers_of_vllm_itself():
    summary = summary_of([sample("vllm:prompt_tokens_total 0\n"), sample(saved("vllm-tiering"))])
    found = {pair: (move["bytes"], move["seconds"], move["gb_per_s"]) for pair, move in summary.transfers.items()}
    assert found == {
        "g2_to_g1": (4_000_000_000, 0.5, 8.0),
        "g1_to_g2": (6_000_000_000, 1.5, 4.0),
        "g3_to_g2": (2_000_000_000, 1.0, 2.0),
        "g2_to_g3": (3_000_000_000, 2.0, 1.5),
        "g4_to_g2": (None, None, None),
        "g2_to_g4": (None, None, None),
    }


def test_sglang():
    page = """\
sglang:prompt_tokens_total{model_name="m",is_streaming="True"} 1000
sglang:cached_tokens_total{model_name="m",cache_source="device"} 300
sglang:cached_tokens_total{model_name="m",cache_source="host"} 200
sglang:cached_tokens_total{model_name="m",cache_source="storage"} 100
sglang:cached_tokens_total{model_name="m",cache_source="total"} 600
sglang:num_running_reqs{model_name="m"} 2
sglang:num_queue_reqs{model_name="m"} 5
sglang:token_usage{model_name="m"} 0.25
sglang:page_size{model_name="m"} 64
sglang:max_total_num_tokens{model_name="m"} 6400
sglang:load_back_bytes_total{model_name="m"} 3e9
sglang:load_back_duration_seconds_sum{model_name="m"} 1.5
"""
    summary = summary_of([sample("sglang:prompt_tokens_total 0\n"), sample(page)])
    assert summary.prompt_tokens == {"g1": 300, "g2": 200, "g3": 100, "g4": 0, "computed": 400}
    assert (summary.peaks["running"], summary.peaks["waiting"], summary.peaks["kv_usage"]) == (2, 5, 0.25)
    assert summary.engine == {"block_size": 64, "g1_blocks": 100, "g1_tokens": 6400}
    assert summary.transfers["g2_to_g1"]["gb_per_s"] == 2.0


def test_lmcache_does_not_say_where_tokens_came_from():
    page = """\
vllm:prompt_tokens_by_source_total{source="local_cache_hit"} 10
vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 20
vllm:prompt_tokens_by_source_total{source="local_compute"} 30
vllm:prompt_tokens_cached_by_source_total{source="disk"} 0
vllm:prompt_tokens_cached_by_source_total{source="external_unspecified"} 20
lmcache:num_requested_tokens_total 50
lmcache:num_hit_tokens_total 20
lmcache:time_to_retrieve_sum 0.5
lmcache:local_cpu_evict_keys_count_total 4
"""
    summary = summary_of([sample("vllm:num_preemptions_total 0\n"), sample(page)])
    assert summary.prompt_tokens == {"g1": 10, "g2": 20, "g3": None, "g4": None, "computed": 30}
    assert summary.hit_shares == pytest.approx({"g1": 1 / 6, "g2": 1 / 3, "g3": None, "g4": None})
    assert summary.external_hit_share == pytest.approx(0.4)
    assert summary.transfers["g2_to_g1"]["seconds"] == 0.5
    assert summary.evictions == 4


BY_TIER = {"kvbm_onboard_blocks_h2d": 9.0, "kvbm_onboard_blocks_d2d": 3.0, "kvbm_onboard_blocks_o2d": 2.0}


@pytest.mark.parametrize(
    ("counters", "g2", "g3", "g4"),
    [
        ({"external_tokens": 0.0}, 0, 0, 0),
        ({"external_tokens": 90.0}, 90, None, None),
        ({"external_tokens": 90.0, "disk_hit_tokens": 30.0}, 60, 30, 0),
        ({"external_tokens": 90.0, "disk_hit_tokens": 120.0}, 0, 90, 0),  # counted at admission, before the tokens are
        ({"external_tokens": 90.0, "disk_hit_tokens": 0.0, "other_hit_tokens": 90.0}, 90, None, None),
        ({"external_tokens": 90.0, "kvbm_onboard_blocks_h2d": 9.0, "kvbm_onboard_blocks_d2d": 3.0}, 60, 30, 0),
        ({"external_tokens": 90.0, **BY_TIER}, 40, 30, 20),
    ],
)
def test_loaded_tokens_are_split_by_tier_only_if_the_tier_is_known(counters, g2, g3, g4):
    tokens = prompt_tokens_by_tier(counters)
    assert (tokens["g2"], tokens["g3"], tokens["g4"]) == (g2, g3, g4)


def test_data_parallel_engines_are_summed_up():
    page = "".join(
        f'vllm:num_requests_running{{engine="{engine}"}} 2\nvllm:kv_cache_usage_perc{{engine="{engine}"}} 0.{engine}\n'
        f'vllm:cache_config_info{{engine="{engine}",block_size="16",num_gpu_blocks="100"}} 1\n'
        for engine in (2, 4)
    )
    found = sample(page)
    assert found.gauges == pytest.approx({"running": 4, "kv_usage": 0.3})
    assert found.facts == {"block_size": 16, "g1_blocks": 200, "g1_tokens": 3200}


def test_a_restart_makes_differences_unknown():
    before, after = "vllm:request_success_total 100\n", "vllm:request_success_total 5\n"
    summary = summary_of([sample(before), sample(after, 1000), sample("vllm:request_success_total 400\n", 2000)])
    assert (summary.requests, summary.prompt_tokens, summary.kvbm_counters) == (None, None, {})
    assert summary.transfers["g2_to_g1"]["bytes"] is None
    assert summary.caveats == ("the engine was restarted during the run, so no difference of its counters is known",)


def test_a_restart_is_seen_at_the_start_time_too():
    page = "vllm:request_success_total %d\nprocess_start_time_seconds %d\n"
    assert summary_of([sample(page % (1, 100)), sample(page % (9, 200))]).requests is None
    assert summary_of([sample(page % (1, 100)), sample(page % (9, 100))]).requests == 8


def test_a_counter_that_appears_with_its_first_event_began_at_zero():
    first, last = "vllm:num_preemptions_total 1\n", "vllm:num_preemptions_total 1\nvllm:request_success_total 7\n"
    assert summary_of([sample(first), sample(last)]).requests == 7


def test_a_counter_of_a_page_that_failed_at_first_did_not_begin_at_zero():
    engine, both = "vllm:num_preemptions_total 1\n", "vllm:num_preemptions_total 1\nkvbm_evicted_blocks %d\n"
    samples = [sample(engine, error="kvbm: no answer"), sample(both % 50), sample(both % 60)]
    assert summary_of(samples).evictions == 10


def test_missing_samples_at_the_start_and_the_end_are_caveats():
    silent = {"error": "engine: refused", "counters": {}, "gauges": {}, "facts": {}}
    page = "vllm:request_success_total %d\n"
    samples = [sample(page % 1, 1000), sample(page % 2, 2000)]
    summary = summary_of([replace(samples[0], t_ms=0, **silent), *samples, replace(samples[0], t_ms=3000, **silent)])
    assert (summary.requests, summary.first_ms, summary.last_ms, summary.failed_samples) == (1, 1000, 2000, 2)
    assert summary.caveats == (
        "2 of 4 samples of server metrics failed; the first: engine: refused",
        "the server's counters before 1.0 s are not known",
        "the server's counters after 2.0 s are not known",
    )


def test_process_and_gpus():
    page = "vllm:request_success_total %d\n"
    gpu = {"index": 0, "utilisation": 0.2, "memory_bytes": 10, "energy_j": 100.0}
    process = {"cpu_s": 5.0, "rss_bytes": 1000, "shared_bytes": 400, "read_bytes": 50, "written_bytes": 0}
    later = {**process, "cpu_s": 7.5, "rss_bytes": 900, "read_bytes": 150}
    later_gpu = {**gpu, "utilisation": 0.6, "memory_bytes": 8, "energy_j": 130.0}
    samples = [sample(page % 0, process=process, gpu=[gpu]), sample(page % 500, process=later, gpu=[later_gpu])]
    summary = summary_of(samples)
    assert summary.cpu_s == 2.5
    assert (summary.peaks["rss_bytes"], summary.peaks["shared_bytes"]) == (1000, 400)
    assert summary.disk == {
        "read_bytes": 100,
        "written_bytes": 0,
        "read_bytes_per_1000_requests": 200,
        "written_bytes_per_1000_requests": 0,
    }
    mean = pytest.approx(0.4)
    assert summary.gpu == ({"index": 0, "mean_utilisation": mean, "peak_memory_bytes": 10, "energy_j": 30.0},)
    assert summary.energy_j == 30.0
    ended = summary_of([samples[0], replace(samples[1], process={**later, "cpu_s": 1.0})])
    assert ended.cpu_s is None
    assert ended.caveats == ("a process of the engine ended during the run, so its CPU time is not known",)


def test_an_engine_that_reports_nothing_is_unknown():
    summary = summary_of([sample(""), sample("", 1000)])
    assert summary.prompt_tokens is None
    assert summary.prompt_tokens_by_source() is None
    assert (summary.queue_wait_ms, summary.evictions, summary.energy_j, summary.cpu_s) == (None, None, None, None)
    assert set(summary.peaks.values()) == {None}
    assert summary.caveats == ("the server reported no metrics",)


def test_a_line_survives_the_file_and_the_summary_is_json(tmp_path):
    path = tmp_path / "server-metrics.jsonl"
    samples = [sample(saved("vllm-kvbm-start")), sample(saved("vllm-kvbm-end"), 5.0, process={"cpu_s": 1.0})]
    path.write_text("".join(json.dumps(one.to_json()) + "\n" for one in samples) + '{"t_ms": 9, "took')
    summary = summarise(path)
    assert summary == summary_of(samples)
    assert json.loads(json.dumps(summary.to_json(), allow_nan=False))["engine"]["g1_blocks"] == 34


def test_keys_of_a_line():
    line = sample(saved("vllm-kvbm-end"), 1234.5).to_json()
    assert line["t_ms"] == 1234.5
    assert line["prompt_tokens"] == {"g1": 0, "g2": 21120, "g3": 12672, "g4": 0, "computed": 78712}
    assert line["onboard"] == {"bytes": 830472192, "blocks": 264, "seconds": None}
    assert line["offload"] == {"bytes": 1755316224, "blocks": 558, "seconds": None}
    assert line["disk"] == {"read_bytes": None, "written_bytes": None}
    assert (line["evictions"], line["running"], line["waiting"], line["kv_usage"]) == (575, 0, 0, 0)
    assert (line["rss_bytes"], line["cpu_s"], line["gpu"]) == (None, None, [])
    assert "error" not in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"has no complete line"),
        (b'{"t_ms": 1', r"has no complete line"),
        (b"[]\n", r":1: not a sample of server metrics"),
        (b'{"t_ms": 1}\n', r":1: not a sample of server metrics: key '\w+' is missing"),
        (b"\xff\n", r"is not a text file"),
    ],
)
def test_a_file_that_is_no_sampler_s_is_an_error(tmp_path, content, message):
    path = tmp_path / "server-metrics.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        summarise(path)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        summarise(tmp_path / "missing")


def test_a_page_of_10_000_lines_costs_little():
    lines = [
        f'vllm:e2e_request_latency_seconds_bucket{{engine="0",le="{n}",model_name="m"}} {n}.0' for n in range(9_000)
    ]
    kvbm = [f'kvbm_evicted_blocks{{engine="{n}"}} 1.0' for n in range(1_000)]
    started = time.thread_time()
    page = parsed("\n".join([*lines, *kvbm]))
    assert time.thread_time() - started < 0.2  # 0.02 s on an idle machine
    assert read_counters(page)["evictions"] == 1_000


def test_every_counter_and_source_is_documented():
    lines = (Path(__file__).parents[2] / "docs/reference/server-metrics.md").read_text().splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.count("|") == 6 and line.startswith("| `")}
    for name, sources in COUNTERS.items():
        for source in sources:
            labels = ",".join(f'{label}="{value}"' for label, value in source.labels)
            series = f"`{source.metric}{{{labels}}}`" if labels else f"`{source.metric}`"
            assert series in rows[name], (name, source)


def test_every_key_of_a_sample_and_of_the_summary_is_documented():
    text = (Path(__file__).parents[2] / "docs/reference/server-metrics.md").read_text()
    samples = [sample(saved("embedded-start"), error="refused"), sample(saved("embedded-end"))]
    for name in (*samples[0].to_json(), *summary_of(samples).to_json()):
        assert f"`{name}`" in text, name
