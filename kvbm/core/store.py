"""BlockStore: the metadata of one tier, and the only code that changes a block's state.

For each slot it knows whether it is free, being written, or registered with a hash; how often it is pinned; and which
block is evicted next. One thread owns a store. There is no lock, no clock and no I/O, and equal calls give equal
results.

    state       in list     in index   ends with
    FREE        free        no         allocate -> MUTABLE, restore -> INACTIVE
    MUTABLE     -           no         register -> PINNED, release -> FREE
    PINNED      -           yes        last release -> INACTIVE, forget or reset -> ORPHANED
    INACTIVE    inactive    yes        pin -> PINNED, evict (inside allocate) -> MUTABLE, forget or reset -> FREE
    ORPHANED    -           no         last release -> FREE            (pinned, but no longer findable)

Per block there is no Python object except its hash and the int of its slot inside the index.

A caller holds a batch of slots by a handle: MutableBlocks or PinnedBlocks. A state change consumes the handle and
returns the next one; if it is refused, the handle stays as it was. `release()`, or the end of a `with`,
gives the blocks back. Use of a consumed or released handle raises InvariantError. If a handle is dropped while it holds
blocks, the store reports a leak and does nothing else, because a finalizer may run in any thread at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, compress
from typing import Self

from kvbm.core.index import HashIndex, picked
from kvbm.core.policies.chain_use import ChainHint, ChainUse
from kvbm.core.policies.table import POLICIES
from kvbm.errors import InvariantError
from kvbm.events import BlocksRemoved, BlocksRestored, BlocksStored, Event, TierCleared
from kvbm.types import Tier


class BlockState(IntEnum):
    """State of a slot, one byte."""

    FREE = 0
    MUTABLE = 1
    PINNED = 2
    INACTIVE = 3
    ORPHANED = 4


SAMPLE_DISTANCE = 16  # blocks of a chain

# Plain ints: the loops below run for every block.
FREE, MUTABLE, PINNED, INACTIVE, ORPHANED = (int(state) for state in BlockState)
_IS_REGISTERED = bytes.maketrans(bytes(BlockState), bytes(state in (PINNED, INACTIVE) for state in BlockState))
_AFTER_RESET = bytes.maketrans(bytes((PINNED, INACTIVE)), bytes((ORPHANED, FREE)))


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """Blocks by state; the sum is the capacity. `pinned` includes pinned blocks that are no longer findable."""

    free: int
    mutable: int
    pinned: int
    inactive: int

    def by_state(self) -> dict[str, int]:
        """Return the counts under the names of the metrics."""
        return {"free": self.free, "moving": self.mutable, "pinned": self.pinned, "evictable": self.inactive}


class BlockStore:
    """Metadata of `capacity_blocks` slots of one tier. See the module for states and ownership."""

    def __init__(
        self, capacity_blocks: int, *, tier: Tier, hash_bytes: int = 16, events: bool = True, eviction: str = "lru"
    ) -> None:
        self.capacity_blocks = capacity_blocks
        self.tier = tier
        self._states = bytearray(capacity_blocks)
        # Pins of a slot after the first one. Few slots have any, so this is small.
        self._extra_pins: dict[int, int] = {}
        self.policy = POLICIES[eviction](capacity_blocks)
        self._order = self.policy.order
        self._lists = self._order.lists
        self._index = HashIndex(self._states, bytes((PINNED, INACTIVE)), hash_bytes)
        self._free_count = capacity_blocks
        self._inactive_count = 0
        self._mutable_count = 0
        self._epoch = 0
        self._forgotten = 0
        self._has_events = events
        self._events: list[Event] = []
        self._leaks: deque[str] = deque()

    # Allocation

    def allocate(self, count: int) -> MutableBlocks | None:
        """Return `count` slots, or None if there are fewer free and evictable ones.

        Free slots are used first, then inactive blocks are evicted, in the order of the policy.
        """
        if count < 0:
            raise InvariantError(f"cannot allocate {count} blocks")
        if count > self._free_count + self._inactive_count:
            return None
        from_free = min(count, self._free_count)
        slots = self._lists.take(self._lists.free, from_free)
        self._free_count -= from_free
        if from_free < count:
            slots += self._evict(count - from_free)
        slots.sort()
        self._set_states(slots, MUTABLE)
        self._mutable_count += count
        return MutableBlocks(self, slots, self._epoch)

    def _evict(self, count: int) -> list[int]:
        slots = self._order.take(count)
        if not self._has_events:  # which report the order of eviction
            slots.sort()
        self._inactive_count -= count
        removed = self._index.remove(slots)
        if self._has_events:
            self._events.append(BlocksRemoved(self.tier, removed))
        return slots

    def _free_mutable(self, slots: list[int]) -> None:
        self._mutable_count -= len(slots)
        self._free(slots)

    def _free(self, slots: list[int]) -> None:
        self._set_states(slots, FREE)
        self._lists.append(self._lists.free, slots)
        self._free_count += len(slots)

    # Registration

    def _register(self, slots: list[int], hashes: tuple[bytes, ...], epoch: int, marks: bytes) -> list[int]:
        if len(slots) != len(hashes):
            raise InvariantError(f"{len(slots)} slots registered with {len(hashes)} hashes: {slots!r:.80}")
        self._index.require_length(hashes)
        self._mutable_count -= len(slots)
        self._order.mark(slots, marks)
        if epoch != self._epoch:
            self._set_states(slots, ORPHANED)
            return slots
        holders = self._index.add(hashes, slots)
        if holders == slots:
            self._set_states(slots, PINNED)
            self._announce_stored(hashes)
        else:
            self._register_with_duplicates(slots, holders, hashes)
        return holders

    def _register_with_duplicates(self, slots: list[int], holders: list[int], hashes: tuple[bytes, ...]) -> None:
        is_new = [slot == holder for slot, holder in zip(slots, holders, strict=True)]
        self._set_states([slot for slot, new in zip(slots, is_new, strict=True) if new], PINNED)
        self._pin_slots([holder for holder, new in zip(holders, is_new, strict=True) if not new])
        self._free([slot for slot, new in zip(slots, is_new, strict=True) if not new])
        self._announce_stored(tuple(h for h, new in zip(hashes, is_new, strict=True) if new))

    def _announce_stored(self, hashes: tuple[bytes, ...]) -> None:
        if self._has_events and hashes:
            self._events.append(BlocksStored(self.tier, hashes))

    # Lookup

    @property
    def available(self) -> int:
        """Blocks that `allocate` can return: free ones and evictable ones."""
        return self._free_count + self._inactive_count

    @property
    def registered(self) -> int:
        """Blocks that can be found."""
        return len(self._index)

    @property
    def free(self) -> int:
        """Blocks that `allocate` can return without an eviction."""
        return self._free_count

    def match(self, hashes: Sequence[bytes], start: int = 0) -> int:
        """Return how many of `hashes[start:]` are registered, up to the first that is not. Changes nothing."""
        return len(self._index.find_prefix(hashes[start:] if start else hashes))

    def contains(self, sequence_hash: bytes) -> bool:
        return sequence_hash in self._index

    def registered_of(self, hashes: set[bytes]) -> set[bytes]:
        """Return those of `hashes` that are registered."""
        return self._index.among(hashes)

    def missing(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the positions in `hashes` of those that are not registered."""
        return [position for position, slot in enumerate(self._index.find(hashes)) if slot is None]

    def missing_of_chain(self, hashes: Sequence[bytes]) -> list[int]:
        """Like `missing`, for consecutive blocks of one chain, in a fraction of the time.

        A chain loses its tail first. So after the first missing block, only every SAMPLE_DISTANCE-th one and the last
        one are looked up. If all of these are missing too, a present block between them is returned as missing.
        """
        first = len(self._index.find_prefix(hashes))
        rest = hashes[first:]
        if len(rest) > 2 * SAMPLE_DISTANCE:
            samples = self._index.find([*rest[::SAMPLE_DISTANCE], rest[-1]])
            if samples.count(None) == len(samples):
                return list(range(first, len(hashes)))
        return [first + position for position in self.missing(rest)]

    # Pins and recency

    def pin(self, hashes: Sequence[bytes]) -> PinnedBlocks | None:
        """Hold all of `hashes` against eviction; None if one of them is not registered."""
        slots = self._index.find_prefix(hashes)
        if len(slots) < len(hashes):
            return None
        self._pin_slots(slots)
        return PinnedBlocks(self, slots, self._epoch, tuple(hashes))

    def pin_prefix(self, hashes: Sequence[bytes]) -> PinnedBlocks:
        """Hold the blocks of `hashes` up to the first that is not registered."""
        slots = self._index.find_prefix(hashes)
        self._pin_slots(slots)
        return PinnedBlocks(self, slots, self._epoch, tuple(hashes[: len(slots)]))

    def _pin_slots(self, slots: list[int]) -> None:
        states, extra_pins = self._states, self._extra_pins
        activated = []
        for slot in slots:
            if states[slot] == INACTIVE:
                states[slot] = PINNED
                activated.append(slot)
            else:
                extra_pins[slot] = extra_pins.get(slot, 0) + 1
        self._lists.remove(activated)
        self._inactive_count -= len(activated)

    def _unpin(self, slots: list[int]) -> None:
        unheld = self._drop_extra_pins(slots) if self._extra_pins else slots[::-1]
        states = self._states
        if picked(states, unheld).count(PINNED) < len(unheld):
            self._free([slot for slot in unheld if states[slot] == ORPHANED])
            unheld = [slot for slot in unheld if states[slot] == PINNED]
        self._set_states(unheld, INACTIVE)
        self._order.add(unheld)
        self._inactive_count += len(unheld)

    def _drop_extra_pins(self, slots: list[int]) -> list[int]:
        """Return those of `slots` that had no extra pin to drop, tail first.

        For a block that occurs several times in a batch, the first position counts: the head of a chain is newest.
        """
        extra_pins, unheld = self._extra_pins, []
        for slot in reversed(slots):
            extra = extra_pins.get(slot, 0)
            if extra > 1:
                extra_pins[slot] = extra - 1
            elif extra:
                del extra_pins[slot]
            else:
                unheld.append(slot)
        return unheld

    def arrive(
        self, hashes: Sequence[bytes], now_s: float, hint: ChainHint | None = None, above: int = 0
    ) -> ChainUse | None:
        """Note that a request for the chain `hashes` has arrived; its blocks get the marks that the ChainUse has for
        them when they are touched or registered. None if the policy knows no uses. The first `above` blocks are in
        a tier above."""
        return self.policy.arrive(hashes, self._index, now_s, hint, above)

    def step(self) -> None:
        """Do a part of the work that arrivals have left. To be called in each engine step, or never."""
        self.policy.see()

    def let_go(self, hashes: Sequence[bytes], *, demotes: bool) -> None:
        """Retain no longer those of a chain's blocks that only the session of `hashes` has used; with `demotes`, evict
        them first."""
        if self.policy.knows_uses:
            slots = self._index.find_prefix(hashes)
            listed = self._listed(slots)
            others = [slot for slot in dict.fromkeys(slots) if self._states[slot] != INACTIVE]
            self.policy.let_go(hashes, listed, others, demotes=demotes)

    def unretain(self, hashes: Sequence[bytes], kept: int) -> None:
        """Retain only the first `kept` blocks of a chain."""
        if self.policy.knows_uses and kept < len(hashes):
            slots = self._index.find_prefix(hashes)
            self.policy.unretain(hashes, kept, self._listed(slots), slots[kept:])

    def _listed(self, slots: Sequence[int]) -> list[int]:
        return [slot for slot in dict.fromkeys(slots) if self._states[slot] == INACTIVE]

    def room(self, marks: bytes, taken: int = 0) -> int:
        """Return how many of the next blocks of a chain, which have these marks, this store would keep, if `taken`
        others are allocated before."""
        return self._order.room(marks, self._free_count - taken, self._inactive_count)

    def touch(self, hashes: Sequence[bytes], marks: bytes = b"") -> list[int]:
        """Make those of `hashes` that are registered the most recently used, the first one newest.

        Pinned ones become so when they are released. `marks[i]` is the mark of `hashes[i]`; without marks, blocks keep
        their marks. Return the positions of those that are not registered.
        """
        runs = self._index.find_runs(hashes)
        slots = list(chain.from_iterable(runs))
        absent: list[int] = []
        if (hit := len(slots)) < len(hashes):
            rest = self._index.find(hashes[hit:])
            absent = [position for position, slot in enumerate(rest, start=hit) if slot is None]
            if later := [slot for slot in rest if slot is not None]:
                runs.append(later)
                slots += later
                marks = marks[:hit] + bytes(compress(marks[hit:], [slot is not None for slot in rest]))
        if slots:
            states = self._states
            inactive = [slot for slot in dict.fromkeys(slots) if states[slot] == INACTIVE]
            self._lists.remove(inactive)
            if marks:
                self._order.remark(slots, marks[: len(slots)], runs)
            self._order.add(inactive[::-1], runs if len(inactive) == len(slots) else ())
        return absent

    def evict_next(self, hashes: Sequence[bytes]) -> None:
        """Make those of `hashes` that are registered and not pinned the next ones to be evicted, the last one first."""
        slots = dict.fromkeys(slot for slot in self._index.find(hashes) if slot is not None)
        inactive = [slot for slot in slots if self._states[slot] == INACTIVE]
        self._lists.remove(inactive)
        self._order.evict_next(inactive)

    def oldest(self, count: int) -> tuple[bytes, ...]:
        """Return the hashes of up to `count` blocks that would be evicted first, in that order."""
        return self._index.hashes_of(self._order.first(count))

    def restore(
        self, slots: list[int], hashes: Sequence[bytes], notes: Sequence[bytes] = (), *, is_last: bool = False
    ) -> None:
        """Register the blocks of an earlier process in these free slots, the last one most recently used. `notes` and
        `is_last` are for the event."""
        if set(map(self._states.__getitem__, slots)) - {FREE} or len(set(slots)) != len(slots):
            raise InvariantError(f"{len(hashes)} blocks restored to {len(slots)} slots: {slots!r:.80}")
        self._index.require_length(hashes)
        if self._index.add(hashes, slots) != slots:
            raise InvariantError(f"a hash occurs twice or is registered already: {len(hashes)} blocks restored")
        self._lists.remove(slots[::-1])  # in this order, blocks that were written together form runs
        self._set_states(slots, INACTIVE)
        self._order.mark(slots, b"")
        self._order.add(slots)
        self._free_count -= len(slots)
        self._inactive_count += len(slots)
        if self._has_events and (hashes or is_last):
            self._events.append(BlocksRestored(self.tier, tuple(hashes), tuple(notes), is_last))

    # Forgetting

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Make those of `hashes` that are registered unfindable. Pinned slots become free at their last release."""
        slots = list(dict.fromkeys(slot for slot in self._index.find(hashes) if slot is not None))
        if not slots:
            return
        self._forgotten += 1
        removed = self._index.remove(slots)
        inactive = [slot for slot in slots if self._states[slot] == INACTIVE]
        self._set_states([slot for slot in slots if self._states[slot] == PINNED], ORPHANED)
        self._lists.remove(inactive)
        self._inactive_count -= len(inactive)
        self._free(inactive)
        if self._has_events:
            self._events.append(BlocksRemoved(self.tier, removed))

    @property
    def losses(self) -> int:
        """A number that grows whenever blocks are forgotten that may be pinned."""
        return self._epoch + self._forgotten

    def reset(self) -> None:
        """Forget every block. Existing handles stay valid and give their slots back when they end.

        Blocks that were allocated before never become findable.
        """
        self._index.clear()
        self._states[:] = self._states.translate(_AFTER_RESET)
        self._order.free_all()
        self.policy.clear()
        self._free_count += self._inactive_count
        self._inactive_count = 0
        self._epoch += 1
        if self._has_events:
            self._events.append(TierCleared(self.tier))

    # Reports

    def take_events(self) -> list[Event]:
        """Return the events since the last call, oldest first. With events on, call this regularly: they accumulate."""
        events, self._events = self._events, []
        return events

    def has_events(self) -> bool:
        """Whether `take_events` would return something."""
        return bool(self._events)

    def counts(self) -> StoreCounts:
        out = self._free_count + self._mutable_count + self._inactive_count
        return StoreCounts(
            free=self._free_count,
            mutable=self._mutable_count,
            pinned=self.capacity_blocks - out,
            inactive=self._inactive_count,
        )

    def registered_mask(self, start: int, count: int) -> bytes:
        """Return a byte for each of `count` slots from `start` on: 1 if its block can be found, else 0."""
        return bytes(self._states[start : start + count].translate(_IS_REGISTERED))

    def hashes_at(self, slots: Sequence[int]) -> tuple[bytes, ...]:
        """Return the hashes of the blocks in these slots, all of which can be found."""
        return self._index.hashes_of(slots)

    def leaked(self) -> list[str]:
        """Return a description of each handle that was dropped while it held blocks, since the last call."""
        reports = []
        while self._leaks:
            reports.append(self._leaks.popleft())
        return reports

    def _set_states(self, slots: Sequence[int], state: int) -> None:
        states = self._states
        for slot in slots:
            states[slot] = state

    # Invariants

    def check(self, start: int, count: int) -> None:
        """Raise InvariantError, with slots and states, if the metadata of `count` slots from `start` on is
        inconsistent."""
        states, end = self._states, min(start + count, self.capacity_blocks)
        holders = self._index.find(self._index.hashes_of(range(start, end)))
        for slot, holder in zip(range(start, end), holders, strict=True):
            state = states[slot]
            if (holder == slot) != (state in (PINNED, INACTIVE)):
                raise InvariantError(f"slot {slot} is {BlockState(state).name}, but its hash is found at slot {holder}")
            if state in (FREE, INACTIVE) and not self._lists.is_linked(slot):
                raise InvariantError(f"slot {slot} is {BlockState(state).name}, but no list contains it")
            if slot in self._extra_pins and (state not in (PINNED, ORPHANED) or self._extra_pins[slot] < 1):
                raise InvariantError(
                    f"slot {slot} is {BlockState(state).name} with {self._extra_pins[slot]} extra pins"
                )


class Handle:
    """A batch of slots of one store. `epoch` is the number of resets of the store before they were allocated."""

    __slots__ = ("_epoch", "_slots", "_store")

    def __init__(self, store: BlockStore, slots: list[int], epoch: int) -> None:
        self._store: BlockStore | None = store
        self._slots = slots
        self._epoch = epoch

    @property
    def slots(self) -> Sequence[int]:
        """The slots, in the order of the batch."""
        self._holder()
        return self._slots

    def release(self) -> None:
        """Give the blocks back; ends the handle."""
        raise NotImplementedError

    def _holder(self) -> BlockStore:
        if self._store is None:
            raise InvariantError(f"{self!r} was used after it was consumed or released")
        return self._store

    def _consume(self) -> BlockStore:
        store = self._holder()
        self._store = None
        return store

    def __enter__(self) -> Self:
        self._holder()
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self.release()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._slots)} blocks, slots {self._slots!r:.80})"

    def __del__(self) -> None:
        # A constructor that failed leaves no `_store`.
        if getattr(self, "_store", None) is not None and self._slots:
            self._holder()._leaks.append(repr(self))


class MutableBlocks(Handle):
    """Slots whose bytes are undefined. Only the holder may write them."""

    __slots__ = ()

    def register(self, hashes: Sequence[bytes], marks: bytes = b"") -> PinnedBlocks:
        """Consumes. Declare the bytes as written, make the blocks findable and return them pinned. `hashes[i]` is the
        sequence hash of `slots[i]`, and `marks[i]` its mark, if known.

        A hash that is already registered keeps its slot: the returned handle holds that slot, and the new one becomes
        free. Slots that were allocated before a reset become pinned without being findable.
        """
        store, names = self._holder(), tuple(hashes)
        holders = store._register(self._slots, names, self._epoch, marks)
        self._store = None
        return PinnedBlocks(store, holders, self._epoch, names)

    def split(self, mask: Sequence[bool]) -> tuple[MutableBlocks, MutableBlocks]:
        """Consumes. Return the blocks chosen by a mask and the others."""
        if len(mask) != len(self._slots):
            raise InvariantError(f"{self!r} cannot be split by {mask!r:.80}")
        store = self._consume()
        chosen = [slot for slot, is_chosen in zip(self._slots, mask, strict=True) if is_chosen]
        others = [slot for slot, is_chosen in zip(self._slots, mask, strict=True) if not is_chosen]
        return MutableBlocks(store, chosen, self._epoch), MutableBlocks(store, others, self._epoch)

    def release(self) -> None:
        """Give the slots back; ends the handle."""
        self._consume()._free_mutable(self._slots)


class PinnedBlocks(Handle):
    """Registered blocks that cannot be evicted while this handle holds them. Several handles may hold one block."""

    __slots__ = ("_hashes",)

    def __init__(self, store: BlockStore, slots: list[int], epoch: int, hashes: tuple[bytes, ...]) -> None:
        super().__init__(store, slots, epoch)
        self._hashes = hashes

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """The sequence hash of each slot."""
        self._holder()
        return self._hashes

    def release(self) -> None:
        """Unpin; ends the handle. Blocks without another pin become the most recently used, the first one newest."""
        self._consume()._unpin(self._slots)
