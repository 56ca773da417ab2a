"""Metrics in vLLM: sends kvbm's counters to vLLM's /metrics and log.

The leader counts in the engine's process; vLLM serves /metrics in another process. After a step that changed a
counter, at most every REPORT_S while transfers run, vLLM's statistics carry the totals as a plain dictionary. In the
other process kvbm's collector exports the latest totals, summed over the engines of a data-parallel server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbm.boundary import Boundary, contained
from kvbm.metrics import TOTALS, Counters, KvbmCollector, TierBlocks
from kvbm.observe.series import EngineReport, SeriesCollector
from kvbm.types import Tier

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from kvbm.leader.guarded import GuardedLeader

REPORT_S = 0.5
WINDOW, BLOCKS, WEAR, SERIES = "hit_window_blocks", "blocks", "wear", "series"


class KvbmStats(KVConnectorStats):  # type: ignore[misc]  # vllm is not there when types are checked
    """Totals since the start of the engine; newer totals replace older ones."""

    boundary = Boundary()

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return self if other.is_empty() else other

    @contained(dict)
    def reduce(self) -> dict[str, int | float]:
        """Return the values for vLLM's log line."""
        host, disk, _, queried = self.data[WINDOW]  # as `Counters.hits` returns them
        has_disk = (
            {"disk hit rate": round(disk / queried, 3) if queried else 0.0} if Tier.DISK in self.data[BLOCKS] else {}
        )
        return {
            "host hit rate": round(host / queried, 3) if queried else 0.0,
            **has_disk,
            "matched tokens": self.data["matched_tokens"],
            "offloaded blocks": self.data["offload_blocks"],
            "onboarded blocks": self.data["onboard_blocks"],
            "failed blocks": self.data["offload_failed_blocks"] + self.data["onboard_failed_blocks"],
        }


class StatsSource:
    """Returns the leader's totals if they have changed. The leader's thread owns it.

    While requests live or something is in flight, further steps follow, so that a change may be reported later with
    the next ones.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_s = 0.0
        self._reported: tuple[int, ...] | None = None
        self._hits = (-1, [0, 0, 0, 0])  # number of finished requests, and their hits

    def take(self, leader: GuardedLeader, *, has_requests: bool) -> KvbmStats | None:
        now_s = self._clock()
        if now_s < self._due_s and (has_requests or leader.has_pending()):
            return None
        numbers = leader.counters.numbers()
        if numbers == self._reported:
            return None
        self._due_s = now_s + REPORT_S
        self._reported = numbers
        totals = dict(zip(TOTALS, numbers, strict=True))
        blocks = {tier.value: states for tier, states in leader.blocks().items()}
        if self._hits[0] != leader.counters.finished_requests:  # the window is long, and most steps end no request
            self._hits = leader.counters.finished_requests, list(leader.counters.hits())
        others = {WINDOW: self._hits[1], BLOCKS: blocks, WEAR: leader.wear(), SERIES: EngineReport.data_of(leader)}
        return KvbmStats(data={**totals, **others})


class KvbmPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Exports the kvbm_* series in the process that serves /metrics."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.boundary = Boundary()
        self._latest: dict[int, dict[str, Any]] = {}
        self._counters = Counters()
        _register(KvbmCollector(self._counters, self._blocks, self._wear), SeriesCollector(self._reports))

    @contained()
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._latest[engine_idx] = transfer_stats_data
        for name in TOTALS:
            self._counters.set_total(name, sum(data[name] for data in self._latest.values()))
        self._counters.hit_window.clear()
        self._counters.hit_window.extend(tuple(data[WINDOW]) for data in self._latest.values())

    @contained(dict)
    def _blocks(self) -> TierBlocks:
        totals: TierBlocks = {}
        for data in self._latest.values():
            for tier, states in data[BLOCKS].items():
                known = totals.setdefault(Tier(tier), {})
                for state, count in states.items():
                    known[state] = known.get(state, 0) + count
        return totals

    @contained(dict)
    def _reports(self) -> dict[int, EngineReport]:
        return {
            engine: EngineReport.from_data(
                data, {Tier(tier): states for tier, states in data[BLOCKS].items()}, data[SERIES]
            )
            for engine, data in self._latest.items()
        }

    @contained(dict)
    def _wear(self) -> dict[str, float]:
        """Return the maximum over engines: those that share a drive measure the same value, so a sum would be wrong."""
        found: dict[str, float] = {}
        for data in self._latest.values():
            for name, value in data[WEAR].items():
                found[name] = max(value, found.get(name, 0.0))
        return found


_registered: tuple[Collector, ...] = ()


def _register(*collectors: Collector) -> None:
    """Register the collectors, replacing those of a previous engine in this process."""
    from prometheus_client import REGISTRY

    global _registered
    for collector in _registered:
        REGISTRY.unregister(collector)
    for collector in collectors:
        REGISTRY.register(collector)
    _registered = collectors
