"""No exception of the block manager reaches the engine: its answers stay those of an engine without it.

A method of the leader or of a part of it raises, on its way in or out, in the middle of real traffic. Whatever was in
flight then, every request ends with the right answer, no G1 block stays held, and the engine can rest and stop. The
engine's model is a hash, which proves the KV of every position before each step.
"""

from __future__ import annotations

import ast
import inspect
import random
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from bookkeeping import tier_of
from fake_store import FakeStore
from faults import FaultyCopier
from simulated_engine import SharedMemoryOfBytes, SimulatedEngine, expected_output

from kvbm.child import deadlines
from kvbm.config.schema import Profile
from kvbm.core.store import BlockStore
from kvbm.engines import opening
from kvbm.engines.embedded import driver
from kvbm.engines.embedded.driver import KvbmScheduler, KvbmWorker
from kvbm.engines.embedded.engine.connector import SchedulerConnector, WorkerConnector
from kvbm.engines.opening import open_tiers
from kvbm.events import TierCleared
from kvbm.host.region import Region
from kvbm.leader.guarded import GuardedLeader
from kvbm.leader.leader import Leader
from kvbm.leader.offloads import Offloads
from kvbm.leader.onboards import Onboards
from kvbm.tiers.disk.tier import DiskTier
from kvbm.tiers.host_tier import HostTier
from kvbm.tiers.shared.tier import SharedTier
from kvbm.types import Tier

PAUSE_S = 0.0002
LIMIT_S = 30.0
BLOCKS = 24
TOKENS = 3
ROUNDS = 4
REPORTS = ("take_events", "lower_tier_tokens", "blocks", "wear")  # what fails there turns nothing off
START_UP = (
    *("__init__", "accept_handshake", "bind_wake", "bind_block_pool", "register_kv_pool"),
    *("metrics", "shutdown"),
)


def methods_of(*classes):
    """Return (class, name) of every method that may raise: not of the start-up, and not those of the boundary."""
    return [
        (owner, name)
        for owner in classes
        for name, method in vars(owner).items()
        if inspect.isfunction(method) and not hasattr(method, "__wrapped__")
        if name not in START_UP
    ]


IN_MEMORY = methods_of(Leader, Offloads, Onboards, HostTier, BlockStore, Region, KvbmScheduler)
ON_DISK = [*methods_of(DiskTier), *IN_MEMORY[::5]]
IN_A_STORE = methods_of(SharedTier)


class Injected(Exception):
    """What a bug in the block manager would raise."""


class Fault:
    """Makes one method raise at some of its calls, after it ran or instead."""

    def __init__(self, patch, owner, name, *, calls, after):
        self.raised = self._calls = 0
        original = getattr(owner, name)

        def faulty(*args, **kwargs):
            self._calls += 1
            if self._calls not in calls:
                return original(*args, **kwargs)
            self.raised += 1
            if after:
                original(*args, **kwargs)
            raise Injected(f"{owner.__name__}.{name}")

        patch.setattr(owner, name, faulty)


class PromptStore(FakeStore):
    """Runs its orders when it is asked for results."""

    def poll(self):
        self.run_all()
        return super().poll()


