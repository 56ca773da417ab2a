"""Engine metrics for Prometheus, under the names that vLLM exports, so that vLLM's dashboards and tools work.

The event loop takes the times when an output arrives. Each scrape reads the engine's own counters from
`Engine.stats()`. A connector adds its own collectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvbm.engines.embedded.http.openai_responses import Usage
from kvbm.observe.shared_page import SharedPage

if TYPE_CHECKING:
    from kvbm.engines.embedded.engine.engine import EngineStats
    from kvbm.engines.embedded.engine.request import RequestOutput

LABELS = ("model_name", "engine")
LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)


class EngineMetrics:
    """Collects latencies and token counts, and returns all metrics for one scrape."""

    def __init__(
        self,
        model_name: str,
        *,
        stats: Callable[[], EngineStats],
        cache_config: dict[str, str],
        connector: Iterable[Collector] = (),
    ) -> None:
        self.page = SharedPage(self.exposition).get
        self._registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self.first_token = self._histogram("time_to_first_token_seconds", "from arrival to the first token", LATENCY_S)
        self.next_token = self._histogram("inter_token_latency_seconds", "from one output to the next", LATENCY_S)
        self._end_to_end = self._histogram("e2e_request_latency_seconds", "from arrival to the last token", LATENCY_S)
        self._queue = self._histogram(
            "request_queue_time_seconds", "from arrival to the first forward pass, including KV loads", LATENCY_S
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "from the first forward pass to the first token", LATENCY_S
        )
        self._prompt_size = self._histogram("request_prompt_tokens", "prompt tokens of a request", TOKENS)
        self._output_size = self._histogram("request_generation_tokens", "generated tokens of a request", TOKENS)
        self._prompt = self._counter("prompt_tokens", "prompt tokens of finished requests")
        self._generated = self._counter("generation_tokens", "generated tokens of finished requests")
        self._sources = self._counters_by("source", "prompt_tokens_by_source", "prompt tokens by source of their KV")
        self._ended = self._counters_by("finished_reason", "request_success", "finished requests by reason")
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
            self._sources.labels(*self._labels, source)
        self._registry.register(_StatsCollector(stats, self._labels, cache_config))
        for collector in connector:
            self._registry.register(collector)

    def request_ended(self, output: RequestOutput, *, seconds: float) -> None:
        """Count a request's last output. Phases that the request did not reach are not counted."""
        assert output.finish_reason is not None, f"not the last output of {output.request_id}"
        self._ended.labels(*self._labels, output.finish_reason.value).inc()
        self._end_to_end.observe(seconds)
        if output.queue_time_s is not None:
            self._queue.observe(output.queue_time_s)
        if output.prefill_time_s is not None:
            self._prefill.observe(output.prefill_time_s)
            self._count_tokens(Usage.of(output, completion_tokens=output.num_output_tokens))

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def _count_tokens(self, usage: Usage) -> None:
        self._sources.labels(*self._labels, "local_cache_hit").inc(usage.device_tokens)
        self._sources.labels(*self._labels, "external_kv_transfer").inc(usage.external_tokens)
        self._sources.labels(*self._labels, "local_compute").inc(usage.computed_tokens)
        self._prompt.inc(usage.prompt_tokens)
        self._generated.inc(usage.completion_tokens)
        self._prompt_size.observe(usage.prompt_tokens)
        self._output_size.observe(usage.completion_tokens)

    def _counter(self, name: str, description: str) -> Counter:
        return Counter(f"vllm:{name}", description, LABELS, registry=self._registry).labels(*self._labels)

    def _counters_by(self, label: str, name: str, description: str) -> Counter:
        return Counter(f"vllm:{name}", description, (*LABELS, label), registry=self._registry)

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", description, LABELS, buckets=buckets, registry=self._registry).labels(
            *self._labels
        )


class _StatsCollector(Collector):
    """Collector of `Engine.stats()`."""

    def __init__(self, stats: Callable[[], EngineStats], labels: tuple[str, str], cache_config: dict[str, str]) -> None:
        self._stats = stats
        self._labels = labels
        self._cache_config = cache_config

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        counters = stats.counters
        for name, description, value in (
            ("num_requests_running", "requests in the batch", stats.num_requests_running),
            ("num_requests_waiting", "requests waiting to be scheduled or for a load", stats.num_requests_waiting),
            ("kv_cache_usage_perc", "fraction of G1 blocks in use by requests, 0 to 1", stats.kv_cache_usage),
        ):
            yield self._add(GaugeMetricFamily(f"vllm:{name}", description, labels=LABELS), value)
        for name, description, count in (
            ("num_preemptions", "preemptions: a request lost its blocks to an older one", counters.preemptions),
            ("prefix_cache_queries", "tokens looked up in G1", counters.prefix_cache_queries),
            ("prefix_cache_hits", "tokens found in G1", counters.prefix_cache_hits),
            ("external_prefix_cache_queries", "tokens looked up in the connector", counters.external_cache_queries),
            ("external_prefix_cache_hits", "tokens found by the connector", counters.external_cache_hits),
        ):
            yield self._add(CounterMetricFamily(f"vllm:{name}", description, labels=LABELS), count)
        yield self._cache_config_info()

    def _add(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric(self._labels, value)
        return family

    def _cache_config_info(self) -> Metric:
        names = sorted(self._cache_config)
        family = GaugeMetricFamily("vllm:cache_config_info", "configuration of the KV cache", labels=["engine", *names])
        family.add_metric([self._labels[1], *(self._cache_config[name] for name in names)], 1)
        return family
