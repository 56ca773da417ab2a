"""Models with states: when a snapshot is offloaded and used, what eviction leaves of a chain, and what comes back."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from bookkeeping import check_leader
from rig import Rig, chain, disk_policy

from kvbm.core.groups import Group, StateGroup
from kvbm.leader import leader
from kvbm.leader.offloads import NO_BLOCK
from kvbm.types import Tier

BLOCK = 16
GROUPS = (Group(BLOCK), StateGroup(BLOCK), StateGroup(BLOCK))


def chains(*parts):
    """Hashes per group of a prompt, as ("root", 2), ("a", 3): two blocks that others share, then three."""
    return [
        [one for name, count in parts for one in chain(f"{name}, group {index}", count)] for index in range(len(GROUPS))
    ]


class Served:
    """Requests of a toy engine that keeps nothing in G1: each loads what it can, computes the rest, and ends."""

    def __init__(self, rig):
        self.rig = rig
        self.count = 0

    def __call__(self, *parts, boundaries=()):
        """Serve a prompt that ends behind these blocks; return the tokens that it loaded. Snapshots are taken at its
        end, at the position that a hit was lost, and at `boundaries`, in blocks."""
        self.count += 1
        request, names = f"request {self.count}", chains(*parts)
        length = len(names[0])
        hit = self.load(request, names, length)
        lost = self.rig.leader.lost_state_tokens(request) // BLOCK
        for end in sorted({*boundaries, length} | ({hit + lost} if lost else set())):
            self.snapshot(request, names, end)
        blocks = self.rig.hold(names[0])
        self.rig.leader.offload(request, names[0], blocks, computed_blocks=length, prompt_blocks=length)
        self.rig.steps(2)
        self.rig.leader.finish(request, *names)
        self.rig.g1.release(blocks)
        return hit * BLOCK

    def load(self, request, names, length):
        matched = self.rig.leader.match_groups(request, names, 0, length * BLOCK)
        end = matched // BLOCK
        if end:
            wanted = [*names[0][:end], *(states[end - 1] for states in names[1:])]
            blocks = self.rig.g1.allocate(len(wanted))
            self.rig.leader.onboard(request, wanted, 0, blocks, tokens=matched)
            results = self.rig.steps(4)
            assert [result.failed_block_ids for result in results] == [()]
            assert all(self.rig.g1.holds(block, name) for block, name in zip(blocks, wanted, strict=True))
            self.rig.g1.release(blocks)
        return end

    def snapshot(self, request, names, end):
        """Offload it; the engine gives up the blocks at once, and only the leader holds them."""
        hashes = [states[end - 1] for states in names[1:]]
        blocks = self.rig.hold(hashes)
        is_kept = self.rig.leader.offload_snapshot(request, hashes, blocks)
        self.rig.g1.release(blocks)
        return is_kept


def make(slots=32, **options):
    return Rig(slots=slots, blocks=64, groups=GROUPS, **options)


@pytest.fixture
def rig():
    rig = make()
    yield rig
    check_leader(rig.leader)


@pytest.fixture
def served(rig):
    return Served(rig)


def found(rig, *parts, start=0, end=None):
    """Tokens that a request would load."""
    names = chains(*parts)
    matched = rig.leader.match_groups("probe", names, start, len(names[0]) * BLOCK if end is None else end)
    lost = rig.leader.lost_state_tokens("probe")
    rig.leader._requests.pop("probe")  # it is no request of the counters
    return matched, lost


# -- hits --------------------------------------------------------------------------------------------------------------


def test_a_hit_ends_at_a_snapshot_and_nowhere_else(rig, served):
    served(("root", 5), ("a", 1), boundaries=(2,))
    assert found(rig, ("root", 5), ("a", 1)) == (96, 0)
    assert found(rig, ("root", 5), ("b", 1)) == (32, 48), "not the deeper snapshot, whose tokens are others"
    assert found(rig, ("root", 5), ("a", 1), end=95) == (32, 48)
    assert found(rig, ("root", 5), ("a", 1), end=31) == (0, 16)
    assert found(rig, ("root", 5), ("a", 1), start=32) == (64, 0)
    assert found(rig, ("root", 5), ("b", 1), start=32) == (0, 48)


def test_tokens_that_no_snapshot_serves_are_counted_once_per_request(rig, served):
    served(("root", 3), ("a", 1))
    names = chains(("root", 3), ("b", 2))
    for _ in range(3):  # vLLM asks again while it has no room
        assert rig.leader.match_groups("r", names, 0, 80) == 0
    assert rig.leader.counters.lost_state_tokens == 0
    rig.leader.finish("r", *names)
    assert rig.leader.counters.lost_state_tokens == 48
    assert rig.leader.lost_state_tokens("r") == 0


def test_a_prefix_that_lost_its_snapshot_has_one_after_the_next_request(rig, served):
    assert served(("root", 3), ("a", 1)) == 0
    assert served(("root", 3), ("b", 1)) == 0
    assert served(("root", 3), ("c", 1)) == 48


def test_no_tokens_are_lost_between_two_ends_of_state_blocks():
    rig = Rig(slots=16, blocks=16, groups=(Group(16), StateGroup(32)))
    attention, states = chain("a", 5), chain("state", 2)
    blocks = rig.compute("r", attention)
    rig.leader.offload_snapshot("r", states[1:], rig.g1.allocate(1))
    rig.step()
    rig.leader.finish("r", attention, states)
    rig.g1.release(blocks)
    assert rig.leader.match_groups("next", [attention, states], 0, 80) == 64
    assert rig.leader.lost_state_tokens("next") == 0


# -- offloads ----------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_offloaded_whole_or_not_at_all():
    rig = make(max_in_flight_blocks=1)  # snapshots may hold twice as many
    served, names = Served(rig), chains(("a", 3))
    assert [served.snapshot("r", names, end) for end in (1, 1, 2)] == [True, True, False]
    assert sorted(len(order.block_ids) for order in rig.order().offloads) == [2]
    assert rig.leader.counters.offload_skipped_blocks == 2
    rig.step()
    served.snapshot("r", names, 2)
    rig.step()
    assert rig.leader.counters.offload_blocks == 4


def test_only_the_lost_part_of_a_snapshot_is_copied_again(rig, served):
    served(("a", 2))
    names = chains(("a", 2))
    rig.leader.host.store.forget([names[2][1]])
    assert found(rig, ("a", 2)) == (0, 32)
    served.snapshot("r", names, 2)  # as after a hit in G1
    assert [len(order.block_ids) for order in rig.order().offloads] == [1]
    rig.step()
    assert found(rig, ("a", 2)) == (32, 0)


def test_a_snapshot_whose_copy_failed_is_not_found(rig, served):
    rig.ranks[0].copier.next("fail")
    served(("a", 2))
    assert found(rig, ("a", 2))[0] == 0
    assert rig.leader.counters.offload_failed_blocks


def test_a_reset_forgets_snapshots_in_flight_and_takes_no_more_of_that_request(rig, served):
    names = chains(("a", 2))
    served.snapshot("r", names, 1)
    rig.order()
    rig.leader.reset()
    served.snapshot("r", names, 2)
    rig.step()
    assert rig.leader.blocks()[Tier.HOST]["free"] == 32
    served.snapshot("next", names, 2)
    rig.step()
    assert rig.leader.blocks()[Tier.HOST]["evictable"] == 2


def test_a_failed_load_is_not_promised_again_and_asks_for_no_snapshot_at_a_wrong_position(rig, served):
    served(("root", 4), ("a", 1), boundaries=(2,))
    names = chains(("root", 4), ("b", 1))
    assert rig.leader.match_groups("r", names, 0, 80) == 32
    assert rig.leader.lost_state_tokens("r") == 32
    wanted = [*names[0][:2], names[1][1], names[2][1]]
    blocks = rig.g1.allocate(4)
    rig.leader.onboard("r", wanted, 0, blocks, tokens=32)
    rig.ranks[0].copier.next("fail")
    (result,) = rig.step()
    assert result.failed_block_ids == result.block_ids
    assert rig.leader.match_groups("r", names, 0, 80) == 0
    assert rig.leader.lost_state_tokens("r") == 0


def test_a_model_of_states_only_is_served():
    rig = Rig(slots=4, blocks=8, groups=(StateGroup(BLOCK),))
    (states,) = [chain("state", 3)]
    source = rig.g1.allocate(1)
    rig.g1.compute(source[0], states[1])
    rig.leader.offload_snapshot("r", states[1:2], source)
    rig.step()
    rig.leader.finish("r", states)
    assert rig.leader.match_groups("next", [states], 0, 47) == 32
    assert rig.leader.lost_state_tokens("next") == 0
    target = rig.g1.allocate(1)
    rig.leader.onboard("next", states[1:2], 0, target, tokens=32)
    (result,) = rig.step()
    assert not result.failed_block_ids
    assert rig.g1.holds(target[0], states[1])


# -- eviction ----------------------------------------------------------------------------------------------------------


def evicted(rig, count):
    """The names that eviction takes next."""
    return list(rig.leader.host.store.oldest(count))


def test_eviction_takes_what_serves_no_hit_first_and_then_shortens_the_chain_snapshot_by_snapshot(rig, served):
    served(("a", 4), boundaries=(1, 2))
    names = chains(("a", 4), ("beyond", 1))
    beyond = rig.hold(names[0][4:])
    rig.leader.offload("r", names[0], [NO_BLOCK] * 4 + beyond, computed_blocks=5, prompt_blocks=5)
    rig.step()
    rig.leader.finish("r", *names)
    order = evicted(rig, 11)
    assert set(order[:3]) == {names[0][4], names[1][0], names[2][0]}, "behind the last snapshot, and the third"
    assert set(order[3:5]) == {names[1][3], names[2][3]}
    assert order[5:7] == names[0][3:1:-1]
    assert set(order[7:9]) == {names[1][1], names[2][1]}
    assert order[9:] == names[0][1::-1]


def test_a_request_that_ends_before_its_copies_leaves_the_head_of_its_chain_newest(rig, served):
    names = chains(("a", 3))
    blocks = rig.hold(names[0])
    served.snapshot("r", names, 3)
    rig.leader.offload("r", names[0], blocks, computed_blocks=3, prompt_blocks=3)
    rig.leader.finish("r", *names)
    rig.step()
    assert evicted(rig, 5)[-1] == names[0][0]
    assert set(evicted(rig, 2)) == {names[1][2], names[2][2]}


def conversations(slots, *, turns=60):
    """Tokens that six conversations with a common system prompt load; some are more active than others."""
    rig, order = make(slots, max_in_flight_blocks=64), random.Random(1)
    served, lengths, hits = Served(rig), Counter(), 0
    for _ in range(turns):
        (who,) = order.choices("abcdef", (6, 5, 4, 3, 2, 1))
        lengths[who] = 1 if lengths[who] == 12 else lengths[who] + 1
        hits += served(("system", 2), (who, lengths[who]))
    rig.close()
    return hits


def whole_chains(is_present, groups, chains):
    """Without a notion of snapshots: the end of a request makes every block of its chains recent."""
    return chains


def test_what_remains_under_pressure_serves_more_tokens_than_recency_alone(monkeypatch):
    hits = [conversations(slots) for slots in (26, 38, 50)]
    monkeypatch.setattr(leader, "hits_to_keep", whole_chains)
    naive = [conversations(slots) for slots in (26, 38, 50)]
    print(hits, naive)
    assert all(ours >= theirs for ours, theirs in zip(hits, naive, strict=True)), (hits, naive)
    assert sum(hits) > sum(naive)


# -- disk --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_disk", ["always", "frequency", "on_evict"])
def test_a_snapshot_and_its_chain_come_back_from_disk_after_a_restart(to_disk):
    policy = disk_policy(writes=to_disk, batch_blocks=2, read_timeout_s=10.0)
    rig = make(16, fake_disk=64, **policy)
    served = Served(rig)
    served(("a", 4))
    if to_disk == "frequency":
        served(("a", 4))
    if to_disk == "on_evict":
        served(("b", 6))
        served(("c", 6))
    rig.steps(6)
    disk = rig.disk
    disk.waiting.clear()
    rig.close()
    rig = make(16, fake_disk=disk, **policy)
    assert Served(rig)(("a", 4)) == 64
    assert rig.leader.counters.disk.onboard_blocks == 6
    check_leader(rig.leader)


def test_host_memory_and_disk_together_serve_a_hit():
    """The chain is on disk only, its snapshot in host memory only."""
    policy = disk_policy(writes="always", batch_blocks=2, read_timeout_s=10.0)
    rig = make(16, fake_disk=64, **policy)
    served, names = Served(rig), chains(("a", 4))
    served(("a", 4))
    rig.step()
    rig.leader.host.store.forget(names[0])
    for states in names[1:]:
        rig.disk_tier.store.forget([states[3]])
    assert served(("a", 4)) == 64
    assert (rig.leader.counters.onboard_blocks, rig.leader.counters.disk.onboard_blocks) == (6, 4)


def test_the_leader_asks_for_an_answer_of_each_step_while_a_load_waits_for_the_disk():
    """Without one, vLLM does not call `settle` after a step without tokens, and the request waits forever."""
    rig = make(16, fake_disk=64, **disk_policy(writes="always", batch_blocks=2, read_timeout_s=10.0))
    served, names = Served(rig), chains(("a", 4))
    served(("a", 4))
    rig.step()
    rig.leader.host.store.reset()
    assert not rig.leader.needs_settle()
    matched = rig.leader.match_groups("r", names, 0, 64)
    wanted = [*names[0], *(states[3] for states in names[1:])]
    rig.leader.onboard("r", wanted, 0, rig.g1.allocate(len(wanted)), tokens=matched)
    rig.disk.is_hanging = True
    rig.step()
    assert rig.leader.needs_settle(), "a read is under way"
    rig.now_s = 11.0
    rig.order()
    assert rig.leader.needs_settle(), "the load has been given up"
    assert [result.failed_block_ids for result in rig.settle()] == [tuple(range(len(wanted)))]
    assert not rig.leader.needs_settle()
