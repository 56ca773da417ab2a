"""Adaptive eviction: classes along a chain, what each table keeps, and when the chooser leaves LRU."""

import math
import random

import pytest
from bookkeeping import check_store
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbm.core.policies.adaptive import RECENT_BLOCKS, History
from kvbm.core.policies.chain_use import ChainHint, ChainUse, grace_class
from kvbm.core.policies.ranking import CLASS_MASK, INCUMBENTS, LRU, NEW, PAUSES, PROBATION, TABLES, Ranked
from kvbm.core.shadow_caches import ADAPTIVE, NAME_BYTES, SimulatedCache
from kvbm.core.shadow_caches import LRU as LRU_POLICY
from kvbm.core.store import BlockStore
from kvbm.types import Tier
from kvbm_cli.bench.trace.hit_rates import name_of

positions = st.integers(0, 12)


@st.composite
def arrivals(draw):
    hit = draw(positions)
    reused_end = draw(st.integers(hit, 12))
    shared_end = draw(st.integers(0, reused_end))
    pause = draw(st.integers(0, PAUSES - 1))
    resident_pause = draw(st.integers(pause, PAUSES - 1))
    return ChainUse(hit, shared_end, reused_end, pause, resident_pause, draw(st.booleans()))


def chain(start, count):
    return [name_of(number) for number in range(start, start + count)]


def shadows(cache):
    return cache.store.policy._shadows  # a cache for each table, of which only the best one shows


def decide(cache):
    return cache.store.policy._decide()  # as the store does when a request arrives


def force(cache, table):
    """Let a cache evict by one table, whatever its shadow caches say."""
    policy, shadow = cache.store.policy, next(one for one in shadows(cache) if one.table is table)
    policy.order.use_table(table)
    # its choice and what it decides from then on
    policy._current, policy._decide = shadow, lambda: shadow
    return cache


def forced(capacity, table):
    return force(SimulatedCache(capacity, ADAPTIVE), table)


def use(cache, at_s, names):
    """Serve a request and return how many of its blocks were found."""
    before = cache.hit_blocks
    cache.use(at_s, names, asked=len(names))
    return cache.hit_blocks - before


# Classes


@given(arrivals(), positions, positions)
def test_classes_never_rise_along_a_chain(arrival, begin, length):
    marks = arrival.marks(begin, begin + length)
    assert len(marks) == length
    classes = [mark & CLASS_MASK for mark in arrival.marks(0, begin + length)]
    assert classes == sorted(classes, reverse=True)
    assert bytes(marks) == arrival.marks(0, begin + length)[begin:]


conversations = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 9), st.floats(0, 2000)), min_size=1, max_size=40
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TABLES), st.integers(1, 24), conversations)
@example(PROBATION, 5, [(1, 1, 1, 0.0), (1, 0, 1, 60.0), (1, 1, 1, 41.0), (0, 0, 1, 0.0)])
def test_no_table_leaves_a_hole_in_a_chain(table, capacity, requests):
    cache, now_s, chains = forced(capacity, table), 0.0, []
    for system, conversation, length, pause_s in requests:
        now_s += pause_s
        names = [*chain(1000 * (system + 1), 3), *chain(100_000 + 10_000 * system + 100 * conversation, length)]
        chains.append(names)
        use(cache, now_s, names)
        check_store(cache.store)
        for one in chains:
            present = [cache.store.contains(name) for name in one]
            assert present == sorted(present, reverse=True), (one, present)


def test_a_chain_that_another_request_still_uses_was_used_at_its_arrival():
    """The beginning of both chains is held from 60 s to 161 s. Its pause is not that of the other chain's end."""
    cache = forced(5, PROBATION)
    store, begin, ended, running = cache.store, chain(2000, 3), chain(3000, 1), chain(4000, 1)
    use(cache, 0, begin + ended)
    marks = store.arrive(begin + running, 60).marks(0, 4)
    with store.pin_prefix(begin + running):
        store.touch(begin + running, marks)
        with store.allocate(1).register(running, marks[3:]):
            use(cache, 161, begin + ended)
    store.touch(begin + running)
    use(cache, 161, chain(5000, 2))
    present = [store.contains(name) for name in begin + running]
    assert present == sorted(present, reverse=True)
    assert all(present[:3])


# Tables


def test_probation_evicts_new_blocks_before_older_ones_that_came_back():
    cache = forced(8, PROBATION)
    use(cache, 0, chain(0, 4))
    use(cache, 10, chain(0, 5))  # comes back
    use(cache, 20, chain(100, 3))  # new, and used later
    use(cache, 30, chain(200, 2))
    assert cache.store.match(chain(0, 5)) == 5
    assert cache.store.match(chain(100, 3)) < 3


