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

from kvbm.types import Tier

if TYPE_CHECKING:
    from prometheus_client.core import Metric

WINDOW_REQUESTS = 1000


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
    onboard_disk_blocks: int = 0
    disk_offload_blocks: int = 0
    disk_offload_bytes: int = 0
    disk_fetched_blocks: int = 0
    disk_failed_blocks: int = 0
    disk_declined_blocks: int = 0
    disk_late_blocks: int = 0
    disk_dropped_blocks: int = 0
    disk_filter_admitted_blocks: int = 0
    disk_filter_rejected_blocks: int = 0
    disk_checksum_failures: int = 0
    disk_io_errors: int = 0
    disk_flushes: int = 0
    disk_times_off: int = 0
    disk_off: int = 0
    disk_restarts: int = 0
    disk_only_blocks: int = 0
    record_dropped_calls: int = 0
    hit_window: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW_REQUESTS))

    def hits(self) -> tuple[int, int, int]:
        """Of the prompt blocks of the last finished requests: (came from G2, came from G3, asked for)."""
        window = tuple(self.hit_window)
        return (
            sum(host for host, _, _ in window),
            sum(disk for _, disk, _ in window),
            sum(asked for _, _, asked in window),
        )

    def hit_rate(self, tier: Tier) -> float:
        """Share of the prompt blocks asked for that came from host or disk, over the last finished requests; 0 to 1."""
        host, disk, asked = self.hits()
        return (disk if tier is Tier.DISK else host) / asked if asked else 0.0


# metric name -> (attribute of Counters, help). The first three names are NVIDIA's.
COUNTERS: dict[str, tuple[str, str]] = {
    "kvbm_matched_tokens": ("matched_tokens", "prompt tokens that the engine took from the cache instead of computing"),
    "kvbm_offload_blocks_d2h": ("offload_blocks", "blocks copied from device to host and registered there"),
    "kvbm_onboard_blocks_h2d": ("onboard_blocks", "blocks copied from host to device and given to the engine"),
    "kvbm_offload_bytes_d2h": ("offload_bytes", "bytes copied from device to host, of registered blocks"),
    "kvbm_onboard_bytes_h2d": ("onboard_bytes", "bytes copied from host to device, of blocks given to the engine"),
    "kvbm_offload_blocks_h2d": ("disk_offload_blocks", "blocks copied from host to disk and registered there"),
    "kvbm_onboard_blocks_d2d": (
        "onboard_disk_blocks",
        "blocks of disk given to the engine; they are part of kvbm_onboard_blocks_h2d too",
    ),
    "kvbm_offload_blocks_d2d": (
        "disk_only_blocks",
        "blocks registered on disk where there is no host tier; they are part of kvbm_offload_blocks_h2d too",
    ),
    "kvbm_offload_bytes_h2d": ("disk_offload_bytes", "bytes copied from host to disk, of registered blocks"),
    "kvbm_disk_fetched_blocks": ("disk_fetched_blocks", "blocks read from disk, proven and registered in host"),
    "kvbm_disk_failed_blocks": (
        "disk_failed_blocks",
        "blocks whose write or read failed, or whose bytes were not those written; they are forgotten",
    ),
    "kvbm_disk_declined_blocks": ("disk_declined_blocks", "blocks on disk not read, as computing them was faster"),
    "kvbm_disk_late_blocks": ("disk_late_blocks", "blocks on disk computed after all, as reading took too long"),
    "kvbm_disk_dropped_blocks": ("disk_dropped_blocks", "blocks due for disk that left host before they were written"),
    "kvbm_disk_filter_admitted_blocks": ("disk_filter_admitted_blocks", "blocks that the frequency filter let through"),
    "kvbm_disk_filter_rejected_blocks": (
        "disk_filter_rejected_blocks",
        "blocks that the frequency filter kept from disk when they came to host",
    ),
    "kvbm_disk_checksum_failures": ("disk_checksum_failures", "blocks read whose bytes were not those written"),
    "kvbm_disk_io_errors": ("disk_io_errors", "reads and writes that the disk refused or cut short"),
    "kvbm_disk_flushes": ("disk_flushes", "times that written blocks were made durable"),
    "kvbm_disk_off": ("disk_off", "1 while the disk tier is off: nothing is written there or read from there"),
    "kvbm_disk_times_off": ("disk_times_off", "times that the disk tier turned itself off after repeated errors"),
    "kvbm_disk_restarts": (
        "disk_restarts",
        "times that another process for disk I/O took the place of one that had ended",
    ),
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
    "kvbm_record_dropped_calls": ("record_dropped_calls", "decisions that the recording had no room for"),
    "kvbm_disabled": ("disabled", "1 after a rank was lost: the engine runs on without the cache"),
}

HIT_RATES = {
    tier: (
        f"kvbm_{name}_cache_hit_rate",
        f"share of prompt blocks that came from {name}, 0 to 1, over the last `metrics.window_requests` requests",
    )
    for tier, name in ((Tier.HOST, "host"), (Tier.DISK, "disk"))
}
BLOCKS = {
    tier: (f"kvbm_{name}_blocks", f"blocks of the {name} tier by `state`: free, moving, pinned or evictable")
    for tier, name in ((Tier.HOST, "host"), (Tier.DISK, "disk"))
}
# What NVIDIA's dashboards and alerts ask for and nothing here can move; 0 is the truth, and no gap in a panel.
NEVER: dict[str, str] = {
    "kvbm_offload_blocks_d2o": "blocks copied to an object store, of which there is none in this version: always 0",
    "kvbm_onboard_blocks_o2d": "blocks copied from an object store, of which there is none in this version: always 0",
    "kvbm_object_read_failures": "of an object store, of which there is none in this version: always 0",
    "kvbm_object_write_failures": "of an object store, of which there is none in this version: always 0",
}
NEVER_GAUGES: dict[str, str] = {
    "kvbm_object_cache_hit_rate": "of an object store, of which there is none in this version: always 0",
}
DISK_GAUGES: dict[str, str] = {
    "kvbm_disk_write_amplification": "bytes that reached the drive for each byte of blocks written, by everybody on it",
    "kvbm_disk_drive_writes_per_day": "how often the drive would be written over in a day at the present rate",
}

TierBlocks = dict[Tier, dict[str, int]]


class KvbmCollector:
    """A prometheus_client collector over one leader's counters and the state of its tiers; `wear` gives the values of
    DISK_GAUGES that are known."""

    def __init__(
        self,
        counters: Counters,
        blocks: Callable[[], TierBlocks],
        wear: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._counters = counters
        self._blocks = blocks
        self._wear = wear

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily, UnknownMetricFamily

        for name, (attribute, description) in COUNTERS.items():
            yield UnknownMetricFamily(name, description, value=getattr(self._counters, attribute))
        for name, description in NEVER.items():
            yield UnknownMetricFamily(name, description, value=0)
        for tier, rate in HIT_RATES.items():
            yield GaugeMetricFamily(*rate, value=self._counters.hit_rate(tier))
        for name, description in NEVER_GAUGES.items():
            yield GaugeMetricFamily(name, description, value=0)
        for tier, states in self._blocks().items():
            blocks = GaugeMetricFamily(*BLOCKS[tier], labels=["state"])
            for state, count in states.items():
                blocks.add_metric([state], count)
            yield blocks
        for name, value in self._wear().items():
            yield GaugeMetricFamily(name, DISK_GAUGES[name], value=value)
