"""Variables of a vLLM that is started by its own command line: a port for metrics, and mistakes before it starts."""

from __future__ import annotations

import socket
from random import Random

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from traffic import tokens
from vllm_server import BLOCK_TOKENS, CONNECTOR, VllmServer, host_blocks

from kvbm.engines.make_model import materialise
from kvbm.errors import EnvironmentProblem, ProfileError
from kvbm.metrics import COUNTERS
from kvbm_cli.engine.process import choose_port

PROMPT = tokens(Random(1), 3 * BLOCK_TOKENS + 10)


def scrape(url: str) -> dict[str, float]:
    text = httpx.get(url, trust_env=False).raise_for_status().text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }


def labelled(url: str, name: str) -> list[tuple[dict[str, str], float]]:
    text = httpx.get(url, trust_env=False).raise_for_status().text
    families = text_string_to_metric_families(text)
    return [(one.labels, one.value) for family in families for one in family.samples if one.name == name]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_series_at_a_port_of_their_own_are_those_of_vllm_itself(tmp_path):
    port = choose_port("127.0.0.1", 0)
    environment = host_blocks(60) | {
        "DYN_KVBM_METRICS": "1",
        "DYN_KVBM_METRICS_PORT": str(port),
        "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS": "1",
        "DYN_KVBM_ENABLE_RECORD": "true",
        "DYN_KVBM_LEADER_ZMQ_HOST": "not read",
        "HOME": str(tmp_path),
    }
    with VllmServer(materialise("vllm-25m"), blocks=40, connector=CONNECTOR, environment=environment) as server:
        server.ask(PROMPT)
        server.wait_until("offload", lambda metrics: metrics["kvbm_offload_blocks_d2h"] >= 3)
        assert server.reset_prefix_cache(external=False)
        assert server.ask(PROMPT).cached == 3 * BLOCK_TOKENS
        server.wait_until("onboard", lambda metrics: metrics["kvbm_onboard_blocks_h2d"] >= 3)
        own, vllms = scrape(f"http://127.0.0.1:{port}/metrics"), server.metrics()
        assert set(COUNTERS) <= set(own)
        assert {name: vllms[name] for name in COUNTERS} == {name: own[name] for name in COUNTERS}
        assert own["kvbm_host_cache_hit_rate"] > 0
        for url in (f"http://127.0.0.1:{port}/metrics", f"{server.url}/metrics"):
            sources = {one["source"]: value for one, value in labelled(url, "kvbm_prompt_tokens_total")}
            computed = 2 * len(PROMPT) - 3 * BLOCK_TOKENS
            assert sources == {"device": 0, "host": 3 * BLOCK_TOKENS, "computed": computed}
            ((info, _),) = labelled(url, "kvbm_info")
            assert (info["engine"], info["engine_name"], info["block_tokens"]) == ("0", "vllm", str(BLOCK_TOKENS))
            assert all(value > 0 for _, value in labelled(url, "kvbm_startup_seconds"))
            assert {one["phase"] for one, _ in labelled(url, "kvbm_startup_seconds")} == {
                "memory",
                "map",
                "tiers",
                "blocks",
            }
            assert sum(value for _, value in labelled(url, "kvbm_saved_prefill_seconds_total")) >= 0
        assert "`DYN_KVBM_LEADER_ZMQ_HOST` has no effect" in server.log()
        server.wait_until("a line of the log", lambda metrics: "cache hit rates of the last" in server.log())
    (recording,) = (tmp_path / ".local/state/kvbm").glob("records-*.jsonl")
    assert '"call":"onboard"' in recording.read_text()


def test_a_mistake_is_refused_before_any_process_of_an_engine_starts(monkeypatch):
    from kvbm.engines.vllm.connector import DynamoConnector

    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "100GB")
    with pytest.raises(ProfileError) as caught:
        DynamoConnector.requires_piecewise_for_cudagraph({})
    assert "`DYN_KVBM_CPU_CACHE_GB` must be a number of GB" in caught.value.message
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "1")
    assert DynamoConnector.requires_piecewise_for_cudagraph({}) is False


def test_vllm_asks_that_of_an_engine_with_cuda_graphs(monkeypatch):
    """In the process that answers requests, when its configuration is made."""
    import inspect

    from vllm.config import VllmConfig

    assert "requires_piecewise_for_cudagraph" in inspect.getsource(VllmConfig.__post_init__)


def test_a_taken_port_stops_the_side_that_decides(monkeypatch):
    from kvbm.config.schema import ConnectorConfig
    from kvbm.engines.vllm.engine_facts import VllmFacts
    from kvbm.engines.vllm.scheduler_side import SchedulerSide

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        contents = {"tiers": {"host": {"blocks": 1}}, "metrics": {"serve": True, "port": port}}
        config, facts = ConnectorConfig.model_validate(contents), VllmFacts(1, hash_bytes=32)
        with pytest.raises(EnvironmentProblem, match=f"port {port} for metrics"):
            SchedulerSide(config, (), facts, lambda: ({}, ""))
