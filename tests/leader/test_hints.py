"""Hints of clients: their words, their quota, and what host memory keeps because of them."""

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import Rig, chain, disk_policy

from kvbm.core.shadow_caches import NAME_BYTES
from kvbm.core.store import BlockStore
from kvbm.leader.hints import (
    HIGH_S,
    LONGEST_S,
    MOST_RETENTIONS,
    MOST_SESSIONS,
    QUOTA_SHARE,
    TOTAL_SHARE,
    Hint,
    Hints,
    Invalid,
    parsed,
)
from kvbm.leader.tenant_table import MOST_GIVEN_UP
from kvbm.types import Tier
from kvbm_cli.bench.trace.hit_rates import PrefixTree, TimedUse, Use, name_of

sys.path.insert(0, str(Path(__file__).parents[2] / "bench/eviction"))
from wrong_hints import LEAST, WRONG, HintedCache, hits, requests_of

HINTS: dict[str, object] = {}


@pytest.fixture
def rig():
    HINTS.clear()
    return Rig(slots=40, blocks=80, host_eviction="adaptive", hints=HINTS)


def serve(rig, name, hashes, hint=None):
    """A request from its lookup to its end, without a load. Returns how many blocks were found."""
    HINTS[name] = hint
    found = rig.leader.match(name, hashes, 0)
    blocks = rig.compute(name, hashes)
    rig.step()
    rig.finish(name, hashes, blocks)
    rig.now_s += 0.1
    return found


def scan(rig, count):
    for number in range(count):
        serve(rig, f"scan {rig.now_s} {number}", chain(f"scan {rig.now_s} {number}", 5))


def present(rig, hashes):
    return rig.leader.host.store.match(hashes)


# Words


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({}, Hint()),
        ({"retain_s": 60}, Hint(retain_s=60.0)),
        ({"retain_s": 1e9}, Hint(retain_s=LONGEST_S)),
        ({"retain_s": 10**400}, Hint(retain_s=LONGEST_S)),
        ({"priority": "high"}, Hint(retain_s=HIGH_S)),
        ({"priority": "low"}, Hint(demotes=True)),
        ({"priority": "high", "retain_s": 5}, Hint(retain_s=5.0)),
        ({"session": "a", "release": True}, Hint("a", releases=True)),
        ({"end": ["a", "b"], "demote": False}, Hint(ends=("a", "b"))),
        ({"prefetch_s": 0.5}, Hint(prefetch_s=0.5)),
    ],
)
def test_words_of_a_hint(given, expected):
    assert parsed(given) == expected


@pytest.mark.parametrize(
    "given",
    [
        "retain",
        ["retain_s"],
        5,
        {"retain_s": -1},
        {"retain_s": True},
        {"retain_s": "60"},
        {"retain_s": float("nan")},
        {"retain_s": float("inf")},
        {"priority": "urgent"},
        {"priority": ["low"]},
        {"priority": "low", "retain_s": 5},
        {"demote": 1},
        {"session": ""},
        {"session": "a" * 129},
        {"session": 7},
        {"end": "a"},
        {"end": ["a"] * 9},
        {"end": [None]},
        {"prefetch_s": 1e9},
        {"prefetch_s": None},
        {"pin": True},
        dict.fromkeys(map(str, range(100)), 1),
        {7: 7},
    ],
)
def test_what_is_no_hint_is_refused(given):
    with pytest.raises(Invalid):
        parsed(given)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists), st.text())
def test_no_value_of_a_client_raises_anything_else(value, session):
    for key in ("session", "retain_s", "priority", "demote", "release", "end", "prefetch_s"):
        try:
            hint = parsed({key: value}, session)
        except Invalid:
            continue
        assert hint is not None
        assert 0 <= hint.retain_s <= LONGEST_S


def test_the_session_of_the_engine_counts_unless_the_client_names_one():
    assert parsed(None, "engine") == Hint("engine")
    assert parsed({"retain_s": 5}, "engine") == Hint("engine", retain_s=5.0)
    assert parsed({"session": "client"}, "engine") == Hint("client")
    assert parsed(None, "a" * 200) is None


