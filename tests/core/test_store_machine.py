"""The block store under any legal sequence of calls, against a model of a few dicts.

The model holds what a reader of the contract would write down: which slots each handle has, which hashes are findable
and where, how often each slot is pinned, and the least recently used order as a list. After every rule the store's own
check, its counts, its answers and the replay of its events must agree with the model.
"""

from bookkeeping import check_store
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvbm.core.policies.table import POLICIES
from kvbm.core.store import BlockStore
from kvbm.events import BlocksRemoved, BlocksStored, TierCleared
from kvbm.types import Tier

HASHES = [bytes([number]) * 16 for number in range(12)]
batches = st.lists(st.sampled_from(HASHES), max_size=6)


class StoreMachine(RuleBasedStateMachine):
    mutable = Bundle("mutable")
    pinned = Bundle("pinned")

    @initialize(capacity=st.integers(0, 9), eviction=st.sampled_from(sorted(POLICIES)))
    def create(self, capacity, eviction):
        self.store = BlockStore(capacity, tier=Tier.HOST, eviction=eviction)  # without requests, all are LRU
        self.capacity = capacity
        self.epoch = 0
        self.out = []  # live handles: [kind, handle, slots, hashes, epoch]
        self.findable = {}  # hash -> slot
        self.pins = {}  # slot -> how often
        self.order = []  # inactive hashes, least recently used first
        self.live = set()  # replayed from events

    def _adopt(self, kind, handle, slots, hashes=(), epoch=None):
        slots = list(slots)
        assert list(handle.slots) == slots
        if kind == "pinned":
            assert handle.hashes == tuple(hashes)
        self.out.append([kind, handle, slots, tuple(hashes), self.epoch if epoch is None else epoch])
        return handle

    def _drop(self, handle):
        entry = next(entry for entry in self.out if entry[1] is handle)
        self.out.remove(entry)
        return entry

    def _free_count(self):
        taken = {slot for kind, _, slots, _, _ in self.out if kind != "pinned" for slot in slots}
        return self.capacity - len(taken | set(self.pins) | set(self.findable.values()))

    @rule(target=mutable, count=st.integers(0, 6))
    def allocate(self, count):
        free = self._free_count()
        handle = self.store.allocate(count)
        if count > free + len(self.order):
            assert handle is None
            return multiple()
        for _ in range(max(0, count - free)):
            del self.findable[self.order.pop(0)]
        assert len(handle.slots) == len(set(handle.slots)) == count
        return self._adopt("mutable", handle, handle.slots)

    @rule(target=mutable, handle=consumes(mutable), data=st.data())
    def split(self, handle, data):
        _, _, slots, _, epoch = self._drop(handle)
        mask = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)), label="mask")
        first, second = handle.split(mask)
        chosen = [slot for slot, is_chosen in zip(slots, mask, strict=True) if is_chosen]
        others = [slot for slot, is_chosen in zip(slots, mask, strict=True) if not is_chosen]
        return multiple(
            self._adopt("mutable", first, chosen, epoch=epoch), self._adopt("mutable", second, others, epoch=epoch)
        )

    @rule(target=pinned, handle=consumes(mutable), data=st.data())
    def register(self, handle, data):
        _, _, slots, _, epoch = self._drop(handle)
        hashes = data.draw(st.lists(st.sampled_from(HASHES), min_size=len(slots), max_size=len(slots)), label="hashes")
        holders = slots
        if epoch == self.epoch:
            holders = [
                self.findable.setdefault(sequence_hash, slot) for sequence_hash, slot in zip(hashes, slots, strict=True)
            ]
            self.order = [sequence_hash for sequence_hash in self.order if sequence_hash not in hashes]
        for slot in holders:
            self.pins[slot] = self.pins.get(slot, 0) + 1
        return self._adopt("pinned", handle.register(hashes), holders, hashes, epoch)

    @rule(target=pinned, hashes=batches)
    def pin(self, hashes):
        handle = self.store.pin(hashes)
        if not all(sequence_hash in self.findable for sequence_hash in hashes):
            assert handle is None
            return multiple()
        slots = [self.findable[sequence_hash] for sequence_hash in hashes]
        for slot in slots:
            self.pins[slot] = self.pins.get(slot, 0) + 1
        self.order = [sequence_hash for sequence_hash in self.order if sequence_hash not in hashes]
        return self._adopt("pinned", handle, slots, hashes)

    @rule(handle=consumes(mutable))
    def release_mutable(self, handle):
        self._release(handle)

    @rule(handle=consumes(pinned))
    def release_pinned(self, handle):
        self._release(handle)

    def _release(self, handle):
        kind, _, slots, _, _ = self._drop(handle)
        handle.release()
        if kind != "pinned":
            return
        hash_at = {slot: sequence_hash for sequence_hash, slot in self.findable.items()}
        for slot in slots:
            self.pins[slot] -= 1
        ended = dict.fromkeys(slot for slot in slots if self.pins[slot] == 0)
        for slot in ended:
            del self.pins[slot]
        self.order += [hash_at[slot] for slot in reversed(ended) if slot in hash_at]

    @rule(hashes=batches)
    def touch(self, hashes):
        self.store.touch(hashes)
        touched = [sequence_hash for sequence_hash in dict.fromkeys(hashes) if sequence_hash in self.order]
        self.order = [sequence_hash for sequence_hash in self.order if sequence_hash not in touched]
        self.order += reversed(touched)

    @rule(hashes=batches)
    def evict_next(self, hashes):
        self.store.evict_next(hashes)
        moved = [sequence_hash for sequence_hash in dict.fromkeys(hashes) if sequence_hash in self.order]
        rest = [sequence_hash for sequence_hash in self.order if sequence_hash not in moved]
        self.order = [*reversed(moved), *rest]

    @rule(hashes=batches)
    def forget(self, hashes):
        self.store.forget(hashes)
        for sequence_hash in hashes:
            self.findable.pop(sequence_hash, None)
        self.order = [sequence_hash for sequence_hash in self.order if sequence_hash not in hashes]

    @rule()
    def reset(self):
        self.store.reset()
        self.epoch += 1
        self.findable.clear()
        self.order.clear()

    @rule(hashes=batches, start=st.integers(0, 3))
    def look_up(self, hashes, start):
        before = self.store.counts()
        known = [sequence_hash in self.findable for sequence_hash in hashes]
        tail = [*known[start:], False]
        assert self.store.match(hashes, start) == tail.index(False)
        assert self.store.missing(hashes) == [position for position, is_known in enumerate(known) if not is_known]
        assert [self.store.contains(sequence_hash) for sequence_hash in hashes] == known
        assert self.store.counts() == before

    @rule(start=st.integers(0, 9), count=st.integers(0, 9))
    def check_a_slice(self, start, count):
        self.store.check(start, count)

    @invariant()
    def store_agrees_with_itself(self):
        check_store(self.store)

    @invariant()
    def counts_agree_with_the_model(self):
        counts = self.store.counts()
        assert counts.mutable == sum(len(entry[2]) for entry in self.out if entry[0] == "mutable")
        assert (counts.pinned, counts.inactive) == (len(self.pins), len(self.order))
        assert counts.free + counts.mutable + counts.pinned + counts.inactive == self.capacity

    @invariant()
    def exactly_the_model_is_findable_at_its_slots(self):
        known = [sequence_hash for sequence_hash in HASHES if sequence_hash in self.findable]
        assert [HASHES[i] for i in self.store.missing(HASHES)] == [h for h in HASHES if h not in self.findable]
        before = self.store.counts()
        if known and not self.order:  # otherwise looking would change the order that is under test
            with self.store.pin(known) as handle:
                assert list(handle.slots) == [self.findable[sequence_hash] for sequence_hash in known]
        assert self.store.counts() == before

    @invariant()
    def each_slot_is_in_one_place(self):
        held = [slot for kind, _, slots, _, _ in self.out if kind != "pinned" for slot in slots]
        held += [*self.pins, *(self.findable[sequence_hash] for sequence_hash in self.order)]
        assert len(held) == len(set(held))

    @invariant()
    def replayed_events_equal_what_is_findable(self):
        for event in self.store.take_events():
            assert event.tier is Tier.HOST
            match event:
                case BlocksStored(hashes=hashes):
                    assert hashes
                    assert len(set(hashes)) == len(hashes)
                    assert not self.live & set(hashes)
                    self.live |= set(hashes)
                case BlocksRemoved(hashes=hashes):
                    assert hashes
                    assert len(set(hashes)) == len(hashes)
                    assert set(hashes) <= self.live
                    self.live -= set(hashes)
                case TierCleared():
                    self.live.clear()
        assert self.live == set(self.findable)

    def teardown(self):
        if not hasattr(self, "store"):
            return
        for entry in list(self.out):
            self._release(entry[1])
        check_store(self.store)
        self.store.take_events()
        with self.store.allocate(self.capacity):
            evicted = [event.hashes for event in self.store.take_events()]
        assert evicted == ([tuple(self.order)] if self.order else [])
        assert self.store.leaked() == []


StoreMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestStoreMachine = StoreMachine.TestCase
