"""Translates the metrics of an engine and its KV cache into one set of names, and splits prompt tokens by their tier.

A counter is a total since the engine started, a gauge is its state now. A name that the page lacks is left out: unknown
is never 0. engine_metrics.json has the names. Every metric name there and here was read from a running engine, or from
the source of the released package that exports it: vLLM 0.32, SGLang 0.5.23, LMCache 0.5.6.
docs/reference/server-metrics.md has the table.

`SampleLine` is one line of server-metrics.jsonl. Its top-level keys are for readers of the file. `counters` has every
total that a page had; only the totals are exact enough for differences, so the summary is computed from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvbm.metrics import COUNTERS as KVBM_METRICS
from kvbm_cli.bench.result.results import TIERS
from kvbm_cli.system.metrics_page import MetricsPage

KVBM_STATES = ("kvbm_disabled", "kvbm_disk_off", "kvbm_shared_off")  # 0 or 1
KVBM_COUNTERS = tuple(name for name in KVBM_METRICS if name not in KVBM_STATES)
KVBM_BLOCKS = {"g2_blocks": "kvbm_host_blocks", "g3_blocks": "kvbm_disk_blocks"}
CONFIG = "vllm:cache_config_info"
STARTED = ("vllm:prompt_tokens_created", "process_start_time_seconds")
WRITE_AMPLIFICATION = "kvbm_disk_write_amplification"
KV_USAGE = ("vllm:kv_cache_usage_perc", "sglang:token_usage")
MOVES = {"onboard": "g2_to_g1", "offload": "g1_to_g2"}
QUANTITIES = ("bytes", "blocks", "seconds")
_SIZE = re.compile("[0-9]{1,18}")
_LABEL = re.compile(r'(\w+)="(\w+)"')
OWN_PROMPTS, OWN_HITS = "sglang:prompt_tokens", "sglang:cached_tokens"  # kvbm knows no requests of SGLang
SGLANG_SIZES = {"block_size": "sglang:page_size", "g1_tokens": "sglang:max_total_num_tokens"}


@dataclass(frozen=True, slots=True)
class MetricSource:
    """One series, or the sum of the series with these labels."""

    metric: str
    labels: tuple[tuple[str, str], ...] = ()

    def total(self, page: MetricsPage) -> float | None:
        values = page.values(self.metric, **dict(self.labels))
        return sum(values) if values else None


def _sources(selectors: Sequence[str]) -> tuple[MetricSource, ...]:
    """Selectors are written as in Prometheus. The first whose series the page has counts."""
    found = (selector.partition("{") for selector in selectors)
    return tuple(MetricSource(metric, tuple(_LABEL.findall(labels))) for metric, _, labels in found)


_SELECTORS: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("engine_metrics.json").read_text())
COUNTERS, GAUGES = (
    MappingProxyType({name: _sources(selectors) for name, selectors in _SELECTORS[kind].items()})
    for kind in ("counters", "gauges")
)

NAMES = frozenset(
    [source.metric for sources in (*COUNTERS.values(), *GAUGES.values()) for source in sources]
    + [*KVBM_METRICS, *KVBM_BLOCKS.values(), *KV_USAGE, *SGLANG_SIZES.values(), *STARTED, CONFIG, WRITE_AMPLIFICATION]
)


def read_counters(page: MetricsPage) -> dict[str, float]:
    """Return the counters of the page by the names of COUNTERS, and every kvbm_* counter by its own name."""
    found = {name: _first(sources, page) for name, sources in COUNTERS.items()}
    found |= {name: MetricSource(name).total(page) for name in KVBM_COUNTERS}
    return {name: value for name, value in found.items() if value is not None}


def read_gauges(page: MetricsPage) -> dict[str, float]:
    """Return `running`, `waiting`, `kv_usage` (0 to 1, the mean of data-parallel engines) and the states of kvbm."""
    found = {name: _first(sources, page) for name, sources in GAUGES.items()}
    for name in KV_USAGE:
        if usage := page.values(name):
            found["kv_usage"] = sum(usage) / len(usage)
    for name in (*KVBM_STATES, WRITE_AMPLIFICATION):
        found[name] = max(page.values(name), default=None)
    return {name: value for name, value in found.items() if value is not None}


def read_facts(page: MetricsPage) -> dict[str, int]:
    """Return what does not change while the engine runs: block size in tokens, blocks and tokens of every tier."""
    facts: dict[str, int] = {}
    for name, metric in SGLANG_SIZES.items():
        if values := page.values(metric):
            facts[name] = round(max(values))
    if "g1_tokens" in facts and facts.get("block_size"):
        facts["g1_blocks"] = facts["g1_tokens"] // facts["block_size"]
    facts |= _vllm_sizes(page.labels_of(CONFIG))
    for name, metric in KVBM_BLOCKS.items():
        if values := page.values(metric):
            facts[name] = round(sum(values))
    return facts


def started_s(page: MetricsPage) -> float | None:
    """Return a time that is different after a restart of the engine, in seconds since 1970."""
    return next((min(values) for name in STARTED if (values := page.values(name))), None)


def _first(sources: tuple[MetricSource, ...], page: MetricsPage) -> float | None:
    return next((total for source in sources if (total := source.total(page)) is not None), None)


def _vllm_sizes(engines: list[dict[str, str]]) -> dict[str, int]:
    """Sum up data-parallel engines. vLLM reports `None` as text until the blocks are allocated."""
    blocks, sizes, tokens = (
        [int(text) for labels in engines if _SIZE.fullmatch(text := labels.get(name, ""))]
        for name in ("num_gpu_blocks", "block_size", "kv_cache_size_tokens")
    )
    facts = {"block_size": sizes[0]} if sizes else {}
    if blocks:
        facts["g1_blocks"] = sum(blocks)
    if tokens or (blocks and sizes):
        facts["g1_tokens"] = sum(tokens) or sum(blocks) * sizes[0]
    return facts


def prompt_tokens_by_tier(counters: Mapping[str, float]) -> dict[str, int | None] | None:
    """Return the tokens of g1, g2, g3, g4 and computed; None if the engine reports no sources.

    g3 and g4 are None if the engine reports only that tokens were loaded, but not from where: g2 then has all of them.
    """
    if "external_tokens" in counters:
        return _from_external(counters)
    if "device_hit_tokens" in counters and "prompt_tokens" in counters:  # SGLang: by tier, without the computed tokens
        found = [round(counters.get(name, 0)) for name in ("device_hit_tokens", "host_hit_tokens", "disk_hit_tokens")]
        return dict(zip(TIERS, (*found, 0, max(0, round(counters["prompt_tokens"]) - sum(found))), strict=True))
    return None


def _from_external(counters: Mapping[str, float]) -> dict[str, int | None]:
    """vLLM and the embedded engine count each prompt token as found in G1, as loaded, or as computed."""
    external = round(counters["external_tokens"])
    disk = _disk_tokens(counters, external)
    g3 = None if disk is None else min(disk, external)
    g4 = None if g3 is None else min(_shared_tokens(counters, external), external - g3)
    g1, computed = (round(counters.get(name, 0)) for name in ("device_hit_tokens", "computed_tokens"))
    return {"g1": g1, "g2": external - (g3 or 0) - (g4 or 0), "g3": g3, "g4": g4, "computed": computed}


def _disk_tokens(counters: Mapping[str, float], external: int) -> int | None:
    """From kvbm's blocks if there are any, otherwise from vLLM's sources: these count a load that then fails, too."""
    if external == 0:
        return 0
    if loaded_blocks := counters.get("kvbm_onboard_blocks_h2d"):
        return round(external * counters.get("kvbm_onboard_blocks_d2d", 0) / loaded_blocks)
    if "disk_hit_tokens" in counters and not counters.get("other_hit_tokens"):
        return round(counters["disk_hit_tokens"])
    return None


def _shared_tokens(counters: Mapping[str, float], external: int) -> int:
    """Only kvbm's blocks tell the shared tier apart."""
    loaded_blocks = counters.get("kvbm_onboard_blocks_h2d")
    return round(external * counters.get("kvbm_onboard_blocks_o2d", 0) / loaded_blocks) if loaded_blocks else 0


