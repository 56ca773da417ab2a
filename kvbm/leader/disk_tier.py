"""DiskSide: the leader's part that decides about G3: what is written there, what is read back, and what is forgotten.

It owns the metadata of G3 and moves no bytes: a `LastingDisk` does. The leader's thread owns both and calls

    registered, hit, touch      what happens to blocks in host memory, from which follows what goes to disk
    match, contains, fetch      what is on disk, and bringing it to host memory
    step                        begin the writes that are due
    settle                      what has ended: written blocks become findable, read ones are registered in G2

Where the process for disk I/O has ended, the disk is off, and what was on it is forgotten here; when the next one is
there, what that has found is taken over step by step, and then it is on again.

A block on its way to disk is pinned in G2, and is not registered in G3 unless the control words of its slot were still
right when all of it had been written: a rank may have ended meanwhile. One on its way back is pinned in G3 and has a G2
slot of its own that nobody finds before its bytes are proven. A G2 slot whose read overruns stays taken until it ends.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvbm.core.admission import FrequencyFilter
from kvbm.core.store import BlockStore
from kvbm.disk.directory import RATES
from kvbm.disk.orders import Read, Write
from kvbm.hashing import namespace
from kvbm.leader.rates import Rates, RatesFile
from kvbm.types import Tier

if TYPE_CHECKING:
    from kvbm.config.schema import ConnectorConfig
    from kvbm.core.blocks import MutableBlocks, PinnedBlocks
    from kvbm.disk.health import DiskCounters
    from kvbm.disk.orders import DiskResult, FoundBlocks
    from kvbm.disk.service.supervisor import DiskSupervisor
    from kvbm.disk.wear import Wear
    from kvbm.leader.host_tier import HostTier, Reservation
    from kvbm.leader.settings import LeaderSettings
    from kvbm.metrics import Counters
    from kvbm.types import SegmentInfo

WRITES_AT_A_TIME = 2
TAKEN_AT_A_TIME = 8  # batches in a step: one that has left host memory meanwhile is only dropped, but takes time too
PINNED_SHARE = 4  # of G2 that writes may pin
CLEANED_AHEAD = 256  # blocks at the old end of G2 that `on_evict` keeps written
FILL_S = 0.002  # of a step, for taking over what the next process has found
SAY_INTERVAL_S = 2.0  # between two lines about what is written at the end
AWAKE_S = 5.0  # that an engine without requests waits for the next process

log = logging.getLogger(__name__)


class Disk(Protocol):
    """What moves the bytes: a `LastingDisk`, or a test that holds them in memory."""

    @property
    def slot_count(self) -> int: ...
    @property
    def home(self) -> Path | None: ...
    @property
    def is_on(self) -> bool: ...
    @property
    def counters(self) -> DiskCounters: ...
    @property
    def losses(self) -> int: ...
    @property
    def restarts(self) -> int: ...
    def recovered(self, *, waits: bool) -> FoundBlocks | None: ...
    def submit(self, order: Read | Write) -> None: ...
    def forget(self, disk_slots: Sequence[int]) -> None: ...
    def clear(self) -> None: ...
    def poll(self) -> list[DiskResult]: ...
    def wear(self) -> Wear: ...
    def close(self, timeout_s: float) -> None: ...


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks on their way from disk to host memory. `blocks` holds them, pinned in G2, when they have come."""

    source: PinnedBlocks
    target: Reservation
    blocks: PinnedBlocks | None = None
    is_void: bool = False
    is_abandoned: bool = False


@dataclass(slots=True)
class _Write:
    source: PinnedBlocks
    target: MutableBlocks
    is_void: bool = False


@dataclass(slots=True)
class _Queue:
    """Hashes that are due for a write, first come, first written, each once."""

    limit: int
    hashes: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def add(self, hashes: Sequence[bytes]) -> int:
        """How many found no place."""
        room = self.limit - len(self.hashes)
        fresh = [sequence_hash for sequence_hash in hashes if sequence_hash not in self.hashes]
        self.hashes.update(dict.fromkeys(fresh[: max(0, room)]))
        return len(fresh) - max(0, min(room, len(fresh)))

    def take(self, count: int) -> list[bytes]:
        return [self.hashes.popitem(last=False)[0] for _ in range(min(count, len(self.hashes)))]


