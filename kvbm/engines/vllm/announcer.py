"""Announcer: turns the leader's events into KV events of vLLM that describe every block.

The leader names blocks by their hashes only. The announcer takes the description of a block from the request that
computes or loads it (`describe`), and keeps it until the block has left every tier. A block without a description is
not announced: a router could do nothing with it. Neither is one of the shared tier, which every engine reads.

Work is done in the order of its arrival, a limited number of blocks per engine step (`take`). So a cleared tier, or a
disk that is found full after a restart, delays no step; the events come over the next steps. A cleared tier is
announced as removals of its blocks: vLLM's event `AllBlocksCleared` means every tier of the engine, device memory
included. Fields that the installed version of vLLM does not have are left out of events.

`announce_again` repeats what is present, for a router that has forgotten it or has never heard it. Each block is first
removed, which a router that does not know it ignores, so that one that counts events does not count it twice.

The thread of vLLM's scheduler owns it.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvbm.boundary import Boundary, contained
from kvbm.engines.vllm.descriptions import Descriptions, Forms
from kvbm.engines.vllm.restored import RestoredBlocks
from kvbm.events import BlocksRestored, BlocksStored, Event, TierCleared
from kvbm.types import Tier

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

    from kvbm.config.schema import EventsSection
    from kvbm.engines.vllm.request import VllmRequest

PLACES = {Tier.HOST: ("CPU", "LOCAL"), Tier.DISK: ("STORAGE", "LOCAL")}
STORED_FIELDS = frozenset(inspect.signature(BlockStored).parameters)
REMOVED_FIELDS = frozenset(inspect.signature(BlockRemoved).parameters)
PART_BLOCKS = 128  # that one action handles
STEP_BLOCKS = 384  # that a step handles; the longest actions take 0.7 us per block
LARGE_BACKLOG = 16_384  # blocks; for each of so many more, a step handles STEP_BLOCKS more

Work = Iterator[int]  # yields after each action how many blocks it has handled


class Announcer:
    """See the module's text. `expected_blocks`: how many blocks may be described and not yet stored."""

    def __init__(
        self,
        boundary: Boundary,
        settings: EventsSection,
        forms: Forms,
        *,
        expected_blocks: int = 65536,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.boundary = boundary
        self._settings = settings
        self._forms = forms
        self._clock = clock
        tiers = (Tier.HOST, Tier.DISK)  # every engine reads the shared tier: it says nothing about this one
        self._announced: dict[Tier, dict[bytes, bytes]] = {tier: {} for tier in tiers}  # hash -> description
        # Descriptions of blocks on their way; when the first dict is full, it replaces the second, which is dropped.
        self._described: tuple[dict[bytes, bytes], dict[bytes, bytes]] = ({}, {})
        self._expected_blocks = max(1, expected_blocks)
        self._restored = RestoredBlocks(forms.of)
        self._work: deque[Work] = deque()
        self._backlog = 0  # blocks in `_work`
        self._repetition: Work | None = None
        self._repeated_s = clock()
        self._events: list[KVCacheEvent] = []

    @contained()
    def describe(self, request: Request, position: int, chain: Sequence[bytes], begin: int, end: int) -> None:
        """Note that the blocks `chain[begin:end]` of a request may be stored soon. `position`: of their group."""
        if begin < end:
            parent = chain[begin - 1] if begin else None
            self._add(end - begin, self._describe(request, self._forms.all[position], begin, chain[begin:end], parent))

    def describe_up_to(self, tracked: VllmRequest, position: int, chain: Sequence[bytes], end: int) -> None:
        """Describe the blocks of one group from where the last call has ended."""
        if not tracked.described:
            tracked.described = [0] * len(self._forms.all)
        begin, tracked.described[position] = tracked.described[position], end
        self.describe(tracked.request, position, chain, begin, end)

    def _describe(
        self, request: Request, form: Descriptions, begin: int, hashes: Sequence[bytes], parent: bytes | None
    ) -> Work:
        for start in range(0, len(hashes), PART_BLOCKS):
            part = hashes[start : start + PART_BLOCKS]
            if unknown := self._unknown(part):
                first, some = unknown[0], part[unknown[0] : unknown[-1] + 1]
                found = form.of(request, begin + start + first, some, part[first - 1] if first else parent)
                self._described[0].update(zip(some, found, strict=True))
            parent = part[-1]
            yield len(part)
            if len(self._described[0]) >= self._expected_blocks:
                self._described = {}, self._described[0]

    def _unknown(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the positions of blocks without a description."""
        unknown = list(range(len(hashes)))
        for known in (*self._described, *self._announced.values()):
            unknown = [index for index in unknown if hashes[index] not in known]
        return unknown

    @contained(list)
    def notes_of(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the descriptions of blocks that are written to disk; empty for an unknown one."""
        return [one or b"" for one in self._descriptions(hashes)]

    def _descriptions(self, hashes: Sequence[bytes]) -> list[bytes | None]:
        found = list(map(self._described[0].get, hashes))
        if None in found:
            others = (self._described[1], *self._announced.values())
            for index, one in enumerate(found):
                if one is None:
                    known = (some[hashes[index]] for some in others if hashes[index] in some)
                    found[index] = next(known, None) or self._restored.description(hashes[index])
        return found

    def has_work(self) -> bool:
        """Whether the next calls of `take` return more without new events."""
        return bool(self._work) or self._repetition is not None

    def announce_again(self) -> None:
        """Announce every block again, over the next steps, after the events that are due."""
        self._repetition = self._repeat()
        self._repeated_s = self._clock()

    def take(self, events: Sequence[Event]) -> list[KVCacheEvent]:
        """Accept the leader's new events; return those that are due in this step."""
        for event in events:
            self._follow(event)
        if not (self._work or self._events or self._settings.repeat_s or self._repetition):
            return []
        interval_s = self._settings.repeat_s
        if interval_s and self._clock() - self._repeated_s >= interval_s and self._repetition is None:
            self.announce_again()
        left = STEP_BLOCKS * (1 + self._backlog // LARGE_BACKLOG)
        while self._work and left > 0:
            if not (blocks := next(self._work[0], 0)):
                self._work.popleft()
            left -= blocks
            self._backlog = self._backlog - blocks if self._work else 0  # an exception has left the rest of an action
        while self._repetition is not None and left > 0:
            if not (blocks := next(self._repetition, 0)):
                self._repetition = None
            left -= blocks
        due, self._events = self._events, []
        return due

    def _add(self, blocks: int, work: Work) -> None:
        self._backlog += blocks
        self._work.append(work)

    def _follow(self, event: Event) -> None:
        if event.tier not in self._announced:
            return
        if isinstance(event, TierCleared):
            self._work.append(self._clear(event.tier))
            return
        if isinstance(event, BlocksRestored):
            self._add(len(event.hashes), self._hold(event))
            if event.is_last:
                self._work.append(self._announce_restored())
            return
        act = self._store if isinstance(event, BlocksStored) else self._remove
        self._add(len(event.hashes), _in_parts(partial(act, event.tier), event.hashes))

    def _store(self, tier: Tier, hashes: Sequence[bytes]) -> None:
        found = self._descriptions(hashes)
        if None in found:
            hashes = [name for name, one in zip(hashes, found, strict=True) if one is not None]
        self._say_stored(tier, hashes, [one for one in found if one is not None])

    def _say_stored(self, tier: Tier, hashes: Sequence[bytes], known: Sequence[bytes]) -> None:
        self._announced[tier].update(zip(hashes, known, strict=True))
        for form, some, descriptions in self._forms.split(hashes, known):
            self._events += _stored(tier, some, descriptions, form)

    def _hold(self, event: BlocksRestored) -> Work:
        """Keep blocks of an earlier process until all of them are known."""
        notes = event.notes or (b"",) * len(event.hashes)
        for start in range(0, len(event.hashes), PART_BLOCKS):
            part = slice(start, start + PART_BLOCKS)
            self._restored.hold(event.hashes[part], notes[part])
            yield len(event.hashes[part])

    def _announce_restored(self) -> Work:
        """Announce what an earlier process has left on disk."""
        self._backlog += len(self._restored)
        for part in self._restored.parents_first(PART_BLOCKS):
            if not part:
                self._backlog += 1
            self._say_stored(Tier.DISK, [name for name, _ in part], [description for _, description in part])
            yield max(1, len(part))

    def _remove(self, tier: Tier, hashes: Sequence[bytes]) -> None:
        if tier is Tier.DISK and self._restored:
            self._restored.drop(hashes)
        announced = self._announced[tier]
        gone = [sequence_hash for sequence_hash in hashes if announced.pop(sequence_hash, None) is not None]
        self._say_removed(tier, gone)

    def _say_removed(self, tier: Tier, hashes: Sequence[bytes]) -> None:
        for form, some, _ in self._forms.split(hashes, hashes):
            self._events.append(_removed(tier, some, form))

    def _clear(self, tier: Tier) -> Work:
        if tier is Tier.DISK:
            self._restored.clear()
        announced, self._announced[tier] = self._announced[tier], {}
        self._backlog += len(announced)
        yield from _in_parts(partial(self._say_removed, tier), announced)

    def _repeat(self) -> Work:
        """Announce the blocks of each tier in the order in which they were stored: parents before their children,
        unless a parent was evicted and stored again."""
        for tier in self._announced:
            yield from _in_parts(partial(self._say_again, tier), list(self._announced[tier]))

    def _say_again(self, tier: Tier, hashes: Sequence[bytes]) -> None:
        announced = self._announced[tier]
        present = [sequence_hash for sequence_hash in hashes if sequence_hash in announced]
        known = [announced[sequence_hash] for sequence_hash in present]
        self._say_removed(tier, present)
        self._say_stored(tier, present, known)


def _in_parts(act: Callable[[Sequence[bytes]], None], hashes: Sequence[bytes] | dict[bytes, bytes]) -> Work:
    remaining = iter(hashes)
    while part := list(islice(remaining, PART_BLOCKS)):
        act(part)
        yield len(part)


def _stored(
    tier: Tier, hashes: Sequence[bytes], descriptions: Sequence[bytes], form: Descriptions
) -> Iterator[KVCacheEvent]:
    """Yield the events of blocks of one group that became findable, one per extent."""
    group = form.group
    medium, locality = PLACES[tier]
    facts: dict[str, Any] = {
        "block_size": form.block_tokens,
        "medium": medium,
        "group_idx": group.index,
        "kv_cache_spec_kind": group.kind,
        "kv_cache_spec_sliding_window": group.sliding_window,
        "locality": locality,
    }
    facts = {name: value for name, value in facts.items() if name in STORED_FIELDS}
    for extent in form.extents(hashes, descriptions):
        yield BlockStored(**extent, **facts)


def _removed(tier: Tier, hashes: Sequence[bytes], form: Descriptions) -> KVCacheEvent:
    """Return the event of blocks of one group that are no longer findable."""
    medium, locality = PLACES[tier]
    facts = {"locality": locality} if "locality" in REMOVED_FIELDS else {}
    return BlockRemoved(block_hashes=form.names(hashes), medium=medium, group_idx=form.group.index, **facts)
