"""Readers on pages of real engines, and the summary of samples.

The pages in data/ were saved from a vLLM 0.32 with kvbm (profile vllm-cpu-demo with a disk tier) and from the embedded
engine (profile demo-disk) before and after requests; most buckets of histograms are removed. vllm-tiering.txt was
written by the metrics classes of vLLM 0.32 for its own offloading, which refuses to run on a CPU. sglang.txt and
vllm-lmcache.txt have their names and made-up values.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from terminal import assert_entry

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


PARALLEL = "".join(
    f'vllm:num_requests_running{{engine="{engine}"}} 2\nvllm:kv_cache_usage_perc{{engine="{engine}"}} 0.{engine}\n'
    f'vllm:cache_config_info{{engine="{engine}",block_size="16",num_gpu_blocks="100"}} 1\n'
    for engine in (2, 4)
)
ENDED, STARTED = "vllm:request_success_total {}\n", "process_start_time_seconds {}\n"
OTHER = "vllm:num_preemptions_total 1\n"
EVICTED = OTHER + "kvbm_evicted_blocks {}\n"
SILENT = {"error": "engine: refused"}
GPU = {"index": 0, "utilisation": 0.2, "memory_bytes": 10, "energy_j": 100.0}
LATER_GPU = {**GPU, "utilisation": 0.6, "memory_bytes": 8, "energy_j": 130.0}
PROCESS = {"cpu_s": 5.0, "rss_bytes": 1000, "shared_bytes": 400, "read_bytes": 50, "written_bytes": 0}
LATER = {**PROCESS, "cpu_s": 7.5, "rss_bytes": 900, "read_bytes": 150}
BEFORE = sample(ENDED.format(0), process=PROCESS, gpu=[GPU])
SAMPLES = {
    "vLLM with kvbm": [sample(saved("vllm-kvbm-start")), sample(saved("vllm-kvbm-end"), 60_000)],
    "the embedded engine": [sample(saved("embedded-start")), sample(saved("embedded-end"), 60_000)],
    "tiers of vLLM itself": [sample("vllm:prompt_tokens_total 0\n"), sample(saved("vllm-tiering"))],
    "SGLang": [sample("sglang:prompt_tokens_total 0\n"), sample(saved("sglang"))],
    "LMCache does not say where tokens came from": [
        sample("vllm:num_preemptions_total 0\n"),
        sample(saved("vllm-lmcache")),
    ],
    "data parallel engines are summed up": [sample(PARALLEL)],
    "a restart makes differences unknown": [
        *(sample(ENDED.format(100)), sample(ENDED.format(5), 1000), sample(ENDED.format(400), 2000)),
    ],
    "a restart is seen at the start time too": [
        *(sample(ENDED.format(1) + STARTED.format(100)), sample(ENDED.format(9) + STARTED.format(200))),
    ],
    "the start time without a restart": [
        *(sample(ENDED.format(1) + STARTED.format(100)), sample(ENDED.format(9) + STARTED.format(100))),
    ],
    "a counter that appears with its first event began at zero": [sample(OTHER), sample(OTHER + ENDED.format(7))],
    "a counter of a page that failed at first did not begin at zero": [
        *(sample(OTHER, error="kvbm: no answer"), sample(EVICTED.format(50)), sample(EVICTED.format(60))),
    ],
    "missing samples at the start and the end are caveats": [
        *(sample("", 0, **SILENT), sample(ENDED.format(1), 1000)),
        *(sample(ENDED.format(2), 2000), sample("", 3000, **SILENT)),
    ],
    "the process and the GPUs": [BEFORE, sample(ENDED.format(500), process=LATER, gpu=[LATER_GPU])],
    "a process that ended": [BEFORE, sample(ENDED.format(500), process={**LATER, "cpu_s": 1.0}, gpu=[LATER_GPU])],
    "an engine that reports nothing is unknown": [sample(""), sample("", 1000)],
}


def known(value: Any) -> Any:
    """The same without what is unknown or empty."""
    if not isinstance(value, dict):
        return value
    return {key: one for key, one in ((key, known(one)) for key, one in value.items()) if one not in (None, {}, [])}


@pytest.mark.parametrize("name", SAMPLES)
def test_summary(name):
    """A line for each key that is known, and the last sample as a line of the file."""
    shown = {**summary_of(SAMPLES[name]), "last sample": SAMPLES[name][-1].to_json()}
    lines = [f"{key}: {json.dumps(value)}\n" for key, value in known(shown).items()]
    assert_entry("bench/server_metrics", name, "".join(lines), names=SAMPLES)


def test_every_counter_of_kvbm_is_summarised():
    summary = summary_of([sample(saved("vllm-kvbm-start")), sample(saved("vllm-kvbm-end"))])
    later = {"kvbm_lost_state_tokens", *(name for name in KVBM_METRICS if "shared" in name or name[-3:] == "d2o")}
    later |= {"kvbm_disk_unnamed", "kvbm_disk_silent", "kvbm_lost_spans"}
    later |= {"kvbm_eviction_order", "kvbm_eviction_gain_percent", "kvbm_offload_declined_blocks"}
    later |= {"kvbm_disk_eviction_order", "kvbm_disk_eviction_gain_percent"}
    later |= {"kvbm_hinted_requests", "kvbm_invalid_hints", "kvbm_hints_off"}
    later -= {"kvbm_onboard_shared_requests", "kvbm_offload_blocks_d2o"}  # which the saved pages have
    assert {*summary["kvbm_counters"], *summary["kvbm_states"]} == {
        *KVBM_METRICS,
        "kvbm_disk_write_amplification",
    } - later


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


def test_a_line_survives_the_file_and_the_summary_is_json(tmp_path):
    path = tmp_path / "server-metrics.jsonl"
    samples = [sample(saved("vllm-kvbm-start")), sample(saved("vllm-kvbm-end"), 5.0, process={"cpu_s": 1.0})]
    path.write_text("".join(json.dumps(one.to_json()) + "\n" for one in samples) + '{"t_ms": 9, "took')
    summary = summarise(path)
    assert summary == summary_of(samples)
    assert json.loads(json.dumps(summary, allow_nan=False))["engine"]["g1_blocks"] == 34


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"has no complete line"),
        (b'{"t_ms": 1', r"has no complete line"),
        (b"[]\n", r", line 1: must be a JSON object"),
        (b'{"t_ms": 1}\n', r":1: not a sample of server metrics: key '\w+' is missing"),
        (b"\xff\n", r", line 1: not JSON"),
    ],
)
def test_a_file_that_is_no_sampler_s_is_an_error(tmp_path, content, message):
    path = tmp_path / "server-metrics.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        summarise(path)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="has no complete line"):
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
    for name in (*samples[0].to_json(), *summary_of(samples)):
        assert f"`{name}`" in text, name
