"""Onboards: copies into G1, from host memory at once, from disk and the shared tier through host memory.

A load is what one request was promised: blocks of a chain, and the G1 blocks that receive them. It moves in parts:

- Blocks in host memory are one part, ordered at once. Many of them are several parts, one slice per step: the parts of
  one load take turns with those of others.
- Blocks on disk are read in batches, in order. Each batch is a part, ordered when its bytes are in host memory. So a
  load larger than host memory passes through it, and one batch is copied while the next is read.
- Blocks in the shared tier are read in the same way; there a batch is what the load needs of one object.

A load ends when all its parts have ended. If a copy failed, the whole load failed and the engine computes all of it. If
the tier fails or is too slow, the load is cut at the first missing block: the engine keeps what comes before and
computes the rest. An engine that cannot use the beginning without the rest gets a failed load instead; the blocks that
have arrived can still be found in host memory.

The G1 blocks of a part are held from when it begins until nothing can write to them any more. Before that they belong
to the waiting request; so if the request ends, its load begins no more parts. A load that is given up before its
copiers have stopped is reported as failed at once, and its blocks stay held.

No request waits for a lower tier that hangs. A load loses time while its first missing part makes no progress: its read
(open_reads.py), or, while it waits for room, the reads of the loads before it. A load is cut when it has lost as much
time as one read may lose, also if it lost that piece by piece.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvbm.host.control_words import LANES
from kvbm.leader.shared_tier import RunFetch
from kvbm.plan import Onboard
from kvbm.types import SlotState, Tier

if TYPE_CHECKING:
    from kvbm.core.blocks import PinnedBlocks
    from kvbm.leader.disk_tier import DiskTier, Fetch
    from kvbm.leader.host_tier import HostTier
    from kvbm.leader.load_choice import LoadChoice
    from kvbm.leader.long_match import LongMatch
    from kvbm.leader.offloads import OffloadProgress
    from kvbm.leader.open_reads import OpenRead, OpenReads
    from kvbm.leader.settings import LeaderCallbacks, LeaderSettings
    from kvbm.leader.shared_tier import Run, SharedTier
    from kvbm.leader.slices import Slices

FETCHES_AT_A_TIME = 32
PARTS = 16  # least number of parts of a read from disk, if it has as many blocks
LANES_SHARE = 4  # this part of the lanes is left for loads without slices
SHARES_OF_G2 = 4  # one part takes at most this share of host memory
REMEMBERED = 64  # loads that were given up


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request, from its arrival to its end. If it is preempted and returns under its id, it is another LiveRequest.

    `awaited` is the number of the load it waited for, because that load brings its prefix; 0 if none. The `probed`
    blocks are those that it looked for in the cache, the `hit` blocks those that it got. `lost_state_tokens` are tokens
    whose blocks were found, but no snapshot at their end. `promised` pins what the last match found, for an engine that
    does not accept failed loads. `match_restarts`: how often its long match began again. `runs` are those that its last
    match found in the shared tier.
    """

    request_id: str
    tenant: bytes
    offloads: list[OffloadProgress] = field(default_factory=list)
    has_blocks: bool = False
    has_probed: bool = False
    awaited: int = 0
    is_waiting: bool = False
    may_onboard: bool = True
    may_read_disk: bool = True
    may_offload: bool = True
    probed_blocks: int = 0
    hit_blocks: int = 0
    disk_hit_blocks: int = 0
    disk_tokens: int = 0
    shared_tokens: int = 0
    lost_state_tokens: int = 0
    promised: PinnedBlocks | None = None
    match_restarts: int = 0
    runs: list[Run] = field(default_factory=list)
    shared_hit_blocks: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """Blocks of a load that move together: `block_ids[i]` receives `hashes[i]`. `first` is the position in the load.
    `run` is where they are in the shared tier."""

    first: int
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    run: Run | None = None

    @classmethod
    def of(cls, load: Load, begin: int, end: int) -> _Part:
        return cls(begin, load.hashes[begin:end], load.block_ids[begin:end])


