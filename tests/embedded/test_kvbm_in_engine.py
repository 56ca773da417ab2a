"""The block manager inside the real engine: hits in every case, and never another output than without it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from bookkeeping import check_leader
from kvbm_engine import assert_same, prompt, running
from pool_check import check_pool

from kvbm.core.policies.ranking import TABLES
from kvbm.errors import EnvironmentProblem
from kvbm.types import Tier

HOMES = [(False, "block_first"), (False, "layer_first"), (True, "block_first")]


def conversations(engine, *, users: int = 4, turns: int = 3) -> list[list[tuple[int, float]]]:
    """Multi-turn chats side by side: a shared system prompt, the model's own answers as history."""

    def talk(user: int) -> list[int]:
        history, said = prompt(user, 180, shared=96), []
        for turn in range(turns):
            answer = engine.ask(history, max_tokens=20)
            said += answer.said()
            history = history + answer.tokens + prompt(100 * user + turn, 24)
        return said

    with ThreadPoolExecutor(users) as pool:
        return list(pool.map(talk, range(users)))


@pytest.fixture(scope="module")
def expected():
    """What the same engine says without the block manager."""
    with running(host_blocks=None) as engine:
        return conversations(engine)


@pytest.mark.parametrize(("worker_process", "kv_layout"), HOMES)
def test_multi_turn_outputs_are_equal_and_blocks_really_travel(expected, worker_process, kv_layout):
    with running(host_blocks=400, worker_process=worker_process, kv_layout=kv_layout) as engine:
        assert_same(conversations(engine), expected)
        engine.settle()
        assert engine.counters.onboard_blocks > 10
        assert engine.counters.offload_blocks > 30
        assert engine.counters.onboard_failed_blocks == engine.counters.offload_failed_blocks == 0
        check_leader(engine.leader)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_no_table_of_adaptive_eviction_changes_an_output(expected, table):
    with running(host_blocks=40, eviction="adaptive", prefix_caching=False) as engine:
        adaptive = engine.leader.host.store.policy
        adaptive.order.use_table(table)
        # Which table is best follows from the requests; here it is the given one.
        adaptive._decide = lambda: next(one for one in adaptive._shadows if one.table is table)
        assert_same(conversations(engine), expected)
        engine.settle()
        check_leader(engine.leader)
        counters = engine.counters
        assert counters.onboard_blocks > 0
        assert counters.evicted_blocks + counters.offload_declined_blocks > 0
        assert counters.onboard_failed_blocks == counters.offload_failed_blocks == 0


def test_no_process_can_shorten_the_memory_that_the_engine_shares_with_its_worker():
    with running(host_blocks=40, worker_process=True) as engine:
        pool = engine.engine.pool
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, 4096)


def test_generated_tokens_come_back_too():
    with running(host_blocks=400) as engine:
        first = engine.ask(prompt(1, 100), max_tokens=60)
        history = prompt(1, 100) + first.tokens
        engine.settle()
        engine.between_steps(lambda: engine.engine.blocks.reset() or True)
        again = engine.ask([*history, 5, 6, 7])
        assert again.last.num_external_tokens == 144  # 159 computed tokens are 9 full blocks of 16


def test_prompts_only_when_the_profile_says_so():
    with running(host_blocks=400, generated=False) as engine:
        first = engine.ask(prompt(1, 100), max_tokens=60)
        engine.settle()
        engine.between_steps(lambda: engine.engine.blocks.reset() or True)
        again = engine.ask([*prompt(1, 100), *first.tokens, 5, 6, 7])
        assert again.last.num_external_tokens == 96


def test_host_hits_without_the_engines_own_prefix_cache():
    with running(host_blocks=400, prefix_caching=False) as engine:
        first = engine.ask(prompt(1, 100))
        engine.settle()
        again = engine.ask(prompt(1, 100))
        assert (again.last.num_cached_tokens, again.last.num_external_tokens) == (0, 96)
        assert_same([again.said()], [first.said()])


def test_a_salt_keeps_tenants_apart():
    with running(host_blocks=400) as engine:
        engine.ask(prompt(1, 100), cache_salt="a")
        engine.settle()
        engine.between_steps(lambda: engine.engine.blocks.reset() or True)
        assert engine.ask(prompt(1, 100), cache_salt="b").last.num_external_tokens == 0
        engine.between_steps(lambda: engine.engine.blocks.reset() or True)
        assert engine.ask(prompt(1, 100), cache_salt="a").last.num_external_tokens == 96


