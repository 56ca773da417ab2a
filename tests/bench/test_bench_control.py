from __future__ import annotations

import pytest
from mock_engine import MockEngine, Options

from kvbm.errors import EngineError
from kvbm_cli.bench import control
from kvbm_cli.bench.control import Control, MetricsDelta, ScrapedMetrics

BEFORE = """
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{model_name="m",source="local_compute"} 100
vllm:prompt_tokens_by_source_total{model_name="m",source="local_cache_hit"} 10
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{le="0.1"} 1
vllm:request_queue_time_seconds_bucket{le="+Inf"} 2
vllm:request_queue_time_seconds_sum 0.5
vllm:request_queue_time_seconds_count 2
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="416"} 1.0
kvbm_offload_blocks_d2h 5
kvbm_host_blocks{state="free"} 7
kvbm_host_cache_hit_rate 0.5
"""
AFTER = BEFORE.replace(" 100\n", " 400\n").replace("sum 0.5", "sum 0.8").replace("count 2", "count 5")
AFTER = AFTER.replace("d2h 5", "d2h 25").replace("7\n", "9\n") + (
    'vllm:prompt_tokens_by_source_total{model_name="m",source="external_kv_transfer"} 48\n'
)


def test_counters_are_read_as_changes():
    delta = MetricsDelta(ScrapedMetrics.parse(BEFORE), ScrapedMetrics.parse(AFTER))
    assert delta.prompt_tokens_by_source() == {"g1": 0, "g2": 48, "computed": 300}
    assert delta.queue_wait_ms() == pytest.approx(100.0)
    assert delta.kvbm_counters() == {"kvbm_offload_blocks_d2h": 20.0}
    assert delta.after.labels_of("vllm:cache_config_info") == {"block_size": "16", "num_gpu_blocks": "416"}


def test_an_engine_that_counts_nothing_says_nothing():
    delta = MetricsDelta(ScrapedMetrics.parse(""), ScrapedMetrics.parse(""))
    assert delta.prompt_tokens_by_source() is None
    assert delta.queue_wait_ms() is None
    assert delta.kvbm_counters() == {}


@pytest.mark.parametrize("is_like_vllm", [False, True])
def test_a_reset_waits_until_no_block_is_in_use(is_like_vllm):
    options = Options(resets_to_refuse=3, is_like_vllm=is_like_vllm)
    with MockEngine(options) as engine:
        client = Control(engine.base_url, "mock")
        client.reset_cache()
        assert engine.resets_to_refuse == 0
        assert client.tokenize("ab") == [97, 98]


@pytest.mark.parametrize("is_like_vllm", [False, True])
def test_a_reset_that_is_refused_for_too_long_is_an_error(monkeypatch, is_like_vllm):
    monkeypatch.setattr(control, "RESET_TIMEOUT_S", 0.1)
    with (
        MockEngine(Options(resets_to_refuse=10**6, is_like_vllm=is_like_vllm)) as engine,
        pytest.raises(EngineError, match=r"still in use 0\.1 s"),
    ):
        Control(engine.base_url, "mock").reset_cache()


def test_nobody_there_is_an_error_that_names_the_question():
    with MockEngine(Options()) as engine:
        address = engine.base_url
    with pytest.raises(EngineError, match=r"did not answer GET /metrics: .*refused"):
        Control(address, "mock").metrics()