def open_disk(
    config: ConnectorConfig,
    segments: Sequence[SegmentInfo],
    *,
    identity: Mapping[str, object],
    is_stable: bool,
    hash_bytes: int,
    progress: Callable[[int, int], None] | None = None,
) -> DiskSupervisor | None:
    """The disk of an engine, None where none is configured. Raises EnvironmentProblem.

    `identity` is whatever decides the bytes and the hashes of a block, beside how the ranks lay it out, and has the
    `model` for people; where that is not stable from start to start, nothing is kept.
    """
    section = config.tiers.disk
    if section is None:
        return None
    from kvbm.disk.service.supervisor import DiskSupervisor
    from kvbm.disk.settings import DiskSettings, Namespace

    layout = [[info.block_bytes, info.slot_stride, info.layout_digest] for info in segments]
    facts = {"layouts": layout, **identity}
    settings = DiskSettings(
        directory=Path(section.directory).expanduser(),
        capacity_bytes=section.capacity,
        block_count=section.blocks,
        allocator=section.allocator,
        zerofill=section.zerofill,
        o_direct=section.o_direct,
        io=section.io,
        threads=section.threads,
        persist=section.persist and is_stable,
        reclaim=section.reclaim,
    )
    if section.persist and not is_stable:
        log.warning("kvbm: blocks on disk are not kept for the next start: their names change from start to start")
    name = Namespace(namespace(facts), facts)
    disk = DiskSupervisor.open(settings, name, segments, hash_bytes=hash_bytes, progress=progress)
    log.info("kvbm: room for %d blocks in %s, moved by %s", disk.slot_count, settings.directory, disk.io_name)
    return disk


