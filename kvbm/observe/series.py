"""Series: what Prometheus shows of the block manager in addition to NVIDIA's names (kvbm/metrics.py).

They follow Prometheus' conventions: counters end in `_total`, units are seconds and bytes, and labels tell tiers,
reasons and engines apart. Each has the label `engine`, the number of an engine in a data-parallel server. A sample
exists from the start for each tier that an engine has, so that `rate()` sees the first increase.

A new counter is a field of `Counters` in `kvbm/metrics.py`, and has a row in `series.json` only if it is one of several
with different labels. The leader's thread writes all numbers, into `Counters`. A collector only reads, in any thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvbm.metrics import MATCH_BOUNDS_S, TRANSFER_BOUNDS_S, Counters, Facts, TierBlocks
from kvbm.observe.decision_trace import kvbm_version
from kvbm.types import Tier

if TYPE_CHECKING:
    from prometheus_client.core import Metric

NAMES = {Tier.HOST: "host", Tier.DISK: "disk", Tier.SHARED: "object"}
ENGINE = "engine"
FACTS = tuple(one.name for one in fields(Facts))


@dataclass(frozen=True, slots=True)
class Family:
    """A metric. Of a counter, `rows` has the key of a total for each tuple of label values. `in_blocks`: that counts
    blocks, and the series bytes."""

    about: str
    labels: Sequence[str]
    rows: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    in_blocks: Sequence[str] = ()


def _families(kind: str) -> dict[str, Family]:
    """Read series.json. A row there has the values of the labels, and then the key of the total."""
    families: dict[str, Any] = json.loads(Path(__file__).with_name("series.json").read_bytes())[kind]
    return {
        name: Family(**{**family, "rows": {tuple(values): total for *values, total in family.get("rows", ())}})
        for name, family in families.items()
    }


COUNTED, GAUGES, HISTOGRAMS = map(_families, ("counters", "gauges", "histograms"))


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The state of one engine, in values that any process can read. `durations` are the counts per
    bucket and then the sum, by pair of tiers, and of `match`; `queues` are (blocks, seconds)."""

    totals: Mapping[str, float]
    blocks: TierBlocks
    queues: Mapping[str, Sequence[float]]
    durations: Mapping[str, Sequence[float]]
    facts: Facts
    hit_rates_at: Mapping[tuple[str, float], float] = field(default_factory=dict)

    @classmethod
    def of(cls, leader: Reporting) -> EngineReport:
        totals, rates_at = leader.counters.totals(), leader.counters.hit_rates_at
        return cls(totals, leader.blocks(), leader.queues(), _durations(leader), leader.facts, rates_at)

    @staticmethod
    def data_of(leader: Reporting) -> dict[str, Any]:
        """Return all but the totals and the blocks, as values that can be sent to another process: up to once per step
        of an engine."""
        facts = leader.facts
        known = {name: getattr(facts, name) for name in FACTS}
        rates = [(*key, rate) for key, rate in leader.counters.hit_rates_at.items()]
        return {"queues": leader.queues(), "durations": _durations(leader), "facts": known, "hit_rates_at": rates}

    @classmethod
    def from_data(cls, totals: Mapping[str, float], blocks: TierBlocks, data: Mapping[str, Any]) -> EngineReport:
        rates = {(eviction, size): rate for eviction, size, rate in data["hit_rates_at"]}
        return cls(totals, blocks, data["queues"], data["durations"], Facts(**data["facts"]), rates)

    @property
    def tiers(self) -> set[str]:
        """The tiers that the engine has, by name."""
        lower = {NAMES[Tier.SHARED]} if self.facts.has_shared else set[str]()
        return {"device", *(NAMES[tier] for tier in self.blocks), *lower}


class Reporting(Protocol):
    """What a leader, guarded or not, offers to a collector."""

    @property
    def counters(self) -> Counters: ...
    @property
    def facts(self) -> Facts: ...
    def blocks(self) -> TierBlocks: ...
    def queues(self) -> Mapping[str, Sequence[float]]: ...


def _durations(leader: Reporting) -> dict[str, Sequence[float]]:
    return {name: (*one.counts, one.sum_s) for name, one in leader.counters.durations.items()}


class SeriesCollector:
    """A prometheus_client collector of the engines that `reports` returns, by their number."""

    def __init__(self, reports: Callable[[], Mapping[int, EngineReport]]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        reports = {str(engine): report for engine, report in self._reports().items()}
        for name, family in COUNTED.items():
            yield _counter(name, family, reports)
        yield from _histograms(reports)
        yield from _gauges(reports)


def _counter(name: str, family: Family, reports: Mapping[str, EngineReport]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    metric = CounterMetricFamily(name, family.about, labels=[*family.labels, ENGINE])
    for engine, report in reports.items():
        absent = set(NAMES.values()) - report.tiers
        for values, attribute in family.rows.items():
            if absent.isdisjoint(values):
                each = report.facts.block_bytes if attribute in family.in_blocks else 1
                metric.add_metric([*values, engine], report.totals[attribute] * each)
    return metric


def _histograms(reports: Mapping[str, EngineReport]) -> Iterator[Metric]:
    from prometheus_client.core import HistogramMetricFamily

    found = {
        name: HistogramMetricFamily(name, family.about, labels=[*family.labels, ENGINE])
        for name, family in HISTOGRAMS.items()
    }
    for engine, report in reports.items():
        for name, (*counts, sum_s) in report.durations.items():
            if name == "match":
                found["kvbm_match_seconds"].add_metric([engine], _cumulated(MATCH_BOUNDS_S, counts), sum_s)
            elif report.tiers.issuperset(pair := name.split("-")):
                buckets = _cumulated(TRANSFER_BOUNDS_S, counts)
                found["kvbm_transfer_seconds"].add_metric([*pair, engine], buckets, sum_s)
    yield from found.values()


def _cumulated(bounds_s: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    total, buckets = 0.0, list[tuple[str, float]]()
    for bound, count in zip((*map(str, bounds_s), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


def _gauges(reports: Mapping[str, EngineReport]) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    found = {
        name: GaugeMetricFamily(name, family.about, labels=[*family.labels, ENGINE]) for name, family in GAUGES.items()
    }
    for engine, report in reports.items():
        for tier, states in report.blocks.items():
            total = sum(states.values())
            used_bytes = (total - states["free"]) * report.facts.block_bytes
            found["kvbm_tier_used_bytes"].add_metric([NAMES[tier], engine], used_bytes)
            found["kvbm_tier_capacity_bytes"].add_metric([NAMES[tier], engine], total * report.facts.block_bytes)
        for queue, (blocks, seconds) in report.queues.items():
            found["kvbm_queue_blocks"].add_metric([queue, engine], blocks)
            found["kvbm_queue_oldest_seconds"].add_metric([queue, engine], seconds)
        for phase, seconds in report.facts.startup_s.items():
            found["kvbm_startup_seconds"].add_metric([phase, engine], seconds)
        for (eviction, size), rate in report.hit_rates_at.items():
            found["kvbm_hit_rate_at"].add_metric([f"{size:g}", eviction, engine], rate)
        known = {"version": kvbm_version(), **report.facts.info}
        values = [known.get(name, "") for name in GAUGES["kvbm_info"].labels]
        found["kvbm_info"].add_metric([*values, engine], 1)
    yield from found.values()