@dataclass(frozen=True, slots=True)
class SampleLine:
    """`error` says which page is missing, and why. The readers return `counters`, `gauges` and `facts`."""

    t_ms: float
    took_ms: float
    error: str | None = None
    started_s: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, int] = field(default_factory=dict)
    process: Mapping[str, float | None] = field(default_factory=dict)
    gpu: Sequence[Mapping[str, float | int | None]] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "t_ms": round(self.t_ms, 3),
            "took_ms": round(self.took_ms, 3),
            **({} if self.error is None else {"error": self.error}),
            "prompt_tokens": prompt_tokens_by_tier(self.counters),
            **{name: self._move(pair) for name, pair in MOVES.items()},
            "disk": {name: self.process.get(name) for name in ("read_bytes", "written_bytes")},
            "evictions": self.counters.get("evictions"),
            **{name: self.gauges.get(name) for name in ("running", "waiting", "kv_usage")},
            **{name: self.process.get(name) for name in ("rss_bytes", "shared_bytes", "cpu_s")},
            "gpu": list(self.gpu),
            "started_s": self.started_s,
            "counters": dict(self.counters),
            "states": {name: value for name, value in self.gauges.items() if name.startswith("kvbm_")},
            "facts": dict(self.facts),
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> SampleLine:
        """Raise KeyError, TypeError or AttributeError if the line is not one of a sampler."""
        gauges = {name: line[name] for name in ("running", "waiting", "kv_usage") if line[name] is not None}
        return cls(
            t_ms=float(line["t_ms"]),
            took_ms=float(line["took_ms"]),
            error=line.get("error"),
            started_s=line["started_s"],
            counters=dict(line["counters"]),
            gauges={**gauges, **line["states"]},
            facts=dict(line["facts"]),
            process={**line["disk"], **{name: line[name] for name in ("rss_bytes", "shared_bytes", "cpu_s")}},
            gpu=tuple(line["gpu"]),
        )

    def _move(self, pair: str) -> dict[str, float | None]:
        return {quantity: self.counters.get(f"{pair}_{quantity}") for quantity in QUANTITIES}
