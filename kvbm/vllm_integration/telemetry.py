"""Our counters on their way to vLLM's /metrics and log.

The leader counts in the engine's process; vLLM answers /metrics in another one. With each step whose counters differ
from the last, the totals travel as a plain dictionary in vLLM's own statistics; over there the collector of the block
manager shows the latest, summed over the engines of a data-parallel server.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbm.metrics import Counters, KvbmCollector

if TYPE_CHECKING:
    from kvbm.leader import Leader

_NUMBERS = tuple(field.name for field in fields(Counters) if field.name != "hit_window")
WINDOW, BLOCKS = "hit_window_blocks", "host_blocks"


class KvbmStats(KVConnectorStats):  # type: ignore[misc]  # vllm is not there when types are checked
    """Totals since the start of the engine; a newer one replaces an older one."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return self if other.is_empty() else other

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        hit, asked = self.data[WINDOW]
        return {
            "host hit rate": round(hit / asked, 3) if asked else 0.0,
            "matched tokens": self.data["matched_tokens"],
            "offloaded blocks": self.data["offload_blocks"],
            "onboarded blocks": self.data["onboard_blocks"],
            "failed blocks": self.data["offload_failed_blocks"] + self.data["onboard_failed_blocks"],
        }


class StatsSource:
    """Tells the leader's totals whenever they have changed. The leader's thread owns it."""

    def __init__(self) -> None:
        self._told: tuple[int, ...] | None = None

    def take(self, leader: Leader) -> KvbmStats | None:
        numbers = tuple(getattr(leader.counters, name) for name in _NUMBERS)
        if numbers == self._told:
            return None
        self._told = numbers
        window = tuple(leader.counters.hit_window)
        hit_and_asked = [sum(hit for hit, _ in window), sum(asked for _, asked in window)]
        data = {**dict(zip(_NUMBERS, numbers, strict=True)), WINDOW: hit_and_asked, BLOCKS: leader.host_blocks()}
        return KvbmStats(data=data)


class KvbmPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The kvbm_* series of the process that answers /metrics."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._latest: dict[int, dict[str, Any]] = {}
        self._counters = Counters()
        _register(KvbmCollector(self._counters, self._host_blocks))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._latest[engine_idx] = transfer_stats_data
        for name in _NUMBERS:
            setattr(self._counters, name, sum(data[name] for data in self._latest.values()))
        self._counters.hit_window.clear()
        self._counters.hit_window.extend((data[WINDOW][0], data[WINDOW][1]) for data in self._latest.values())

    def _host_blocks(self) -> dict[str, int]:
        states: dict[str, int] = {}
        for data in self._latest.values():
            for state, count in data[BLOCKS].items():
                states[state] = states.get(state, 0) + count
        return states


_registered: KvbmCollector | None = None


def _register(collector: KvbmCollector) -> None:
    """In place of the one of an engine that this process had before."""
    from prometheus_client import REGISTRY

    global _registered
    if _registered is not None:
        REGISTRY.unregister(_registered)
    REGISTRY.register(collector)
    _registered = collector