# In host memory


def test_a_retained_chain_is_there_after_the_pause_of_a_tool(rig):
    retained, other = chain("agent", 8), chain("other", 8)
    serve(rig, "agent", retained, {"retain_s": 100})
    serve(rig, "other", other)
    scan(rig, 12)
    assert (present(rig, retained), present(rig, other)) == (8, 0)
    rig.now_s += 1
    assert serve(rig, "again", chain("agent", 10)) == 8


def test_a_wrong_hint_is_counted_and_the_request_served(rig):
    serve(rig, "a", chain("a", 5), {"retain_s": "for ever"})
    serve(rig, "b", chain("b", 5), {"retain_s": 5})
    assert present(rig, chain("a", 5)) == 5
    counters = rig.leader.counters
    assert (counters.hinted_requests, counters.invalid_hints, counters.hints_off) == (1, 1, 0)


def test_with_lru_a_hint_retains_nothing():
    hints = {"a": {"retain_s": 100}}
    rig = Rig(slots=40, blocks=80, hints=hints)
    rig.leader.match("a", chain("a", 8), 0)
    blocks = rig.compute("a", chain("a", 8))
    rig.step()
    rig.finish("a", chain("a", 8), blocks)
    HINTS.clear()
    scan(rig, 12)
    assert present(rig, chain("a", 8)) == 0


def test_the_end_of_a_session_frees_its_blocks_first(rig):
    serve(rig, "one", chain("a", 6), {"session": "a", "retain_s": 480})
    serve(rig, "two", chain("a", 9), {"session": "a", "retain_s": 480})
    serve(rig, "other", chain("b", 8))
    serve(rig, "last", chain("c", 3), {"end": ["a"]})
    scan(rig, 5)  # 20 slots are free
    assert present(rig, chain("b", 8)) == 8
    assert present(rig, chain("a", 9)) < 9


def test_a_tenant_cannot_end_the_session_of_another_one(rig):
    serve(rig, "one@alice", chain("a", 6), {"session": "a", "retain_s": 480})
    serve(rig, "two@bob", chain("b", 3), {"end": ["a"]})
    scan(rig, 12)
    assert present(rig, chain("a", 6)) == 6


# Reads ahead


@pytest.fixture
def disk_rig():
    HINTS.clear()
    rig = Rig(slots=16, blocks=64, fake_disk=64, hints=HINTS, **disk_policy("always"))
    rig.woken = []
    rig.leader.control.wake_after = rig.woken.append
    return rig


def test_a_chain_comes_back_from_disk_at_its_time_in_an_idle_engine(disk_rig):
    rig, hashes = disk_rig, chain("agent", 6)
    serve(rig, "agent", hashes, {"prefetch_s": 50})
    assert rig.woken == [50]
    scan(rig, 4)
    rig.steps(3)
    assert present(rig, hashes) == 0
    assert not rig.leader.has_pending()
    rig.now_s = 51
    assert rig.leader.has_pending()
    rig.steps(5)
    assert present(rig, hashes) == 6
    assert not rig.leader.has_pending()


def test_a_clear_of_host_memory_keeps_what_comes_back_later(disk_rig):
    rig, hashes = disk_rig, chain("agent", 6)
    serve(rig, "agent", hashes, {"prefetch_s": 50})
    rig.steps(3)
    answer = rig.leader.control.submit("clear", {"tier": "G2"})
    rig.leader.control.advance()
    assert answer.done()
    assert present(rig, hashes) == 0
    rig.now_s = 51
    rig.steps(5)
    assert present(rig, hashes) == 6


def test_a_preempted_request_has_not_ended_for_its_hint(disk_rig):
    rig, hashes = disk_rig, chain("agent", 6)
    HINTS["agent"] = {"prefetch_s": 50}
    rig.leader.match("agent", hashes, 0)
    blocks = rig.compute("agent", hashes)
    rig.step()
    rig.leader.finish("agent", hashes, is_preempted=True)
    rig.g1.release(blocks)
    assert rig.woken == []
    serve(rig, "agent", hashes, {"prefetch_s": 50})
    assert rig.woken == [50]


