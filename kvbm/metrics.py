"""What the leader counts, and how Prometheus sees it.

`Counters` is a plain record that only the leader writes; any thread may read it. Every number is raised after the
event it names: a block is counted as offloaded when it is registered, as onboarded when the engine may read it.

The metric names that NVIDIA's KVBM exports are kept to the letter, so that its dashboards go on working. Those
counters have no `_total` suffix, which the Prometheus client would add to the type `counter`; they are therefore
exported untyped, and `rate()` works on them all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

HIT_RATE_WINDOW_REQUESTS = 1000


@dataclass(slots=True)
class Counters:
    """Totals since the leader started. Unit in the name; `blocks` are whole blocks over all ranks."""

    matched_tokens: int = 0
    offload_blocks: int = 0
    offload_bytes: int = 0
    offload_failed_blocks: int = 0
    offload_skipped_blocks: int = 0
    onboard_blocks: int = 0
    onboard_bytes: int = 0
    onboard_failed_blocks: int = 0
    onboard_shared_requests: int = 0
    overdue_transfers: int = 0
    evicted_blocks: int = 0
    resets: int = 0
    finished_requests: int = 0
    disabled: int = 0
    hit_window: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=HIT_RATE_WINDOW_REQUESTS))

    def host_hit_rate(self) -> float:
        """Share of the prompt blocks asked for that came from G2, over the last finished requests; 0 to 1."""
        window = tuple(self.hit_window)
        asked = sum(queried for _, queried in window)
        return sum(hit for hit, _ in window) / asked if asked else 0.0


# metric name -> (attribute of Counters, help). The first three names are NVIDIA's.
COUNTERS: dict[str, tuple[str, str]] = {
    "kvbm_matched_tokens": ("matched_tokens", "prompt tokens that the engine took from the cache instead of computing"),
    "kvbm_offload_blocks_d2h": ("offload_blocks", "blocks copied from device to host and registered there"),
    "kvbm_onboard_blocks_h2d": ("onboard_blocks", "blocks copied from host to device and given to the engine"),
    "kvbm_offload_bytes_d2h": ("offload_bytes", "bytes copied from device to host, of registered blocks"),
    "kvbm_onboard_bytes_h2d": ("onboard_bytes", "bytes copied from host to device, of blocks given to the engine"),
    "kvbm_offload_failed_blocks": (
        "offload_failed_blocks",
        "blocks whose copy to host failed; they were not registered",
    ),
    "kvbm_offload_skipped_blocks": (
        "offload_skipped_blocks",
        "computed blocks not copied: no room in flight or in host",
    ),
    "kvbm_onboard_failed_blocks": (
        "onboard_failed_blocks",
        "blocks whose copy to device failed; the engine recomputed",
    ),
    "kvbm_onboard_shared_requests": ("onboard_shared_requests", "requests that waited for another one's load"),
    "kvbm_overdue_transfers": ("overdue_transfers", "transfers asked after because no result had come for long"),
    "kvbm_evicted_blocks": ("evicted_blocks", "registered blocks evicted from host to make room"),
    "kvbm_resets": ("resets", "times the cache was emptied on request"),
    "kvbm_finished_requests": ("finished_requests", "requests that asked for blocks and have ended"),
    "kvbm_disabled": ("disabled", "1 after a rank was lost: the engine runs on without the cache"),
}

HIT_RATE = (
    "kvbm_host_cache_hit_rate",
    f"share of prompt blocks found in host, last {HIT_RATE_WINDOW_REQUESTS} requests",
)
HOST_BLOCKS = ("kvbm_host_blocks", "blocks of the host tier by `state`: free, moving, pinned or evictable")


class KvbmCollector:
    """A prometheus_client collector over one leader's counters and the state of its host tier."""

    def __init__(self, counters: Counters, host_blocks: Callable[[], dict[str, int]]) -> None:
        self._counters = counters
        self._host_blocks = host_blocks

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily, UnknownMetricFamily

        for name, (attribute, description) in COUNTERS.items():
            yield UnknownMetricFamily(name, description, value=getattr(self._counters, attribute))
        yield GaugeMetricFamily(*HIT_RATE, value=self._counters.host_hit_rate())
        blocks = GaugeMetricFamily(*HOST_BLOCKS, labels=["state"])
        for state, count in self._host_blocks().items():
            blocks.add_metric([state], count)
        yield blocks