class Kvbm:
    """A simulated engine with the real block manager inside; `copier` fails on request."""

    def __init__(self, directory=None, store=None):
        tiers = {"host": {"blocks": 40 if directory is None and store is None else 12}}
        if directory is not None:
            tiers["disk"] = {"directory": str(directory), "blocks": 64, "persist": False}
        profile = Profile.model_validate(
            {
                "engine": {"model": "synthetic:tiny"},
                "tiers": tiers,
                "offload": {"to_disk": "always", "to_shared": "always"},
                "onboard": {"policy": "always"},
                "metrics": {"serve": False},
            }
        )
        with pytest.MonkeyPatch.context() as patch:
            more = [] if store is None else [(store, partial(SharedTier, store))]
            patch.setattr(opening, "open_tiers", lambda *args: open_tiers(*args) + more)
            self.connector = driver.create_connector(profile.model_dump_json())
            self.engine = SimulatedEngine(
                blocks=BLOCKS, max_batched_tokens=48, connector=self.connector, memory=SharedMemoryOfBytes
            )
        if store is not None:
            # A store of another process opens the region by its name.
            region = self.connector[0]._guarded.region
            store.shards, store.slots_carry = region.shards, region.slots_carry
        # The engine shows no worker, and faults belong into its copier.
        worker = self.connector[1]._home
        worker.copier = self.copier = FaultyCopier(worker.copier)

    @property
    def counters(self):
        return self.connector[0].leader.counters

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def run(self) -> None:
        """Step until the engine can rest."""
        end_s = time.monotonic() + LIMIT_S
        while self.engine.core.has_work:
            assert time.monotonic() < end_s, "requests hang, or the engine cannot rest"
            if not self.engine.step():
                time.sleep(PAUSE_S)

    def lose_g1(self) -> None:
        self.engine.blocks.reset()
        if not self.engine.blocks.used_count:
            self.engine.memory.spoil()

    def serve(self, choice: random.Random) -> None:
        """Several rounds of requests that share prefixes, some aborted; every answer must be right."""
        for _ in range(ROUNDS):
            results = []
            for _ in range(4):
                prompt = [(seed * 7) % 50 for seed in range(choice.choice([9, 18, 33]))] + [choice.randrange(3)] * 6
                results.append((prompt, self.engine.add(prompt, max_tokens=TOKENS)))
                self.steps(choice.randrange(3))
            if choice.random() < 0.3:
                self.engine.core.abort(results.pop()[1].request.request_id)
            self.run()
            for prompt, result in results:
                assert result.token_ids == expected_output(prompt, TOKENS)
            self.lose_g1()

    def assert_at_rest(self) -> None:
        """After the copies that run have ended, no G1 block is held."""
        end_s = time.monotonic() + LIMIT_S
        while self.engine.blocks.used_count:
            assert time.monotonic() < end_s, f"{self.engine.blocks.used_count} blocks stay held"
            self.engine.step()
            time.sleep(PAUSE_S)
        self.run()

    def stop(self) -> None:
        self.copier.heal()
        self.connector[0].shutdown()
        self.connector[1].shutdown()


@contextmanager
def running(directory=None, store=None):
    kvbm = Kvbm(directory, store)
    try:
        yield kvbm
    finally:
        kvbm.stop()


def test_without_a_fault_blocks_are_loaded_and_nothing_is_caught():
    """The traffic of these tests reaches the paths that they break."""
    with running() as kvbm:
        kvbm.serve(random.Random(0))
        kvbm.assert_at_rest()
        assert kvbm.counters.onboard_blocks > 10
        assert kvbm.counters.faults == kvbm.counters.disabled == 0


def check(kvbm, fault, choice, *, is_report):
    kvbm.serve(choice)
    kvbm.assert_at_rest()
    assert kvbm.counters.faults >= fault.raised
    if not is_report:
        assert kvbm.counters.disabled == bool(fault.raised)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("after", [False, True], ids=["instead", "after"])
@pytest.mark.parametrize(("owner", "name"), IN_MEMORY, ids=lambda value: getattr(value, "__name__", value))
def test_a_method_that_raises_stops_no_request(owner, name, after, monkeypatch):
    choice = random.Random(f"{owner.__name__}.{name}.{after}")
    calls = {choice.choice([1, 2, 3, 7, 20])} if choice.random() < 0.7 else {2, 3}
    with running() as kvbm, monkeypatch.context() as patch:
        check(kvbm, Fault(patch, owner, name, calls=calls, after=after), choice, is_report=name in REPORTS)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name"), ON_DISK, ids=lambda value: getattr(value, "__name__", value))
def test_a_method_that_raises_stops_no_request_that_reads_from_disk(owner, name, monkeypatch, tmp_path):
    choice = random.Random(f"disk.{owner.__name__}.{name}")
    with running(tmp_path) as kvbm, monkeypatch.context() as patch:
        fault = Fault(patch, owner, name, calls={choice.choice([1, 3, 9])}, after=choice.random() < 0.5)
        check(kvbm, fault, choice, is_report=name in REPORTS)


def test_without_a_fault_blocks_are_loaded_from_a_shared_store():
    with running(store=PromptStore(2)) as kvbm:
        for _ in range(3):
            kvbm.serve(random.Random(0))
        assert kvbm.counters.shared.onboard_blocks > 10
        assert kvbm.counters.faults == kvbm.counters.disabled == 0


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name"), IN_A_STORE, ids=lambda value: getattr(value, "__name__", value))
def test_a_method_that_raises_stops_no_request_that_reads_from_a_shared_store(owner, name, monkeypatch):
    choice = random.Random(f"shared.{owner.__name__}.{name}")
    with running(store=PromptStore(2)) as kvbm, monkeypatch.context() as patch:
        kvbm.serve(random.Random(1))  # it finds runs from now on
        fault = Fault(patch, owner, name, calls={choice.choice([1, 3, 9])}, after=choice.random() < 0.5)
        check(kvbm, fault, choice, is_report=name in REPORTS)


