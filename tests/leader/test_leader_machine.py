"""Any order of requests, copies, failures, aborts, preemptions and resets: never a wrong byte, never a leak.

The model is the toy engine itself: it knows which hash belongs in which G1 block, and overwrites a block with garbage
as soon as its last reference is released.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from bookkeeping import check_leader, tier_of
from fake_store import FakeStore
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rig import Rig, chain, disk_policy, pattern

from kvbm.core.groups import Group, StateGroup
from kvbm.core.policies.ranking import TABLES
from kvbm.tiers.settings import TierPolicy
from kvbm.types import Tier

LENGTH = 4
CHAINS = {name: chain("root", 2) + chain(name, LENGTH - 2) for name in "abc"}
STATES = {name: chain("state of root", 2) + chain(f"state of {name}", LENGTH - 2) for name in "abc"}


@dataclass
class Live:
    """A request of the toy engine; `computed` blocks of `hashes` are right in G1."""

    hashes: list[bytes]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    loading: bool = False


class LeaderMachine(RuleBasedStateMachine):
    @initialize(
        ranks=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
        limit=st.integers(1, 8),
        slice_blocks=st.sampled_from([1, 2, 4096]),
        table=st.sampled_from([None, *TABLES]),
    )
    def build(self, ranks, limit, slice_blocks, table):
        eviction = "lru" if table is None else "adaptive"
        self.begin(
            host_eviction=eviction,
            slots=6,
            blocks=12,
            ranks=ranks[0],
            replicas=ranks[1],
            max_in_flight_blocks=limit,
            slice_blocks=slice_blocks,
        )
        if table is not None:
            self.rig.leader.host.store.policy.order.use_table(table)

    def begin(self, fake_disk=None, **options):
        self.options = {"overdue_steps": 3, "onboard_parts": 2, **options}
        self.rig = Rig(fake_disk=fake_disk, **self.options)
        self.live: dict[str, Live] = {}
        self.names = iter(range(10**6))

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        if self.rig.disk is not None and self.rig.disk.is_lost:
            self.rig.disk.begin_again()
        for request_id in list(self.live):
            self.drop(request_id)
        for step in range(400):  # slices of one block take a step each, and many may wait
            self.rig.now_s += 0.01
            self.rig.order()
            self.rig.run_tiers()
            for rank in self.rig.ranks:
                rank.copier.heal()
                rank.run_all()
            self.settle()
            if step >= 60 and not self.rig.leader.has_pending():
                break
        assert not self.rig.leader.has_pending()
        assert not +self.rig.g1.references
        assert self.rig.leader.blocks()[Tier.HOST]["pinned"] == 0
        assert self.rig.leader.blocks()[Tier.HOST]["moving"] == 0
        self.rig.close()

    # -- the toy engine ------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from("abc"))
    def a_request_arrives(self, name):
        self.arrive(name)

    def arrive(self, name):
        request_id = f"{name}{next(self.names)}"
        self.live[request_id] = Live(CHAINS[name])
        self.admit(request_id)
        return request_id

    @precondition(lambda self: any(not r.blocks for r in self.live.values()))
    @rule(data=st.data())
    def admit_one_that_waits(self, data):
        self.admit(data.draw(st.sampled_from([i for i, r in self.live.items() if not r.blocks])))

    def admit(self, request_id):
        request = self.live[request_id]
        matched = self.rig.leader.match(request_id, request.hashes[:-1], 0)
        if matched is None or (blocks := self.rig.g1.allocate(LENGTH)) is None:
            return
        request.blocks = blocks
        if matched:
            self.rig.leader.onboard(request_id, request.hashes[:-1], 0, blocks[:matched])
            request.loading = True

    @rule(
        name=st.sampled_from("abc"), faults=st.lists(st.sampled_from([None, None, "fail", "short", "die"]), max_size=4)
    )
    def serve_from_start_to_end(self, name, faults):
        """One request alone, every step whole, with these faults on the way."""
        request_id = self.arrive(name)
        for step in range(8):
            self.go_on(request_id)
            if step < len(faults) and faults[step]:
                self.rig.ranks[step % len(self.rig.ranks)].copier.next(faults[step])
            self.whole_step()
        self.drop(request_id)

    def go_on(self, request_id):
        request = self.live[request_id]
        if not request.blocks:
            self.admit(request_id)
        elif not request.loading and request.computed < LENGTH:
            self.advance(request_id, 2)

    @rule()
    def whole_step(self):
        self.rig.order()
        self.rig.run_tiers()
        for rank in self.rig.ranks:
            rank.run_all()
        self.settle()

    @precondition(lambda self: any(r.blocks and not r.loading and r.computed < LENGTH for r in self.live.values()))
    @rule(data=st.data(), count=st.integers(1, LENGTH))
    def compute(self, data, count):
        ready = [i for i, r in self.live.items() if r.blocks and not r.loading and r.computed < LENGTH]
        self.advance(data.draw(st.sampled_from(ready)), count)

    def advance(self, request_id, count):
        request = self.live[request_id]
        end = min(LENGTH, request.computed + count)
        for index in range(request.computed, end):
            self.rig.g1.compute(request.blocks[index], request.hashes[index])
        request.computed = end
        self.rig.leader.offload(
            request_id, request.hashes, request.blocks, computed_blocks=end, prompt_blocks=LENGTH - 1
        )

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        self.drop(data.draw(st.sampled_from(sorted(self.live))))

    @precondition(lambda self: any(r.blocks and not r.loading for r in self.live.values()))
    @rule(data=st.data())
    def preempt(self, data):
        running = [i for i, r in self.live.items() if r.blocks and not r.loading]
        request_id = data.draw(st.sampled_from(running))
        hashes = self.live[request_id].hashes
        self.drop(request_id)
        self.live[request_id] = Live(hashes)

    def drop(self, request_id):
        request = self.live.pop(request_id)
        self.rig.finish(request_id, request.hashes, request.blocks)

    @rule()
    def reset(self):
        self.rig.leader.reset()

    @rule()
    def give_up_offloads(self):
        self.rig.leader.settle_offloads()
        self.rig.leader.abandon_offloads()

    # -- steps, copies and what can go wrong with them -----------------------------------------------------------------

    @rule()
    def order(self):
        self.rig.order()

    @rule()
    def settle(self):
        for result in self.rig.settle():
            request = self.live[result.request_id]
            assert request.loading
            request.loading = False
            request.computed = len(result.block_ids) - len(result.failed_block_ids)
            assert result.failed_block_ids == result.block_ids[request.computed :]

    @rule(rank=st.integers(0, 1), kind=st.sampled_from(["onboard", "offload"]))
    def copy(self, rank, kind):
        self.rig.ranks[rank % len(self.rig.ranks)].run(kind)

    @rule(
        rank=st.integers(0, 1), kind=st.sampled_from(["onboard", "offload"]), fault=st.sampled_from(["fail", "short"])
    )
    def copy_fails(self, rank, kind, fault):
        victim = self.rig.ranks[rank % len(self.rig.ranks)]
        victim.copier.next(fault)
        if not victim.run(kind):
            victim.copier.heal()

    @rule(rank=st.integers(0, 1), kind=st.sampled_from(["onboard", "offload"]))
    def thread_dies_and_its_result_is_lost(self, rank, kind):
        victim = self.rig.ranks[rank % len(self.rig.ranks)]
        pool = victim.onboard_pool if kind == "onboard" else victim.offload_pool
        pool.lose_next()

    # -- what must always hold -----------------------------------------------------------------------------------------

    @invariant()
    def what_the_engine_may_read_is_right(self):
        for request in getattr(self, "live", {}).values():
            for block, block_hash in zip(request.blocks[: request.computed], request.hashes, strict=False):
                assert self.rig.g1.holds(block, block_hash), "the engine reads a wrong block"

    @invariant()
    def the_books_are_consistent(self):
        if hasattr(self, "rig"):
            check_leader(self.rig.leader)


class DiskMachine(LeaderMachine):
    """The same with a disk behind a host memory that is too small for everything."""

    model: ClassVar = {"blocks": 12}

    @initialize(
        ranks=st.integers(1, 2),
        host=st.integers(1, 6),
        disk=st.integers(1, 9),
        to_disk=st.sampled_from(["always", "frequency", "on_evict"]),
        batch=st.integers(1, 3),
        gives_up=st.booleans(),
        slice_blocks=st.sampled_from([1, 2, 4096]),
    )
    def build(self, ranks, host, disk, to_disk, batch, gives_up, slice_blocks):
        self.begin(
            disk,
            slots=host,
            ranks=ranks,
            gives_up_blocks=gives_up,
            slice_blocks=slice_blocks,
            **disk_policy(writes=to_disk, batch_blocks=batch, read_timeout_s=10.0, frequency_decay_s=5.0),
            **self.model,
        )

    @rule(kind=st.sampled_from(["read", "write"]), fault=st.sampled_from([None, None, "fail", "fail-all"]))
    def disk_transfer(self, kind, fault):
        self.rig.disk.run(kind, fault)

    @rule(faults=st.lists(st.sampled_from([None, "fail", "fail-all"]), min_size=2, max_size=4))
    def reads_end_together(self, faults):
        for fault in faults:
            self.rig.disk.run("read", fault)

    @rule(seconds=st.sampled_from([0.1, 4.0, 11.0]))
    def time_passes(self, seconds):
        self.rig.now_s += seconds

    @rule(is_on=st.booleans())
    def disk_turns(self, is_on):
        if not self.rig.disk.is_lost:
            self.rig.disk.is_on = is_on

    @precondition(lambda self: not self.rig.disk.is_lost)
    @rule(has_committed=st.booleans(), lost=st.sets(st.integers(0, 8)))
    def disk_process_ends(self, has_committed, lost):
        """Then it is unknown which of the last writes are on disk, and some rows may be lost."""
        self.rig.disk.end(has_committed=has_committed)
        for slot in lost:
            self.rig.disk.kept.pop(slot, None)
        self.settle()

    @precondition(lambda self: self.rig.disk.is_lost)
    @rule()
    def next_disk_process_begins(self):
        self.rig.disk.begin_again()

    @rule(tokens=st.sampled_from([64, 4096]), seconds=st.sampled_from([0.01, 1.0]))
    def engine_has_computed(self, tokens, seconds):
        self.rig.leader.note_step(tokens, seconds)

    @rule()
    def restart(self):
        """The engine ends in the middle of whatever it does; only what the disk keeps is there for the next one."""
        disk = self.rig.disk
        disk.waiting.clear()
        disk.poll()
        disk.is_on, disk.is_lost = True, False
        self.rig.close()
        self.live.clear()
        self.rig = Rig(fake_disk=disk, **self.options)

    @invariant()
    def what_the_leader_would_find_is_on_disk(self):
        if hasattr(self, "rig"):
            leader = self.rig.leader
            under_way = {slot for order in self.rig.disk.waiting for slot in order.disk_slots}
            for name in "abc":
                for sequence_hash in CHAINS[name]:
                    slots = [s for s, (kept, _) in self.rig.disk.kept.items() if kept == sequence_hash]
                    assert slots or under_way or not tier_of(leader, Tier.DISK).store.contains(sequence_hash)


class SharedMachine(DiskMachine):
    """The same with a store that other engines write and delete in. With runs of two blocks, the last run of a request
    lies partly behind what it may load."""

    @initialize(
        ranks=st.integers(1, 2),
        host=st.integers(2, 6),
        disk=st.sampled_from([None, 1, 9]),
        extent_blocks=st.sampled_from([1, 2]),
        to_shared=st.sampled_from(["always", "frequency"]),
        reads_always=st.booleans(),
        gives_up=st.booleans(),
        slice_blocks=st.sampled_from([1, 2, 4096]),
        is_full=st.booleans(),
    )
    def build(self, ranks, host, disk, extent_blocks, to_shared, reads_always, gives_up, slice_blocks, is_full):
        self.begin(
            disk,
            slots=host,
            ranks=ranks,
            gives_up_blocks=gives_up,
            slice_blocks=slice_blocks,
            **disk_policy(writes="always", batch_blocks=2, read_timeout_s=10.0, reads_always=reads_always),
            shared=TierPolicy(writes=to_shared, frequency_decay_s=50.0),
            store=FakeStore(extent_blocks),
            **self.model,
        )
        for run in self.runs("abc" if is_full else ""):
            self.write(run)
        self.store.list_all()

    @property
    def store(self) -> FakeStore:
        return self.options["store"]

    def runs(self, names="abc"):
        size = self.store.extent_blocks
        return [CHAINS[name][end - size : end] for name in names for end in range(size, LENGTH + 1, size)]

    @rule(fault=st.sampled_from([None, None, None, "fail", "bad"]), index=st.integers(0, 2))
    def store_runs(self, fault, index):
        self.store.run(fault, index=index)

    @rule(
        name=st.sampled_from("abc"), faults=st.lists(st.sampled_from([None, None, "fail", "bad", "lost"]), max_size=3)
    )
    def serve_what_another_engine_has_written(self, name, faults):
        """One request alone, every step whole, after a listing."""
        for run in self.runs(name):
            self.write(run)
        self.store.list_all()
        self.settle()
        request_id = self.arrive(name)
        for _ in range(10):
            self.go_on(request_id)
            self.order()
            if faults and self.store.waiting:
                if (fault := faults.pop()) == "lost":
                    self.store.kept.clear()
                self.store.run(None if fault == "lost" else fault)
            self.whole_step()
        self.drop(request_id)

    @rule()
    def whole_step(self):
        self.rig.now_s += 0.1
        super().whole_step()

    @rule(is_meant=st.sampled_from([True, False, False, False]))
    def reset(self, is_meant):
        if is_meant:  # for good, therefore not as often as other rules
            self.rig.leader.reset()

    @rule(data=st.data())
    def another_engine_writes(self, data):
        self.write(data.draw(st.sampled_from(self.runs())))

    def write(self, run):
        if run[-1] not in self.store.kept:
            self.store.kept[run[-1]] = [[shard_of(block, rank) for rank in range(len(self.rig.ranks))] for block in run]

    @precondition(lambda self: self.store.kept)
    @rule(data=st.data())
    def another_engine_deletes(self, data):
        del self.store.kept[data.draw(st.sampled_from(sorted(self.store.kept)))]

    @rule()
    def store_is_listed(self):
        self.store.list_all()

    @rule(is_on=st.booleans())
    def store_turns(self, is_on):
        self.store.is_on = is_on

    @rule()
    def process_of_the_store_ends(self):
        self.store.fail_all()

    @precondition(lambda self: self.rig.disk is not None)
    @rule(kind=st.sampled_from(["read", "write"]), fault=st.sampled_from([None, None, "fail", "fail-all"]))
    def disk_transfer(self, kind, fault):
        self.rig.disk.run(kind, fault)

    @precondition(lambda self: self.rig.disk is not None)
    @rule(is_on=st.booleans())
    def disk_turns(self, is_on):
        super().disk_turns(is_on)

    @rule(faults=st.lists(st.sampled_from([None, "fail", "bad"]), min_size=2, max_size=4))
    def reads_end_together(self, faults):
        for fault in faults:
            self.store.run(fault)

    @precondition(lambda self: self.rig.disk is not None and not self.rig.disk.is_lost)
    @rule(has_committed=st.booleans(), lost=st.sets(st.integers(0, 8)))
    def disk_process_ends(self, has_committed, lost):
        super().disk_process_ends(has_committed, lost)

    @precondition(lambda self: self.rig.disk is not None and self.rig.disk.is_lost)
    @rule()
    def next_disk_process_begins(self):
        self.rig.disk.begin_again()

    @rule()
    def restart(self):
        """Another engine continues with what the store keeps, on another machine."""
        self.store.waiting.clear()
        self.store.poll()
        self.store.is_on = True
        self.rig.close()
        self.live.clear()
        self.rig = Rig(fake_disk=9, **self.options)
        self.store.list_all()

    @invariant()
    def what_the_leader_would_find_is_on_disk(self):
        if hasattr(self, "rig") and self.rig.disk is not None:
            super().what_the_leader_would_find_is_on_disk()

    @invariant()
    def what_is_in_the_store_is_right(self):
        if not hasattr(self, "rig"):
            return
        for run in self.runs():
            for block, shards in zip(run, self.store.kept.get(run[-1], ()), strict=False):
                for rank, shard in enumerate(shards):
                    content = shard_of(block, rank)
                    assert (shard[: len(content)] == content).all(), "a wrong block is in the store"


def shard_of(block, rank):
    return np.concatenate([pattern(block, rank, 0), pattern(block, rank, 1)])


class StateMachine(DiskMachine):
    """The same in a model with states: the engine gives up the block of a snapshot as soon as it is computed."""

    model: ClassVar = {"groups": (Group(16), StateGroup(16)), "blocks": 16}

    def admit(self, request_id):
        request, states = self.live[request_id], STATES[request_id[0]]
        matched = self.rig.leader.match_groups(request_id, (request.hashes, states), 0, 16 * LENGTH - 1)
        if matched is None or (blocks := self.rig.g1.allocate(LENGTH + 1)) is None:
            return
        request.blocks = blocks
        if matched:
            end = matched // 16
            wanted = [*request.hashes[:end], states[end - 1]]
            self.rig.leader.onboard(request_id, wanted, 0, [*blocks[:end], blocks[LENGTH]], tokens=matched)
            request.loading = True

    def advance(self, request_id, count):
        request = self.live[request_id]
        end = min(LENGTH, request.computed + count)
        if (snapshot := self.rig.g1.allocate(1)) is not None:
            self.rig.g1.compute(snapshot[0], STATES[request_id[0]][end - 1])
            self.rig.leader.offload_snapshot(request_id, [STATES[request_id[0]][end - 1]], snapshot)
            self.rig.g1.release(snapshot)
        super().advance(request_id, count)

    def drop(self, request_id):
        request = self.live.pop(request_id)
        self.rig.leader.finish(request_id, request.hashes, STATES[request_id[0]])
        self.rig.g1.release(request.blocks)

    @rule()
    def settle(self):
        for result in self.rig.settle():
            request = self.live[result.request_id]
            assert request.loading
            request.loading = False
            if result.failed_block_ids:
                assert result.failed_block_ids == result.block_ids
                continue
            request.computed = len(result.block_ids) - 1
            state = STATES[result.request_id[0]][request.computed - 1]
            assert self.rig.g1.holds(request.blocks[LENGTH], state), "the state is that of another position"


for machine in (LeaderMachine, DiskMachine, SharedMachine, StateMachine):
    machine.TestCase.settings = settings(
        max_examples=25 if machine is StateMachine else 100,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
test_any_order_of_events_keeps_every_byte_right = LeaderMachine.TestCase
test_any_order_of_events_with_a_disk_keeps_every_byte_right = DiskMachine.TestCase
test_any_order_of_events_with_a_shared_store_keeps_every_byte_right = SharedMachine.TestCase
test_any_order_of_events_in_a_model_with_states_keeps_every_byte_right = StateMachine.TestCase