def test_incumbents_give_new_blocks_only_what_is_free_or_new():
    cache = forced(8, INCUMBENTS)
    use(cache, 0, chain(0, 6))
    use(cache, 1, chain(0, 6))
    use(cache, 2, chain(100, 5))
    assert cache.store.match(chain(0, 6)) == 6
    assert cache.store.match(chain(100, 5)) == 2
    use(cache, 3, chain(200, 5))
    assert cache.store.match(chain(0, 6)) == 6


def test_a_block_that_came_back_after_a_long_pause_counts_as_old():
    order = Ranked(4, PROBATION)
    long, short = 0, PAUSES - 1
    order.advance_to(100.0)
    order.lists.take(order.lists.free, 4)
    order.mark([0, 1], ChainUse(2, 0, 2, short, short, True).marks(0, 2))
    order.add([0, 1])
    order.advance_to(400.0)
    order.mark([2, 3], ChainUse(2, 0, 2, long, long, True).marks(0, 2))
    order.add([2, 3])
    assert order.first(4) == [2, 3, 0, 1]
    order.use_table(LRU)
    assert order.first(4) == [0, 1, 2, 3]


# The chooser


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_blocks_that_are_to_be_evicted_next_come_before_all_that_the_table_would_keep(table):
    cache = forced(12, table)
    spare, new, other = chain(0, 4), chain(100, 4), chain(200, 4)
    use(cache, 0.0, new)
    for at_s in (1.0, 50.0, 60.0):
        use(cache, at_s, other)
        use(cache, at_s, spare[:2] if at_s == 1.0 else spare)
    times_s = [cache.store.policy.order.used_s(slot) for slot in range(12)]
    assert cache.store.oldest(4) == tuple(new[::-1])
    cache.store.evict_next(spare)
    last_first = [*spare, *new] if math.isinf(table.new) else [*new, *spare]
    assert cache.store.oldest(8) == tuple(last_first[::-1])
    assert [cache.store.policy.order.used_s(slot) for slot in range(12)] == pytest.approx(times_s, abs=1e-5)
    cache.store.touch(spare)
    assert cache.store.oldest(4) == tuple(new[::-1])


def requests_of(choice, count, conversations=60, longest=12):
    """Requests of growing conversations that share a beginning, with what comes once between them."""
    lengths, now_s = [1] * conversations, 0.0
    for number in range(count):
        now_s += choice.expovariate(1.0)
        one = choice.randrange(conversations)
        if number % 3 == 0:
            yield now_s, chain(10_000_000 + 100 * number, choice.randrange(1, longest))
        else:
            lengths[one] = min(90, lengths[one] + choice.randrange(4))
            yield now_s, [*chain(0, 3), *chain(1000 * (one + 1), lengths[one])]


def hits(cache, requests):
    for now_s, names in requests:
        cache.use(now_s, names, asked=len(names))
    return cache.hit_blocks


def test_without_requests_the_order_is_that_of_lru():
    store = BlockStore(50, tier=Tier.HOST, hash_bytes=NAME_BYTES, eviction="adaptive")
    store.allocate(50).register(chain(0, 50)).release()
    store.touch(chain(20, 10))
    assert store.oldest(50) == (*chain(30, 20)[::-1], *chain(0, 20)[::-1], *chain(20, 10)[::-1])
    assert store.policy.choice() == (1, 0)


