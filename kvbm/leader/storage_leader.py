"""StorageLeader: the leader for an engine that has its own host memory, and asks for tiers below it.

Such an engine has no step, and kvbm sees no G1. Its threads name blocks and wait. One thread owns this object with all
metadata. It calls `step` again and again, and advances each question, which is a generator, until it ends:

    find       how many blocks of a chain can be read, from its first one on
    read       brings blocks into our host memory (G2), and lends them: the caller's thread copies them out
    write      lends free slots of G2: the caller's thread copies blocks in, then they are registered

Only the caller's thread copies. So when it has stopped waiting, nothing writes into the engine's memory: a late read
writes only into G2, where its slots stay reserved until it has ended. A question may be closed when its caller has
stopped copying, and not before; it takes all loans back.

G2 is a buffer here, unless the profile has a host tier: then blocks stay in it as for other engines.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from kvbm.child import deadlines
from kvbm.leader.control import CacheControl
from kvbm.leader.engine_tiers import EngineTiers
from kvbm.metrics import HIT_TIERS
from kvbm.types import Tier

if TYPE_CHECKING:
    from kvbm.core.store import PinnedBlocks
    from kvbm.host.region import Region
    from kvbm.tiers.host_tier import Reservation
    from kvbm.tiers.lower_tier import LowerTier, OpenTier
    from kvbm.tiers.open_reads import Extent, Fetch
    from kvbm.tiers.settings import LeaderCallbacks, LeaderSettings

LENT_SHARE = 4  # a loan of free slots has at most this share of host memory
SHARED_WAIT_S = 1.0  # for free slots, until a write no longer spares the blocks that the shared store has still to take

Answer = TypeVar("Answer")
Question = Generator[None, None, Answer]


@dataclass(slots=True, eq=False)
class Loan:
    """Slots of G2 that the caller copies blocks out of, or into: `slots[i]` is for block `positions[i]` of a question.
    `tier`: where the blocks come from. The caller's thread sets `is_over`; the leader's thread reads it."""

    positions: Sequence[int]
    slots: Sequence[int]
    tier: Tier = Tier.HOST
    is_over: bool = False


Lend = Callable[[Loan], None]


def has_ended(question: Question[Answer], take: Callable[[Answer], None]) -> bool:
    """Advance a question; return whether it has ended. If so, `take` got its answer."""
    try:
        next(question)
    except StopIteration as end:
        take(end.value)
        return True
    return False


@dataclass(slots=True, eq=False)
class _Reading:
    """What one question reads. `waiting` are batches that have not begun, in order; `open` are reads in flight; `lent`
    are loans with the pins of their blocks; `kept` pins blocks in their tiers."""

    waiting: deque[tuple[Sequence[int], LowerTier, Extent | None]] = field(default_factory=deque)
    open: dict[Fetch, tuple[Sequence[int], LowerTier]] = field(default_factory=dict)
    lent: dict[Loan, PinnedBlocks] = field(default_factory=dict)
    kept: list[PinnedBlocks] = field(default_factory=list)
    loaded: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(HIT_TIERS, 0))

    def has_work(self) -> bool:
        return bool(self.waiting or self.open or self.lent)


class StorageLeader(EngineTiers):
    """See the module's text. *Consumes* the region."""

    def __init__(
        self, region: Region, settings: LeaderSettings, callbacks: LeaderCallbacks, open_tiers: Sequence[OpenTier]
    ) -> None:
        super().__init__(region, settings, callbacks, open_tiers, reads_always=True)
        self.control = CacheControl(self, callbacks.clock)
        self.region = region
        self._arrived: set[Fetch] = set()
        self._numbers = itertools.count(1)
        self._refused_blocks = sys.maxsize  # the fewest slots for which a write has found no room in this step
        self._due: dict[bytes, None] | None = None  # of this step, see `_kept_for_shared`

    @property
    def is_on(self) -> bool:
        """Whether a lower tier is on."""
        return any(tier.is_on for tier in self.lower_tiers)

    def is_busy(self) -> bool:
        return self.control.has_work() or super().is_busy()

    def step(self) -> None:
        """Start the writes that are due, note what has ended, and advance what an operator asks."""
        self.control.advance()
        self._refused_blocks, self._due = sys.maxsize, None
        for tier in self.lower_tiers:
            tier.step(computes=False)
            self._arrived.update(tier.settle())
        self.host.check_next()

    def contains(self, sequence_hash: bytes) -> bool:
        """Return whether a block can be read, as far as this process knows."""
        return self.host.store.contains(sequence_hash) or any(tier.contains(sequence_hash) for tier in self.lower_tiers)

    def readable(self, hashes: Sequence[bytes]) -> int:
        """Return how many blocks can be read, up to the first that cannot, as far as this process knows."""
        at, end = 0, len(hashes)
        while at < end:
            found = self.host.store.match(hashes, at)
            for tier in self.lower_tiers if not found else ():
                if found := tier.match(hashes, at, end):
                    break
            if not found:
                break
            at += found
        return at

    def note_request(self, chain: Sequence[bytes], found: int, asked: int) -> None:
        """Note the end of a request for `asked` blocks, of which `found` could be read: those of `chain` become
        recent."""
        self._touch(chain)
        self.counters.count_match(found, asked)
        self.counters.note_hits({}, asked)

    def _touch(self, chain: Sequence[bytes]) -> None:
        for store in self._stores():
            store.touch(chain)

    def find(self, hashes: Sequence[bytes], prefix: Sequence[bytes] = ()) -> Question[int]:
        """Return how many of `hashes` can be read, up to the first that cannot. `prefix` are the blocks before them in
        their chain, if they are known: they become recent too, so that they are not evicted before the others."""
        began_s = self._clock()
        count = yield from self.ask(hashes)
        self.counters.durations["match"].observe(self._clock() - began_s)
        self.note_request([*prefix, *hashes[:count]], count, len(hashes))
        return count

    def ask(self, hashes: Sequence[bytes]) -> Question[int]:
        """Like `find`, for an engine that notes its requests itself. `readable` knows the answer afterwards."""
        name = f"question {next(self._numbers)}"
        try:
            while (count := self.readable(hashes)) < len(hashes):
                if not any(tier.must_wait(name, hashes, count, len(hashes)) for tier in self._asked_tiers):
                    break
                yield
        finally:
            for tier in self._asked_tiers:
                tier.forget_request(name)
        return count

    def which(self, hashes: Sequence[bytes]) -> Question[list[bool]]:
        """Return for each block whether it can be read, also after one that cannot."""
        name, found = f"question {next(self._numbers)}", []
        try:
            for one in hashes:
                while not (is_there := self.readable([one])):
                    if not any(tier.must_wait(name, [one], 0, 1) for tier in self._asked_tiers):
                        break
                    yield
                found.append(bool(is_there))
        finally:
            for tier in self._asked_tiers:
                tier.forget_request(name)
        self._touch([one for one, is_there in zip(hashes, found, strict=True) if is_there])
        return found

    def read(self, hashes: Sequence[bytes], lend: Lend) -> Question[None]:
        """Lend blocks as they arrive, in order within a tier, up to the first that is missing. The question ends when
        all loans are over."""
        reading = _Reading()
        try:
            self._claim(reading, hashes, lend)
            for tier in self.lower_tiers:
                tier.hit(hashes)
            while True:
                for loan in [one for one in reading.lent if one.is_over]:
                    reading.lent.pop(loan).release()
                    reading.loaded[loan.tier] += len(loan.positions)
                self._begin_reads(reading, hashes)
                for fetch in [one for one in reading.open if one in self._arrived]:
                    self._lend_arrived(reading, fetch, hashes, lend)
                if not reading.has_work():
                    break
                yield
        finally:
            self._end_reading(reading)
        self._note_loaded(reading, hashes)

    def write(self, hashes: Sequence[bytes], lend: Lend, *, waits_for_shared: bool = False) -> Question[list[bool]]:
        """Return for each block whether it is stored: in a lower tier, or in G2, from where it will be written. With
        `waits_for_shared`, blocks stay in G2 until the shared store has them too, unless it is slow."""
        stored = [self._is_stored(one) for one in hashes]
        due = [index for index, is_stored in enumerate(stored) if not is_stored]
        self._used([one for one, is_stored in zip(hashes, stored, strict=True) if is_stored])
        size = max(1, self.host.capacity_blocks // LENT_SHARE)
        for begin in range(0, len(due), size):
            batch, end_s = due[begin : begin + size], self._clock() + SHARED_WAIT_S
            while (target := self._reserve(len(batch), keeps_due=waits_for_shared)) is None:
                if not self.is_on:
                    return stored
                waits_for_shared = waits_for_shared and self._clock() < end_s
                yield
            yield from self._filled(target, Loan(batch, target.slots), lend)
            written = [hashes[index] for index in batch]
            self._register(target, written)
            self._used(written)
            for index in batch:
                stored[index] = True
        return stored

    def reset(self, *, ends_persistence: bool = False) -> bool:
        """Forget every block, in every tier. False if that is not durable yet; until then the tier stays off."""
        self._forget_host_memory()
        return self._forget_lower_tiers(ends_persistence=ends_persistence)

    def close(self) -> None:
        """Write what is due as far as the time allows, end the processes, and unmap. No question is open."""
        super().close()
        self.region.close()

    def abandon(self) -> None:
        """End the processes. Writes nothing more: the metadata may be damaged."""
        for tier in reversed(self.lower_tiers):
            tier.abandon(deadlines.ABANDON_S)

    def _is_stored(self, sequence_hash: bytes) -> bool:
        """Whether a block needs no copy: it is in the nearest tier that is on, or in G2 if that is a tier."""
        nearest = next((tier for tier in self.lower_tiers if tier.is_on), None)
        return self.host.store.contains(sequence_hash) or (nearest is not None and nearest.contains(sequence_hash))

    def _claim(self, reading: _Reading, hashes: Sequence[bytes], lend: Lend) -> None:
        """Lend what is in G2, up to the first block that is in no tier, and queue the reads of the rest."""
        end = self.readable(hashes)
        here = [index for index in range(end) if self.host.store.contains(hashes[index])]
        absent = sorted(set(range(end)).difference(here))
        self._lend(reading, here, Tier.HOST, hashes, lend)
        batches = []
        for tier in self.lower_tiers:
            claim = tier.claim(hashes, absent, ())
            reading.kept += claim.kept
            batches += [(positions, tier, extent) for positions, extent in claim.batches]
            absent = sorted(set(absent).difference(*(positions for positions, _ in claim.batches)))
        reading.waiting.extend(sorted(batches, key=lambda batch: batch[0][0]))

    def _begin_reads(self, reading: _Reading, hashes: Sequence[bytes]) -> None:
        while reading.waiting:
            positions, tier, extent = reading.waiting[0]
            if not tier.is_on:
                reading.waiting.clear()
                return
            fetch = tier.fetch([hashes[index] for index in positions], b"", extent)
            if fetch is None:
                return
            reading.waiting.popleft()
            reading.open[fetch] = positions, tier
        for fetch, (_, tier) in list(reading.open.items()):
            if tier.reads.are_hung and fetch not in self._arrived:
                fetch.abandon()
                del reading.open[fetch]

    def _lend_arrived(self, reading: _Reading, fetch: Fetch, hashes: Sequence[bytes], lend: Lend) -> None:
        """Lend the blocks of a read that has ended. If one is bad, drop the batches after it: they are of no use."""
        positions, tier = reading.open.pop(fetch)
        self._arrived.discard(fetch)
        if fetch.blocks is not None:
            loan = Loan(positions, tuple(fetch.blocks.slots), tier.kind)
            reading.lent[loan] = fetch.blocks
            lend(loan)
            return
        good = self.host.store.match([hashes[index] for index in positions])
        self.counters.onboard_failed_blocks += len(positions) - good
        self._lend(reading, positions[:good], tier.kind, hashes, lend)
        while reading.waiting and reading.waiting[-1][0][0] > positions[0]:
            reading.waiting.pop()

    def _lend(
        self, reading: _Reading, positions: Sequence[int], tier: Tier, hashes: Sequence[bytes], lend: Lend
    ) -> None:
        if positions:
            blocks = self.host.store.pin([hashes[index] for index in positions])
            assert blocks is not None, "blocks that were just found can be pinned"
            loan = Loan(positions, tuple(blocks.slots), tier)
            reading.lent[loan] = blocks
            lend(loan)

    def _end_reading(self, reading: _Reading) -> None:
        for blocks in (*reading.lent.values(), *reading.kept):
            blocks.release()
        for fetch in reading.open:
            if fetch not in self._arrived:
                fetch.abandon()
            elif fetch.blocks is not None:
                fetch.blocks.release()
            self._arrived.discard(fetch)

    def _note_loaded(self, reading: _Reading, hashes: Sequence[bytes]) -> None:
        counters, loaded = self.counters, reading.loaded
        total = sum(loaded.values())
        for tier in self.lower_tiers:
            tier.used(hashes, total, b"")
            counters.of(tier.kind).onboard_blocks += loaded[tier.kind]
        counters.matched_tokens += total * self._settings.traits.block_tokens
        counters.onboard_blocks += total
        counters.onboard_bytes += total * self._settings.block_bytes
        counters.note_hits(loaded, 0)

    def _used(self, hashes: Sequence[bytes]) -> None:
        if self.is_on and hashes:
            for tier in self.lower_tiers:
                tier.used(hashes, len(hashes), b"")
        if self._due is not None:
            self._due |= self._due_for_shared_only(hashes)

    def _reserve(self, count: int, *, keeps_due: bool) -> Reservation | None:
        """Return free slots; None while lower tiers have still to write what is in them, and while no tier is on. With
        `keeps_due`, the shared tier is one of those."""
        if not self.is_on or (keeps_due and count >= self._refused_blocks):
            return None
        room = self.host.store.available - len(self._unwritten())
        if count <= room and keeps_due:
            due = self._kept_for_shared()
            room -= len(due)
            if self.host.store.free < count <= room:
                self.host.store.touch([*due])  # what was read since the last reservation is evicted first
        if count > room:
            self._refused_blocks = min(count, self._refused_blocks)
            return None
        return self.host.reserve(count, keeps_unwritten=True)

    def _kept_for_shared(self) -> dict[bytes, None]:
        """Return the blocks in G2 that the shared store has still to take, in their order, without those that the disk
        has to take too. The first call of a step finds them."""
        if self._due is None:
            pieces = (piece for tier in self._asked_tiers for piece in tier.due_blocks())
            due = list(dict.fromkeys(itertools.chain.from_iterable(pieces)))
            self._due = self._due_for_shared_only(due)
        return self._due

    def _due_for_shared_only(self, due: Sequence[bytes]) -> dict[bytes, None]:
        unwritten, registered = self._unwritten(), self.host.store.registered_of(set(due))
        return {one: None for one in due if one in registered and one not in unwritten}

    def _unwritten(self) -> Collection[bytes]:
        """Return the blocks in G2 that the disk has still to write, if G2 is a buffer."""
        return self.host.unwritten_blocks(0) or ()

    def _filled(self, target: Reservation, loan: Loan, lend: Lend) -> Question[None]:
        try:
            lend(loan)
            while not loan.is_over:
                yield
        except BaseException:
            target.release()
            raise

    def _register(self, target: Reservation, hashes: Sequence[bytes]) -> None:
        all_good = [True] * len(hashes)
        self.host.prove(target, all_good)
        with self.host.register(target, hashes, all_good) as blocks:
            for tier in self.host.listeners:
                tier.registered(blocks.hashes, blocks.slots)
        self.counters.offload_blocks += len(hashes)
        self.counters.offload_bytes += len(hashes) * self._settings.block_bytes
