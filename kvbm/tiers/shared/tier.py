"""SharedTier: the metadata of G4. It decides which extents are written to the shared store, and reads them back.

An extent is K consecutive blocks of a chain, beginning at a multiple of K: one object. SharedTier moves no bytes: a
SharedClient does. The leader's thread owns both, and calls it as `lower_tier.py` says.

Other engines write and delete objects too. So what is known here is a hint (presence.py): a read that fails is a miss,
and its extent is forgotten. Extents of a chain are written head first, so that a chain in the store has no gaps.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvbm.child import deadlines
from kvbm.core.admission import FrequencyFilter
from kvbm.tiers.lower_tier import AskedTier, Claim, TierContext
from kvbm.tiers.open_reads import Extent, Fetch, OpenReads
from kvbm.tiers.settings import TierPolicy
from kvbm.tiers.shared.orders import NOT_WANTED, Get, ObjectResult, Outcome, Probe, ProbeResult, Put
from kvbm.tiers.shared.presence import Presence
from kvbm.types import Tier

if TYPE_CHECKING:
    from kvbm.core.store import PinnedBlocks
    from kvbm.tiers.shared.service.client import SharedClient

WRITES_AT_A_TIME = 8
TAKEN_AT_A_TIME = 4  # extents per step
PINNED_SHARE = 4  # writes pin at most this part of G2
EXAMINED_AT_A_TIME = 64  # extents per step of chains that were used
MAX_USED = 1024  # chains that wait to be examined
MAX_TO_REPLACE = 10_000
WAIT_STEPS = 2  # a request waits for a probe in so many steps that compute
WAIT_S = 0.1  # and not longer than this
WAIT_SHARE = 0.25  # nor longer than this part of the time to compute what it looks for
JITTER_S = 0.2  # engines that compute the same blocks at the same time do not write them at the same time
REPEAT_S = 0.2
DRAIN_HUNG_S = 1.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Due:
    """An extent that is written after `due_s`."""

    extent: Extent
    tenant: bytes
    due_s: float
    replaces: bool
    is_repeated: bool = False


@dataclass(slots=True)
class _ExtentWrite:
    extent: Extent
    source: PinnedBlocks
    born_s: float


@dataclass(slots=True)
class _Asked:
    """A request that asked the store. `computed_steps`: steps that computed something since."""

    ticket: int
    deadline_s: float
    computed_steps: int = 0


class SharedTier(AskedTier):
    kind = Tier.SHARED

    def __init__(self, client: SharedClient, context: TierContext) -> None:
        self.client = client
        self._host = context.host
        self._policy = policy = context.settings.shared or TierPolicy()
        self._block_bytes = context.settings.block_bytes
        self._counters = context.counters
        self._rates = context.rates
        self._clock = clock = context.callbacks.clock
        self.presence = Presence(clock)
        self._filter = FrequencyFilter(threshold=policy.frequency_threshold, max_entries=policy.frequency_entries)
        self._decay_s = clock() + policy.frequency_decay_s
        self._used: deque[tuple[Sequence[bytes], int, int, bytes]] = deque()  # chain, first block, end, tenant
        self._queue: OrderedDict[bytes, _Due] = OrderedDict()
        self._to_replace: set[bytes] = set()  # names of objects that were damaged or will expire
        self._writes: dict[int, _ExtentWrite] = {}
        self._departing: set[bytes] = set()  # names of extents that are being written
        self.reads = OpenReads("the shared tier", self, self._host, clock)
        self._probes: dict[int, tuple[bytes, ...]] = {}
        self._asked: dict[str, _Asked] = {}
        self._results: list[ObjectResult] = []  # that have arrived and are not settled
        self._tickets = itertools.count(1)
        self._random = random.Random()
        self._has_ended = False
        self._copy_counters()

    @property
    def extent_blocks(self) -> int:
        """The number of blocks in an extent, 0 until the process has started."""
        return self.client.extent_blocks

    @property
    def is_on(self) -> bool:
        return self.client.is_on and not (self._has_ended or self.reads.are_hung)

    def refresh(self) -> None:
        """Detect the end of reads that hung while the engine was idle."""
        if not self.is_on and self.reads.are_abandoned:
            self.settle()
        else:
            self.receive()

    def receive(self) -> None:
        """Receive what has arrived. The engine may not have settled for long. Results of reads and writes wait for
        `settle`."""
        for result in self.client.poll():
            if isinstance(result, ProbeResult):
                self._end_probe(result)
            else:
                self._results.append(result)
        if (listing := self.client.take_listing()) is not None and not self._has_ended:
            self.presence.take(listing)

    def contains(self, sequence_hash: bytes) -> bool:
        """Whether the extent that ends with this block is known to be in the store."""
        return self.is_on and self.presence.contains(sequence_hash)

    def match(self, hashes: Sequence[bytes], start: int, end: int) -> int:
        if not self.is_on or start >= end:
            return 0
        self.receive()
        reached = start
        for name, stop in self._names(hashes, start, end):
            if not self.presence.contains(name):
                break
            reached = min(stop, end)
        return reached - start

    def extents_of(self, hashes: Sequence[bytes], start: int, end: int) -> list[Extent]:
        size = self.extent_blocks
        return [Extent(tuple(hashes[stop - size : stop])) for _, stop in self._names(hashes, start, end)]

    def must_wait(self, request_id: str, hashes: Sequence[bytes], start: int, end: int) -> bool:
        """Each request asks the store once, and waits for a short time only."""
        asked = self._asked.get(request_id)
        if asked is None:
            asked = self._ask(request_id, hashes, start, end)
            return asked is not None
        is_over = asked.computed_steps >= WAIT_STEPS or self._clock() > asked.deadline_s
        if is_over or asked.ticket not in self._probes:
            asked.deadline_s = 0.0
            return False
        return True

    def forget_request(self, request_id: str) -> None:
        self._asked.pop(request_id, None)

    def due_blocks(self) -> Iterator[Sequence[bytes]]:
        left = self._host.capacity_blocks if self.is_on else 0
        for hashes, start, end, _ in reversed(self._used):
            if left <= 0:
                break
            yield hashes[max(start, end - left) : end]
            left -= end - start
        if self.is_on:
            yield from (due.extent.hashes for due in reversed(self._queue.values()))

    def claim(self, hashes: Sequence[bytes], positions: Sequence[int], extents: Sequence[Extent]) -> Claim:
        extent_of = {one: extent for extent in extents for one in extent.hashes}
        batches: dict[bytes, tuple[list[int], Extent | None]] = {}
        for position in positions:
            one = hashes[position]
            extent = extent_of.get(one)
            if extent is None and self.extent_blocks == 1 and self.contains(one):
                extent = Extent((one,))
            if extent is not None:
                batches.setdefault(extent.name, ([], extent))[0].append(position)
        return Claim(list(batches.values()))

    def has_lost(self, hashes: Sequence[bytes], extent: Extent | None) -> bool:
        return extent is None or not self.presence.contains(extent.name)

    def fetch(self, hashes: Sequence[bytes], tenant: bytes | None, extent: Extent | None = None) -> Fetch | None:
        assert extent is not None, "blocks are read from extents"
        ticket = next(self._tickets)
        fetch = self.reads.begin(ticket, hashes, tenant) if self.is_on else None
        if fetch is None:
            return None
        fetch.extent = extent
        slots = dict(zip(hashes, fetch.target.slots, strict=True))
        self.client.submit(Get(ticket, extent.hashes, tuple(slots.get(one, NOT_WANTED) for one in extent.hashes)))
        return fetch

    def used(self, hashes: Sequence[bytes], end: int, tenant: bytes) -> None:
        """Write the extents that are used often enough."""
        if self._policy.writes != "never" and not self._has_ended and end and len(self._used) < MAX_USED:
            self._used.append((hashes, 0, end, tenant))

    def step(self, *, computes: bool) -> None:
        if computes:
            for asked in self._asked.values():
                asked.computed_steps += 1
        if self._clock() >= self._decay_s:
            self._decay_s = self._clock() + self._policy.frequency_decay_s
            self._filter.decay()
        if self._used and self.extent_blocks:
            self._examine()
        self._begin_writes()

    def settle(self) -> list[Fetch]:
        ended = []
        self.receive()
        results, self._results = self._results, []
        for result in results:
            if (write := self._writes.pop(result.ticket, None)) is not None:
                self._end_write(write, result)
            elif (fetch := self.reads.end(result.ticket)) is not None:
                self._end_fetch(fetch, result)
                if not fetch.is_abandoned:
                    ended.append(fetch)
        self.reads.check(is_on=self.client.is_on)
        self._copy_counters()
        return ended

    def is_busy(self) -> bool:
        """Whether extents are being written or due for it, or the store is being asked."""
        return self.is_on and bool(self._writes or self._queue or self._used or self._probes)

    def reset(self, *, ends_persistence: bool) -> None:
        """Forget every extent, for good: the objects belong to other engines too, so that they cannot be deleted, and
        this engine must not find them again."""
        if not self._has_ended:
            log.warning("kvbm: the cache was reset: this engine does not use the shared tier until it is restarted")
        self._has_ended = True
        self.presence.clear()
        self._queue.clear()
        self._used.clear()
        self._to_replace.clear()
        self.reads.void()

    def queues(self) -> dict[str, tuple[int, float | None]]:
        writes = list(self._writes.values())
        extents = len(self._queue) + len(writes)
        return {
            "object_write": (extents * self.extent_blocks, writes[0].born_s if writes else None),
            "object_read": self.reads.queue(),
        }

    def drop_results(self) -> None:
        self.client.poll()

    def abandon(self, timeout_s: float) -> None:
        self.client.close(timeout_s)

    def close(self) -> None:
        """Write what is due, for at most `drain_s`; then end the process. A store that ends nothing for DRAIN_HUNG_S is
        not waited for."""
        began_s = moved_s = self._clock()
        deadline_s, open_before = began_s + self._policy.drain_s, 0
        while self.is_busy() and self._clock() < deadline_s and self._clock() - moved_s < DRAIN_HUNG_S:
            self.step(computes=False)
            time.sleep(0.001)
            self.settle()
            left = len(self._writes) + len(self._queue) + len(self._used) + len(self._probes)
            if left != open_before:
                open_before, moved_s = left, self._clock()
        is_hung = self._clock() - moved_s >= DRAIN_HUNG_S or not self.is_on
        self.client.close(0.0 if is_hung else deadlines.FINISH_S)

    def _names(self, hashes: Sequence[bytes], start: int, end: int) -> Iterator[tuple[bytes, int]]:
        """Yield name and end of the whole extents that hold `hashes[start:end]`, in order."""
        size = self.extent_blocks
        stop = (start // size + 1) * size
        while stop <= len(hashes) and stop - size < end:
            yield hashes[stop - 1], stop
            stop += size

    def _ask(self, request_id: str, hashes: Sequence[bytes], start: int, end: int) -> _Asked | None:
        """Ask the store for the extents from `start` on; None if that cannot help."""
        if not self.is_on or not self._rates.may_pay(Tier.SHARED):
            return None
        names = tuple(name for name, _ in self._names(hashes, start, end))
        if not names or self.presence.is_absent(names[0]):
            return None
        same = (ticket for ticket, asked_for in self._probes.items() if asked_for[: len(names)] == names)
        ticket = next(same, None)
        if ticket is None:
            ticket = next(self._tickets)
            self._probes[ticket] = names
            self.client.submit(Probe(ticket, names))
        blocks = len(names) * self.extent_blocks
        limit_s = min(WAIT_S, WAIT_SHARE * self._rates.compute_s(blocks))
        asked = self._asked[request_id] = _Asked(ticket, self._clock() + limit_s)
        return asked

    def _end_probe(self, result: ProbeResult) -> None:
        names = self._probes.pop(result.ticket, None)
        if names is None or result.present is None or self._has_ended:
            return
        self.presence.add(names[: result.present])
        if result.present < len(names):
            self.presence.note_absent(names[result.present])

    def _examine(self) -> None:
        """Count the extents of chains that were used, and queue those that are admitted."""
        left = EXAMINED_AT_A_TIME
        while self._used and left > 0:
            hashes, start, end, tenant = self._used.popleft()
            for name, stop in itertools.islice(self._names(hashes, start, end), left):
                left -= 1
                start = stop
                if stop <= end:
                    self._consider(name, hashes, stop, tenant)
            if start < end and left == 0:
                self._used.appendleft((hashes, start, end, tenant))

    def _consider(self, name: bytes, hashes: Sequence[bytes], stop: int, tenant: bytes) -> None:
        replaces = name in self._to_replace
        if name in self._queue or name in self._departing or (self.presence.contains(name) and not replaces):
            return
        if self._policy.writes == "frequency" and not replaces:
            self._filter.hit([name])
            if self._filter.count(name) < self._policy.frequency_threshold:
                self._counters.shared.rejected_blocks += self.extent_blocks
                return
        if len(self._queue) * self.extent_blocks < self._host.capacity_blocks:
            extent = Extent(tuple(hashes[stop - self.extent_blocks : stop]))
            due_s = self._clock() + JITTER_S * self._random.random()
            self._queue[name] = _Due(extent, tenant, due_s, replaces)
            self._counters.shared.admitted_blocks += self.extent_blocks
        else:
            self._counters.shared.dropped_blocks += self.extent_blocks

    def _begin_writes(self) -> None:
        if not self._queue:
            return
        limit = self._host.capacity_blocks // PINNED_SHARE // self.extent_blocks
        for _ in range(TAKEN_AT_A_TIME):
            if not self._queue or not self.is_on or len(self._writes) >= max(1, min(WRITES_AT_A_TIME, limit)):
                return
            due = next(iter(self._queue.values()))
            if due.due_s > self._clock():
                return
            self._queue.popitem(last=False)
            if self.presence.contains(due.extent.name) and not due.replaces:
                continue  # found by a probe meanwhile
            source = self._host.store.pin(due.extent.hashes)
            if source is None:
                self._put_off(due)
                continue
            ticket = next(self._tickets)
            self._writes[ticket] = _ExtentWrite(due.extent, source, self._clock())
            self._departing.add(due.extent.name)
            generations = self._host.generations_of(source.slots)
            self.client.submit(
                Put(ticket, due.extent.hashes, tuple(source.slots), generations, due.tenant, replaces=due.replaces)
            )

    def _put_off(self, due: _Due) -> None:
        """Try an extent again, but only one time, whose blocks are not in host memory: when a request ends, its last
        blocks may still be on their way there."""
        if due.is_repeated:
            self._counters.shared.dropped_blocks += self.extent_blocks
        else:
            self._queue[due.extent.name] = replace(due, due_s=self._clock() + REPEAT_S, is_repeated=True)

    def _end_write(self, write: _ExtentWrite, result: ObjectResult) -> None:
        write.source.release()
        self._departing.discard(write.extent.name)
        count = len(write.extent.hashes)
        if result.outcome not in (Outcome.GOOD, Outcome.EXISTS):
            self._counters.shared.write_failures += 1
            self._counters.shared.dropped_blocks += count
            self._counters.shared.write_failed_blocks += count
            return
        if not self._has_ended:
            self.presence.add([write.extent.name])
            self._to_replace.discard(write.extent.name)
        if result.outcome is Outcome.GOOD:
            self._counters.shared.offload_blocks += count
            self._counters.shared.offload_bytes += count * self._block_bytes
            self._counters.durations["host-object"].observe(self._clock() - write.born_s)

    def _end_fetch(self, fetch: Fetch, result: ObjectResult) -> None:
        """Register the blocks that have arrived. An extent that could not be read is forgotten."""
        assert fetch.extent is not None, "blocks are read from extents"
        name = fetch.extent.name
        if result.is_aging and not fetch.is_void:
            self._replace_later(name)
        if fetch.is_void or result.outcome is not Outcome.GOOD:
            fetch.target.release()
            if not fetch.is_void:
                self._note_failed_read(name, len(fetch.hashes), result)
            return
        fetch.is_copy = result.is_copy
        self._counters.shared.fetched_blocks += self.reads.arrive(fetch, (True,) * len(fetch.hashes))
        self._counters.durations["object-host"].observe(self._clock() - fetch.born_s)

    def _note_failed_read(self, name: bytes, blocks: int, result: ObjectResult) -> None:
        self._counters.shared.failed_blocks += blocks
        self._counters.shared.read_failures += 1
        if result.outcome is Outcome.BAD:
            self._counters.shared.damaged_blocks += blocks
            self._replace_later(name)
        elif result.outcome is Outcome.ABSENT:
            self._counters.shared.absent_blocks += blocks
        else:
            self._counters.shared.read_failed_blocks += blocks
        if result.outcome is not Outcome.FAILED or self.client.is_on:
            self.presence.erase(name)

    def _replace_later(self, name: bytes) -> None:
        if self._policy.writes != "never" and len(self._to_replace) < MAX_TO_REPLACE:
            self._to_replace.add(name)

    def _copy_counters(self) -> None:
        known, counters = self.client.counters, self._counters.shared
        counters.bad_objects = known.bad_objects
        counters.absent_objects = known.absent_objects
        counters.failed_requests = known.failed_requests
        counters.saved_writes = known.writes_saved
        counters.copies_read = known.copies_read
        counters.probes = known.probes
        counters.times_off = known.times_off + self.reads.times_hung
        counters.restarts = self.client.restarts
        counters.off = int(not self.is_on)
        counters.unnamed = int(self.client.is_unnamed)
        counters.silent = int(self.client.is_silent or self.reads.are_hung)
