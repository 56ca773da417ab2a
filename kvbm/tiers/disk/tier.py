"""DiskTier: the metadata of G3. It decides which blocks are written to disk, read back, and deleted.

It moves no bytes: a DiskSupervisor does. The leader's thread owns both, and calls it as `lower_tier.py` says.

When the disk I/O process ends, the disk is off and all metadata of G3 is dropped. When the next process has started,
the blocks that it found are registered over several steps; then the disk is on again. The first process may start later
than the engine; until then the store has no slots, and blocks that are due for a write stay in G2.

A block on its way to disk is pinned in G2. It is registered in G3 only if the control words of its slot were still
valid after the write, because a rank may have ended meanwhile. A block on its way back is pinned in G3 and has its own
G2 slot, which is registered only when its bytes are proven. The slot of an abandoned read stays reserved until the read
ends.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING

from kvbm.child import deadlines
from kvbm.core.admission import FrequencyFilter
from kvbm.core.policies.ranking import IN_LOWER_TIER
from kvbm.core.store import BlockStore
from kvbm.tiers.disk.orders import DiskResult, Read, Write
from kvbm.tiers.host_tier import HostListener
from kvbm.tiers.lower_tier import Claim, OwnedTier, TierContext
from kvbm.tiers.open_reads import Extent, Fetch, OpenReads
from kvbm.tiers.slot_labels import SlotLabels
from kvbm.types import Tier

if TYPE_CHECKING:
    from kvbm.core.policies.chain_use import ChainUse
    from kvbm.core.store import MutableBlocks, PinnedBlocks
    from kvbm.tiers.disk.service.client import DiskSupervisor
    from kvbm.tiers.rates import KnownRates

WRITES_AT_A_TIME = 2
TAKEN_AT_A_TIME = 8  # batches per step; dropping a batch that has left host memory takes time too
PINNED_SHARE = 4  # writes pin at most this part of G2
CLEANED_AHEAD = 256  # `on_evict` keeps this many of the next evicted blocks written
FILL_S = 0.002  # time per step to register what the next process found
DRAIN_HUNG_S = 1.5
RATES_INTERVAL_S = 10.0  # between two times that rates are kept
LOG_INTERVAL_S = 2.0  # between progress lines of the final write
AWAKE_S = 5.0  # how long an idle engine waits for the next process
PARTS = 16  # least number of batches in which a load is read, if it has as many blocks
SHARES_OF_G2 = 4  # a batch takes at most this share of host memory

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Write:
    source: PinnedBlocks
    target: MutableBlocks
    blocks: int
    born_s: float
    marks: bytes
    is_void: bool = False
    cleared: set[bytes] = field(default_factory=set)  # tenants whose blocks were cleared meanwhile


class DiskTier(OwnedTier, HostListener):
    kind = Tier.DISK

    def __init__(self, disk: DiskSupervisor, context: TierContext) -> None:
        self.disk = disk
        self._notes_of = context.callbacks.notes_of
        self._settings = context.settings
        self._policy = policy = context.settings.disk
        self._host = context.host
        self._counters = context.counters
        self._clock = clock = context.callbacks.clock
        self.store, self.labels = self._empty_store(), SlotLabels(disk.slot_count, clock)
        self._losses = disk.losses
        self._is_filled = False  # all blocks that the process found are registered
        self._awake_until_s = 0.0
        self._fill(math.inf, waits=True)
        self._filter = FrequencyFilter(threshold=policy.frequency_threshold, max_entries=policy.frequency_entries)
        self._decay_s = clock() + policy.frequency_decay_s
        self._queue: OrderedDict[bytes, float] = OrderedDict()  # due for a write, in order of arrival: since when
        self._due_since_s: float | None = None  # the first of them
        self._cleaned = 0  # number of offloads and evictions at the last `_clean`
        self._departing: set[bytes] = set()
        self._unowned: set[bytes] = set()  # read from disk for an unknown tenant: not written until a request has them
        self._writes: dict[int, _Write] = {}
        self.reads = OpenReads("the disk tier", self, self._host, clock)
        self._tickets = itertools.count(1)
        self.rates = context.rates
        if disk.process.earlier_rates is not None:
            self.rates.begin_with(disk.process.earlier_rates)
        self._kept_rates: KnownRates | None = None
        self._rates_due_s = clock()
        self._copy_counters()

    def registered(self, hashes: Sequence[bytes], slots: Sequence[int]) -> None:
        self.adopt(hashes)
        if self._policy.writes == "always":
            self._enqueue(hashes)
        elif self._policy.writes == "frequency":
            admitted = self._filter.register(hashes)
            self._counters.disk.filter_rejected_blocks += len(hashes) - len(admitted)
            self._admit(admitted)

    def adopt(self, hashes: Sequence[bytes]) -> None:
        if self._unowned:
            self._unowned.difference_update(hashes)

    def hit(self, hashes: Sequence[bytes]) -> None:
        """Those that the hit admits are written if still in G2."""
        if self._policy.writes == "frequency":
            self._admit(self._filter.hit(hashes))

    def evicting(self, count: int, *, keeps_unwritten: bool) -> None:
        if keeps_unwritten:
            self._host.store.touch(list(self._queue))
        if self._policy.writes == "on_evict":
            self._counters.disk.dropped_blocks += len(self.store.missing(self._host.store.oldest(count)))

    @property
    def is_on(self) -> bool:
        return self._is_filled and self.disk.is_on and not self.reads.are_hung

    def arrive(self, hashes: Sequence[bytes], now_s: float) -> ChainUse | None:
        arrival = self.store.arrive(hashes, now_s)
        if arrival is not None:
            self.store.touch(hashes[: arrival.hit], arrival.marks(0, arrival.hit))
            counters, choice = self._counters, self.store.policy.choice()
            counters.disk.eviction_order, counters.disk.eviction_gain_percent = choice
        return arrival

    def refresh(self) -> None:
        """Detect a process that was replaced while the engine was idle."""
        if not self.is_on and self.reads.are_abandoned:
            self.settle()  # notes the end of one process, or its answer
            self.settle()  # and the start of the next one

    def contains(self, sequence_hash: bytes) -> bool:
        return self.is_on and self.store.contains(sequence_hash)

    def match(self, hashes: Sequence[bytes], start: int, end: int) -> int:
        return self.store.match(hashes[:end], start) if self.is_on else 0

    def claim(self, hashes: Sequence[bytes], positions: Sequence[int], extents: Sequence[Extent] = ()) -> Claim:
        present = [position for position in positions if self.contains(hashes[position])]
        if not present:
            return Claim()
        kept = self.store.pin([hashes[position] for position in present])
        assert kept is not None, "blocks that were just found can be pinned"
        return Claim([(batch, None) for batch in self.batches(present)], [kept])

    def batches(self, positions: Sequence[int]) -> list[Sequence[int]]:
        """There are enough batches to see early whether the disk is fast enough, and none is so large that host memory
        might never have room for it."""
        share = self._host.capacity_blocks // SHARES_OF_G2
        size = max(1, min(self._settings.batch_blocks, len(positions) // PARTS, share))
        return [positions[at : at + size] for at in range(0, len(positions), size)]

    def has_lost(self, hashes: Sequence[bytes], extent: Extent | None = None) -> bool:
        return self.is_on and bool(self.store.missing(hashes))

    def fetch(self, hashes: Sequence[bytes], tenant: bytes | None, extent: Extent | None = None) -> Fetch | None:
        ticket = next(self._tickets)
        fetch = self.reads.begin(ticket, hashes, tenant) if self.is_on else None
        if fetch is None:
            return None
        source = fetch.source = self.store.pin(hashes)
        assert source is not None, "blocks to be fetched are held"
        if tenant is None:
            self._unowned.update(hashes)
        self.disk.submit(Read(ticket, source.hashes, source.slots, fetch.target.slots))
        return fetch

    def step(self, *, computes: bool) -> None:
        if self._clock() >= self._decay_s:
            self._decay_s = self._clock() + self._policy.frequency_decay_s
            self._filter.decay()
        if self._policy.writes == "on_evict":
            self._clean()
        if self.is_on and self._clock() >= self._rates_due_s:
            self._keep_rates()
        self.store.step()
        self._begin_writes()
        self._due_since_s = next(iter(self._queue.values()), None)

    def settle(self) -> list[Fetch]:
        ended = []
        for result in self.disk.poll():
            if (write := self._writes.pop(result.ticket, None)) is not None:
                self._end_write(write, result.is_good)
            elif (fetch := self.reads.end(result.ticket)) is not None:
                self._end_fetch(fetch, result)
                if not fetch.is_abandoned:
                    ended.append(fetch)
        self.reads.check(is_on=self.disk.is_on)
        self._follow_process()
        self._copy_counters()
        return ended

    def is_writing(self) -> bool:
        """Whether blocks are being written or due for it, and the disk is on."""
        return self.is_on and bool(self._writes or self._queue)

    def is_busy(self) -> bool:
        """Whether it is writing, or the disk I/O process has ended and the disk may be on again within seconds."""
        return self.is_writing() or (not self._is_filled and self._clock() < self._awake_until_s)

    def unwritten_blocks(self, end: int) -> Collection[bytes] | None:
        is_larger = end > self._host.capacity_blocks
        if self._policy.writes != "always" or not self.is_on or not (is_larger or self._settings.is_buffer):
            return None
        return self._queue.keys()

    def queues(self) -> dict[str, tuple[int, float | None]]:
        writes = list(self._writes.values())
        blocks = len(self._queue) + sum(write.blocks for write in writes)
        return {
            "disk_write": (blocks, writes[0].born_s if writes else self._due_since_s),
            "disk_read": self.reads.queue(),
        }

    def wear(self) -> dict[str, float]:
        return self.disk.process.wear()

    def reset(self, *, ends_persistence: bool) -> None:
        self._drop_all()
        self.clear(ends_persistence=ends_persistence)

    def begin_clear(self, tenant: bytes | None) -> None:
        if tenant is None:
            self._drop_all()
        else:
            self.reads.void(tenant)
            for write in self._writes.values():
                write.cleared.add(tenant)
        self.disk.begin_clear(tenant)

    def not_durable(self) -> str:
        if not self.disk.is_clearing:
            return ""
        return self.disk.process.off_because or "the disk has not answered yet"

    def _drop_all(self) -> None:
        self._counters.disk.reset_blocks += self.store.registered
        self.store.reset()
        self._filter.clear()
        self._queue.clear()
        self._departing.clear()
        self._unowned.clear()
        for write in self._writes.values():
            write.is_void = True
        self.reads.void()

    def clear(self, *, ends_persistence: bool) -> None:
        self.disk.clear(ends_persistence=ends_persistence)

    def drop_results(self) -> None:
        self.disk.poll()

    def abandon(self, timeout_s: float) -> None:
        self.disk.close(timeout_s)

    def close(self) -> None:
        """Write blocks that are only in host memory, most recently used first, for at most `drain_s`; then close.

        Of more blocks than the disk has slots, only the newest are written: older ones would evict them. A disk that
        confirms nothing for DRAIN_HUNG_S is not waited for.
        """
        began_s = self._clock()
        deadline_s = began_s + self._policy.drain_s
        newest_first = self._host.store.oldest(self._host.store.counts().inactive)[::-1]
        absent = self._absent(newest_first)
        fitting = newest_first[: self.disk.slot_count]
        self.store.touch(fitting)
        self._queue.clear()
        self._queue.update(dict.fromkeys(self._absent(fitting), began_s))
        due = len(self._queue)
        in_flight = sum(len(write.source.hashes) for write in self._writes.values())
        before, confirmed = self._counters.disk.offload_blocks, 0
        logged_s = moved_s = began_s
        while self.is_writing() and self._clock() < deadline_s and self._clock() - moved_s < DRAIN_HUNG_S:
            self._begin_writes()
            time.sleep(0.001)
            self.settle()
            if self._counters.disk.offload_blocks - before > confirmed:
                confirmed, moved_s = self._counters.disk.offload_blocks - before, self._clock()
            if self._clock() - logged_s > LOG_INTERVAL_S:
                logged_s = self._clock()
                log.info("kvbm: writing host memory to disk, %d of %d blocks", confirmed, due + in_flight)
        is_hung = bool(self._writes or self.reads.are_hung) and self._clock() - moved_s >= DRAIN_HUNG_S
        self.disk.close(0.0 if is_hung or not self.is_on else deadlines.FINISH_S)
        for result in self.disk.poll():
            if (write := self._writes.pop(result.ticket, None)) is not None:
                self._end_write(write, result.is_good)
        done = self._counters.disk.offload_blocks - before
        left = max(0, len(absent) + in_flight - done)
        log.info("kvbm: the disk confirmed %d blocks of host memory before exit; %d may not be there", done, left)

    def _follow_process(self) -> None:
        """Drop all metadata when the process has ended, and register what the next one found."""
        if self.disk.losses != self._losses:
            assert not self._writes, f"{self._writes.keys()} have not ended, and their process has"
            assert self.reads.are_ended, "reads have not ended, and their process has"
            self._losses = self.disk.losses
            self._counters.disk.reset_blocks += self.store.registered
            self.store.reset()
            self._is_filled = False
            self._awake_until_s = self._clock() + AWAKE_S
        if not self._is_filled:
            self._fill(FILL_S)

    def _fill(self, limit_s: float, *, waits: bool = False) -> None:
        """Register what a process found, for `limit_s`. Waits until no slot from before is held."""
        counts = self.store.counts()
        if counts.free + counts.inactive < self.store.capacity_blocks:
            return
        if self.store.capacity_blocks != self.disk.slot_count:  # the first process has just started
            self.store, self.labels = self._empty_store(), SlotLabels(self.disk.slot_count, self._clock)
        end_s = self._clock() + limit_s
        while not self._is_filled and self._clock() < end_s:
            found = self.disk.recovered(waits=waits)
            if found is None:
                return
            slots = found.slots
            self.store.restore(slots, found.hashes, found.notes, is_last=found.is_last)
            self.labels.begin_at(slots, found.ages_s(time.time()))
            self.labels.own_each(slots, found.tenants or [b""] * len(slots))
            self._is_filled = found.is_last
            self._awake_until_s = self._clock() + AWAKE_S
        count = self.store.counts().inactive
        if self._is_filled and self._losses:
            log.warning("kvbm: the disk tier is on again with %d blocks", count)
        elif self._is_filled:
            log.info("kvbm: found %d blocks of an earlier engine on disk", count)

    def _keep_rates(self) -> None:
        """Let the disk process write the rates, if they are known and have changed."""
        known = self.rates.known()
        if known is not None:
            self._rates_due_s = self._clock() + RATES_INTERVAL_S
            if self._kept_rates is None or known.differ(self._kept_rates):
                self._kept_rates = known
                self.disk.process.keep_rates(known)

    def _empty_store(self) -> BlockStore:
        traits = self._settings.traits
        return BlockStore(
            self.disk.slot_count,
            tier=Tier.DISK,
            hash_bytes=traits.hash_bytes,
            events=traits.publishes_events,
            eviction=self._settings.disk_eviction,
        )

    def _admit(self, hashes: Sequence[bytes]) -> None:
        self._counters.disk.filter_admitted_blocks += len(hashes)
        self._enqueue(hashes)

    def _absent(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the blocks that may be written, and are neither on disk nor on their way there."""
        absent = [hashes[index] for index in self.store.missing(hashes)]
        return [one for one in absent if one not in self._unowned and one not in self._departing]

    def _enqueue(self, hashes: Sequence[bytes]) -> None:
        """Queue the blocks that are not on disk. Beyond one place per slot of host memory, blocks are dropped."""
        fresh = [one for one in self._absent(hashes) if one not in self._queue]
        room = max(0, self._host.capacity_blocks - len(self._queue))
        self._queue.update(dict.fromkeys(fresh[:room], self._clock()))
        self._counters.disk.admitted_blocks += min(len(fresh), room)
        self._counters.disk.dropped_blocks += max(0, len(fresh) - room)

    def _copy_counters(self) -> None:
        known, counters = self.disk.counters, self._counters.disk
        counters.checksum_failures = known.checksum_misses
        counters.io_errors = known.io_errors.total()
        counters.flushes = known.flushes
        counters.times_off = known.times_off + self.reads.times_hung
        counters.restarts = self.disk.restarts
        counters.dropped_rows = known.dropped_rows
        counters.damaged_files = known.damaged_files
        counters.off = int(not self.is_on)
        counters.unnamed = int(self.disk.is_unnamed)
        counters.silent = int(self.disk.is_silent or self.reads.are_hung)

    def _clean(self) -> None:
        """Queue the blocks that would be evicted next, if there are few free slots."""
        changes = self._counters.offload_blocks + self._counters.evicted_blocks
        if changes != self._cleaned and not self._queue and self._host.store.free < CLEANED_AHEAD:
            self._cleaned = changes
            self._enqueue(self._host.store.oldest(CLEANED_AHEAD))

    def _begin_writes(self) -> None:
        for _ in range(TAKEN_AT_A_TIME):
            if not self._queue or len(self._writes) >= WRITES_AT_A_TIME or not self.is_on:
                return
            share = 1 if self._settings.is_buffer else PINNED_SHARE
            limit = max(1, min(self._settings.batch_blocks, self._host.capacity_blocks // share // WRITES_AT_A_TIME))
            due = [self._queue.popitem(last=False)[0] for _ in range(min(limit, len(self._queue)))]
            wanted = [due[index] for index in self.store.missing(due)]
            source = self._host.store.pin([h for h in wanted if self._host.store.contains(h)])
            assert source is not None
            self._counters.disk.dropped_blocks += len(wanted) - len(source.slots)
            evicted = max(0, len(source.slots) - self.store.free)
            target = self.store.allocate(len(source.slots))
            if target is None or not source.slots:
                self._counters.disk.dropped_blocks += len(source.slots)
                source.release()
                if target is not None:
                    target.release()
                continue
            self._counters.disk.evicted_blocks += evicted
            ticket = next(self._tickets)
            marks = self._host.marks_of(source.slots).translate(IN_LOWER_TIER)
            self._writes[ticket] = _Write(source, target, len(source.slots), self._clock(), marks)
            self._departing.update(source.hashes)
            generations = self._host.generations_of(source.slots)
            tenants = self._host.labels.tenants_of(source.slots)
            self.labels.own_each(target.slots, tenants)
            notes = () if self._notes_of is None else self._notes_of(source.hashes)
            self.disk.submit(Write(ticket, source.hashes, target.slots, source.slots, tenants, generations, notes))

    def _end_write(self, write: _Write, is_good: Sequence[bool]) -> None:
        hashes = write.source.hashes
        write.source.release()
        if write.is_void:
            write.target.release()
            return
        self._departing.difference_update(hashes)
        failed_count = is_good.count(False)
        if write.cleared:
            owners = self.labels.tenants_of(write.target.slots)
            failed_count = sum(not good and one not in write.cleared for one, good in zip(owners, is_good, strict=True))
            is_good = [good and one not in write.cleared for one, good in zip(owners, is_good, strict=True)]
        written, failed = write.target.split(is_good)
        failed.release()
        good = [h for h, is_written in zip(hashes, is_good, strict=True) if is_written]
        with written.register(good, bytes(compress(write.marks, is_good))) as blocks:
            self.labels.begin(blocks.slots)
        self._counters.disk.offload_blocks += len(good)
        self._counters.disk.only_blocks += len(good) * self._settings.is_buffer
        self._counters.disk.offload_bytes += len(good) * self._settings.block_bytes
        self._counters.disk.failed_blocks += failed_count
        self._counters.disk.write_failed_blocks += failed_count
        if good:
            self._counters.durations["host-disk"].observe(self._clock() - write.born_s)

    def _end_fetch(self, fetch: Fetch, result: DiskResult) -> None:
        """Register the blocks that have arrived, and delete those that are damaged; others that failed stay on disk."""
        source, is_good = fetch.source, result.is_good
        assert source is not None, "blocks that are read are held"
        if not fetch.is_void:
            failed = is_good.count(False)
            self._counters.disk.failed_blocks += failed
            self._counters.disk.damaged_blocks += len(result.damaged)
            self._counters.disk.read_failed_blocks += failed - len(result.damaged)
        if result.damaged and not fetch.is_void:
            self.store.forget([source.hashes[index] for index in result.damaged])
            self.disk.process.forget([source.slots[index] for index in result.damaged])
        source.release()
        if arrived := self.reads.arrive(fetch, is_good):
            self._counters.disk.fetched_blocks += arrived
            self._counters.durations["disk-host"].observe(self._clock() - fetch.born_s)
