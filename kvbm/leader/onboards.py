"""Loads: the leader's part for what is on its way into G1, from host memory at once or from disk through it.

A load is what one request was promised: blocks of a chain, and the G1 blocks that receive them. Those that are in host
memory are one part, ordered at once; those on disk are read batch by batch, in order, each a part of its own that is
ordered when its bytes are in host memory. So a load larger than host memory passes through it, and the copy of one
batch runs beside the read of the next. When all parts have ended, the load has: well if all went well, else as failed,
and then the engine computes all of it. A load whose disk fails, or takes too long, is cut: what comes up to the first
block that does not is the engine's, which computes the rest. Where the beginning of a load is of no use without the
rest, it fails by the disk, and what has come can still be found in host memory.

The G1 blocks of a load are held from its beginning until nothing of it can write to them any more; a load that is given
up before its copiers have stopped is told as failed at once, and its blocks stay held. Blocks that are still being read
from disk hold no G1 block.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from kvbm.host.region import LANES, Region
from kvbm.plan import Onboard
from kvbm.types import SlotState

if TYPE_CHECKING:
    from kvbm.core.blocks import PinnedBlocks
    from kvbm.core.store import BlockStore
    from kvbm.leader.disk_tier import DiskTier, Fetch

FETCHES_AT_A_TIME = 32
PARTS = 16  # that a read from disk has at least, if it has as many blocks
SHARES_OF_G2 = 4

Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True)
class _Part:
    """Blocks of a load that move together: `block_ids[i]` receives `hashes[i]`. `first` is where in the load they
    begin."""

    first: int
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Load(Generic[Owner]):
    """What was promised to `owner`; `tokens` is what the engine need not compute.

    `on_disk` are the positions of those blocks that were there; `waiting` are parts of them that have not begun, pinned
    by `kept`; `open_parts` counts those under way. `end`: what is behind it is not loaded after all.
    """

    number: int
    owner: Owner
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    tokens: int
    tenant: bytes
    born_s: float
    end: int
    on_disk: tuple[int, ...] = ()
    waiting: deque[_Part] = field(default_factory=deque)
    kept: PinnedBlocks | None = None
    open_parts: int = 0
    is_failed: bool = False
    is_failed_by_disk: bool = False
    is_given_up: bool = False

    @property
    def disk_blocks(self) -> int:
        """Of those that are loaded."""
        return bisect_left(self.on_disk, self.end)

    @property
    def loaded_tokens(self) -> int:
        """What of `tokens` the engine has in the end, where blocks of several groups come together all of it."""
        return self.tokens * self.end // max(1, len(self.hashes))

    @property
    def disk_tokens(self) -> int:
        """What of `tokens` comes from disk, where blocks of several groups come together by their share."""
        return self.tokens * self.disk_blocks // max(1, len(self.hashes))


@dataclass(slots=True, eq=False)
class _Copy(Generic[Owner]):
    order: Onboard
    load: Load[Owner]
    source: PinnedBlocks
    born_step: int
    is_void: bool = False


class Onboards(Generic[Owner]):
    """See the module's text. A transfer without a result is asked after every `overdue_steps` steps. `can_cut`: the
    beginning of a load is of use without the rest."""

    def __init__(
        self,
        store: BlockStore,
        region: Region,
        *,
        disk: DiskTier | None,
        slot_generations: array[int],
        next_generation: Callable[[], int],
        hold: Callable[[Sequence[int]], None],
        release: Callable[[Sequence[int]], None],
        overdue_steps: int,
        batch_blocks: int,
        disk_timeout_s: float,
        can_cut: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._region = region
        self._disk = disk
        self._slot_generations = slot_generations
        self._next_generation = next_generation
        self._hold = hold
        self._release = release
        self._overdue_steps = overdue_steps
        self._batch_blocks = batch_blocks
        self._disk_timeout_s = disk_timeout_s
        self._can_cut = can_cut
        self._clock = clock
        self._step = 0
        self._copies: dict[int, _Copy[Owner]] = {}
        self._fetches: dict[Fetch, tuple[Load[Owner], _Part]] = {}
        self._from_disk: list[Load[Owner]] = []
        self._arriving: dict[bytes, int] = {}
        self._lanes = deque(range(LANES))
        self._orders: list[Onboard] = []
        self._ended: list[Load[Owner]] = []

    def can_begin(self) -> bool:
        """Whether a load may be promised: not while an older one hangs."""
        oldest = next(iter(self._copies.values()), None)
        return bool(self._lanes) and (oldest is None or self._step - oldest.born_step < self._overdue_steps)

    def arriving(self, sequence_hash: bytes) -> int | None:
        """The number of the load that brings this block, if one does."""
        return self._arriving.get(sequence_hash)

    def begin(
        self, owner: Owner, hashes: Sequence[bytes], block_ids: Sequence[int], tokens: int, *, tenant: bytes = b""
    ) -> Load[Owner] | None:
        """Bring `hashes[i]` of a tenant into G1 block `block_ids[i]`. None if one of them has gone since the match."""
        on_disk = set(self._store.missing(hashes))
        in_host = _part(hashes, block_ids, [i for i in range(len(hashes)) if i not in on_disk])
        source = self._store.pin(in_host.hashes)
        assert source is not None, "blocks that are not missing can be pinned"
        behind = sorted(on_disk)
        kept = None
        if behind:
            kept = self._disk.hold([hashes[index] for index in behind]) if self._disk is not None else None
            if kept is None:
                source.release()
                return None
        number = self._next_generation()
        load = Load(
            number, owner, tuple(hashes), tuple(block_ids), tokens, tenant, self._clock(), len(hashes), tuple(behind)
        )
        load.kept = kept
        self._hold(load.block_ids)
        self._arriving.update(dict.fromkeys(load.hashes, number))
        if in_host.hashes:
            self._order(load, in_host, source)
        else:
            source.release()
        if behind:
            size = self._part_blocks(len(behind))
            for first in range(0, len(behind), size):
                batch = behind[first : first + size]
                load.waiting.append(_part(hashes, block_ids, batch))
            self._from_disk.append(load)
            self._begin_fetches()
        return load

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self) -> tuple[Onboard, ...]:
        """The orders of this step."""
        self._step += 1
        self._give_up_hopeless()
        self._begin_fetches()
        orders, self._orders = tuple(self._orders), []
        return orders

    def overdue(self) -> tuple[Onboard, ...]:
        """Orders of which nothing has been heard for long, every so many steps."""
        ages = ((copy.order, self._step - copy.born_step) for copy in self._copies.values())
        return tuple(order for order, age in ages if age > 0 and age % self._overdue_steps == 0)

    def fetched(self, fetches: Sequence[Fetch]) -> None:
        """These blocks have come from disk, or failed to."""
        for fetch in fetches:
            if fetch not in self._fetches:  # its load failed with one of those before it
                if fetch.blocks is not None:
                    fetch.blocks.release()
                continue
            load, part = self._fetches.pop(fetch)
            load.open_parts -= 1
            if fetch.blocks is not None:
                self._order(load, part, fetch.blocks)
            else:
                self._release(part.block_ids[::-1])
                self._cut(load, part.first)
            self._end_if_over(load)

    def settle(self, *, gives_up_blocks: bool) -> list[Load[Owner]]:
        """Read the control words; return the loads that have ended, each once. An engine that `gives_up_blocks` is told
        of an overdue one that it has failed, before its copiers have stopped."""
        for copy in self._reported():
            result = self._region.lane_result(copy.order.lane, copy.order.generation)
            if result is not SlotState.EMPTY:
                self._end_copy(copy, is_ready=result is SlotState.READY and not copy.is_void)
        if gives_up_blocks:
            self._give_up_overdue()
        ended, self._ended = self._ended, []
        return ended

    def is_under_way(self, *, within_steps: int) -> bool:
        """Whether something is on its way that is not older than that."""
        if self._fetches or any(load.waiting for load in self._from_disk):
            return True
        youngest = next(reversed(self._copies.values()), None)
        return youngest is not None and self._step - youngest.born_step <= within_steps

    def reset(self) -> None:
        """What is on its way ends as failed."""
        for copy in self._copies.values():
            copy.is_void = True
        for load in list(self._from_disk):
            self._fail(load)
            self._end_if_over(load)
        self._arriving.clear()

    def check(self) -> None:
        """Raise unless the bookkeeping is consistent. For tests."""
        assert len(self._lanes) + len(self._copies) == LANES, (len(self._lanes), len(self._copies))
        live = {copy.load.number for copy in self._copies.values()} | {load.number for load in self._from_disk}
        assert set(self._arriving.values()) <= live, (self._arriving, live)
        for load in self._from_disk:
            fetching = sum(other is load for other, _ in self._fetches.values())
            copying = sum(copy.load is load for copy in self._copies.values())
            assert load.open_parts == fetching + copying, (load, fetching, copying)
            assert load.open_parts or load.waiting, load

    # -- inside --------------------------------------------------------------------------------------------------------

    def _order(self, load: Load[Owner], part: _Part, source: PinnedBlocks) -> None:
        order = Onboard(
            generation=self._next_generation(),
            lane=self._lanes.popleft(),
            slots=tuple(source.slots),
            slot_generations=tuple(self._slot_generations[slot] for slot in source.slots),
            block_ids=part.block_ids,
        )
        load.open_parts += 1
        self._copies[order.generation] = _Copy(order, load, source, self._step)
        self._orders.append(order)

    def _part_blocks(self, count: int) -> int:
        """How many of `count` blocks are read together: enough parts to see soon whether the disk is fast enough, and
        none that host memory, of which others hold a part too, may never have room for."""
        return max(1, min(self._batch_blocks, count // PARTS, self._store.capacity_blocks // SHARES_OF_G2))

    def _begin_fetches(self) -> None:
        """First come, first served: a later load does not overtake one that waits for room."""
        for load in self._from_disk:
            while load.waiting:
                if len(self._fetches) >= FETCHES_AT_A_TIME or len(self._lanes) <= len(self._fetches):
                    return
                assert self._disk is not None
                fetch = self._disk.fetch(load.waiting[0].hashes, load.tenant)
                if fetch is None:
                    return
                self._fetches[fetch] = (load, load.waiting.popleft())
                load.open_parts += 1

    def _reported(self) -> Iterator[_Copy[Owner]]:
        copies = list(self._copies.values())
        if not copies:
            return iter(())
        reported = self._region.are_lanes_reported([copy.order.lane for copy in copies], list(self._copies))
        return (copy for copy, is_reported in zip(copies, reported, strict=True) if is_reported)

    def _end_copy(self, copy: _Copy[Owner], *, is_ready: bool) -> None:
        order, load = copy.order, copy.load
        del self._copies[order.generation]
        self._lanes.append(order.lane)
        self._release(order.block_ids[::-1])
        load.open_parts -= 1
        if not is_ready:
            if not copy.is_void:
                self._store.forget(copy.source.hashes)
            self._fail(load)
        copy.source.release()
        self._end_if_over(load)

    def _fail(self, load: Load[Owner]) -> None:
        """Begin nothing more of it, and give the blocks back that nothing writes to."""
        load.is_failed = True
        self._fetch_no_more(load, 0)

    def _cut(self, load: Load[Owner], end: int) -> None:
        """What lies from `end` on will not come from disk."""
        load.end = min(load.end, end if self._can_cut else 0)
        if load.end == 0:
            load.is_failed = load.is_failed_by_disk = True
        self._fetch_no_more(load, load.end)

    def _fetch_no_more(self, load: Load[Owner], end: int) -> None:
        while load.waiting and load.waiting[-1].first >= end:
            self._release(load.waiting.pop().block_ids[::-1])
        mine = [(fetch, part) for fetch, (other, part) in self._fetches.items() if other is load and part.first >= end]
        for fetch, part in mine:
            assert self._disk is not None
            del self._fetches[fetch]
            self._disk.abandon(fetch)
            self._release(part.block_ids[::-1])
            load.open_parts -= 1

    def _end_if_over(self, load: Load[Owner]) -> None:
        if load.open_parts or load.waiting:
            return
        if load.kept is not None:
            self._from_disk.remove(load)
            load.kept.release()
            if self._disk is not None and not load.is_failed and load.end == len(load.hashes):
                self._disk.rates.note_read(load.disk_blocks, self._clock() - load.born_s)
        self._tell(load)

    def _tell(self, load: Load[Owner]) -> None:
        """Once."""
        if load.is_given_up:
            return
        load.is_given_up = True
        for sequence_hash in load.hashes:
            if self._arriving.get(sequence_hash) == load.number:
                del self._arriving[sequence_hash]
        self._ended.append(load)

    def _give_up_overdue(self) -> None:
        for copy in self._copies.values():
            if self._step - copy.born_step < self._overdue_steps:
                return
            self._fail(copy.load)
            self._tell(copy.load)

    def _give_up_hopeless(self) -> None:
        """Computing has become the better way to what is still on disk, or the disk does not answer."""
        missing = {load.number: load.waiting[0].first for load in self._from_disk if load.waiting}
        for load, part in self._fetches.values():
            missing[load.number] = min(part.first, missing.get(load.number, part.first))
        for load in [load for load in self._from_disk if load.number in missing]:
            assert self._disk is not None
            waited_s, all_blocks = self._clock() - load.born_s, load.disk_blocks
            end = missing[load.number]
            blocks = bisect_left(load.on_disk, end)
            is_late = waited_s > self._disk_timeout_s or not self._disk.is_on
            if is_late or self._disk.is_hopeless(waited_s, blocks, all_blocks):
                self._disk.gave_up(blocks, all_blocks - blocks, waited_s)
                self._cut(load, end)
                self._end_if_over(load)


def _part(hashes: Sequence[bytes], block_ids: Sequence[int], indexes: Sequence[int]) -> _Part:
    return _Part(
        indexes[0] if indexes else 0,
        tuple(hashes[index] for index in indexes),
        tuple(block_ids[index] for index in indexes),
    )