@dataclass(slots=True, eq=False)
class Load:
    """What was promised to a request. The engine need not compute `tokens` tokens.

    `on_disk` and `in_shared` are the positions of the blocks that were there. `waiting` are parts of them that have not
    begun, those on disk pinned by `kept`; `slices` are parts in host memory that have not begun, with their pins.
    `open_parts` counts the parts in flight. Blocks from `end` on are not loaded. `idle_s`: how long its first missing
    part has made no progress; `lost_s`: the sum of such times that are over.
    """

    number: int
    request: LiveRequest
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    tokens: int
    born_s: float
    born_step: int
    end: int
    on_disk: tuple[int, ...] = ()
    in_shared: tuple[int, ...] = ()
    waiting: deque[_Part] = field(default_factory=deque)
    kept: list[PinnedBlocks] = field(default_factory=list)
    slices: deque[tuple[_Part, PinnedBlocks]] = field(default_factory=deque)
    open_parts: int = 0
    is_failed: bool = False
    is_failed_by_disk: bool = False
    is_reported: bool = False
    read_s: dict[Tier, tuple[float, float]] = field(default_factory=dict)  # until the first and the last read ended
    idle_s: float = 0.0
    lost_s: float = 0.0
    has_copies: bool = False  # which say nothing about the rate of the shared tier

    @property
    def disk_blocks(self) -> int:
        """Blocks from disk among those that are loaded."""
        return bisect_left(self.on_disk, self.end)

    @property
    def shared_blocks(self) -> int:
        """Blocks from the shared tier among those that are loaded."""
        return bisect_left(self.in_shared, self.end)

    def count_of(self, tier: Tier, end: int) -> int:
        """Return how many of its first `end` blocks come from this tier."""
        return bisect_left(self.on_disk if tier is Tier.DISK else self.in_shared, end)

    def has_hung(self, idle_s: float, reads: OpenReads) -> bool:
        """Note that its first missing part has made no progress for `idle_s`. Return whether the load has lost too much
        time. `reads`: of its tier."""
        if idle_s < self.idle_s and self.idle_s > reads.grace_s:
            self.lost_s += self.idle_s
        self.idle_s = idle_s
        return self.lost_s + (idle_s if idle_s > reads.grace_s else 0.0) > reads.limit_s

    def note_read(self, tier: Tier, waited_s: float) -> None:
        """Note that a read from this tier has ended."""
        self.read_s[tier] = (self.read_s.get(tier, (waited_s, waited_s))[0], waited_s)

    @property
    def shared_tokens(self) -> int:
        """The part of `tokens` that comes from the shared tier."""
        return self.tokens * self.shared_blocks // max(1, len(self.hashes))

    @property
    def loaded_tokens(self) -> int:
        """The part of `tokens` that the engine gets in the end. With several KV cache groups it is all of them."""
        return self.tokens * self.end // max(1, len(self.hashes))

    @property
    def disk_tokens(self) -> int:
        """The part of `tokens` that comes from disk. With several KV cache groups it is the share of the blocks."""
        return self.tokens * self.disk_blocks // max(1, len(self.hashes))


@dataclass(slots=True, eq=False)
class _Copy:
    order: Onboard
    load: Load
    source: PinnedBlocks
    born_step: int
    is_void: bool = False


