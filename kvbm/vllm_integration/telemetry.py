"""Our counters on their way to vLLM's /metrics and log.

The leader counts in the engine's process; vLLM answers /metrics in another one. With each step whose counters differ
from the last, the totals travel as a plain dictionary in vLLM's own statistics; over there the collector of the block
manager shows the latest, summed over the engines of a data-parallel server.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvbm.metrics import Counters, KvbmCollector, TierBlocks
from kvbm.types import Tier

if TYPE_CHECKING:
    from kvbm.leader.leader import Leader

_NUMBERS = tuple(field.name for field in fields(Counters) if field.name != "hit_window")
WINDOW, BLOCKS, WEAR = "hit_window_blocks", "blocks", "wear"


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
        host, disk, asked = self.data[WINDOW]
        has_disk = {"disk hit rate": round(disk / asked, 3) if asked else 0.0} if Tier.DISK in self.data[BLOCKS] else {}
        return {
            "host hit rate": round(host / asked, 3) if asked else 0.0,
            **has_disk,
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
        totals = dict(zip(_NUMBERS, numbers, strict=True))
        blocks = {tier.value: states for tier, states in leader.blocks().items()}
        return KvbmStats(data={**totals, WINDOW: list(leader.counters.hits()), BLOCKS: blocks, WEAR: leader.wear()})


class KvbmPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The kvbm_* series of the process that answers /metrics."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._latest: dict[int, dict[str, Any]] = {}
        self._counters = Counters()
        _register(KvbmCollector(self._counters, self._blocks, self._wear))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._latest[engine_idx] = transfer_stats_data
        for name in _NUMBERS:
            setattr(self._counters, name, sum(data[name] for data in self._latest.values()))
        self._counters.hit_window.clear()
        self._counters.hit_window.extend(tuple(data[WINDOW]) for data in self._latest.values())

    def _blocks(self) -> TierBlocks:
        totals: TierBlocks = {}
        for data in self._latest.values():
            for tier, states in data[BLOCKS].items():
                known = totals.setdefault(Tier(tier), {})
                for state, count in states.items():
                    known[state] = known.get(state, 0) + count
        return totals

    def _wear(self) -> dict[str, float]:
        """Engines that share a drive measure the same, and those on several are not to be added: the worst is shown."""
        found: dict[str, float] = {}
        for data in self._latest.values():
            for name, value in data[WEAR].items():
                found[name] = max(value, found.get(name, 0.0))
        return found


_registered: KvbmCollector | None = None


def _register(collector: KvbmCollector) -> None:
    """In place of the one of an engine that this process had before."""
    from prometheus_client import REGISTRY

    global _registered
    if _registered is not None:
        REGISTRY.unregister(_registered)
    REGISTRY.register(collector)
    _registered = collector