def test_reset_prefix_cache_empties_both_tiers():
    with running(host_blocks=400) as engine:
        engine.ask(prompt(1, 100))
        engine.settle()
        assert engine.engine.begin_reset().result()
        last = engine.ask(prompt(1, 100)).last
        assert (last.num_cached_tokens, last.num_external_tokens) == (0, 0)


def test_one_load_serves_requests_that_share_a_prefix():
    with running(host_blocks=400) as engine:
        expected = engine.ask(prompt(1, 200)).said()
        engine.settle()
        engine.between_steps(lambda: engine.engine.blocks.reset() or True)
        engine.copier.next("hold")
        first = engine.submit(prompt(1, 200))
        engine.copier.wait_until_held()
        others = [engine.submit(prompt(1, 200)) for _ in range(3)]
        engine.copier.heal()
        assert_same([answer.wait().said() for answer in (first, *others)], [expected] * 4)
        assert engine.counters.onboard_blocks == 12
        assert engine.counters.onboard_shared_requests == 3


def test_preemption_and_host_hits_together_keep_outputs_equal():
    prompts = [prompt(seed, 90, shared=32) for seed in range(6)]

    def outputs(engine):
        answers = [engine.submit(p, max_tokens=40) for p in prompts]
        return [answer.wait().said() for answer in answers]

    with running(host_blocks=None, num_blocks=20) as engine:
        expected = outputs(engine)
    with running(host_blocks=400, num_blocks=20) as engine:
        assert_same(outputs(engine), expected)
        assert_same(outputs(engine), expected)
        assert engine.engine.stats().counters.preemptions > 0
        assert engine.counters.onboard_blocks > 0


# -- faults ------------------------------------------------------------------------------------------------------------


FAILURES = ("fail", "short", "die", "odd")


@pytest.mark.parametrize(
    "faults", [FAILURES, *(pytest.param((fault,), marks=pytest.mark.soak) for fault in FAILURES)], ids="-".join
)
def test_every_seventh_copy_failing_changes_no_output(expected, faults):
    """By turns in each way; the long form has an engine for each."""
    with running(host_blocks=400) as engine:
        for number, call in enumerate(range(0, 400, 7)):
            engine.copier.at(call, faults[number % len(faults)])
        assert_same(conversations(engine), expected)
        engine.copier.heal()
        engine.settle()
        counters = engine.counters
        assert counters.offload_failed_blocks + counters.onboard_failed_blocks > 0
        assert counters.onboard_blocks > 0
        assert engine.engine.is_healthy
        check_leader(engine.leader)


@pytest.mark.parametrize("fault", ["hold", "lost"])
def test_a_hanging_offload_delays_nobody(expected, fault):
    with running(host_blocks=400) as engine:
        engine.copier.next(fault)
        assert_same(conversations(engine), expected)
        assert engine.leader.has_pending()
        engine.copier.heal()
        engine.settle()


def test_while_a_load_hangs_others_are_served_and_then_it_is_served_too():
    with running(host_blocks=400) as engine:
        expected = engine.ask(prompt(1, 200)).said()
        other = engine.ask(prompt(2, 200)).said()
        engine.settle()
        engine.between_steps(lambda: engine.engine.blocks.reset() or True)
        engine.copier.next("hold")
        hung = engine.submit(prompt(1, 200))
        engine.copier.wait_until_held()
        assert_same([engine.ask(prompt(2, 200)).said()], [other])
        assert not hung.done.is_set()
        engine.copier.heal()
        assert_same([hung.wait().said()], [expected])


def test_aborting_in_every_state_leaves_nothing_behind():
    randomness = random.Random(7)
    with running(host_blocks=200, num_blocks=24) as engine:
        for call in range(0, 300, 9):
            engine.copier.at(call, "fail")
        for _ in range(12):
            answers = [engine.submit(prompt(seed, 120, shared=64), max_tokens=20) for seed in range(4)]
            for answer in randomness.sample(answers, 2):
                threading.Event().wait(randomness.random() * 0.02)
                engine.engine.abort(answer.request_id)
            for answer in answers:
                answer.wait()
        engine.copier.heal()
        engine.settle()
        pool = engine.engine.blocks
        assert engine.between_steps(lambda: check_pool(pool) or pool.used_count == 0)
        assert engine.leader.blocks()[Tier.HOST]["pinned"] == engine.leader.blocks()[Tier.HOST]["moving"] == 0
        assert not engine.leader._requests  # what it keeps of a request has no public count