class Onboards:
    """See the module's text."""

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None,
        shared: SharedTier | None,
        choice: LoadChoice,
        engine: LeaderCallbacks,
        settings: LeaderSettings,
        slices: Slices,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slices = slices
        self._host = host
        self._disk = disk
        self._shared = shared
        self._choice = choice
        self._engine = engine
        self._settings = settings
        self._clock = clock
        self._step = 0
        self.in_flight: dict[int, _Copy] = {}  # from before a copier can run until it has stopped
        self._fetches: dict[Fetch | RunFetch, tuple[Load, _Part]] = {}
        self._reading: list[Load] = []  # loads with blocks from disk or from the shared tier
        self._in_slices: deque[Load] = deque()  # loads with `slices`, the one whose turn it is first
        self._arriving: dict[bytes, int] = {}
        self._given_up: deque[int] = deque(maxlen=REMEMBERED)  # numbers of loads whose tier hung
        self._has_moved = True  # a read or a copy of a load in `_reading` has ended, or a read has begun
        self._idle_s = 0.0  # how long nothing has
        self._checked_s = clock()
        self._lanes = deque(range(LANES))
        self._orders: list[Onboard] = []
        self._ended: list[Load] = []
        self._are_ranks_silent = False

    def can_begin(self, promises: int = 0) -> bool:
        """Whether a load may be promised in addition to these: not while an older one is overdue or given up, or a rank
        is silent."""
        oldest = next(iter(self.in_flight.values()), None)
        return (
            len(self._lanes) > promises + len(self._fetches)
            and not self._are_ranks_silent
            and (oldest is None or not (oldest.load.is_reported or self._is_overdue(oldest)))
        )

    def arriving(self, sequence_hash: bytes) -> int | None:
        """Return the number of the load that brings this block, if there is one."""
        return self._arriving.get(sequence_hash)

    def has_given_up(self, number: int) -> bool:
        """Whether a recent load was cut because its tier hung."""
        return number in self._given_up

    def begin(
        self,
        request: LiveRequest,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        tokens: int,
        found: LongMatch | None = None,
    ) -> Load | None:
        """Bring `hashes[i]` into G1 block `block_ids[i]`. None if a block is no longer there. Consumes the match."""
        if found is not None and (load := self._begin_long(request, hashes, block_ids, tokens, found)) is not None:
            return load
        missing: list[int] = []
        in_host = _Part(0, tuple(hashes), tuple(block_ids))
        source = self._host.store.pin(hashes)
        if source is None:
            missing = self._host.store.missing(hashes)
            in_host = _part(hashes, block_ids, sorted(set(range(len(hashes))) - set(missing)))
            source = self._host.store.pin(in_host.hashes)
        assert source is not None, "blocks that are not missing can be pinned"
        on_disk, in_shared = self._where(request, hashes, missing)
        kept = None
        if on_disk and self._disk is not None:
            kept = self._disk.pin([hashes[index] for index in on_disk])
        if in_shared is None or (on_disk and kept is None):
            source.release()
            return None
        load = self._new_load(request, hashes, block_ids, tokens, on_disk=on_disk)
        self._arriving.update(dict.fromkeys(load.hashes[: self._slices.size], load.number))
        if in_host.hashes:
            self._open(load, in_host.block_ids)
            self._order(load, in_host, source)
        else:
            source.release()
        if kept is not None:
            load.kept.append(kept)
            size = self._part_blocks(len(on_disk))
            for first in range(0, len(on_disk), size):
                load.waiting.append(_part(hashes, block_ids, on_disk[first : first + size]))
        self._add_runs(load, in_shared)
        if load.waiting:
            self._reading.append(load)
            self._begin_fetches()
        return load

    def _where(
        self, request: LiveRequest, hashes: Sequence[bytes], missing: Sequence[int]
    ) -> tuple[list[int], list[tuple[Run, list[int]]] | None]:
        """Return which of the blocks at these positions are on disk, and the positions of the others by run of the
        shared tier. None for these if one of them is in no run that the match has found."""
        on_disk = [index for index in missing if self._disk is not None and self._disk.contains(hashes[index])]
        left = missing if not on_disk else sorted(set(missing).difference(on_disk))
        if not left:
            return on_disk, []
        run_of = {one: run for run in request.runs for one in run.hashes}
        found: dict[bytes, tuple[Run, list[int]]] = {}
        for index in left:
            run = run_of.get(hashes[index])
            if run is None and self._shared is not None:
                run = self._shared.run_of_one(hashes[index])
            if run is None:
                return on_disk, None
            found.setdefault(run.name, (run, []))[1].append(index)
        return on_disk, list(found.values())

    def _add_runs(self, load: Load, runs: Sequence[tuple[Run, Sequence[int]]]) -> None:
        """Add a part per run. Parts wait in the order of their positions, so that the beginning arrives first."""
        if not runs:
            return
        parts = [replace(_part(load.hashes, load.block_ids, indexes), run=run) for run, indexes in runs]
        load.in_shared = tuple(sorted(index for _, indexes in runs for index in indexes))
        load.waiting = deque(sorted((*load.waiting, *parts), key=lambda part: part.first))

    def _begin_long(
        self, request: LiveRequest, hashes: Sequence[bytes], block_ids: Sequence[int], tokens: int, found: LongMatch
    ) -> Load | None:
        """Begin a load whose blocks the match holds already. None if it found other blocks or fewer."""
        is_valid, handles = found.is_valid(), found.take()
        load = self._new_load(request, hashes, block_ids, tokens)
        first = 0
        for is_on_disk, blocks in handles:
            last = min(first + len(blocks.slots), len(hashes))
            is_valid &= first >= last or blocks.hashes[last - first - 1] == hashes[last - 1]  # proves the whole prefix
            if first >= last:
                self._slices.release(blocks)
            elif is_on_disk:
                load.on_disk += tuple(range(first, last))
                load.kept.append(blocks)
                size = self._part_blocks(last - first)
                load.waiting += (_Part.of(load, at, min(at + size, last)) for at in range(first, last, size))
            else:
                load.slices.append((_Part.of(load, first, last), blocks))
            first = last
        in_shared: list[tuple[Run, list[int]]] | None = []
        if first < len(hashes):
            on_disk, in_shared = self._where(request, hashes, range(first, len(hashes)))
            in_shared = None if on_disk else in_shared
        if in_shared is None or not is_valid:
            for blocks in (*load.kept, *(source for _, source in load.slices)):
                self._slices.release(blocks)
            return None
        self._add_runs(load, in_shared)
        self._arriving.update(dict.fromkeys(load.hashes[: self._slices.size], load.number))
        if load.waiting:
            self._reading.append(load)
            self._begin_fetches()
        if load.slices:
            self._in_slices.append(load)
        return load

    def end_request(self, request: LiveRequest) -> None:
        """Begin no more parts of its loads: its G1 blocks are the engine's again, except those that are held."""
        for load in dict.fromkeys((*self._reading, *self._in_slices)):
            if load.request is request and (load.waiting or load.slices):
                self._fail(load)
                self._end_if_over(load)

    def step(self) -> tuple[Onboard, ...]:
        self._step += 1
        if self._reading:
            self._give_up_hopeless()
            self._begin_fetches()
        if self._in_slices:
            self._begin_slices()
        orders, self._orders = tuple(self._orders), []
        return orders

    def overdue(self) -> tuple[Onboard, ...]:
        """Return the orders without a result, each once every `overdue_steps` steps."""
        if not self.in_flight:
            return ()
        ages = ((copy.order, self._step - copy.born_step) for copy in self.in_flight.values())
        return tuple(order for order, age in ages if age > 0 and age % self._settings.overdue_steps == 0)

    def fetched(self, fetches: Sequence[Fetch | RunFetch]) -> None:
        """Continue with blocks that have arrived from disk or from the shared tier, or failed to."""
        for fetch in fetches:
            if fetch not in self._fetches:  # its load failed with an earlier fetch of this batch
                if fetch.blocks is not None:
                    fetch.blocks.release()
                continue
            load, part = self._fetches.pop(fetch)
            self._has_moved = True
            load.note_read(Tier.DISK if part.run is None else Tier.SHARED, self._clock() - load.born_s)
            load.has_copies |= isinstance(fetch, RunFetch) and fetch.is_copy
            if fetch.blocks is not None:
                self._order(load, part, fetch.blocks)
            else:
                self._close(load, part.block_ids)
                self._cut(load, part.first)
            self._end_if_over(load)

    def settle(self, *, are_ranks_silent: bool = False) -> list[Load]:
        """Read the lane words; return the loads that have ended, each once. An engine that `gives_up_blocks` gets a
        load as failed before its copiers have stopped if it is overdue, or if a rank does not respond."""
        self._are_ranks_silent = are_ranks_silent
        copies = list(self.in_flight.values())
        lanes = [copy.order.lane for copy in copies]
        results = self._host.region.lane_results(lanes, list(self.in_flight)) if copies else ()
        for copy, result in zip(copies, results, strict=True):
            if result is not SlotState.EMPTY:
                self._end_copy(copy, is_ready=result is SlotState.READY and not copy.is_void)
        if self._settings.engine.gives_up_blocks:
            self._give_up_late()
        ended, self._ended = self._ended, []
        return ended

    def has_ended(self) -> bool:
        """Whether a load has ended since the last `settle`."""
        return bool(self._ended)

    def is_reading(self) -> bool:
        """Whether a load waits for blocks from disk, or for the turn of its next slice."""
        return bool(self._fetches or self._in_slices) or any(load.waiting for load in self._reading)

    def is_under_way(self, *, within_steps: int) -> bool:
        """Whether a read is in flight, or a copy that is not older than that."""
        if self.is_reading():
            return True
        youngest = next(reversed(self.in_flight.values()), None)
        return youngest is not None and self._step - youngest.born_step <= within_steps

    def reset(self) -> None:
        """Let everything in flight end as failed."""
        for copy in self.in_flight.values():
            copy.is_void = True
        for load in dict.fromkeys((*self._reading, *self._in_slices)):
            self._fail(load)
            self._end_if_over(load)
        self._arriving.clear()

    def _new_load(
        self,
        request: LiveRequest,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        tokens: int,
        on_disk: Sequence[int] = (),
    ) -> Load:
        return Load(
            self._host.next_generation(),
            request,
            tuple(hashes),
            tuple(block_ids),
            tokens,
            born_s=self._clock(),
            born_step=self._step,
            end=len(hashes),
            on_disk=tuple(on_disk),
        )

    def _open(self, load: Load, block_ids: Sequence[int]) -> None:
        """Hold the G1 blocks of a part that begins."""
        self._engine.hold(block_ids)
        load.open_parts += 1

    def _close(self, load: Load, block_ids: Sequence[int]) -> None:
        """Release the G1 blocks of a part to which nothing writes any more."""
        self._engine.release(block_ids[::-1])
        load.open_parts -= 1

    def _order(self, load: Load, part: _Part, source: PinnedBlocks) -> None:
        """Order the copy of an open part. `source` holds its blocks first, and possibly more."""
        slots = source.slots[: len(part.block_ids)]
        order = Onboard(
            generation=self._host.next_generation(),
            lane=self._lanes.popleft(),
            slots=tuple(slots),
            slot_generations=self._host.generations_of(slots),
            block_ids=part.block_ids,
        )
        self.in_flight[order.generation] = _Copy(order, load, source, self._step)
        self._orders.append(order)

    def _begin_slices(self) -> None:
        """Order parts of long loads, about one slice of blocks per step. The loads take turns. A new one begins at the
        next step, because its beginning took as much time."""
        left = self._slices.size
        while left > 0 and self._in_slices and len(self._lanes) > len(self._fetches) + LANES // LANES_SHARE:
            if self._in_slices[0].born_step == self._step - 1:
                return
            load = self._in_slices.popleft()
            part, source = load.slices.popleft()
            if load.slices:
                self._in_slices.append(load)
            self._open(load, part.block_ids)
            self._order(load, part, source)
            left -= len(part.block_ids)

    def _part_blocks(self, count: int) -> int:
        """How many of `count` blocks are read together. There are enough parts to see early whether the disk is fast
        enough, and none is so large that host memory might never have room for it."""
        share = self._host.capacity_blocks // SHARES_OF_G2
        return max(1, min(self._settings.disk.batch_blocks, count // PARTS, share))

    def _begin_fetches(self) -> None:
        """First come, first served: a later load does not overtake one that waits for room."""
        for load in list(self._reading):
            while load.waiting:
                if len(self._fetches) >= FETCHES_AT_A_TIME or len(self._lanes) <= len(self._fetches):
                    return
                part = load.waiting[0]
                if self._has_lost(part) or len(part.hashes) > self._host.capacity_blocks:
                    self._cut(load, part.first)
                    self._end_if_over(load)
                    break
                fetch = self._fetch(part, load.request.tenant)
                if fetch is None:
                    return
                load.waiting.popleft()
                self._has_moved = True
                self._fetches[fetch] = (load, part)
                self._open(load, part.block_ids)

    def _has_lost(self, part: _Part) -> bool:
        """Whether the blocks of a part are gone, because another read of them has failed."""
        if part.run is not None:
            return self._shared is None or self._shared.has_lost(part.run)
        return self._disk is None or self._disk.has_lost(part.hashes)

    def _fetch(self, part: _Part, tenant: bytes) -> Fetch | RunFetch | None:
        if part.run is None:
            return None if self._disk is None else self._disk.fetch(part.hashes, tenant)
        return None if self._shared is None else self._shared.fetch(part.run, part.hashes, tenant)

    def _end_copy(self, copy: _Copy, *, is_ready: bool) -> None:
        order, load = copy.order, copy.load
        del self.in_flight[order.generation]
        self._lanes.append(order.lane)
        self._has_moved |= load in self._reading
        self._close(load, order.block_ids)
        if not is_ready:
            if not copy.is_void:
                self._host.store.forget(copy.source.hashes)
            self._fail(load)
        copy.source.release()
        self._end_if_over(load)

    def _fail(self, load: Load) -> None:
        """Begin no more parts of it, and release the G1 blocks that nothing writes to."""
        load.is_failed = True
        self._drop_parts(load, 0)

    def _cut(self, load: Load, end: int) -> None:
        """Load nothing from position `end` on."""
        load.end = min(load.end, end if self._settings.can_cut_loads else 0)
        if load.end == 0:
            load.is_failed = load.is_failed_by_disk = True
        self._drop_parts(load, load.end)

    def _drop_parts(self, load: Load, end: int) -> None:
        """Drop the parts from position `end` on that have not begun or are being read."""
        while load.waiting and load.waiting[-1].first >= end:
            load.waiting.pop()
        while load.slices and load.slices[-1][0].first >= end:
            self._slices.release(load.slices.pop()[1])
        if not load.slices and load in self._in_slices:
            self._in_slices.remove(load)
        own = [(fetch, part) for fetch, (other, part) in self._fetches.items() if other is load and part.first >= end]
        for fetch, part in own:
            del self._fetches[fetch]
            fetch.abandon()
            self._close(load, part.block_ids)

    def _end_if_over(self, load: Load) -> None:
        if load.open_parts or load.waiting or load.slices:
            return
        if load in self._reading:
            self._reading.remove(load)
            for kept in load.kept:
                self._slices.release(kept) if len(load.kept) > 1 else kept.release()
            load.kept.clear()
            if not load.is_failed and load.end == len(load.hashes):
                for tier, (first_s, last_s) in load.read_s.items():
                    if tier is Tier.SHARED and load.has_copies:
                        continue
                    first_s = first_s if tier is Tier.SHARED else 0.0
                    self._choice.rates.note_read(load.count_of(tier, load.end), last_s, tier, first_s=first_s)
        self._report(load)

    def _report(self, load: Load) -> None:
        """Put it among the ended loads, once."""
        if load.is_reported:
            return
        load.is_reported = True
        for sequence_hash in load.hashes[: self._slices.size]:
            if self._arriving.get(sequence_hash) == load.number:
                del self._arriving[sequence_hash]
        self._ended.append(load)

    def _is_overdue(self, copy: _Copy) -> bool:
        return self._step - copy.born_step >= self._settings.overdue_steps

    def _give_up_late(self) -> None:
        for copy in self.in_flight.values():
            if not (self._are_ranks_silent or self._is_overdue(copy)):
                return
            self._fail(copy.load)
            self._report(copy.load)

    def _give_up_hopeless(self) -> None:
        """Cut the loads whose remaining blocks are computed faster than read, or whose tier hangs."""
        self._note_time()
        missing: dict[int, tuple[_Part, OpenRead | None]] = {
            load.number: (load.waiting[0], None) for load in self._reading if load.waiting
        }
        for fetch, (load, part) in self._fetches.items():
            if load.number not in missing or part.first < missing[load.number][0].first:
                missing[load.number] = part, fetch.read
        for load in [load for load in self._reading if load.number in missing]:
            part, read = missing[load.number]
            tier = Tier.DISK if part.run is None else Tier.SHARED
            waited_s, all_blocks = self._clock() - load.born_s, load.disk_blocks + load.shared_blocks
            blocks = load.count_of(Tier.DISK, part.first) + load.count_of(Tier.SHARED, part.first)
            hangs = self._hangs(load, tier, read, waited_s)
            if (
                hangs
                or waited_s > self._settings.disk.timeout_s
                or self._choice.is_hopeless(waited_s, blocks, all_blocks)
            ):
                if hangs:
                    self._given_up.append(load.number)
                self._choice.give_up(tier, load.count_of(tier, part.first), all_blocks - blocks, waited_s)
                self._cut(load, part.first)
                self._end_if_over(load)

    def _note_time(self) -> None:
        """Note for how long no load has made progress."""
        now_s = self._clock()
        self._idle_s = 0.0 if self._has_moved else self._idle_s + now_s - self._checked_s
        self._has_moved, self._checked_s = False, now_s

    def _hangs(self, load: Load, tier: Tier, read: OpenRead | None, waited_s: float) -> bool:
        """Whether a load waits for a tier that is off, or has lost too much time. `read`: of its first missing
        part, None if that waits for room."""
        side = self._disk if tier is Tier.DISK else self._shared
        if side is None or not side.is_on:
            return True
        return load.has_hung(min(waited_s, self._idle_s) if read is None else read.idle_s, side.reads)


def _part(hashes: Sequence[bytes], block_ids: Sequence[int], indexes: Sequence[int]) -> _Part:
    return _Part(
        indexes[0] if indexes else 0,
        tuple(hashes[index] for index in indexes),
        tuple(block_ids[index] for index in indexes),
    )
