"""Counters of the leader, and the Prometheus collector that exports them.

Only the leader writes `Counters`; any thread may read it. A number is incremented after its event: a block counts as
offloaded when it is registered, and as onboarded when the engine may read it.

The names of NVIDIA's KVBM metrics are kept exactly, so that its dashboards continue to work. Its counters have no
`_total` suffix, which the Prometheus client would add to metrics of type `counter`. So all counters are exported
untyped; `rate()` works on them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from kvbm.types import Tier

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Made = TypeVar("Made")

WINDOW_REQUESTS = 1000
REST = 4  # times as long as a page has taken passes before the next one: nothing else of the process runs meanwhile
HIT_TIERS = (Tier.HOST, Tier.DISK, Tier.SHARED)
_LOWER = {Tier.DISK: "disk", Tier.SHARED: "shared"}


@dataclass(slots=True)
class Counters:
    """Totals since the leader started, with the unit in the name. A block counts once for all ranks."""

    matched_tokens: int = 0
    offload_blocks: int = 0
    offload_bytes: int = 0
    offload_failed_blocks: int = 0
    offload_skipped_blocks: int = 0
    onboard_blocks: int = 0
    onboard_bytes: int = 0
    onboard_failed_blocks: int = 0
    onboard_shared_requests: int = 0
    lost_state_tokens: int = 0
    overdue_transfers: int = 0
    evicted_blocks: int = 0
    resets: int = 0
    finished_requests: int = 0
    disabled: int = 0
    faults: int = 0
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
    disk_unnamed: int = 0
    disk_silent: int = 0
    disk_restarts: int = 0
    disk_dropped_rows: int = 0
    disk_damaged_files: int = 0
    disk_only_blocks: int = 0
    onboard_shared_blocks: int = 0
    shared_offload_blocks: int = 0
    shared_offload_bytes: int = 0
    shared_fetched_blocks: int = 0
    shared_failed_blocks: int = 0
    shared_declined_blocks: int = 0
    shared_late_blocks: int = 0
    shared_dropped_blocks: int = 0
    shared_saved_writes: int = 0
    shared_copies_read: int = 0
    shared_bad_objects: int = 0
    shared_absent_objects: int = 0
    shared_failed_requests: int = 0
    shared_probes: int = 0
    shared_off: int = 0
    shared_unnamed: int = 0
    shared_silent: int = 0
    shared_times_off: int = 0
    shared_restarts: int = 0
    object_read_failures: int = 0
    object_write_failures: int = 0
    record_dropped_calls: int = 0
    hit_window: deque[tuple[int, int, int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW_REQUESTS))

    def add(self, name: str, tier: Tier, count: int) -> None:
        """Add to the counter of a lower tier. `name` has `{}` in place of `disk` or `shared`."""
        name = name.format(_LOWER[tier])
        setattr(self, name, getattr(self, name) + count)

    def hits(self) -> tuple[int, int, int, int]:
        """Return (blocks loaded from G2, from G3, from G4, prompt blocks looked up) for the last finished requests."""
        host, disk, shared, probed = map(sum, zip((0, 0, 0, 0), *tuple(self.hit_window), strict=True))
        return host, disk, shared, probed

    def hit_rate(self, tier: Tier) -> float:
        """Return the share of prompt blocks loaded from a tier, 0 to 1, over the last finished requests."""
        *loaded, probed = self.hits()
        return loaded[HIT_TIERS.index(tier)] / probed if probed else 0.0


# metric name -> (attribute of Counters, help). The first three names are NVIDIA's.
_NAMED: dict[str, tuple[str, str]] = {
    "kvbm_matched_tokens": ("matched_tokens", "prompt tokens loaded from the cache instead of computed"),
    "kvbm_offload_blocks_d2h": ("offload_blocks", "blocks copied from device to host memory and registered there"),
    "kvbm_onboard_blocks_h2d": ("onboard_blocks", "blocks copied from host memory to device and passed to the engine"),
    "kvbm_offload_bytes_d2h": (
        "offload_bytes",
        "bytes of blocks copied from device to host memory and registered there",
    ),
    "kvbm_onboard_bytes_h2d": (
        "onboard_bytes",
        "bytes of blocks copied from host memory to device and passed to the engine",
    ),
    "kvbm_offload_blocks_h2d": ("disk_offload_blocks", "blocks copied from host memory to disk and registered there"),
    "kvbm_onboard_blocks_d2d": (
        "onboard_disk_blocks",
        "blocks loaded from disk and passed to the engine; also counted in kvbm_onboard_blocks_h2d",
    ),
    "kvbm_offload_blocks_d2d": (
        "disk_only_blocks",
        "blocks registered on disk without a host tier; also counted in kvbm_offload_blocks_h2d",
    ),
    "kvbm_offload_bytes_h2d": (
        "disk_offload_bytes",
        "bytes of blocks copied from host memory to disk and registered there",
    ),
    "kvbm_offload_blocks_d2o": ("shared_offload_blocks", "blocks written to the shared tier"),
    "kvbm_onboard_blocks_o2d": (
        "onboard_shared_blocks",
        "blocks loaded from the shared tier and passed to the engine; also counted in kvbm_onboard_blocks_h2d",
    ),
    "kvbm_offload_bytes_d2o": ("shared_offload_bytes", "bytes of blocks written to the shared tier"),
}
# metric name -> help. The attribute is the name without `kvbm_`.
_OWN = {
    "kvbm_disk_fetched_blocks": "blocks read from disk, verified and registered in host memory",
    "kvbm_disk_failed_blocks": "blocks whose write or read failed, or whose checksum was wrong",
    "kvbm_disk_declined_blocks": "blocks on disk not read because computing was predicted faster",
    "kvbm_disk_late_blocks": "blocks on disk computed because their read took too long",
    "kvbm_disk_dropped_blocks": "blocks evicted from host memory before they could be written",
    "kvbm_disk_filter_admitted_blocks": "blocks that the frequency filter admitted",
    "kvbm_disk_filter_rejected_blocks": "blocks that the frequency filter rejected at registration in host memory",
    "kvbm_disk_checksum_failures": "blocks read from disk with a wrong checksum",
    "kvbm_disk_io_errors": "reads and writes that failed or were incomplete",
    "kvbm_disk_flushes": "flushes of written blocks to durable storage",
    "kvbm_disk_off": "1 while the disk tier is off: no block is written or read",
    "kvbm_disk_unnamed": "1 while the disk tier is off because the files of the model are still being read",
    "kvbm_disk_silent": "1 while the disk tier is off because its directory or its process does not answer",
    "kvbm_disk_times_off": "times the disk tier was turned off: repeated errors, or no answer",
    "kvbm_disk_restarts": "restarts of the disk I/O process",
    "kvbm_disk_dropped_rows": "blocks lost when a disk cache was opened, because their index rows were invalid",
    "kvbm_disk_damaged_files": "damaged superblocks and indexes of disk caches, and caches with unusable files",
    "kvbm_shared_fetched_blocks": "blocks read from the shared tier, verified and registered in host memory",
    "kvbm_shared_failed_blocks": "blocks of the shared tier whose read failed",
    "kvbm_shared_declined_blocks": "blocks not read from the shared tier because computing was predicted faster",
    "kvbm_shared_late_blocks": "blocks of the shared tier computed because their read took too long",
    "kvbm_shared_dropped_blocks": "blocks not written to the shared tier: they left host memory, or the write failed",
    "kvbm_shared_copies_read": "objects read from the copy of another engine of this machine instead of the store",
    "kvbm_shared_saved_writes": "objects not written to the shared tier because another engine had written them",
    "kvbm_shared_bad_objects": "objects of the shared tier that were damaged, or of another namespace or version",
    "kvbm_shared_absent_objects": "reads of objects that the shared tier no longer had",
    "kvbm_shared_failed_requests": "requests to the shared tier's store that failed or were not answered in time",
    "kvbm_shared_probes": "chains that were looked up in the shared tier's store",
    "kvbm_shared_off": "1 while the shared tier is off: no block is written or read",
    "kvbm_shared_unnamed": "1 while the shared tier is off because the files of the model are still being read",
    "kvbm_shared_silent": "1 while the shared tier is off because its store or its process does not answer",
    "kvbm_shared_times_off": "times the shared tier was turned off: repeated errors, or no answer",
    "kvbm_shared_restarts": "restarts of the process of the shared tier",
    "kvbm_object_read_failures": "objects of the shared tier that could not be read",
    "kvbm_object_write_failures": "objects that could not be written to the shared tier",
    "kvbm_offload_failed_blocks": "blocks whose copy to host memory failed; they were not registered",
    "kvbm_offload_skipped_blocks": "computed blocks not copied: host memory was full, or too many copies in flight",
    "kvbm_onboard_failed_blocks": "promised blocks that the engine recomputed: a copy failed, or the disk failed or "
    "was too slow, which kvbm_disk_late_blocks also counts",
    "kvbm_onboard_shared_requests": "requests that waited while another request loaded the same blocks",
    "kvbm_lost_state_tokens": "prompt tokens whose blocks were found, but that were computed because no snapshot "
    "of the state was found at their end",
    "kvbm_overdue_transfers": "queries for the result of a transfer that was late",
    "kvbm_evicted_blocks": "registered blocks evicted from host memory to make space",
    "kvbm_resets": "times the cache was emptied on request",
    "kvbm_finished_requests": "finished requests that looked up blocks in the cache",
    "kvbm_record_dropped_calls": "decisions dropped because the recording queue was full",
    "kvbm_disabled": "1 after a rank was lost, ranks with one copy had different KV, or kvbm failed: the cache is off",
    "kvbm_faults": "exceptions of kvbm that were stopped before they reached the engine; its log has the first one",
}
COUNTERS = {**_NAMED, **{name: (name.removeprefix("kvbm_"), about) for name, about in _OWN.items()}}

HIT_RATES = {
    tier: (
        f"kvbm_{name}_cache_hit_rate",
        f"share of prompt blocks loaded from {name}, 0 to 1, over the last `metrics.window_requests` requests",
    )
    for tier, name in ((Tier.HOST, "host"), (Tier.DISK, "disk"), (Tier.SHARED, "object"))
}
BLOCKS = {
    tier: (f"kvbm_{name}_blocks", f"blocks of the {name} tier by `state`: free, moving, pinned or evictable")
    for tier, name in ((Tier.HOST, "host"), (Tier.DISK, "disk"))
}
DISK_GAUGES: dict[str, str] = {
    "kvbm_disk_write_amplification": "bytes that all processes wrote to the drive, per byte of blocks written",
    "kvbm_disk_drive_writes_per_day": "times per day that the drive's whole capacity is written, at the current rate",
}

TierBlocks = dict[Tier, dict[str, int]]


class KvbmCollector:
    """A prometheus_client collector of one leader's counters and the state of its tiers. `wear` returns the known
    values of DISK_GAUGES."""

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
        for tier, rate in HIT_RATES.items():
            yield GaugeMetricFamily(*rate, value=self._counters.hit_rate(tier))
        for tier, states in self._blocks().items():
            blocks = GaugeMetricFamily(*BLOCKS[tier], labels=["state"])
            for state, count in states.items():
                blocks.add_metric([state], count)
            yield blocks
        for name, value in self._wear().items():
            yield GaugeMetricFamily(name, DISK_GAUGES[name], value=value)


class PagePace:
    """Lets pages of metrics take at most a fifth of the time. The caller waits for `wait_s` before each."""

    def __init__(self) -> None:
        self._free_at_s = 0.0

    def wait_s(self) -> float:
        return max(0.0, self._free_at_s - time.monotonic())

    def make(self, page: Callable[[], Made]) -> Made:
        began_s = time.monotonic()
        made = page()
        ended_s = time.monotonic()
        self._free_at_s = ended_s + REST * (ended_s - began_s)
        return made