def test_reset_under_load_changes_no_output(expected):
    with running(host_blocks=400) as engine:
        stop = threading.Event()

        def reset_often():
            while not stop.wait(0.03):
                engine.engine.begin_reset().result()

        thread = threading.Thread(target=reset_often)
        thread.start()
        try:
            assert_same(conversations(engine), expected)
        finally:
            stop.set()
            thread.join()
        engine.settle()
        assert engine.counters.resets > 0


def test_kill_of_the_worker_process_under_load_leaves_a_working_engine(expected):
    with running(host_blocks=400, worker_process=True) as engine:
        engine.ask(prompt(9, 100))
        killer = threading.Timer(0.2, engine.worker_process.kill)
        killer.start()
        assert_same(conversations(engine), expected)
        killer.join()
        engine.settle()
        assert engine.ask(prompt(9, 100)).last.num_external_tokens == 0
        assert engine.counters.disabled == 1


def test_signals_for_the_whole_group_leave_the_worker_process_to_its_engine(expected):
    """Ctrl-C, a closed terminal and systemd reach every process. The engine still answers its open requests."""
    with running(host_blocks=120, worker_process=True) as engine:
        pid = engine.worker_process.pid
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(pid, number)
        assert_same(conversations(engine), expected)
        assert engine.counters.disabled == 0
        assert engine.worker_process.poll() is None


@pytest.mark.soak
def test_a_worker_process_that_does_not_read_holds_up_nobody():
    with running(host_blocks=400, worker_process=True, num_blocks=60) as engine:
        first = engine.ask(prompt(1, 200))
        process = engine.worker_process
        os.kill(process.pid, signal.SIGSTOP)
        try:
            for seed in range(40):
                engine.ask(prompt(seed + 10, 300), max_tokens=1)
            idle_until = time.monotonic() + 3  # the leader asks after its transfers again and again
            while time.monotonic() < idle_until:
                engine.ask(prompt(99, 20), max_tokens=1)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        engine.settle()
        engine.forget_g1()
        assert_same([engine.ask(prompt(1, 200)).said()], [first.said()])
        assert engine.counters.disabled == 0


def test_a_request_does_not_wait_for_a_worker_process_that_is_stopped():
    with running(host_blocks=400, worker_process=True, num_blocks=60) as engine:
        expected = [engine.ask(prompt(seed, 200)).said() for seed in (1, 2)]
        engine.settle()
        engine.forget_g1()
        process = engine.worker_process
        os.kill(process.pid, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            waiting = [engine.submit(prompt(seed, 200)) for seed in (1, 2)]
            assert_same([answer.wait().said() for answer in waiting], expected)
            assert time.monotonic() - began_s < 20, "2 s to recognise it, the rest is a busy machine"
            held = engine.engine.blocks.used_count
            assert held > 0, "a copy that continues later would write to these blocks"
            failed = engine.counters.onboard_failed_blocks
            engine.forget_g1()
            later = engine.ask(prompt(1, 200))
            assert_same([later.said()], expected[:1])
            assert later.last.num_external_tokens == 0, "only the first requests wait for a stopped process"
            assert engine.counters.onboard_failed_blocks == failed
        finally:
            os.kill(process.pid, signal.SIGCONT)
        end_s = time.monotonic() + 30
        while engine.engine.blocks.used_count:
            assert time.monotonic() < end_s
            engine.ask(prompt(99, 20), max_tokens=1)
        engine.settle()
        engine.forget_g1()
        assert_same([engine.ask(prompt(1, 200)).said()], expected[:1])
        assert engine.counters.disabled == 0
        assert engine.counters.matched_tokens > 0, "the process is used again"
        check_leader(engine.leader)


def test_a_stop_of_the_engine_does_not_wait_for_a_stopped_worker_process():
    with running(host_blocks=400, worker_process=True) as engine:
        engine.ask(prompt(1, 200))
        os.kill(engine.worker_process.pid, signal.SIGSTOP)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 15


def test_a_worker_process_without_memory_says_how_much_it_asked_for():
    with pytest.raises(EnvironmentProblem, match="requests") as caught, running(host_blocks=10**9, worker_process=True):
        pass
    assert caught.value.hint == "lower `tiers.host.capacity`"
