"""Counters of the leader, and the Prometheus collector that exports them.

Only the leader writes `Counters`; any thread may read it. A number is incremented after its event: a block counts as
offloaded when it is registered, and as onboarded when the engine may read it.

The names of NVIDIA's KVBM metrics are kept exactly, so that its dashboards continue to work. Its counters have no
`_total` suffix, which the Prometheus client would add to metrics of type `counter`. So all counters are exported
untyped; `rate()` works on them. `observe/series.py` exports the same counts with labels and under the names that
Prometheus recommends. A new counter is a field here, and a row there if it is one of several with different labels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kvbm.types import Tier

if TYPE_CHECKING:
    from prometheus_client.core import Metric

WINDOW_REQUESTS = 1000
TRANSFER_BOUNDS_S = tuple(0.0005 * 4**i for i in range(8))  # 0.5 ms to 8.2 s
MATCH_BOUNDS_S = tuple(0.000016 * 4**i for i in range(8))  # 16 µs to 0.26 s
HIT_TIERS = (Tier.HOST, Tier.DISK, Tier.SHARED)


def _counter(about: str, *, name: str = "", key: str = "") -> Any:
    """Return a field for a counter, which is exported under `name`, or `kvbm_` and its key (see `_Total`)."""
    return field(default=0, metadata={"key": key, "exported": (about, name)})


def _of_each(disk: str, shared: str, *, names: tuple[str, str] = ("", ""), key: str = "") -> Any:
    """Return a field for a counter that both lower tiers have: its texts, and the names under which it is exported."""
    return field(default=0, metadata={"key": key, "disk": (disk, names[0]), "shared": (shared, names[1])})


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
class TierCounters:
    """What is counted of each lower tier. The tier and the field are the key of a total, as in `disk_off`,
    unless the field has a key."""

    offload_blocks: int = _of_each(
        "blocks copied from host memory to disk and registered there",
        "blocks written to the shared tier",
        names=("kvbm_offload_blocks_h2d", "kvbm_offload_blocks_d2o"),
    )
    onboard_blocks: int = _of_each(
        "blocks loaded from disk and passed to the engine; also counted in kvbm_onboard_blocks_h2d",
        "blocks loaded from the shared tier and passed to the engine; also counted in kvbm_onboard_blocks_h2d",
        names=("kvbm_onboard_blocks_d2d", "kvbm_onboard_blocks_o2d"),
        key="onboard_{}_blocks",
    )
    offload_bytes: int = _of_each(
        "bytes of blocks copied from host memory to disk and registered there",
        "bytes of blocks written to the shared tier",
        names=("kvbm_offload_bytes_h2d", "kvbm_offload_bytes_d2o"),
    )
    fetched_blocks: int = _of_each(
        "blocks read from disk, verified and registered in host memory",
        "blocks read from the shared tier, verified and registered in host memory",
    )
    failed_blocks: int = _of_each(
        "blocks whose write or read failed, or whose checksum was wrong",
        "blocks of the shared tier whose read failed",
    )
    declined_blocks: int = _of_each(
        "blocks on disk not read because computing was predicted faster",
        "blocks not read from the shared tier because computing was predicted faster",
    )
    late_blocks: int = _of_each(
        "blocks on disk computed because their read took too long",
        "blocks of the shared tier computed because their read took too long",
    )
    dropped_blocks: int = _of_each(
        "blocks evicted from host memory before they could be written",
        "blocks not written to the shared tier: they left host memory, or the write failed",
    )
    off: int = _of_each(
        "1 while the disk tier is off: no block is written or read",
        "1 while the shared tier is off: no block is written or read",
    )
    unnamed: int = _of_each(
        "1 while the disk tier is off because the files of the model are still being read",
        "1 while the shared tier is off because the files of the model are still being read",
    )
    silent: int = _of_each(
        "1 while the disk tier is off because its directory or its process does not answer",
        "1 while the shared tier is off because its store or its process does not answer",
    )
    times_off: int = _of_each(
        "times the disk tier was turned off: repeated errors, or no answer",
        "times the shared tier was turned off: repeated errors, or no answer",
    )
    restarts: int = _of_each("restarts of the disk I/O process", "restarts of the process of the shared tier")
    prompt_tokens: int = field(default=0, metadata={"key": "prompt_{}_tokens"})
    admitted_blocks: int = 0
    write_failed_blocks: int = 0
    read_failed_blocks: int = 0
    damaged_blocks: int = 0


@dataclass(slots=True)
class DiskTierCounters(TierCounters):
    """What is counted of the disk tier."""

    only_blocks: int = _counter(
        "blocks registered on disk without a host tier; also counted in kvbm_offload_blocks_h2d",
        name="kvbm_offload_blocks_d2d",
    )
    filter_admitted_blocks: int = _counter("blocks that the frequency filter admitted")
    filter_rejected_blocks: int = _counter("blocks that the frequency filter rejected at registration in host memory")
    checksum_failures: int = _counter("blocks read from disk with a wrong checksum")
    io_errors: int = _counter("reads and writes that failed or were incomplete")
    flushes: int = _counter("flushes of written blocks to durable storage")
    dropped_rows: int = _counter("blocks lost when a disk cache was opened, because their index rows were invalid")
    damaged_files: int = _counter("damaged superblocks and indexes of disk caches, and caches with unusable files")
    eviction_order: int = _counter("like kvbm_eviction_order, of the disk")
    eviction_gain_percent: int = _counter("like kvbm_eviction_gain_percent, of the disk")
    evicted_blocks: int = 0
    reset_blocks: int = 0


@dataclass(slots=True)
class SharedTierCounters(TierCounters):
    """What is counted of the shared tier."""

    copies_read: int = _counter("objects read from the copy of another engine of this machine instead of the store")
    saved_writes: int = _counter("objects not written to the shared tier because another engine had written them")
    bad_objects: int = _counter("objects of the shared tier that were damaged, or of another namespace or version")
    absent_objects: int = _counter("reads of objects that the shared tier no longer had")
    failed_requests: int = _counter("requests to the shared tier's store that failed or were not answered in time")
    probes: int = _counter("chains that were looked up in the shared tier's store")
    read_failures: int = _counter("objects of the shared tier that could not be read", key="object_read_failures")
    write_failures: int = _counter("objects that could not be written to the shared tier", key="object_write_failures")
    rejected_blocks: int = 0
    absent_blocks: int = 0


@dataclass(slots=True)
class Counters:
    """Totals since the leader started, with the unit in the name. A block counts once for all ranks.

    Those without a text have no series of their own: they are parts of one in `observe/series.py`. `disk` and `shared`
    count what a lower tier does. `durations` are by source and target of a transfer, and `match`.
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
    onboard_copy_failed_blocks: int = 0
    disk: DiskTierCounters = field(default_factory=DiskTierCounters)
    shared: SharedTierCounters = field(default_factory=SharedTierCounters)
    durations: dict[str, Durations] = field(default_factory=_durations, compare=False)
    hit_rates_at: Mapping[tuple[str, float], float] = field(default_factory=dict, compare=False)  # of shadow caches
    hit_window: deque[tuple[int, int, int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW_REQUESTS))

    def of(self, tier: Tier) -> TierCounters:
        """Return the counters of a lower tier: `tier` is DISK or SHARED."""
        assert tier in (Tier.DISK, Tier.SHARED), tier
        return self.disk if tier is Tier.DISK else self.shared

    @property
    def is_tier_off(self) -> bool:
        """Whether a lower tier that the engine has is off."""
        return bool(self.disk.off or self.shared.off)

    def note_reset(self, tier: Tier, blocks: int) -> None:
        """Count blocks that host memory or the disk has forgotten. kvbm does not know how many the shared tier has."""
        if tier is Tier.HOST:
            self.host_reset_blocks += blocks
        else:
            self.disk.reset_blocks += blocks

    def numbers(self) -> tuple[int, ...]:
        """Return the totals, in the order of TOTALS."""
        return _read_numbers(self)

    def totals(self) -> dict[str, float]:
        """Return the totals by key."""
        return dict(zip(TOTALS, self.numbers(), strict=True))

    def set_total(self, key: str, value: float) -> None:
        owner, _, name = _PATHS[key].rpartition(".")
        setattr(getattr(self, owner) if owner else self, name, value)

    def note_hits(self, blocks: Mapping[Tier, int], asked: int) -> None:
        """Note how many blocks were loaded from each tier, and how many were looked up."""
        host, disk, shared = (blocks.get(tier, 0) for tier in HIT_TIERS)
        self.hit_window.append((host, disk, shared, asked))

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
        self.disk.prompt_tokens += disk
        self.shared.prompt_tokens += shared
        self.prompt_computed_tokens += tokens - device - external

    def hits(self) -> tuple[int, int, int, int]:
        """Return (blocks loaded from G2, from G3, from G4, prompt blocks looked up) for the last finished requests."""
        host, disk, shared, probed = map(sum, zip((0, 0, 0, 0), *tuple(self.hit_window), strict=True))
        return host, disk, shared, probed

    def hit_rate(self, tier: Tier) -> float:
        """Return the share of prompt blocks loaded from a tier, 0 to 1, over the last finished requests."""
        *loaded, probed = self.hits()
        return loaded[HIT_TIERS.index(tier)] / probed if probed else 0.0


