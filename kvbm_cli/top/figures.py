"""Figures: what two readings of an engine's metrics say about the time between them.

Rates are increases per second. If a counter fell, the engine was restarted, and its counters are the increases since
then. Quantiles are estimated from the buckets of the interval, as Prometheus does. What nothing was measured for is
None, never 0.

kvbm knows no requests of SGLang: tokens by source and requests are SGLang's own counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from kvbm_cli.bench.metrics.engine_metrics import GAUGES, OWN_HITS, OWN_PROMPTS
from kvbm_cli.system.metrics_page import LARGEST, MetricsPage

SOURCES = ("device", "host", "disk", "object", "computed")
TIERS = ("host", "disk", "object")
LOADS = (("host", "device"), ("disk", "host"), ("object", "host"))
OFFLOADS = (("device", "host"), ("host", "disk"), ("host", "object"))
OFF = {"kvbm_disabled": "cache", "kvbm_disk_off": "disk tier", "kvbm_shared_off": "shared tier"}
COUNTERS = (
    *("kvbm_prompt_tokens", "kvbm_saved_prefill_seconds", "kvbm_matches", "kvbm_transfer_bytes"),
    *("kvbm_transfer_failures", "kvbm_transfer_seconds_bucket", OWN_PROMPTS, OWN_HITS),
)
OWN_SOURCES = {"device": "device", "host": "host", "disk": "storage"}  # with `object` too, if there is a shared tier
REQUESTS = {name: [source.metric for source in sources] for name, sources in GAUGES.items()}
NAMES = frozenset(
    [
        *(*COUNTERS, "kvbm_tier_used_bytes", "kvbm_tier_capacity_bytes"),
        *("kvbm_queue_blocks", "kvbm_queue_oldest_seconds", "kvbm_hit_rate_at", "kvbm_info", *OFF),
        *(name for names in REQUESTS.values() for name in names),
    ]
)
ENGINE = "engine"
MOST_ENGINES = 1000  # of a page, and series of a name that belong to each of them
NOTHING = MetricsPage({})


@dataclass(frozen=True, slots=True)
class Reading:
    """A page of metrics of one engine, read at `at_s` of the monotonic clock."""

    at_s: float
    page: MetricsPage


@dataclass(frozen=True, slots=True)
class TransferFigures:
    """`p50_s` and `p99_s` are None if no transfer ended in the interval."""

    bytes_per_s: float
    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one engine, or the sum over several. `tokens_per_s` by source, `matches_per_s` by result, `tiers` as (used,
    capacity) in bytes, `queues` as (blocks, age of the oldest transfer in seconds)."""

    interval_s: float
    tokens_per_s: dict[str, float]
    saved_s_per_s: float
    matches_per_s: dict[str, float]
    failed_blocks_per_s: float
    transfers: dict[tuple[str, str], TransferFigures]
    tiers: dict[str, tuple[float, float]]
    queues: dict[str, tuple[float, float]]
    requests: dict[str, float]
    off: tuple[str, ...] = ()
    info: dict[str, str] = field(default_factory=dict)

    @property
    def prompt_tokens_per_s(self) -> float:
        return sum(self.tokens_per_s.values())

    @property
    def hit_rate(self) -> float | None:
        """The share of prompt tokens that were not computed; None without completed requests."""
        total = self.prompt_tokens_per_s
        return (total - self.tokens_per_s.get("computed", 0.0)) / total if total else None

    def bandwidth(self, pairs: Iterable[tuple[str, str]]) -> float:
        return sum(self.transfers[pair].bytes_per_s for pair in pairs if pair in self.transfers)

    @property
    def queued_blocks(self) -> float:
        return sum(blocks for blocks, _ in self.queues.values())

    def as_data(self) -> dict[str, Any]:
        return {
            "interval_s": self.interval_s,
            "prompt_tokens_per_s": self.tokens_per_s,
            "hit_rate": self.hit_rate,
            "saved_prefill_s_per_s": self.saved_s_per_s,
            "matches_per_s": self.matches_per_s,
            "failed_blocks_per_s": self.failed_blocks_per_s,
            "transfers": [
                {"source": source, "target": target, **asdict(one)} for (source, target), one in self.transfers.items()
            ],
            "tiers": {name: {"used_bytes": used, "capacity_bytes": all_} for name, (used, all_) in self.tiers.items()},
            "queues": {name: {"blocks": blocks, "oldest_s": age} for name, (blocks, age) in self.queues.items()},
            "requests": self.requests,
            "off": list(self.off),
            "info": self.info,
        }


def engines_of(page: MetricsPage) -> dict[str, MetricsPage]:
    """Split a page by its engines. Series without that label belong to each of them."""
    names = islice(dict.fromkeys(labels.get(ENGINE, "") for labels in page.labels_of("kvbm_info")), MOST_ENGINES)
    found = {engine: MetricsPage({}) for engine in names}
    for name, series in page.series.items():
        shared = [one for one in series if ENGINE not in one[0]][:MOST_ENGINES]
        for of_one in found.values():
            of_one.series[name] = list(shared)
        for labels, value in series:
            if (engine := labels.get(ENGINE)) in found:
                found[engine].series[name].append((labels, value))
    return found


