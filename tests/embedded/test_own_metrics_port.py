"""The series of the block manager in a running engine: on a port of their own, in its log, and as a recording."""

from __future__ import annotations

import json
import logging
import re
import urllib.request

from kvbm_engine import prompt, running
from prometheus_client.parser import text_string_to_metric_families

from kvbm.metrics import COUNTERS


def test_a_running_engine_tells_of_its_cache_in_all_three_ways(tmp_path, caplog):
    metrics = {"serve": True, "port": 0, "log_interval_s": 0.05, "record": True, "record_directory": str(tmp_path)}
    with caplog.at_level(logging.INFO), running(host_blocks=100, metrics=metrics) as engine:
        engine.ask(prompt(1, 100))
        engine.settle()
        engine.forget_g1()
        engine.ask(prompt(1, 100))
        found = re.search(r"metrics at (http://127\.0\.0\.1:\d+/metrics)", caplog.text)
        with urllib.request.urlopen(found[1], timeout=10) as answer:
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
    assert re.search(r"cache hit rates of the last 2 requests: host 50\.0% \(6/12 blocks\)", caplog.text)
    (file,) = tmp_path.iterdir()
    calls = [json.loads(line)["call"] for line in file.read_text().splitlines()]
    assert (calls[0], calls[-1]) == ("begin", "end")
    assert {"match", "onboard", "offload", "loaded", "finish"} <= set(calls)