@dataclass(frozen=True, slots=True)
class _Total:
    """A number of Counters: its attribute, its key in everything that kvbm sends or writes, and its own series."""

    path: str
    key: str
    metric: str | None
    about: str


def _totals_of(counters: type, tier: str = "") -> Iterator[_Total]:
    """Yield the numbers of Counters, or those of the class for a lower tier, which is then named."""
    for one in fields(counters):
        if one.default is MISSING:
            continue
        usual, path = (f"{tier}_{one.name}", f"{tier}.{one.name}") if tier else (one.name, one.name)
        key = (one.metadata.get("key") or usual).format(tier)
        about, metric = one.metadata.get("exported") or one.metadata.get(tier) or ("", "")
        yield _Total(path, key, (metric or f"kvbm_{key}") if about else None, about)


_ALL = (
    *_totals_of(Counters),
    *_totals_of(DiskTierCounters, "disk"),
    *_totals_of(SharedTierCounters, "shared"),
)
_PATHS = {total.key: total.path for total in _ALL}
TOTALS = tuple(_PATHS)
_read_numbers: Callable[[Counters], tuple[int, ...]] = attrgetter(*_PATHS.values())  # a tenth of a loop's time

# metric name -> (key of the total, help)
COUNTERS: dict[str, tuple[str, str]] = {total.metric: (total.key, total.about) for total in _ALL if total.metric}

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

        totals = self._counters.totals()
        for name, (key, description) in COUNTERS.items():
            yield UnknownMetricFamily(name, description, value=totals[key])
        for tier, rate in HIT_RATES.items():
            yield GaugeMetricFamily(*rate, value=self._counters.hit_rate(tier))
        for tier, states in self._blocks().items():
            blocks = GaugeMetricFamily(*BLOCKS[tier], labels=["state"])
            for state, count in states.items():
                blocks.add_metric([state], count)
            yield blocks
        for name, value in self._wear().items():
            yield GaugeMetricFamily(name, DISK_GAUGES[name], value=value)
