"""LateOffloads: which blocks `offload.to_host: on_evict` copies to host memory, those that the engine evicts next; and
when `auto` is `on_evict`.

    computed   -> `note`: the leader keeps its name, and what the engine has in it
    evictable  -> the engine may use the block again, or give it to another request; it says neither
    next       -> `pick`: near the head of the engine's queue, and with the content that was noted
    copied     -> `changed`: a block without that content was evicted during its copy, and is not registered

With `auto`, a block is copied as soon as it is noted while host memory has free slots. So until it is full, a reset of
the engine's cache loses only blocks whose copy has not begun, as too many were in flight.

A *content* is an object of the engine, compared by identity: the engine makes another one whenever it fills a block
again, even with equal tokens. So a block that has the noted content after its copy was not written since it was noted.
Blocks under a copy are not held: the engine would evict others in their place, and use them last when they come back.

A step does nothing without room for a copy, and examines at most a slice of noted blocks.

There is at most one note per block of G1. A block that was picked because it is evicted next has none: it is in host
memory, or its copy has failed. A request that uses it again notes it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import islice, repeat
from typing import TYPE_CHECKING

from kvbm.core.policies.ranking import PLAIN, known_blocks

if TYPE_CHECKING:
    from kvbm.config.schema import Tiers
    from kvbm.tiers.lower_tier import TierContext
    from kvbm.tiers.settings import EvictionQueue

SMALL_HOST = 20  # `auto` copies late if host memory has less than so many times the blocks of G1
STEPS_AHEAD = 2
HOST_SHARE = 4  # at most this part of host memory is watched, or as many blocks as may be in flight: it has them twice
WATCHED_SLICES = 4  # but no more than this, of the blocks that a step may copy
FADING = 1 - 1 / 256  # of the demand, in each step that fills a block: it halves in 177 such steps

Note = tuple[object, bytes, bytes, int]  # content, sequence hash, tenant, mark
Pick = tuple[int, object, bytes, bytes, int]  # G1 block, and its note


def reason_to_copy_at_once(tiers: Tiers, *, host_blocks: int, g1_blocks: int) -> str:
    """Return why `auto` copies blocks to host memory when they are computed; empty if it waits until the engine evicts
    them, once host memory is full. A tier that outlives the engine would lack the blocks that are in G1 at its end."""
    if tiers.host is None:
        return "host memory is only a buffer"
    if tiers.disk is not None and tiers.disk.persist:
        return "blocks on disk are kept for the next start"
    if tiers.shared is not None and tiers.shared.write:
        return "the shared tier takes the blocks of a request at its end"
    if host_blocks >= SMALL_HOST * g1_blocks:
        return f"host memory has {host_blocks:,} blocks, at least {SMALL_HOST} times the {g1_blocks:,} of G1"
    return ""


class LateOffloads:
    """See the module's text. Watches the next blocks in the engine's queue, STEPS_AHEAD times as many as it has lately
    filled in a step, as a load of many blocks evicts as many at once. `departing` are the names of blocks in flight."""

    def __init__(self, queue: EvictionQueue, context: TierContext, departing: Set[bytes]) -> None:
        self._queue = queue
        self._departing = departing
        self._store = context.host.store
        self._counters = context.counters
        self._may_decline = context.settings.may_decline
        self._slice = context.settings.slice_blocks
        most = max(context.settings.max_in_flight_blocks, context.host.capacity_blocks // HOST_SHARE)
        self._most = min(most, WATCHED_SLICES * self._slice)
        self._filled = 0  # blocks since the last step
        self._demand = 0.0  # the most blocks that a step has filled; older steps count less
        self._notes: dict[int, Note] = {}
        self._is_behind = False  # whether a block of the last step had no room
        self._fills_slots = context.settings.to_host == "auto"
        self._fresh: dict[int, None] = {}  # noted blocks for free slots of host memory

    def note(self, hashes: Sequence[bytes], block_ids: Sequence[int], tenant: bytes, marks: bytes) -> None:
        """Note that these blocks are complete, or that the coming forward pass completes them."""
        notes = self._notes
        contents = self._queue.contents_of(block_ids)
        known = [(content, notes[one]) for one, content in zip(block_ids, contents, strict=True) if one in notes]
        changed = [note[1] for content, note in known if note[0] is not content]
        self._filled += len(block_ids) - len(known) + len(changed)
        self._count_lost(changed)
        notes.update(zip(block_ids, zip(contents, hashes, repeat(tenant), marks or repeat(PLAIN)), strict=False))
        if self._fills_slots and self._store.free:
            self._fresh |= dict.fromkeys(block_ids)

    def _count_lost(self, hashes: list[bytes]) -> None:
        """Count blocks that the engine has evicted, unless they are in host memory, or in flight: the end of the copy
        counts these."""
        hashes = [name for name in hashes if name not in self._departing]
        if hashes:
            self._counters.offload_skipped_blocks += len(self._store.missing(hashes))

    def pick(self, room: int) -> list[Pick]:
        """Return up to `room` blocks to copy in this step, the head of a chain before its tail."""
        window = self._window()
        if room <= 0:
            self._is_behind = True
            return []
        notes, departing, lost = self._notes, self._departing, []
        wanted: dict[bytes, Pick] = {}
        for block_id, content in self._queue.first(window, again=self._is_behind):
            note = notes.get(block_id)
            if note is None:
                continue
            if note[0] is not content:
                lost.append(notes.pop(block_id)[1])
            elif note[1] not in departing:
                wanted[note[1]] = (block_id, *note)
                if len(wanted) == self._slice:
                    break
        self._count_lost(lost)
        names = list(wanted)[::-1]
        absent = [names[position] for position in self._store.touch(names)]
        room = min(room, self._slice)
        chosen = absent[max(0, len(absent) - room) :]  # those that are evicted first
        self._is_behind = len(chosen) < len(absent) or len(wanted) == self._slice
        for name in (wanted.keys() - absent).union(chosen):
            del notes[wanted[name][0]]
        picks = self._worthwhile([wanted[name] for name in chosen])
        spare = self._store.free - len(picks)
        fresh = self._pick_fresh(min(room - len(picks), spare), wanted)
        if len(fresh) >= spare:
            self._fresh.clear()
        return picks + fresh

    def _pick_fresh(self, room: int, others: Mapping[bytes, Pick]) -> list[Pick]:
        """Return noted blocks for up to `room` free slots, none of the `others`. They keep their notes: once host
        memory is full, they may be evicted there first."""
        block_ids = list(islice(self._fresh, max(0, room)))  # no more, as each costs time
        wanted: dict[bytes, Pick] = {}
        for block_id, content in zip(block_ids, self._queue.contents_of(block_ids), strict=True):
            del self._fresh[block_id]
            note = self._notes.get(block_id)
            if note is None or content is None or note[0] is not content:
                continue
            if note[1] not in self._departing and note[1] not in others:
                wanted[note[1]] = (block_id, *note)
        names = list(wanted)
        return [wanted[names[position]] for position in self._store.missing(names)]

    def _worthwhile(self, picks: list[Pick]) -> list[Pick]:
        """Return those that host memory would keep: of known chains first."""
        kept = len(picks)
        if self._may_decline:
            kept = self._store.room(bytes([mark for *_, mark in picks]))
        if kept < len(picks):
            self._counters.offload_declined_blocks += len(picks) - kept
            picks = sorted(picks, key=lambda pick: known_blocks(bytes(pick[4:])) == 0)[:kept]
        return picks

    def _window(self) -> int:
        """Return how many blocks are watched. The engine takes a step's worth of them at once, before the next look."""
        if self._filled:
            self._demand = max(self._filled, self._demand * FADING)
            self._filled = 0
        return min(self._most, math.ceil(STEPS_AHEAD * self._demand))

    def changed(self, block_ids: Sequence[int], contents: Sequence[object]) -> set[int]:
        """Return the positions of blocks that have not these contents any more, and forget notes of these."""
        pairs = zip(self._queue.contents_of(block_ids), contents, strict=True)
        found = {index for index, (now, then) in enumerate(pairs) if now is not then}
        for index in found:
            if (note := self._notes.get(block_ids[index])) is not None and note[0] is contents[index]:
                del self._notes[block_ids[index]]
        return found

    def forget(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._notes.pop(block_id, None)

    def forget_tenant(self, tenant: bytes) -> None:
        self.forget([block_id for block_id, note in self._notes.items() if note[2] == tenant])

    def reset(self) -> None:
        self._notes.clear()
        self._fresh.clear()