class DiskTier:
    """See the module's text."""

    def __init__(
        self,
        disk: Disk,
        host: HostTier,
        settings: LeaderSettings,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._disk = disk
        self._policy = policy = settings.disk
        self._host = host
        self._block_bytes = settings.block_bytes
        self._counters = counters
        self._clock = clock
        self.store = BlockStore(disk.slot_count, tier=Tier.DISK, hash_bytes=settings.engine.hash_bytes, events=False)
        self._losses = disk.losses
        self._is_filled = False  # with all that a process has found
        self._awake_until_s = 0.0
        self._fill(math.inf, waits=True)
        log.info("kvbm: %d blocks on disk are of an earlier engine", self.store.counts().inactive)
        self._filter = FrequencyFilter(threshold=policy.frequency_threshold, max_entries=policy.frequency_entries)
        self._decay_s = clock() + policy.frequency_decay_s
        self._queue = _Queue(host.capacity_blocks)
        self._cleaned = 0  # how much had come and gone when the old end of host memory was last looked at
        self._departing: set[bytes] = set()
        self._tenants: dict[int, bytes] = {}  # of the G2 slots whose blocks belong to one
        self._writes: dict[int, _Write] = {}
        self._fetches: dict[int, Fetch] = {}
        self._tickets = itertools.count(1)
        self._rates_file = None if disk.home is None else RatesFile(disk.home / RATES, clock=clock)
        known = None if self._rates_file is None else self._rates_file.read()
        self.rates = Rates(block_tokens=settings.engine.block_tokens, clock=clock, known=known)

    # -- what happens in host memory -----------------------------------------------------------------------------------

    def registered(self, hashes: Sequence[bytes], slots: Sequence[int], tenant: bytes) -> None:
        """These blocks of a tenant have come to these slots of host memory from device memory."""
        self._note_tenant(slots, tenant)
        if self._policy.to_disk == "always":
            self._enqueue(hashes)
        elif self._policy.to_disk == "frequency":
            admitted = self._filter.register(hashes)
            self._counters.disk_filter_rejected_blocks += len(hashes) - len(admitted)
            self._admit(admitted)

    def hit(self, hashes: Sequence[bytes]) -> None:
        """A request has found these blocks, in whichever tier. Those that it makes worth keeping are written, if they
        are in host memory."""
        if self._policy.to_disk == "frequency":
            self._admit(self._filter.hit(hashes))

    def touch(self, hashes: Sequence[bytes]) -> None:
        """These blocks are in use; what is used in any tier is not evicted from disk."""
        self.store.touch(hashes)

    def evicting(self, count: int, *, keeps_unwritten: bool = False) -> None:
        """So many blocks are about to be evicted from host memory; if wanted, not those that are due for the disk."""
        if count <= 0:
            return
        if keeps_unwritten:
            self._host.touch(list(self._queue.hashes))
        if self._policy.to_disk == "on_evict":
            self._counters.disk_dropped_blocks += len(self.store.missing(self._host.store.oldest(count)))

    # -- what is on disk -----------------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether blocks are found there, read and written."""
        return self._is_filled and self._disk.is_on

    def refresh(self) -> None:
        """Before something is looked for: take over what the next process has found while the engine rested."""
        if not (self.is_on or self._writes or self._fetches):
            self.settle()  # tells the end of one process
            self.settle()  # and the beginning of another

    def contains(self, sequence_hash: bytes) -> bool:
        return self.is_on and self.store.contains(sequence_hash)

    def match(self, hashes: Sequence[bytes], start: int) -> int:
        """How many of `hashes[start:]` are on disk, up to the first that is not."""
        return self.store.match(hashes, start) if self.is_on else 0

    def worthwhile(self, spans: Sequence[tuple[bool, int]]) -> int:
        """How many blocks of a chain to load, whose spans are (are on disk, blocks)."""
        if self._policy.reads_always:
            return sum(count for _, count in spans)
        wanted = self.rates.worthwhile(spans)
        self._counters.disk_declined_blocks += sum(count for _, count in spans) - wanted
        return wanted

    def is_hopeless(self, waited_s: float, blocks: int, of_blocks: int) -> bool:
        """Whether a request that has waited so long, and has got `blocks` of its `of_blocks`, had better compute."""
        return not self._policy.reads_always and self.rates.is_hopeless(
            waited_s=waited_s, blocks=blocks, of_blocks=of_blocks
        )

    def give_up(self, blocks: int, missing: int, waited_s: float) -> None:
        """A request computes `missing` blocks after all, having got `blocks` in so long."""
        self.rates.note_read(blocks, waited_s)
        self._counters.disk_late_blocks += missing

    def pin(self, hashes: Sequence[bytes]) -> PinnedBlocks | None:
        """Keep these blocks on disk until they have been fetched; None if one has gone."""
        return self.store.pin(hashes) if self.is_on else None

    def fetch(self, hashes: Sequence[bytes], tenant: bytes) -> Fetch | None:
        """Begin to read blocks that are held, and are a tenant's, into host memory; None while there is no room, or the
        disk is off. `settle` tells the end."""
        if not self.is_on:
            return None
        self.evicting(len(hashes) - self._host.store.counts().free)
        target = self._host.reserve(len(hashes))
        if target is None:
            return None
        source = self.store.pin(hashes)
        assert source is not None, "blocks to be fetched are held"
        ticket = next(self._tickets)
        self._note_tenant(target.slots, tenant)
        self._host.unprove(target)
        fetch = self._fetches[ticket] = Fetch(source, target)
        self._disk.submit(Read(ticket, source.hashes, source.slots, target.slots))
        return fetch

    def abandon(self, fetch: Fetch) -> None:
        """No request waits for it any more: `settle` releases its blocks when the read has ended."""
        fetch.is_abandoned = True

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Begin the writes that are due, as many as may run at a time."""
        if self._clock() >= self._decay_s:
            self._decay_s = self._clock() + self._policy.frequency_decay_s
            self._filter.decay()
        if self._policy.to_disk == "on_evict":
            self._clean()
        if self._rates_file is not None:
            self._rates_file.keep(self.rates.known())
        self._begin_writes()

    def settle(self) -> list[Fetch]:
        """Take note of what has ended; return the fetches among it, which are the caller's now."""
        ended = []
        for result in self._disk.poll():
            if (write := self._writes.pop(result.ticket, None)) is not None:
                self._end_write(write, result.is_good)
            elif (fetch := self._fetches.pop(result.ticket, None)) is not None:
                self._end_fetch(fetch, result.is_good)
                if fetch.is_abandoned and fetch.blocks is not None:
                    fetch.blocks.release()
                elif not fetch.is_abandoned:
                    ended.append(fetch)
        self._follow_process()
        self._copy_counters()
        return ended

    def is_writing(self) -> bool:
        """Whether something is on its way to a disk that works, or due for it."""
        return self.is_on and bool(self._writes or self._queue.hashes)

    def is_returning(self) -> bool:
        """Whether it is to be expected within seconds that a disk is on again whose process has ended."""
        return not self._is_filled and self._clock() < self._awake_until_s

    def must_be_waited_for(self, end: int) -> int | None:
        """How many blocks a chain of `end` blocks may not evict, as they are still to be written: it passes through
        host memory, since the disk takes everything. None if it does not, and has to fit in."""
        is_larger = end > self._host.capacity_blocks
        if self._policy.to_disk != "always" or not self.is_on or not (is_larger or self._policy.is_buffer):
            return None
        return len(self._queue.hashes)

    def wear(self) -> dict[str, float]:
        """By the names of metrics, what is known of it."""
        wear = self._disk.wear()
        found = {
            "kvbm_disk_write_amplification": wear.write_amplification,
            "kvbm_disk_drive_writes_per_day": wear.drive_writes_per_day,
        }
        return {name: value for name, value in found.items() if value is not None}

    # -- the end -------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every block, durably, and what is on its way too. Raises EnvironmentProblem where the disk does not
        answer: then it stays off until it has forgotten."""
        self.store.reset()
        self._filter.clear()
        self._queue.hashes.clear()
        self._departing.clear()
        for write in self._writes.values():
            write.is_void = True
        for fetch in self._fetches.values():
            fetch.is_void = True
        self._disk.clear()

    def close(self) -> None:
        """Write what host memory has and the disk has not, the most recently used first, while there is time."""
        deadline_s = self._clock() + self._policy.drain_s
        counts = self._host.store.counts()
        newest_first = self._host.store.oldest(counts.inactive)[::-1]
        absent = [newest_first[index] for index in self.store.missing(newest_first)]
        self._queue.hashes.clear()
        self._queue.add([sequence_hash for sequence_hash in absent if sequence_hash not in self._departing])
        said_s = self._clock()
        while self.is_writing() and self._clock() < deadline_s:
            self._begin_writes()
            time.sleep(0.001)
            self.settle()
            if self._clock() - said_s > SAY_INTERVAL_S:
                said_s = self._clock()
                done = len(absent) - len(self._queue.hashes)
                log.info("kvbm: writing host memory to disk, %d of %d blocks", done, len(absent))
        left = len(self._queue.hashes)
        log.info("kvbm: %d blocks were written to disk at the end, %d not", len(absent) - left, left)
        self._disk.close(max(0.1, deadline_s - self._clock()))

    def check(self) -> None:
        """Raise unless the bookkeeping is consistent. For tests."""
        self.store.check()
        written = {h for write in self._writes.values() if not write.is_void for h in write.source.hashes}
        assert written == self._departing, (len(written), len(self._departing))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _follow_process(self) -> None:
        """Forget what was on disk when its process has ended, and take over what the next one has found."""
        if self._disk.losses != self._losses:
            tickets = self._writes.keys() | self._fetches.keys()
            assert not tickets, f"{tickets} have not ended, and their process has"
            self._losses = self._disk.losses
            self.store.reset()
            self._is_filled = False
            self._awake_until_s = self._clock() + AWAKE_S
        if not self._is_filled:
            self._fill(FILL_S)

    def _fill(self, limit_s: float, *, waits: bool = False) -> None:
        """Take over what a process has found, as much as the time allows, once nobody holds a slot from before."""
        counts = self.store.counts()
        if counts.free + counts.inactive < self.store.capacity_blocks:
            return
        end_s = self._clock() + limit_s
        while not self._is_filled and self._clock() < end_s:
            found = self._disk.recovered(waits=waits)
            if found is None:
                return
            self.store.restore(*found.lists())
            self._is_filled = found.is_last
            self._awake_until_s = self._clock() + AWAKE_S
        if self._is_filled and self._losses:
            log.warning("kvbm: the disk tier has a process again, and %d blocks", self.store.counts().inactive)

    def _note_tenant(self, slots: Sequence[int], tenant: bytes) -> None:
        if tenant:
            self._tenants.update(dict.fromkeys(slots, tenant))
        elif self._tenants:
            for slot in slots:
                self._tenants.pop(slot, None)

    def _admit(self, hashes: Sequence[bytes]) -> None:
        self._counters.disk_filter_admitted_blocks += len(hashes)
        self._enqueue(hashes)

    def _enqueue(self, hashes: Sequence[bytes]) -> None:
        absent = [hashes[index] for index in self.store.missing(hashes) if hashes[index] not in self._departing]
        self._counters.disk_dropped_blocks += self._queue.add(absent)

    def _copy_counters(self) -> None:
        known, counters = self._disk.counters, self._counters
        counters.disk_checksum_failures = known.checksum_misses
        counters.disk_io_errors = known.io_errors.total()
        counters.disk_flushes = known.flushes
        counters.disk_times_off = known.times_off
        counters.disk_restarts = self._disk.restarts
        counters.disk_off = int(not self.is_on)

    def _clean(self) -> None:
        """Keep the old end of host memory written, once blocks are about to be evicted."""
        changes = self._counters.offload_blocks + self._counters.evicted_blocks
        if changes != self._cleaned and not self._queue.hashes and self._host.store.counts().free < CLEANED_AHEAD:
            self._cleaned = changes
            self._enqueue(self._host.store.oldest(CLEANED_AHEAD))

    def _begin_writes(self) -> None:
        for _ in range(TAKEN_AT_A_TIME):
            if not self._queue.hashes or len(self._writes) >= WRITES_AT_A_TIME or not self.is_on:
                return
            share = 1 if self._policy.is_buffer else PINNED_SHARE
            limit = max(1, min(self._policy.batch_blocks, self._host.capacity_blocks // share // WRITES_AT_A_TIME))
            due = self._queue.take(limit)
            wanted = [due[index] for index in self.store.missing(due)]
            source = self._host.pin([h for h in wanted if self._host.contains(h)])
            assert source is not None
            self._counters.disk_dropped_blocks += len(wanted) - len(source.slots)
            target = self.store.allocate(len(source.slots))
            if target is None or not source.slots:
                self._counters.disk_dropped_blocks += len(source.slots)
                source.release()
                if target is not None:
                    target.release()
                continue
            ticket = next(self._tickets)
            self._writes[ticket] = _Write(source, target)
            self._departing.update(source.hashes)
            generations = self._host.generations_of(source.slots)
            tenants = [self._tenants.get(slot, b"") for slot in source.slots]
            self._disk.submit(Write(ticket, source.hashes, target.slots, source.slots, tenants, generations))

    def _end_write(self, write: _Write, is_good: Sequence[bool]) -> None:
        hashes = write.source.hashes
        write.source.release()
        if write.is_void:
            write.target.release()
            return
        self._departing.difference_update(hashes)
        written, failed = write.target.split(is_good)
        failed.release()
        good = [h for h, is_written in zip(hashes, is_good, strict=True) if is_written]
        written.stage(good).register().release()
        self._counters.disk_offload_blocks += len(good)
        self._counters.disk_only_blocks += len(good) * self._policy.is_buffer
        self._counters.disk_offload_bytes += len(good) * self._block_bytes
        self._counters.disk_failed_blocks += len(hashes) - len(good)

    def _end_fetch(self, fetch: Fetch, is_good: Sequence[bool]) -> None:
        hashes, slots = fetch.source.hashes, fetch.source.slots
        bad = [index for index, good in enumerate(is_good) if not good]
        if fetch.is_void:
            fetch.source.release()
            fetch.target.release()
            return
        self._counters.disk_failed_blocks += len(bad)
        if bad:
            self.store.forget([hashes[index] for index in bad])
            self._disk.forget([slots[index] for index in bad])
        fetch.source.release()
        self._host.prove(fetch.target, is_good)
        blocks = self._host.register(fetch.target, hashes, is_good)
        self._counters.disk_fetched_blocks += len(blocks.slots)
        if bad:
            blocks.release()
        else:
            fetch.blocks = blocks