def test_a_chain_that_is_nowhere_is_given_up_at_once_and_counted(disk_rig):
    rig, hashes = disk_rig, chain("agent", 6)
    serve(rig, "agent", hashes, {"prefetch_s": 1})
    rig.now_s = 2
    for store in (rig.leader.host.store, rig.disk_tier.store):
        store.forget(hashes)
    rig.step()
    assert not rig.leader.has_pending()
    assert rig.leader.counters.prefetch_late_hints == 1


def test_a_disk_that_hangs_keeps_no_engine_awake(disk_rig):
    rig, hashes = disk_rig, chain("agent", 6)
    serve(rig, "agent", hashes, {"prefetch_s": 1})
    scan(rig, 4)
    rig.step()
    rig.now_s = 5
    rig.disk.is_hanging = True
    for _ in range(100):
        rig.now_s += 0.1
        rig.step()
    assert not rig.leader.has_pending()


def test_reads_ahead_are_bounded(disk_rig):
    rig = disk_rig
    for number in range(5):
        serve(rig, f"agent {number}", chain(f"agent {number}", 6), {"prefetch_s": 100})
    assert rig.woken == [100, 100, 100]
    assert rig.leader.hints.waiting.total == 16
    rig.leader.reset()
    assert rig.leader.hints.waiting.total == 0


def test_a_tenant_brings_its_chain_back_while_others_wait_for_more_than_fits(disk_rig):
    rig, hashes = disk_rig, chain("bob", 4)
    for number in range(3):
        serve(rig, f"greedy {number}", chain(f"greedy {number}", 8), {"prefetch_s": LONGEST_S})
    serve(rig, "bob@bob", hashes, {"prefetch_s": 50})
    assert rig.leader.hints.waiting.total <= 16
    assert rig.leader.counters.prefetch_share_hints == 2
    rig.steps(3)
    scan(rig, 4)
    rig.now_s = 51
    rig.steps(5)
    assert present(rig, hashes) == 4
    assert rig.leader.counters.prefetch_late_hints == 0


def test_chains_that_are_due_together_are_read_by_turns_of_their_tenants(disk_rig):
    rig, hashes = disk_rig, chain("bob", 2)
    for number in range(3):
        serve(rig, f"greedy {number}", chain(f"greedy {number}", 4), {"prefetch_s": 10})
    serve(rig, "bob@bob", hashes, {"prefetch_s": 10})
    scan(rig, 8)
    rig.step()
    rig.disk.is_hanging = True
    rig.now_s = 11
    while rig.leader.counters.prefetch_late_hints < 2:
        rig.now_s += 0.1
        rig.step()
    assert [one.tenant for one in rig.leader.operations._wanted] == [b"", b""]


# The quota


def ledger(capacity=400):
    now = [0.0]
    store = BlockStore(capacity, tier=Tier.HOST, hash_bytes=NAME_BYTES, events=False, eviction="adaptive")
    return Hints(store, lambda: now[0]), now


def sessions(hints):
    return hints._sessions  # memory, which nothing shows


def names(start, count):
    return [name_of(number) for number in range(start, start + count)]


def test_a_tenant_retains_at_most_its_quota_until_the_time_has_ended():
    hints, now = ledger()
    quota = int(QUOTA_SHARE * 400)
    assert hints.arrive(Hint(retain_s=30), b"a", names(0, 70)).retained == 70
    assert hints.arrive(Hint(retain_s=30), b"a", names(1000, 70)).retained == quota - 70
    assert hints.arrive(Hint(retain_s=30), b"a", names(2000, 70)).retained == 0
    assert hints.arrive(Hint(retain_s=30), b"b", names(3000, 70)).retained == 70
    now[0] = 31.0
    assert hints.arrive(Hint(retain_s=30), b"a", names(4000, 70)).retained == 70


def test_requests_without_a_salt_may_retain_what_all_tenants_may():
    hints, _ = ledger()
    assert hints.arrive(Hint(retain_s=30), b"", names(0, 300)).retained == TOTAL_SHARE * 400
    assert hints.limit(0.1, None) == 40
    assert hints.quota(b"") == 40