def test_blocks_under_a_copy_stay_held_until_the_copier_has_stopped(monkeypatch):
    """The engine goes on while a copy from before the fault still reads G1 blocks."""
    with running() as kvbm, monkeypatch.context() as patch:
        kvbm.copier.next("hold")
        first = kvbm.engine.add([7] * 20, max_tokens=TOKENS)
        kvbm.steps(2)
        kvbm.copier.wait_until_held()
        Fault(patch, Leader, "step", calls={1}, after=True)
        while not first.is_finished:
            kvbm.engine.step()
        assert kvbm.counters.disabled
        held = kvbm.engine.blocks.used_count
        assert held > 0, "released under a copy"
        assert kvbm.connector[0].has_pending_work()
        for seed in range(6):
            prompt = [seed] * 20
            result = kvbm.engine.add(prompt, max_tokens=TOKENS)
            while not result.is_finished:
                kvbm.engine.step()
            assert result.token_ids == expected_output(prompt, TOKENS)
        assert kvbm.engine.blocks.used_count == held
        kvbm.copier.release()
        kvbm.assert_at_rest()


@pytest.mark.parametrize("owner", [Leader, Onboards])
def test_a_request_that_waits_for_a_load_computes_its_prompt(owner, monkeypatch):
    prompt = [9] * 30
    with running() as kvbm, monkeypatch.context() as patch:
        kvbm.engine.add(prompt, max_tokens=TOKENS)
        kvbm.run()
        kvbm.lose_g1()
        kvbm.copier.next("hold")
        waiting = kvbm.engine.add(prompt, max_tokens=TOKENS)
        kvbm.steps(2)
        kvbm.copier.wait_until_held()
        Fault(patch, owner, "settle", calls={1}, after=False)
        kvbm.steps(5)
        kvbm.copier.release()
        kvbm.run()
        assert waiting.token_ids == expected_output(prompt, TOKENS)
        assert kvbm.counters.disabled
        assert kvbm.counters.matched_tokens == 0
        kvbm.assert_at_rest()


def test_a_copy_that_never_ends_does_not_keep_an_idle_engine_awake(monkeypatch):
    with running() as kvbm, monkeypatch.context() as patch:
        kvbm.copier.next("hold")
        kvbm.engine.add([7] * 20, max_tokens=TOKENS)
        kvbm.steps(2)
        kvbm.copier.wait_until_held()
        Fault(patch, Leader, "settle", calls={1}, after=False)
        steps = 0
        while kvbm.engine.core.has_work:
            kvbm.engine.step()
            steps += 1
            assert steps < 10_000
        assert kvbm.counters.disabled
        assert kvbm.engine.blocks.used_count > 0


def test_after_a_load_that_hangs_the_request_computes_in_blocks_that_no_copy_writes_to():
    prompt = [9] * 30
    with running() as kvbm:
        kvbm.engine.add(prompt, max_tokens=TOKENS)
        kvbm.run()
        kvbm.lose_g1()
        kvbm.engine.add(prompt[:17], max_tokens=1)  # four blocks are in G1 then
        kvbm.run()
        kvbm.copier.next("hold")
        waiting = kvbm.engine.add(prompt, max_tokens=1000)
        kvbm.steps(2)
        kvbm.copier.wait_until_held()
        written = set(waiting.request.block_ids[4:])
        assert written
        while not waiting.token_ids:
            kvbm.engine.step()
        assert written.isdisjoint(waiting.request.block_ids)
        kvbm.engine.core.abort(waiting.request.request_id)
        assert kvbm.engine.blocks.used_count >= len(written), "blocks under the copy are free"
        kvbm.copier.release()
        kvbm.assert_at_rest()


def test_after_a_fault_a_reset_succeeds_and_one_event_says_that_the_tier_is_empty(monkeypatch):
    with running() as kvbm, monkeypatch.context() as patch:
        kvbm.serve(random.Random(1))
        Fault(patch, Leader, "step", calls={1}, after=False)
        kvbm.serve(random.Random(2))
        assert kvbm.connector[0].reset_cache() is True
        # The events of the cache, before the engine takes them.
        cache = kvbm.connector[0]._cache
        cache._has_cleared = False  # the engine has taken the event
        assert cache.take_events() == [TierCleared(Tier.HOST)]
        assert cache.take_events() == []


