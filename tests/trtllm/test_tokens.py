"""Tokens with the cache are those without: conversations, faults, preemption and aborts, for every version."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace

import pytest
from executor import BLOCK, VOCABULARY, Engine, Script, expected
from interface import MAIN, VERSIONS

from kvbm.device.worker import Worker as RealWorker
from kvbm.errors import TransferError

EVERYWHERE = [
    pytest.param(version, ranks, overlaps, id=f"{version}-{ranks}-{'overlap' if overlaps else 'plain'}")
    for version in VERSIONS
    for ranks in (1, 2)
    for overlaps in (False, True)
]
everywhere = pytest.mark.parametrize(("version", "ranks", "overlaps"), EVERYWHERE)


def conversations(engine, *, users=3, turns=3, max_new=7, stops_early=True):
    """Run turns of several users: each prompt is the one before with its answer. Return (script, tokens) of all."""
    prompts = [tuple(range(100 * user, 100 * user + 9 + 2 * user)) for user in range(users)]
    request_id, results = 1, []
    for turn in range(turns):
        scripts = []
        for user, prompt in enumerate(prompts):
            scripts.append(Script(request_id, prompt, max_new, arrives=user, stops_early=stops_early and user == 1))
            request_id += 1
        done = engine.run(scripts)
        results += [(script, done[script.request_id]) for script in scripts]
        prompts = [(*script.prompt, *done[script.request_id], 900 + turn) for script in scripts]
    return results


def assert_right(results, ranks):
    for script, tokens in results:
        assert tokens == expected(script, ranks), f"request {script.request_id}"


def assert_right_again(engine, results, ranks, *, max_new):
    """Ask all prompts again, with an empty G1."""
    engine.forget_device()
    again = [Script(50 + index, script.prompt, max_new) for index, (script, _) in enumerate(results)]
    done = engine.run(again)
    assert_right([(script, done[script.request_id]) for script in again], ranks)


def workers_of(engine):
    return [worker for side in engine.workers for worker in side.side._workers]  # each has a copier to replace


@pytest.mark.sampled(5)
@everywhere
def test_conversations_get_the_tokens_of_an_engine_without_a_cache(version, ranks, overlaps):
    with Engine(version, rank_count=ranks, overlaps=overlaps, device_blocks=22) as engine:
        results = conversations(engine)
        assert_right(results, ranks)
        assert engine.counters.offload_blocks > 0
        engine.wait_for_saves()
        assert_right_again(engine, results, ranks, max_new=5)
        assert engine.external_tokens >= 3 * BLOCK * ranks
        assert engine.counters.onboard_blocks > 0
        assert not engine.leader.side.boundary.is_off
        assert engine.counters.faults == 0


class Flaky:
    """A copier that fails every third call: before the copy, after a part of it, or with an end of its thread."""

    def __init__(self, copier) -> None:
        self._copier, self._calls, self._lock = copier, 0, threading.Lock()
        self.failures = 0

    def fence(self):
        return self._copier.fence()

    def offload(self, block_ids, slots, fence) -> None:
        self._fail(lambda half: self._copier.offload(block_ids[:half], slots[:half], fence), len(slots))
        self._copier.offload(block_ids, slots, fence)

    def onboard(self, slots, block_ids, fence) -> None:
        self._fail(lambda half: self._copier.onboard(slots[:half], block_ids[:half], fence), len(slots))
        self._copier.onboard(slots, block_ids, fence)

    def _fail(self, copy, count) -> None:
        with self._lock:
            self._calls += 1
            kind = self._calls % 9
        if kind in (1, 4, 7):
            self.failures += 1
            if kind == 4:
                copy(count // 2)
            raise SystemExit if kind == 7 else TransferError("fault: copy failed")


def make_flaky(engine):
    workers = workers_of(engine)
    for worker in workers:
        worker.copier = Flaky(worker.copier)
    return [worker.copier for worker in workers]


@pytest.mark.sampled(5)
@everywhere
def test_copies_that_fail_cost_time_and_no_token(version, ranks, overlaps):
    with Engine(version, rank_count=ranks, overlaps=overlaps, device_blocks=22, host_blocks=14) as engine:
        copiers = make_flaky(engine)
        results = conversations(engine, users=4)
        assert_right(results, ranks)
        assert_right_again(engine, results, ranks, max_new=5)
        assert all(copier.failures for copier in copiers)
        assert engine.counters.offload_failed_blocks > 0
        assert engine.counters.onboard_failed_blocks == 0
        assert engine.counters.evicted_blocks > 0


@pytest.mark.sampled(5)
@everywhere
def test_results_that_are_lost_cost_hits_and_no_token(version, ranks, overlaps, monkeypatch):
    with Engine(version, rank_count=ranks, overlaps=overlaps, device_blocks=22) as engine:
        lost = []
        run = RealWorker._run_offload

        def lose_every_second(worker, order, part, uncopied, fence):
            lost.append(order)
            if len(lost) % 2:
                run(worker, order, part, uncopied, fence)
            else:
                worker.copier.offload(order.block_ids[part], order.slots[part], fence)

        monkeypatch.setattr(RealWorker, "_run_offload", lose_every_second)
        results = conversations(engine, users=4)
        assert_right(results, ranks)
        assert_right_again(engine, results, ranks, max_new=5)
        assert len(lost) > 2
        assert all(not rank.saving for rank in engine.ranks)


@pytest.mark.sampled(5)
@everywhere
def test_aborted_requests_leave_their_blocks_to_the_copies(version, ranks, overlaps):
    """Parked, running and waiting requests are aborted while copies are slow; the others get their tokens."""
    with Engine(version, rank_count=ranks, overlaps=overlaps, device_blocks=22) as engine:
        first = conversations(engine, users=3, turns=2)
        engine.wait_for_saves()
        engine.forget_device()
        slow(engine, 0.002)
        longest = {script.prompt[0]: script.prompt for script, _ in first}
        scripts = [
            Script(
                60 + 10 * wave + index, prompt, 6, arrives=4 * wave, aborts_at=4 * wave + 1 + wave if index else None
            )
            for wave in range(4)
            for index, prompt in enumerate(longest.values())
        ]
        done = engine.run(scripts)
        assert_right([(one, done[one.request_id]) for one in scripts if one.request_id in done], ranks)
        assert engine.ranks[0].aborted
        assert engine.external_tokens
        held = engine.leader.side._held
        engine.wait_for_saves()
        assert not +held


def slow(engine, seconds):
    for worker in workers_of(engine):
        worker.copier = Slow(worker.copier, seconds)


class Slow:
    def __init__(self, copier, seconds) -> None:
        self._copier, self._seconds = copier, seconds
        self.fence = copier.fence

    def offload(self, block_ids, slots, fence) -> None:
        time.sleep(self._seconds)
        self._copier.offload(block_ids, slots, fence)

    def onboard(self, slots, block_ids, fence) -> None:
        time.sleep(self._seconds)
        self._copier.onboard(slots, block_ids, fence)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("overlaps", [False, True])
def test_paused_requests_compute_again_in_other_blocks(ranks, overlaps):
    """Only the newest interface reports pauses; with earlier ones kvbm refuses a policy that pauses requests."""
    settings = {"device_blocks": 12, "preempts": True, "max_iterations": 200_000}  # most wait for a copying thread
    with Engine(MAIN, rank_count=ranks, overlaps=overlaps, **settings) as engine:
        slow(engine, 0.001)
        results = conversations(engine, users=5, turns=2, stops_early=False, max_new=12)
        assert_right(results, ranks)
        engine.wait_for_saves()
        assert_right_again(engine, results, ranks, max_new=3)
        assert engine.pauses > 0
        assert engine.external_tokens > 0


@pytest.mark.parametrize("version", VERSIONS, ids=str)
def test_a_policy_that_pauses_requests_disables_the_cache_unless_pauses_are_reported(version):
    policy = SimpleNamespace(capacity_scheduler_policy="CapacitySchedulerPolicy.MAX_UTILIZATION")
    with Engine(version, scheduler_config=policy) as engine:
        assert (engine.leader.side is not None) == version.has_reset
        assert_right(conversations(engine, turns=1), 1)


@pytest.mark.sampled(5)
@everywhere
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_traffic_gets_the_tokens_of_an_engine_without_a_cache(version, ranks, overlaps, seed):
    """Shared prefixes, salts, adapters, images, aborts, small memories, slow and failing copies, all together."""
    draw = random.Random(f"{seed}/{version}/{ranks}/{overlaps}")
    prefixes = [tuple(draw.randrange(VOCABULARY) for _ in range(24)) for _ in range(4)]
    device, host, budget = draw.choice([16, 20, 28]), draw.choice([12, 30, 100]), draw.choice([6, 16, 40])
    with Engine(
        version, rank_count=ranks, overlaps=overlaps, device_blocks=device, host_blocks=host, budget=budget
    ) as engine:
        if draw.random() < 0.5:
            make_flaky(engine)
        if draw.random() < 0.5:
            slow(engine, 0.001)
        for wave in range(4):
            scripts = [drawn(draw, 100 * wave + index, prefixes) for index in range(10)]
            done = engine.run(scripts)
            assert {one.request_id for one in scripts if one.aborts_at is None} <= set(done)
            assert_right([(one, done[one.request_id]) for one in scripts if one.request_id in done], ranks)
            if draw.random() < 0.6:
                engine.forget_device()
        assert not engine.leader.side.boundary.is_off
        assert engine.counters.offload_blocks > 0


def drawn(draw, request_id, prefixes):
    prompt = draw.choice(prefixes)[: draw.randrange(5, 24)] + (() if draw.random() < 0.7 else (request_id, 5, 6))
    arrives = draw.randrange(12)
    facts = draw.choice(
        [{}, {}, {}, {"salt": "a"}, {"adapter": 1}, {"media": ("x",), "has_media": True}, {"has_media": True}]
    )
    return Script(
        request_id,
        prompt,
        draw.randrange(1, 9),
        arrives=arrives,
        aborts_at=arrives + draw.randrange(1, 12) if draw.random() < 0.2 else None,
        stops_early=draw.random() < 0.3,
        **facts,
    )