def test_a_conversation_that_grows_counts_once():
    hints, _ = ledger()
    for turn in range(1, 20):
        hint = Hint("a", retain_s=120)
        assert hints.arrive(hint, b"a", names(0, 5 * turn)).retained == 5 * turn
        hints.finish(hint, b"a", names(0, 5 * turn + 1))
    assert hints.retentions.total == 5 * 19 + 1


def test_all_tenants_together_retain_at_most_their_share():
    hints, _ = ledger()
    for one in range(10_000):
        assert hints.arrive(Hint(retain_s=1e9), b"%d" % one, names(100 * one, 3)).retained == 3
        assert hints.retentions.total <= TOTAL_SHARE * 400


def test_sessions_and_retentions_are_bounded():
    hints, _ = ledger(100_000)
    for one in range(MOST_SESSIONS + 500):
        hint = Hint(f"session {one}", retain_s=1.0)
        hints.arrive(hint, b"", names(10 * one, 2))
        hints.finish(hint, b"", names(10 * one, 3))
    assert 0.9 * MOST_SESSIONS < len([*sessions(hints)]) <= MOST_SESSIONS
    assert len([*hints.retentions]) <= MOST_RETENTIONS
    hints.finish(Hint("long"), b"", names(0, 16_000))
    for one in range(20):
        hints.finish(Hint(f"long {one}"), b"", names(20_000 * one, 16_000))
    assert sum(len(one.chain) for one in sessions(hints)) <= sessions(hints).total <= 100_000


# The shares of tenants


def retain(hints, tenant, start, count, session=""):
    """A request with a hint. Returns how many of its blocks are retained."""
    hint, chain_ = Hint(session, LONGEST_S), names(start, count)
    retained = hints.arrive(hint, tenant, chain_).retained
    hints.finish(hint, tenant, chain_)
    return retained


def greedy_tenants(hints):
    """Fill the table of retentions in the ways of a greedy client. Each yields after it has filled it."""
    retain(hints, b"", 0, 16_000)
    yield "no salt"
    for one in range(2):
        retain(hints, b"%d" % one, 100_000 * (1 + one), 5_000)
    yield "two salts"
    for one in range(MOST_RETENTIONS):
        retain(hints, b"", 1_000_000 + one, 1)
    yield "4,096 of one block"
    for one in range(MOST_RETENTIONS + 500):
        retain(hints, b"salt %d" % one, 2_000_000 + one, 1)
    yield "4,596 salts"


def test_a_new_tenant_retains_its_share_whoever_came_before():
    hints, _ = ledger(20_000)
    for number, way in enumerate(greedy_tenants(hints)):
        for one in range(4):
            assert retain(hints, b"new %d" % number, 5_000_000 + 1000 * number + 10 * one, 4) == 4, way
        assert hints.retentions.total <= TOTAL_SHARE * 20_000
    assert hints._counters.retain_share_hints > 4


def test_a_tenant_keeps_the_quota_that_an_operator_gave_it():
    hints, _ = ledger(20_000)
    assert hints.limit(0.25, b"bob") == 5_000
    assert retain(hints, b"bob", 9_000_000, 4_990) == 4_990
    for _ in greedy_tenants(hints):
        assert hints.retentions.held(b"bob") == 4_990
        assert retain(hints, b"new", 8_000_000, 4) == 4
    assert retain(hints, b"bob", 9_500_000, 4) == 4


def test_a_tenant_with_a_quota_gets_it_back_from_those_who_borrowed_it():
    hints, _ = ledger(20_000)
    assert retain(hints, b"", 0, 10_000) == 10_000
    hints.limit(0.25, b"bob")
    assert retain(hints, b"bob", 9_000_000, 5_000) == 5_000
    assert hints.retentions.held(b"") + 5_000 <= hints.retentions.total <= 10_000