@pytest.mark.parametrize(
    "clock",
    [
        pytest.param(lambda number, now_s: 0.0, id="stands still"),
        pytest.param(lambda number, now_s: -now_s, id="goes back"),
        pytest.param(lambda number, now_s: now_s + 1e6 * (number // 100), id="jumps"),
        pytest.param(lambda number, now_s: now_s + random.Random(number).uniform(-1e5, 1e5), id="is random"),
    ],
)
def test_lru_table_equals_lru_whatever_the_clock_does(clock):
    requests = list(requests_of(random.Random(3), 600))
    plain, ranked = SimulatedCache(400, LRU_POLICY), forced(400, LRU)
    for number, (now_s, names) in enumerate(requests):
        assert use(plain, now_s, names) == use(ranked, clock(number, now_s), names)
        assert plain.store.oldest(400) == ranked.store.oldest(400)


@pytest.mark.parametrize("capacity", [100, 300, 1000])
def test_a_clock_that_jumps_costs_at_most_a_hundredth_of_the_hits(capacity):
    choice = random.Random(5)
    requests = [
        (now_s + 1e6 * (number // 200), names) for number, (now_s, names) in enumerate(requests_of(choice, 2000))
    ]
    assert hits(SimulatedCache(capacity, ADAPTIVE), requests) >= 0.99 * hits(
        SimulatedCache(capacity, LRU_POLICY), requests
    )


def test_the_chooser_leaves_lru_for_a_gain_and_returns_when_the_workload_changes():
    choice = random.Random(1)
    cache = SimulatedCache(300, ADAPTIVE)
    tables = []
    for number in range(1200):  # a set that fits, and scans that would push it out
        names = chain(1000 * (number % 5), 30) if number % 2 else chain(1_000_000 + 200 * number, 100)
        use(cache, float(number), names)
        tables.append(cache.store.policy.order.table)
    assert tables[0] is LRU
    assert tables[-1] is not LRU
    gained = cache.hit_blocks
    plain = SimulatedCache(300, LRU_POLICY)
    for number in range(1200):
        names = chain(1000 * (number % 5), 30) if number % 2 else chain(1_000_000 + 200 * number, 100)
        use(plain, float(number), names)
    assert gained > 1.5 * plain.hit_blocks
    for number in range(1200, 3000):  # each chain is used twice, soon after: only recency matters
        names = chain(50_000_000 + 100 * (number // 2 + choice.randrange(2)), 40)
        use(cache, float(number), names)
    assert cache.store.policy.order.table.name in {"lru", "probation"}


def test_one_request_decides_nothing():
    """Requests that hit more blocks with another table than with LRU: the first three are chance."""
    cache = SimulatedCache(300, ADAPTIVE)
    lru, *_, last = shadows(cache)
    for _ in range(3):
        last.note(50, 0)
        assert decide(cache) is lru
    last.note(50, 0)
    assert decide(cache) is last


def test_shadow_caches_see_in_steps_what_they_see_at_once():
    at_once, in_steps = SimulatedCache(300, ADAPTIVE), SimulatedCache(300, ADAPTIVE)
    for number, (now_s, names) in enumerate(requests_of(random.Random(7), 800)):
        long = [*names, *chain(10_000_000, 2000)] if number % 50 == 0 else names
        assert use(at_once, now_s, long) == use(in_steps, now_s, long)
        for _ in range(number % 6):
            in_steps.store.step()
    for cache in (at_once, in_steps):
        cache.store.policy.see()
    found = []
    for cache in (at_once, in_steps):
        # what later requests will be judged by
        history = cache.store.policy._history._entries
        found.append(([(shadow.hits, shadow.gain) for shadow in shadows(cache)], history))
    assert found[0] == found[1]


def test_without_a_difference_between_the_tables_the_order_stays_lru():
    cache = SimulatedCache(2000, ADAPTIVE)
    for number in range(60):  # all blocks fit
        use(cache, float(number), chain(1000 * (number % 20), 50))
    assert cache.hit_blocks == 40 * 50
    assert cache.store.policy.order.table is LRU
    assert cache.store.policy.choice() == (1, 0)


def test_new_blocks_have_their_own_class_only_without_a_known_chain():
    cache = SimulatedCache(100, ADAPTIVE)
    adaptive = cache.store.policy
    assert cache.store.arrive(chain(0, 8), 0.0).fresh == NEW
    use(cache, 1.0, chain(0, 8))
    grown = cache.store.arrive(chain(0, 12), 2.0)
    assert (grown.hit, grown.continues) == (8, True)
    assert grown.fresh != NEW
    use(cache, 3.0, chain(0, 12))
    other = cache.store.arrive([*chain(0, 4), *chain(500, 4)], 4.0)  # goes on differently
    assert (other.hit, other.shared_end, other.continues) == (4, 4, False)
    assert other.fresh == NEW
    assert adaptive.choice() == (1, 0)


def test_history_knows_blocks_that_have_left_the_cache():
    history, names = History(1 << 16), chain(0, 16)
    history.note(names, ChainUse(0, 5, 9, 0, 0, False), now_s=12.5)
    assert history.find_last(names, 0) == (12, 0, 12.5)
    assert history.find_last(names[:12], 0) == (8, 0x10, 12.5)
    assert history.find_last(names[:8], 0) == (4, 0x30, 12.5)
    assert history.find_last([*names[:8], *chain(500, 8)], 0) == (4, 0x30, 12.5)
    assert history.find_last(names, 13) is None
    assert history.find_last(chain(500, 16), 0) is None
    history.clear(12.6)
    assert history.find_last(names, 0) is None
    history.note(names, ChainUse(0, 0, 0, 0, 0, False), now_s=12.7)  # in the same quarter of a second
    assert history.find_last(names, 0)[:2] == (12, 0)


def test_history_has_a_quarter_of_the_end_of_a_long_chain_and_little_of_its_beginning():
    """A chain that grew by less than what it was is still found near its former end."""
    history, names = History(1 << 16), chain(0, 10_000)
    positions = history.positions(5000)
    assert len(positions) < 5000 / 50
    assert sum(position >= 5000 - RECENT_BLOCKS for position in positions) == RECENT_BLOCKS / 4
    history.note(names[:5000], ChainUse(0, 0, 0, 0, 0, False), now_s=1.0)
    assert 4500 < history.find_last(names, 0)[0] < 5000
    assert history.find_last(names[:5010], 0)[0] > 5000 - RECENT_BLOCKS


# Hints


class HintedCache(SimulatedCache):
    """Also takes hints, and remembers the last chain of each session as the leader does."""

    def __init__(self, capacity, policy=ADAPTIVE):
        super().__init__(capacity, policy)
        self.sessions = {}

    def serve(self, at_s, names, *, retain_s=0.0, demotes=False, session=None, ends=False):
        last = self.sessions.get(session)
        continues = last is not None and names[: len(last)] == last
        hint = None
        if retain_s or demotes or session is not None:
            retained = len(names) if retain_s else 0
            hint = ChainHint(retained, grace_class(retain_s), demotes, session is not None, continues)
        before = self.hit_blocks
        arrive = self.store.arrive
        self.store.arrive = lambda chain, now_s: arrive(chain, now_s, hint)
        self.use(at_s, names, asked=len(names))
        self.store.arrive = arrive
        if session is not None:
            self.sessions[session] = names
        if ends and session is not None:
            self.store.let_go(self.sessions.pop(session), demotes=demotes)
        return self.hit_blocks - before


def fill(cache, at_s, count):
    """Requests that never repeat."""
    for number in range(count):
        cache.serve(at_s + number / 100, chain(10_000_000 + 10 * int(1000 * at_s) + 5 * number, 5))


def test_a_retained_chain_survives_what_pushes_out_others_until_its_time_has_ended():
    cache = HintedCache(40)
    cache.serve(0, chain(0, 10), retain_s=30)
    cache.serve(1, chain(100, 10))
    fill(cache, 2, 20)
    assert cache.store.match(chain(0, 10)) == 10
    assert cache.store.match(chain(100, 10)) == 0
    fill(cache, 31, 4)  # its time begins to count as a pause
    assert cache.store.match(chain(0, 10)) == 10
    fill(cache, 33, 12)
    assert cache.store.match(chain(0, 10)) < 10


def test_a_longer_retention_outlives_a_shorter_one_and_nothing_is_locked():
    cache = HintedCache(20)
    cache.serve(0, chain(0, 10), retain_s=480)
    cache.serve(1, chain(100, 10), retain_s=30)
    cache.serve(2, chain(200, 8))
    assert cache.store.match(chain(200, 8)) == 8
    assert cache.store.match(chain(0, 10)) == 10
    assert cache.store.match(chain(100, 10)) == 2


def test_a_request_without_a_hint_does_not_end_the_retention_of_its_beginning():
    cache = HintedCache(40)
    cache.serve(0, chain(0, 10), retain_s=120)
    cache.serve(5, [*chain(0, 5), *chain(500, 5)])
    fill(cache, 6, 20)
    assert cache.store.match(chain(0, 10)) == 10


def test_demoted_blocks_leave_first():
    cache = HintedCache(30)
    cache.serve(0, chain(0, 10))
    cache.serve(1, chain(100, 10), demotes=True)
    cache.serve(2, chain(200, 15))
    assert cache.store.match(chain(0, 10)) == 10
    assert cache.store.match(chain(100, 10)) == 5


def test_the_end_of_a_session_demotes_what_only_it_has_used():
    cache = HintedCache(40)
    cache.serve(0, chain(0, 4))
    cache.serve(1, chain(0, 10), session="a", retain_s=480)
    cache.serve(2, chain(0, 14), session="a", retain_s=480)
    cache.serve(3, chain(900, 10))
    cache.serve(4, chain(0, 16), session="a", demotes=True, ends=True)
    cache.serve(5, chain(200, 24))
    assert cache.store.match(chain(0, 16)) == 6
    assert cache.store.match(chain(900, 10)) == 10


def test_the_end_of_a_session_leaves_blocks_that_another_one_uses():
    cache = HintedCache(40)
    cache.serve(0, chain(0, 10), session="a")
    cache.serve(1, chain(0, 12), session="b")
    cache.serve(2, chain(900, 20))
    cache.store.let_go(cache.sessions.pop("a"), demotes=True)
    fill(cache, 3, 2)
    assert cache.store.match(chain(0, 12)) >= 10


def test_the_end_of_a_session_leaves_no_hole_if_hints_are_given_up_later():
    """The demoted block is then ranked like others, so it may not count as used after the block before it."""
    cache = HintedCache(5)
    cache.serve(0, chain(0, 4))
    cache.serve(1, chain(0, 5), session="a", demotes=True, ends=True)
    cache.store.policy.follows_hints = False
    cache.store.policy.order.use_table(LRU)
    cache.serve(2, chain(900, 1))
    assert cache.store.match(chain(0, 5)) == 4


def test_hints_that_are_not_followed_change_no_mark():
    """Retained blocks kept their class, and their chains that of the shortest pause, until their time had ended."""
    plain, hinted = HintedCache(40), HintedCache(40)
    for cache in (plain, hinted):
        cache.serve(0, chain(0, 8), retain_s=1920.0 if cache is hinted else 0.0)
        cache.store.policy.follows_hints = False
        cache.store.policy.order.use_table(LRU)
        cache.serve(200, chain(0, 8), retain_s=1920.0)
        cache.serve(900, chain(0, 10))
    slots = {cache: cache.store._index.find_prefix(chain(0, 10)) for cache in (plain, hinted)}
    marks = [[cache.store.policy.order.marks[slot] for slot in slots[cache]] for cache in (plain, hinted)]
    assert marks[0] == marks[1]
    assert plain.store.arrive(chain(0, 10), 1500) == hinted.store.arrive(chain(0, 10), 1500)


def test_a_retention_from_before_hints_were_given_up_leaves_no_hole():
    """Meanwhile, a request without a hint may have used its beginning, which then leaves before the rest."""
    cache = HintedCache(30)
    adaptive = cache.store.policy
    cache.serve(0, chain(0, 8), retain_s=1920.0)
    adaptive.follows_hints = False
    adaptive.order.use_table(LRU)
    cache.serve(1, chain(0, 4))
    adaptive.follows_hints = True
    adaptive.order.use_table(LRU, follows_hints=True)
    for number in range(6):
        fill(cache, 2 + number, 1)
        present = [cache.store.contains(name) for name in chain(0, 8)]
        assert present == sorted(present, reverse=True), present
    assert not any(present)


hinted_requests = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(1, 9),
        st.floats(0, 700),
        st.sampled_from([0.0, 0.0, 30.0, 120.0, 480.0, 1920.0]),
        st.booleans(),
        st.sampled_from([None, None, "a", "b", "of the conversation"]),
        st.booleans(),
        st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(TABLES), st.integers(1, 24), hinted_requests)
@example(
    LRU,
    5,
    [
        (0, 0, 1, 0.0, 0.0, False, None, False, True),
        (0, 0, 2, 0.0, 0.0, False, "a", True, True),  # its own block did not count as older than the one before it
        (0, 1, 1, 0.0, 0.0, False, None, False, True),
    ],
)
@example(
    PROBATION,
    10,
    [
        *[(0, 0, 1, 0.0, 0.0, False, None, False, True)] * 4,
        *[(0, 1, 1, 0.0, 0.0, False, None, False, True)] * 2,
        (0, 3, 1, 0.0, 0.0, False, None, False, True),
        (0, 1, 5, 26.0, 0.0, False, None, False, True),
        (0, 3, 2, 0.0, 0.0, True, None, False, True),  # its last block is demoted, and its first one has had a pause
        (0, 0, 1, 0.0, 0.0, False, None, False, False),
    ],
)
def test_no_hint_leaves_a_hole_in_a_chain(table, capacity, requests):
    """Also if hints are followed for some of the requests only."""
    cache, now_s, chains = HintedCache(capacity), 0.0, []
    adaptive = cache.store.policy
    force(cache, table)
    for system, conversation, length, pause_s, retain_s, demotes, session, ends, follows in requests:
        now_s += pause_s
        adaptive.follows_hints = follows
        # as the policy does where it was not forced
        adaptive.order.use_table(table, follows_hints=follows and bool(adaptive._hinted))
        names = [*chain(1000 * (system + 1), 3), *chain(100_000 + 10_000 * system + 100 * conversation, length)]
        if session == "of the conversation":
            session = f"{system}/{conversation}"
        chains.append(names)
        cache.serve(now_s, names, retain_s=retain_s, demotes=demotes and not retain_s, session=session, ends=ends)
        check_store(cache.store)
        for one in chains:
            present = [cache.store.contains(name) for name in one]
            assert present == sorted(present, reverse=True), (one, present)
