"""The series of the block manager in a running engine: on a port of their own, in its log, and as a recording."""

from __future__ import annotations

import json
import logging
import re
import urllib.request

from kvbm_engine import WAIT_S, prompt, running
from prometheus_client.parser import text_string_to_metric_families

from kvbm.engines.embedded.http.openai_responses import Usage
from kvbm.metrics import COUNTERS


def test_a_running_engine_tells_of_its_cache_in_all_three_ways(tmp_path, caplog):
    metrics = {"serve": True, "port": 0, "log_interval_s": 0.05, "record": True, "record_directory": str(tmp_path)}
    with caplog.at_level(logging.INFO), running(host_blocks=100, metrics=metrics) as engine:
        engine.ask(prompt(1, 100))
        engine.settle()
        engine.forget_g1()
        engine.ask(prompt(1, 100))
        found = re.search(r"metrics at (http://127\.0\.0\.1:\d+/metrics)", caplog.text)
        with urllib.request.urlopen(found[1], timeout=60) as answer:
            text = answer.read().decode()
        samples = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.labels
        }
        assert set(COUNTERS) <= set(samples)
        assert samples["kvbm_matched_tokens"] == 96
        assert samples["kvbm_host_cache_hit_rate"] == 0.5
        assert not any(name.startswith("vllm:") for name in samples)
        assert 'kvbm_transfer_bytes_total{engine="0",source="device",target="host"}' in text
        assert 'phase="memory"' in text
        assert re.search(r'kvbm_info{block_tokens="16",dtype="\w+",engine="0",engine_name="embedded"', text)
    assert re.search(r"cache hit rates of the last 2 requests: host 50\.0% \(6/12 blocks\)", caplog.text)
    (file,) = tmp_path.iterdir()
    calls = [json.loads(line)["call"] for line in file.read_text().splitlines()]
    assert (calls[0], calls[-1]) == ("begin", "end")
    assert {"match", "onboard", "offload", "loaded", "finish"} <= set(calls)


def test_prompt_tokens_by_source_are_those_of_the_usage_and_aborted_ones_are_apart():
    with running(host_blocks=100) as engine:
        usages = []
        for number in (1, 1, 2, 3, 1):
            answer = engine.ask(prompt(number, 100))
            usages.append(Usage.of(answer.last, completion_tokens=8))
            engine.settle()
            if number == 2:
                engine.forget_g1()
        endless = engine.submit(prompt(9, 50), max_tokens=400)
        assert endless.started.wait(WAIT_S)
        engine.engine.abort(endless.request_id)
        endless.wait()
        counters = engine.counters
        assert counters.prompt_device_tokens == sum(usage.device_tokens for usage in usages) > 0
        assert counters.prompt_host_tokens == sum(usage.host_tokens for usage in usages) > 0
        assert counters.prompt_computed_tokens == sum(usage.computed_tokens for usage in usages) > 0
        assert counters.prompt_aborted_tokens == 50


def test_a_load_that_fails_counts_as_computed():
    with running(host_blocks=100) as engine:
        engine.ask(prompt(1, 100))
        engine.settle()
        engine.forget_g1()
        engine.copier.next("fail")
        usage = Usage.of(engine.ask(prompt(1, 100)).last, completion_tokens=8)
        counters = engine.counters
        assert (counters.prompt_host_tokens, usage.host_tokens) == (0, 0)
        assert counters.prompt_computed_tokens == 200
        assert counters.onboard_copy_failed_blocks == 6