def test_quotas_of_more_than_there_is_are_reserved_in_proportion():
    hints, _ = ledger()
    for tenant in (b"a", b"b", b"c", b"d"):
        hints.limit(0.5, tenant)
        for _ in range(4):
            retain(hints, tenant, 1000 * tenant[0], 200)
    assert [hints.retentions.held(tenant) for tenant in (b"a", b"b", b"c", b"d")] == [50] * 4
    assert retain(hints, b"new", 1_000_000, 4) == 0


def test_two_tenants_that_want_all_have_as_much_each():
    hints, _ = ledger(20_000)
    hints.limit(0.5, None)
    for turn in range(10):
        for number, tenant in enumerate((b"a", b"b")):
            retain(hints, tenant, 1_000_000 * (number + 1) + 10_000 * turn, 4_000)
    assert abs(hints.retentions.held(b"a") - hints.retentions.held(b"b")) <= 3_000
    assert hints.retentions.total > 9_000


def test_a_tenant_remembers_its_session_while_another_one_begins_thousands():
    hints, _ = ledger(20_000)
    hints.finish(Hint("mine"), b"bob", names(0, 4))
    for one in range(MOST_SESSIONS + 500):
        hints.finish(Hint(f"session {one}"), b"", names(1000 + 10 * one, 4))
    assert hints.arrive(Hint("mine"), b"bob", names(0, 6)).continues_session
    assert hints._counters.session_share_hints >= 500


def test_the_session_of_a_new_tenant_is_remembered_among_those_of_thousands():
    hints, _ = ledger(20_000)
    hints.limit(0.1, b"bob")
    hints.finish(Hint("mine"), b"bob", names(0, 4))
    for one in range(MOST_SESSIONS + 500):
        hints.finish(Hint("a"), b"%d" % one, names(1000 + 10 * one, 4))
    hints.finish(Hint("mine"), b"new", names(500, 4))
    assert hints.arrive(Hint("mine"), b"bob", names(0, 6)).continues_session
    assert hints.arrive(Hint("mine"), b"new", names(500, 6)).continues_session


def test_what_is_given_up_for_another_tenant_is_evicted_like_other_blocks():
    """The tail of the chain, but not a beginning that another retained chain has, too. No chain gets a hole."""
    HINTS.clear()
    rig = Rig(slots=80, blocks=120, host_eviction="adaptive", hints=HINTS)
    common = chain("agent", 6)
    one, two = [*common, *chain("one", 14)], [*common, *chain("two", 14)]
    serve(rig, "one", one, {"retain_s": 480})
    serve(rig, "two", two, {"retain_s": 480})
    for number in range(4):
        serve(rig, f"bob {number}@bob", chain(f"bob {number}", 4), {"retain_s": 480})
    assert rig.leader.hints.retentions.total <= 40
    assert rig.leader.hints.retentions.held(b"bob") == 16
    scan(rig, 30)
    assert [present(rig, chain(f"bob {number}", 4)) for number in range(4)] == [4] * 4
    for hashes in (one, two):
        in_host = [rig.leader.host.store.contains(name) for name in hashes]
        assert in_host == sorted(in_host, reverse=True)
    assert present(rig, two) == 20
    assert 6 <= present(rig, one) < 20


def test_many_that_give_up_hold_up_no_step():
    hints, _ = ledger(100_000)
    for one in range(MOST_RETENTIONS):
        retain(hints, b"", 10 * one, 1)
    before = hints._counters.retain_share_hints
    assert 0 < retain(hints, b"bob", 9_000_000, 10_000) < 10_000
    assert hints._counters.retain_share_hints - before <= 2 * MOST_GIVEN_UP  # at its arrival and at its end


def test_an_operator_sets_the_quota_of_all_tenants_or_of_one():
    hints, _ = ledger()
    assert hints.limit(0.0, None) == 0
    assert hints.arrive(Hint(retain_s=30), b"a", names(0, 70)).retained == 0
    assert hints.limit(0.1, b"a") == 40
    assert hints.arrive(Hint(retain_s=30), b"a", names(0, 70)).retained == 40
    assert hints.arrive(Hint(retain_s=30), b"b", names(500, 70)).retained == 0