@pytest.mark.parametrize("is_off", [False, True])
def test_a_change_of_the_weights_ends_persistence_after_a_fault_too(monkeypatch, tmp_path, is_off):
    monkeypatch.setattr(deadlines, "ANSWER_LIMIT_S", 60.0)  # on a busy machine
    with running(tmp_path) as kvbm, monkeypatch.context() as patch:
        if is_off:
            Fault(patch, Leader, "step", calls={1}, after=False)
        kvbm.serve(random.Random(1))
        assert bool(kvbm.counters.disabled) == is_off
        # The events of the cache, before the engine takes them.
        cache = kvbm.connector[0]._cache
        assert cache.reset(ends_persistence=True) is True
        # What persists shows only in the next engine.
        assert tier_of(cache.leader, Tier.DISK).disk._has_ended_persistence


def test_the_first_fault_is_logged_with_its_traceback_and_more_of_them_are_counted(monkeypatch, caplog):
    with running() as kvbm, monkeypatch.context() as patch:
        Fault(patch, KvbmScheduler, "_offload", calls={1}, after=False)
        Fault(patch, Leader, "take_events", calls=range(100), after=False)
        kvbm.serve(random.Random(3))
        assert kvbm.counters.disabled == 1
        faults = [record for record in caplog.records if record.exc_info and "exception" in record.message]
        assert 1 <= len(faults) <= 2
        assert "continues without the cache until it is restarted" in caplog.text


@pytest.mark.parametrize("name", ["fence", "submit_onboard", "submit_offload", "poll", "write_slots", "write_lane"])
def test_an_exception_in_a_worker_fails_its_transfers_and_turns_nothing_off(name, monkeypatch):
    with running() as kvbm, monkeypatch.context() as patch:
        # The engine shows no worker, and faults belong into its copier.
        worker = kvbm.connector[1]._home
        onboard, offload, segment = worker._onboard_pool, worker._offload_pool, worker._segment  # each part of it
        target = {"poll": onboard, "submit_onboard": onboard, "submit_offload": offload}.get(name, segment)
        calls = iter(range(10**6))
        target = kvbm.copier if name == "fence" else target
        original = getattr(target, name.partition("_o")[0])

        def faulty(*args, **kwargs):
            if next(calls) % 3 == 1:
                raise MemoryError
            return original(*args, **kwargs)

        patch.setattr(target, name.partition("_o")[0], faulty)
        kvbm.serve(random.Random(name))
        assert next(calls) > 1
        assert kvbm.counters.disabled == 0
        assert kvbm.counters.offload_failed_blocks + kvbm.counters.onboard_failed_blocks > 0 or name == "poll"


def test_a_recording_that_fails_ends_itself_and_nothing_else(monkeypatch):
    calls = []

    def trace(call, **values):
        calls.append(call)
        raise OSError("no space left on device")

    original = GuardedLeader.__init__

    def with_trace(self, boundary, region, settings, callbacks, *more):
        original(self, boundary, region, settings, replace(callbacks, trace=trace), *more)

    monkeypatch.setattr(GuardedLeader, "__init__", with_trace)
    with running() as kvbm:
        kvbm.serve(random.Random(4))
        assert len(calls) == 1
        assert kvbm.counters.faults == 1
        assert kvbm.counters.disabled == 0
        assert kvbm.counters.onboard_blocks > 0


@pytest.mark.parametrize(
    ("protocol", "ours"),
    [(SchedulerConnector, KvbmScheduler), (WorkerConnector, KvbmWorker)],
    ids=["scheduler", "worker"],
)
def test_every_hook_of_the_embedded_engine_is_guarded(protocol, ours):
    hooks = {name for name in vars(protocol) if not name.startswith("_")} - set(START_UP)
    assert not {name for name in hooks if not hasattr(getattr(ours, name), "__wrapped__")}


def test_only_the_boundary_and_threads_catch_everything():
    """`except Exception` anywhere else would hide a fault that the boundary must count."""
    # reported to all ranks, which then refuse to start together; or raised with what to install
    at_start = ("kvbm/engines/trtllm/rank_side.py", "kvbm/device/replicas.py", "kvbm/engines/sglang/flushes.py")
    instead_of_a_cache = "kvbm/tiers/disk/instance.py"  # logged and counted; another cache is opened
    of_any_form = "kvbm/engines/vllm/media_content.py"  # a model's processor made it; logged, nothing is kept
    as_a_decorator = "kvbm/engines/vllm/secondary_tier.py"  # does, but faster; the boundary counts it
    of_a_thread = ("kvbm/tiers/disk/index_thread.py", "kvbm/engines/sglang/leader_thread.py")  # reported or counted
    allowed = {"kvbm/boundary.py", *of_a_thread, *at_start, instead_of_a_cache, of_any_form, as_a_decorator}
    root = Path(inspect.getfile(driver)).parents[2]
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name) and node.type.id == "Exception":
                assert str(path.relative_to(root.parent)) in allowed, f"{path}:{node.lineno}"
