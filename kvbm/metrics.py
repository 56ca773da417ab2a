"""Counters of the leader, and the Prometheus collector that exports them.

Only the leader writes `Counters`; any thread may read it. A number is incremented after its event: a block counts as
offloaded when it is registered, and as onboarded when the engine may read it.

The names of NVIDIA's KVBM metrics are kept exactly, so that its dashboards continue to work. Its counters have no
`_total` suffix, which the Prometheus client would add to metrics of type `counter`. So all counters are exported
untyped; `rate()` works on them. `observe/series.py` exports the same counts with labels and under the names that
Prometheus recommends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from kvbm.types import Tier

if TYPE_CHECKING:
    from prometheus_client.core import Metric

WINDOW_REQUESTS = 1000
TRANSFER_BOUNDS_S = tuple(0.0005 * 4**i for i in range(8))  # 0.5 ms to 8.2 s
MATCH_BOUNDS_S = tuple(0.000016 * 4**i for i in range(8))  # 16 µs to 0.26 s
HIT_TIERS = (Tier.HOST, Tier.DISK, Tier.SHARED)
_LOWER = {Tier.DISK: "disk", Tier.SHARED: "shared"}


def _counter(about: str, *, name: str = "") -> Any:
    """Return a field for a counter, which is exported under `name`, or that of the field after `kvbm_`."""
    return field(default=0, metadata={"name": name, "about": about})


class Durations:
    """A histogram of durations: `counts[i]` are those up to `bounds_s[i]`, the last one those above all bounds."""

    __slots__ = ("bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: tuple[float, ...] = TRANSFER_BOUNDS_S) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds


def _durations() -> dict[str, Durations]:
    pairs = ("device-host", "host-device", "host-disk", "disk-host", "host-object", "object-host")
    return {"match": Durations(MATCH_BOUNDS_S), **{pair: Durations() for pair in pairs}}


@dataclass(slots=True)
class Counters:
    """Totals since the leader started, with the unit in the name. A block counts once for all ranks.

    Those without a text have no series of their own: they are parts of one in `observe/series.py`. `durations` are by
    source and target of a transfer, and `match`.
    """

    matched_tokens: int = _counter("prompt tokens loaded from the cache instead of computed")
    offload_blocks: int = _counter(
        "blocks copied from device to host memory and registered there", name="kvbm_offload_blocks_d2h"
    )
    onboard_blocks: int = _counter(
        "blocks copied from host memory to device and passed to the engine", name="kvbm_onboard_blocks_h2d"
    )
    offload_bytes: int = _counter(
        "bytes of blocks copied from device to host memory and registered there", name="kvbm_offload_bytes_d2h"
    )
    onboard_bytes: int = _counter(
        "bytes of blocks copied from host memory to device and passed to the engine", name="kvbm_onboard_bytes_h2d"
    )
    disk_offload_blocks: int = _counter(
        "blocks copied from host memory to disk and registered there", name="kvbm_offload_blocks_h2d"
    )
    onboard_disk_blocks: int = _counter(
        "blocks loaded from disk and passed to the engine; also counted in kvbm_onboard_blocks_h2d",
        name="kvbm_onboard_blocks_d2d",
    )
    disk_only_blocks: int = _counter(
        "blocks registered on disk without a host tier; also counted in kvbm_offload_blocks_h2d",
        name="kvbm_offload_blocks_d2d",
    )
    disk_offload_bytes: int = _counter(
        "bytes of blocks copied from host memory to disk and registered there", name="kvbm_offload_bytes_h2d"
    )
    shared_offload_blocks: int = _counter("blocks written to the shared tier", name="kvbm_offload_blocks_d2o")
    onboard_shared_blocks: int = _counter(
        "blocks loaded from the shared tier and passed to the engine; also counted in kvbm_onboard_blocks_h2d",
        name="kvbm_onboard_blocks_o2d",
    )
    shared_offload_bytes: int = _counter("bytes of blocks written to the shared tier", name="kvbm_offload_bytes_d2o")
    disk_fetched_blocks: int = _counter("blocks read from disk, verified and registered in host memory")
    disk_failed_blocks: int = _counter("blocks whose write or read failed, or whose checksum was wrong")
    disk_declined_blocks: int = _counter("blocks on disk not read because computing was predicted faster")
    disk_late_blocks: int = _counter("blocks on disk computed because their read took too long")
    disk_dropped_blocks: int = _counter("blocks evicted from host memory before they could be written")
    disk_filter_admitted_blocks: int = _counter("blocks that the frequency filter admitted")
    disk_filter_rejected_blocks: int = _counter(
        "blocks that the frequency filter rejected at registration in host memory"
    )
    disk_checksum_failures: int = _counter("blocks read from disk with a wrong checksum")
    disk_io_errors: int = _counter("reads and writes that failed or were incomplete")
    disk_flushes: int = _counter("flushes of written blocks to durable storage")
    disk_off: int = _counter("1 while the disk tier is off: no block is written or read")
    disk_unnamed: int = _counter("1 while the disk tier is off because the files of the model are still being read")
    disk_silent: int = _counter("1 while the disk tier is off because its directory or its process does not answer")
    disk_times_off: int = _counter("times the disk tier was turned off: repeated errors, or no answer")
    disk_restarts: int = _counter("restarts of the disk I/O process")
    disk_dropped_rows: int = _counter("blocks lost when a disk cache was opened, because their index rows were invalid")
    disk_damaged_files: int = _counter("damaged superblocks and indexes of disk caches, and caches with unusable files")
    shared_fetched_blocks: int = _counter("blocks read from the shared tier, verified and registered in host memory")
    shared_failed_blocks: int = _counter("blocks of the shared tier whose read failed")
    shared_declined_blocks: int = _counter(
        "blocks not read from the shared tier because computing was predicted faster"
    )
    shared_late_blocks: int = _counter("blocks of the shared tier computed because their read took too long")
    shared_dropped_blocks: int = _counter(
        "blocks not written to the shared tier: they left host memory, or the write failed"
    )
    shared_copies_read: int = _counter(
        "objects read from the copy of another engine of this machine instead of the store"
    )
    shared_saved_writes: int = _counter(
        "objects not written to the shared tier because another engine had written them"
    )
    shared_bad_objects: int = _counter(
        "objects of the shared tier that were damaged, or of another namespace or version"
    )
    shared_absent_objects: int = _counter("reads of objects that the shared tier no longer had")
    shared_failed_requests: int = _counter(
        "requests to the shared tier's store that failed or were not answered in time"
    )
    shared_probes: int = _counter("chains that were looked up in the shared tier's store")
    shared_off: int = _counter("1 while the shared tier is off: no block is written or read")
    shared_unnamed: int = _counter("1 while the shared tier is off because the files of the model are still being read")
    shared_silent: int = _counter("1 while the shared tier is off because its store or its process does not answer")
    shared_times_off: int = _counter("times the shared tier was turned off: repeated errors, or no answer")
    shared_restarts: int = _counter("restarts of the process of the shared tier")
    object_read_failures: int = _counter("objects of the shared tier that could not be read")
    object_write_failures: int = _counter("objects that could not be written to the shared tier")
    offload_failed_blocks: int = _counter("blocks whose copy to host memory failed; they were not registered")
    offload_skipped_blocks: int = _counter(
        "computed blocks not copied: host memory was full, too many copies in flight, or evicted before (`on_evict`)"
    )
    offload_declined_blocks: int = _counter(
        "computed blocks not copied because adaptive eviction would not keep them in host memory"
    )
    eviction_order: int = _counter(
        "how host memory chooses what it evicts: 0 `lru`; with `adaptive` 1 LRU, 2 probation, 3 incumbents"
    )
    eviction_gain_percent: int = _counter(
        "percent of hits that the shadow cache of this order has more than that of LRU, in the last requests"
    )
    hinted_requests: int = _counter("requests with a hint of their client, or with a session")
    invalid_hints: int = _counter("hints that were ignored because their words or values are wrong")
    hints_off: int = _counter("1 while hints are not followed, because they cost hits")
    disk_eviction_order: int = _counter("like kvbm_eviction_order, of the disk")
    disk_eviction_gain_percent: int = _counter("like kvbm_eviction_gain_percent, of the disk")
    onboard_failed_blocks: int = _counter(
        "promised blocks that the engine recomputed: a copy failed, or the disk failed or was too slow, "
        "which kvbm_disk_late_blocks also counts"
    )
    onboard_shared_requests: int = _counter("requests that waited while another request loaded the same blocks")
    lost_state_tokens: int = _counter(
        "prompt tokens whose blocks were found, but that were computed because no snapshot of the state was "
        "found at their end"
    )
    overdue_transfers: int = _counter("queries for the result of a transfer that was late")
    evicted_blocks: int = _counter("registered blocks evicted from host memory to make space")
    resets: int = _counter("times the cache was emptied on request")
    finished_requests: int = _counter("finished requests that looked up blocks in the cache")
    record_dropped_calls: int = _counter("decisions dropped because the recording queue was full")
    lost_spans: int = _counter(
        "spans that were not sent to `metrics.spans_endpoint`: it failed or was too slow, or too many waited"
    )
    disabled: int = _counter(
        "1 after a rank was lost, ranks with one copy had different KV, or kvbm failed: the cache is off"
    )
    faults: int = _counter(
        "exceptions of kvbm that were stopped before they reached the engine; its log has the first one"
    )
    prompt_device_tokens: int = 0
    prompt_host_tokens: int = 0
    prompt_disk_tokens: int = 0
    prompt_shared_tokens: int = 0
    prompt_computed_tokens: int = 0
    prompt_aborted_tokens: int = 0
    saved_prefill_s: float = 0.0
    matches_whole: int = 0
    matches_partial: int = 0
    matches_none: int = 0
    retain_quota_hints: int = 0
    retain_share_hints: int = 0
    session_share_hints: int = 0
    prefetch_share_hints: int = 0
    prefetch_late_hints: int = 0
    host_reset_blocks: int = 0
    disk_evicted_blocks: int = 0
    disk_reset_blocks: int = 0
    disk_admitted_blocks: int = 0
    shared_admitted_blocks: int = 0
    shared_rejected_blocks: int = 0
    onboard_copy_failed_blocks: int = 0
    disk_write_failed_blocks: int = 0
    disk_read_failed_blocks: int = 0
    disk_damaged_blocks: int = 0
    shared_write_failed_blocks: int = 0
    shared_read_failed_blocks: int = 0
    shared_damaged_blocks: int = 0
    shared_absent_blocks: int = 0
    durations: dict[str, Durations] = field(default_factory=_durations, compare=False)
    hit_rates_at: Mapping[tuple[str, float], float] = field(default_factory=dict, compare=False)  # of shadow caches
    hit_window: deque[tuple[int, int, int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW_REQUESTS))

    def add(self, name: str, tier: Tier, count: int) -> None:
        """Add to the counter of a lower tier. `name` has `{}` in place of `disk` or `shared`."""
        name = name.format(_LOWER[tier])
        setattr(self, name, getattr(self, name) + count)

    def count_match(self, found: int, asked: int) -> None:
        """Count a finished request of which `found` of `asked` blocks were in a tier."""
        self.finished_requests += 1
        self.matches_none += not found
        self.matches_partial += 0 < found < asked
        self.matches_whole += found >= asked > 0

    def count_prompt(self, tokens: int, *, device: int, external: int, disk: int, shared: int) -> None:
        """Count the prompt of a completed request: `device` tokens were in G1, `external` ones were loaded, at most
        `disk` and `shared` of them from lower tiers."""
        device = min(device, tokens)
        external = min(external, tokens - device)
        disk = min(disk, external)
        shared = min(shared, external - disk)
        self.prompt_device_tokens += device
        self.prompt_host_tokens += external - disk - shared
        self.prompt_disk_tokens += disk
        self.prompt_shared_tokens += shared
        self.prompt_computed_tokens += tokens - device - external

    def hits(self) -> tuple[int, int, int, int]:
        """Return (blocks loaded from G2, from G3, from G4, prompt blocks looked up) for the last finished requests."""
        host, disk, shared, probed = map(sum, zip((0, 0, 0, 0), *tuple(self.hit_window), strict=True))
        return host, disk, shared, probed

    def hit_rate(self, tier: Tier) -> float:
        """Return the share of prompt blocks loaded from a tier, 0 to 1, over the last finished requests."""
        *loaded, probed = self.hits()
        return loaded[HIT_TIERS.index(tier)] / probed if probed else 0.0


TOTALS = tuple(one.name for one in fields(Counters) if one.default is not MISSING)  # attributes that are numbers

# metric name -> (attribute of Counters, help)
COUNTERS: dict[str, tuple[str, str]] = {
    one.metadata["name"] or f"kvbm_{one.name}": (one.name, one.metadata["about"])
    for one in fields(Counters)
    if one.metadata
}

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


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change while an engine lives. `block_bytes`: of one block, over all ranks. `info` are the labels of
    `kvbm_info`, `startup_s` the seconds that each phase of the start took, as far as they are known."""

    block_bytes: int
    has_shared: bool
    info: dict[str, str] = field(default_factory=dict)
    startup_s: dict[str, float] = field(default_factory=dict)


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