operations = st.lists(
    st.tuples(
        st.sampled_from([b"", b"a", b"b"]),
        st.sampled_from(["", "s", "t"]),
        st.sampled_from([0.0, 5.0, 100.0, LONGEST_S]),
        st.booleans(),
        st.integers(0, 3),
        st.integers(0, 30),
        st.floats(0, 100),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(operations)
def test_the_sums_of_the_quota_are_those_of_its_parts(steps):
    hints, now = ledger(100)
    for tenant, session, retain_s, demotes, start, count, passed_s in steps:
        now[0] += passed_s
        hint = Hint(session, retain_s, demotes and not retain_s, ends=("s",) if demotes else ())
        chain_ = names(1000 * start, count)
        retained = hints.arrive(hint, tenant, chain_).retained
        hints.finish(hint, tenant, [*chain_, *names(50_000 + start, 1)])
        assert 0 <= retained <= count
        by_tenant = {}
        for one in hints.retentions:
            by_tenant[one.tenant] = by_tenant.get(one.tenant, 0) + len(one.chain)
        assert all(count == hints.retentions.held(tenant) <= hints.quota(tenant) for tenant, count in by_tenant.items())
        assert sum(by_tenant.values()) == hints.retentions.total <= 50
        assert sessions(hints).total == sum(max(1, len(one.chain)) for one in sessions(hints)) <= 100


# Wrong and hostile hints, on a workload of conversations and prompts that never repeat


def workload(count=1500):
    choice, lengths, now_s = random.Random(4), [4] * 60, 0.0
    for number in range(count):
        now_s += choice.expovariate(1.0)
        if number % 3 == 0:
            yield now_s, -number, names(10_000_000 + 100 * number, choice.randrange(4, 20))
        else:
            one = choice.randrange(60)
            lengths[one] = min(60, lengths[one] + choice.randrange(4))
            yield now_s, one, [*names(0, 3), *names(1000 * (one + 1), lengths[one])]


@pytest.mark.parametrize("capacity", [150, 600])
@pytest.mark.parametrize("told", WRONG.values(), ids=WRONG)
def test_wrong_hints_cost_at_most_a_twentieth_of_the_hits(told, capacity):
    cache = hits(capacity, workload(), told)
    assert cache.hit_blocks >= LEAST * hits(capacity, workload(), None).hit_blocks
    assert cache.largest <= 1
    assert cache.hints.retentions.total <= TOTAL_SHARE * capacity


def test_a_right_hint_counts_from_the_first_turn_on():
    """Two agents whose tools take a minute, in which others send more than host memory has."""
    found = {}
    for hint in (None, Hint(retain_s=100)):
        cache = HintedCache(200, lambda choice, one, hint=hint: (b"", hint) if one >= 0 and hint else None)
        for turn in range(5):
            for one in range(2):
                cache.serve(60.0 * turn + one, one, names(1000 * (one + 1), 10 + 3 * turn))
            for number in range(30):
                cache.serve(60.0 * turn + 2 + number, -1, names(10_000_000 + 10_000 * turn + 10 * number, 10))
        found[hint] = cache.hit_blocks
    assert found[None] < found[Hint(retain_s=100)] == sum(2 * (10 + 3 * turn) for turn in range(4))


def test_hints_that_cost_hits_are_not_followed():
    cache = hits(400, workload(), WRONG["what never comes back is retained"])
    assert not cache.store.policy.follows_hints


def test_a_request_of_a_trace_comes_back_if_a_later_one_begins_with_it():
    tree, uses = PrefixTree(), []
    for at_s, ids in ((0.0, (1, 2, 3)), (10.0, (1, 2, 3, 4)), (20.0, (1, 5, 6)), (LONGEST_S + 30, (1, 5, 6, 7))):
        node = tree.add(0, ids, token_count=len(ids) * 512, block_tokens=512)
        uses.append(TimedUse(at_s, Use(node, node)))
    assert [session > 0 for _, session, _ in requests_of((tree, uses))] == [True, False, False, False]
    assert [len(chain_) for _, _, chain_ in requests_of((tree, uses))] == [3, 4, 3, 4]