def figures(pairs: Sequence[tuple[Reading, Reading]]) -> Figures:
    """Return the sum over engines, each read twice."""
    pairs = [(Reading(old.at_s, NOTHING) if _has_restarted(old.page, new.page) else old, new) for old, new in pairs]
    transfers = {}
    for source, target in (*LOADS, *OFFLOADS):
        moved = _rate(pairs, "kvbm_transfer_bytes", source=source, target=target)
        if moved is not None:
            buckets = _buckets(pairs, source, target)
            transfers[source, target] = TransferFigures(moved, _quantile(0.5, buckets), _quantile(0.99, buckets))
    after = [new.page for _, new in pairs]
    return Figures(
        interval_s=max((new.at_s - old.at_s for old, new in pairs), default=0.0),
        tokens_per_s=_tokens(pairs),
        saved_s_per_s=_rate(pairs, "kvbm_saved_prefill_seconds") or 0.0,
        matches_per_s=_known({name: _rate(pairs, "kvbm_matches", result=name) for name in ("hit", "partial", "miss")}),
        failed_blocks_per_s=_rate(pairs, "kvbm_transfer_failures") or 0.0,
        transfers=transfers,
        tiers=_tiers(after),
        queues=_queues(after),
        requests=_known({state: _sum(after, *names) for state, names in REQUESTS.items()}),
        off=tuple(tier for name, tier in OFF.items() if any(1 in page.values(name) for page in after)),
        info=next((labels for page in after for labels in page.labels_of("kvbm_info")), {}),
    )


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _rate(pairs: Sequence[tuple[Reading, Reading]], name: str, **labels: str) -> float | None:
    """Return the sum of increases per second; None if no page has the series."""
    rates = []
    for old, new in pairs:
        values = new.page.values(name, **labels)
        if values and new.at_s > old.at_s:
            rates.append((sum(values) - sum(old.page.values(name, **labels))) / (new.at_s - old.at_s))
    return sum(rates) if rates else None


def _tokens(pairs: Sequence[tuple[Reading, Reading]]) -> dict[str, float]:
    """Return prompt tokens per second by source, of engines that count them themselves from these counters."""
    counting = [(old, new) for old, new in pairs if new.page.values(OWN_PROMPTS)]
    others = [(old, new) for old, new in pairs if not new.page.values(OWN_PROMPTS)]
    found = _known({name: _rate(others, "kvbm_prompt_tokens", source=name) for name in SOURCES})
    total = _rate(counting, OWN_PROMPTS)
    if total is None:
        return found
    cached = {name: _rate(counting, OWN_HITS, cache_source=source) or 0.0 for name, source in OWN_SOURCES.items()}
    own = {**cached, "computed": max(0.0, total - sum(cached.values()))}
    return {name: found.get(name, 0.0) + own.get(name, 0.0) for name in SOURCES if name in found or name in own}


def _has_restarted(before: MetricsPage, after: MetricsPage) -> bool:
    """Whether a counter has fallen."""
    old = {(name, *sorted(labels.items())): value for name in COUNTERS for labels, value in before.series.get(name, ())}
    return any(
        value < old.get((name, *sorted(labels.items())), 0.0)
        for name in COUNTERS
        for labels, value in after.series.get(name, ())
    )


def _buckets(pairs: Sequence[tuple[Reading, Reading]], source: str, target: str) -> list[tuple[float, float]]:
    """Return (upper bound, transfers up to it) of the interval, in order."""
    counts: dict[float, float] = {}
    for old, new in pairs:
        before, after = (_counts(reading.page, source, target) for reading in (old, new))
        for bound, count in after.items():
            counts[bound] = counts.get(bound, 0.0) + count - before.get(bound, 0.0)
    return sorted(counts.items())


def _counts(page: MetricsPage, source: str, target: str) -> dict[float, float]:
    wanted = {"source": source, "target": target}.items()
    return {
        bound: value
        for labels, value in page.series.get("kvbm_transfer_seconds_bucket", ())
        if wanted <= labels.items() and (bound := _bound(labels.get("le", ""))) is not None
    }


def _bound(text: str) -> float | None:
    try:
        bound = float(text)
    except ValueError:
        return None
    return bound if bound == math.inf or abs(bound) <= LARGEST else None


def _quantile(share: float, buckets: Sequence[tuple[float, float]]) -> float | None:
    """Return the quantile, by interpolation in its bucket; in the last one the largest finite bound."""
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    rank, below, lower = share * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below) if count > below else bound
        below, lower = count, bound
    return lower


def _sum(pages: Iterable[MetricsPage], *names: str, **labels: str) -> float | None:
    """Return the sum over names, which mean the same in different engines."""
    values = [value for page in pages for name in names for value in page.values(name, **labels)]
    return sum(values) if values else None


def _tiers(pages: Sequence[MetricsPage]) -> dict[str, tuple[float, float]]:
    found = {}
    for tier in TIERS:
        capacity = _sum(pages, "kvbm_tier_capacity_bytes", tier=tier)
        if capacity is not None:
            found[tier] = (_sum(pages, "kvbm_tier_used_bytes", tier=tier) or 0.0, capacity)
    return found


def _queues(pages: Sequence[MetricsPage]) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for labels, count in (one for page in pages for one in page.series.get("kvbm_queue_blocks", ())):
        name = labels.get("queue", "")
        found[name] = found.get(name, (0.0, 0.0))[0] + count, 0.0
    for labels, age in (one for page in pages for one in page.series.get("kvbm_queue_oldest_seconds", ())):
        if (name := labels.get("queue", "")) in found:
            found[name] = found[name][0], max(found[name][1], age)
    return found
