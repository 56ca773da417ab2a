"""The disk tier under the real engine: what an earlier engine wrote is found, and never changes an output.

An engine that is killed is played by a copy of its directory, made while it still runs: what a process has written to
its files is what the next one finds there, whether it ended by itself or not.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from bookkeeping import check_leader, tier_of
from kvbm_engine import assert_same, prompt, running
from waiting import eventually, slept_s

from kvbm.child import deadlines, service
from kvbm.config import schema
from kvbm.types import Tier

ALWAYS = {"to_disk": "always"}
POLICIES = ["frequency", "always", "on_evict"]
HOSTS = {"small": 30, "smaller than a request": 6, "none": None}
OFTEN = {("small", "frequency"), ("small", "on_evict"), ("smaller than a request", "always"), ("none", "always")}
MIXTURES = [
    pytest.param(
        HOSTS[host], to_disk, id=f"{host}-{to_disk}", marks=() if (host, to_disk) in OFTEN else pytest.mark.soak
    )
    for host in HOSTS
    for to_disk in POLICIES
]
LENGTH = 200
LONGEST_STEP_S = 5.0  # without the time on a core and for a core; a step that waits for a process takes much longer
LONGEST_STOP_S = 10.0
LOADABLE = 192  # whole blocks before the last token
USERS = 4
ANSWER = 20


def disk(directory, blocks=400):
    return {"directory": str(directory), "blocks": blocks}


def engine_on(directory, *, host_blocks=400, blocks=400, to_disk="always", policy="always", **config):
    return running(
        host_blocks=host_blocks,
        disk=disk(directory, blocks),
        offload={"to_disk": to_disk},
        onboard={"policy": policy},
        **config,
    )


def rest(engine):
    """Wait until nothing moves, to host memory or to disk. It needs no request to go on."""
    engine.settle()


def cut_off(directory, copy):
    """The files as they are at this moment."""
    shutil.copytree(directory, copy)
    return copy


def instance_of(directory):
    (path,) = [lock.parent for lock in directory.glob("*/*/lock")]
    return path


def conversations(engine, *, users=USERS, turns=2):
    """Chats side by side, of a shared system prompt and the model's own answers."""

    def talk(user):
        history, said = prompt(user, 180, shared=96), []
        for turn in range(turns):
            answer = engine.ask(history, max_tokens=ANSWER)
            said += answer.said()
            history = history + answer.tokens + prompt(100 * user + turn, 24)
        return said

    with ThreadPoolExecutor(users) as pool:
        return list(pool.map(talk, range(users)))


@pytest.fixture(scope="module")
def expected():
    """What the engine says without a cache: in chats, to one prompt, and in longer chats."""
    with running() as engine:
        longer = conversations(engine, turns=3)
        return [said[: 2 * ANSWER] for said in longer], engine.ask(prompt(1, LENGTH)).said(), longer


@pytest.fixture(scope="module")
def written_once(tmp_path_factory, expected):
    directory = tmp_path_factory.mktemp("disk") / "written"
    with engine_on(directory) as engine:
        assert_same([engine.ask(prompt(1, LENGTH)).said()], [expected[1]])
        rest(engine)
        assert engine.counters.disk.offload_blocks == LENGTH // 16
    return directory


@pytest.fixture
def written(tmp_path, written_once):
    """A directory in which an engine has left the blocks of one prompt."""
    return cut_off(written_once, tmp_path / "written")


# -- restart -----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("to_disk", POLICIES)
def test_an_engine_that_ended_has_left_its_blocks(tmp_path, expected, to_disk):
    """Also those that the policy had not chosen: at the end everything is written."""
    with engine_on(tmp_path, to_disk=to_disk) as engine:
        assert_same(conversations(engine), expected[0])
    with engine_on(tmp_path, to_disk=to_disk) as engine:
        assert_same(conversations(engine), expected[0])
        assert engine.counters.disk.onboard_blocks > 20
        assert engine.counters.disk.failed_blocks == engine.counters.disk.checksum_failures == 0
        check_leader(engine.leader)


def test_a_killed_engine_has_left_what_was_written(tmp_path, expected):
    with engine_on(tmp_path / "first") as engine:
        engine.ask(prompt(1, LENGTH))
        rest(engine)
        copy = cut_off(tmp_path / "first", tmp_path / "second")
    with engine_on(copy) as engine:
        answer = engine.ask(prompt(1, LENGTH))
        assert_same([answer.said()], [expected[1]])
        assert answer.last.num_external_tokens == LOADABLE
        assert engine.counters.disk.onboard_blocks == LOADABLE // 16
        assert engine.counters.hit_rate(Tier.DISK) == 1.0


def test_only_what_was_asked_for_again_is_on_disk_when_a_frequent_engine_is_killed(tmp_path):
    with engine_on(tmp_path / "first", to_disk="frequency") as engine:
        for seed in (1, 2, 1):
            engine.ask(prompt(seed, LENGTH))
            rest(engine)
        copy = cut_off(tmp_path / "first", tmp_path / "second")
    with engine_on(copy) as engine:
        assert engine.ask(prompt(2, LENGTH)).last.num_external_tokens == 0
        assert engine.ask(prompt(1, LENGTH)).last.num_external_tokens == LOADABLE


def test_a_killed_engine_under_load_has_left_no_wrong_byte(tmp_path, expected):
    with engine_on(tmp_path / "first", host_blocks=24, blocks=60) as engine, ThreadPoolExecutor(1) as pool:
        talking = pool.submit(conversations, engine)
        copies = []
        while not talking.done() and len(copies) < 2:
            while not talking.done() and engine.counters.disk.offload_blocks < 20 * (len(copies) + 1):
                time.sleep(0.01)
            copies.append(cut_off(tmp_path / "first", tmp_path / f"copy-{len(copies)}"))
        talking.result()
    for copy in copies:
        with engine_on(copy, host_blocks=24, blocks=60) as engine:
            assert_same(conversations(engine), expected[0])
            assert engine.counters.disk.onboard_blocks > 0


# -- three tiers at once -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("host_blocks", "to_disk"), MIXTURES)
def test_outputs_are_equal_while_blocks_move_between_all_tiers(tmp_path, expected, host_blocks, to_disk, monkeypatch):
    monkeypatch.setattr(schema, "BOUNCE_BLOCKS", 16)
    with engine_on(tmp_path, host_blocks=host_blocks, to_disk=to_disk, num_blocks=32) as engine:
        for _ in range(2):
            assert_same(conversations(engine), expected[0])
        rest(engine)
        check_leader(engine.leader)
        counters = engine.counters
        assert counters.disk.offload_blocks > 0
        if host_blocks != 6:  # whose blocks are those that all chats begin with, which stay in device memory
            assert counters.disk.onboard_blocks > 0
        assert counters.onboard_failed_blocks == counters.disk.failed_blocks == counters.disk.io_errors == 0
        assert all(blocks["pinned"] == blocks["moving"] == 0 for blocks in engine.leader.blocks().values())


def test_a_prompt_larger_than_host_memory_passes_through_it(tmp_path, expected):
    with engine_on(tmp_path, host_blocks=4) as engine:
        engine.ask(prompt(1, LENGTH), max_tokens=100)  # long enough for all of it to be written
        rest(engine)
        engine.forget_g1()
        answer = engine.ask(prompt(1, LENGTH))
        assert_same([answer.said()], [expected[1]])
        assert answer.last.num_external_tokens == LOADABLE
        assert engine.counters.disk.onboard_blocks >= LOADABLE // 16 - 4


def test_with_a_disk_alone_everything_goes_there(tmp_path, expected):
    with engine_on(tmp_path, host_blocks=None, to_disk="frequency") as engine:
        engine.ask(prompt(1, LENGTH))
        rest(engine)
        assert engine.counters.disk.offload_blocks == LENGTH // 16
    with engine_on(tmp_path, host_blocks=None) as engine:
        answer = engine.ask(prompt(1, LENGTH))
        assert answer.last.num_external_tokens == LOADABLE
        assert_same([answer.said()], [expected[1]])


def test_requests_for_one_prefix_on_disk_read_it_once(written, expected):
    with engine_on(written) as engine:
        answers = [engine.submit(prompt(1, LENGTH)) for _ in range(4)]
        assert_same([answer.wait().said() for answer in answers], [expected[1]] * 4)
        assert engine.counters.disk.fetched_blocks == LOADABLE // 16


# -- whose blocks they are ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "other", [{"model": "synthetic:small"}, {"dtype": "bfloat16"}, {"block_size": 32}, {"seed": 1}], ids=str
)
def test_another_engine_finds_nothing(written, other):
    with engine_on(written, blocks=50, **other) as engine:
        assert engine.leader.blocks()[Tier.DISK]["evictable"] == 0
        assert engine.ask(prompt(1, LENGTH)).last.num_external_tokens == 0
    with engine_on(written) as engine:
        assert engine.ask(prompt(1, LENGTH)).last.num_external_tokens == LOADABLE, "its blocks are still there"


def test_two_engines_share_a_directory_and_each_has_its_own_blocks(written, expected):
    with engine_on(written) as first, engine_on(written) as second:
        answers = [engine.ask(prompt(1, LENGTH)) for engine in (first, second)]
        assert_same([answer.said() for answer in answers], [expected[1]] * 2)
        assert [answer.last.num_external_tokens for answer in answers] == [LOADABLE, 0]


def test_a_salt_keeps_tenants_apart_on_disk_too(tmp_path):
    with engine_on(tmp_path) as engine:
        engine.ask(prompt(1, LENGTH), cache_salt="a")
    with engine_on(tmp_path) as engine:
        assert engine.ask(prompt(1, LENGTH), cache_salt="b").last.num_external_tokens == 0
        assert engine.ask(prompt(1, LENGTH)).last.num_external_tokens == 0
        assert engine.ask(prompt(1, LENGTH), cache_salt="a").last.num_external_tokens == LOADABLE


# -- a reset is for ever -----------------------------------------------------------------------------------------------


def test_a_reset_is_durable_when_it_returns(tmp_path):
    with engine_on(tmp_path / "first") as engine:
        engine.ask(prompt(1, LENGTH))
        rest(engine)
        before = cut_off(tmp_path / "first", tmp_path / "before")
        assert engine.engine.begin_reset().result()
        after = cut_off(tmp_path / "first", tmp_path / "after")
    for copy, tokens in ((before, LOADABLE), (after, 0), (tmp_path / "first", 0)):
        with engine_on(copy) as engine:
            assert engine.ask(prompt(1, LENGTH)).last.num_external_tokens == tokens


def test_a_reset_covers_what_is_on_its_way_to_disk(tmp_path, expected):
    """Whatever is in the queue, in flight or being copied: nothing that was computed before is found after it."""
    with engine_on(tmp_path / "first") as engine:
        copies = []
        for round_ in range(4):
            engine.ask(prompt(1, LENGTH), max_tokens=1)  # whose blocks are on their way now
            assert engine.engine.begin_reset().result()
            copies.append(cut_off(tmp_path / "first", tmp_path / f"copy-{round_}"))
        rest(engine)
        copies.append(cut_off(tmp_path / "first", tmp_path / "at-rest"))
    for copy in copies:
        with engine_on(copy) as engine:
            answer = engine.ask(prompt(1, LENGTH))
            assert answer.last.num_external_tokens == 0
            assert_same([answer.said()], [expected[1]])


def test_resets_under_load_change_no_output(tmp_path, expected):
    with engine_on(tmp_path, host_blocks=40, num_blocks=32) as engine, ThreadPoolExecutor(1) as pool:
        conversations(engine)
        talking = pool.submit(conversations, engine)
        while not talking.done():
            engine.engine.begin_reset().result()
        assert_same(talking.result(), expected[0])
        rest(engine)
        check_leader(engine.leader)


# -- damage between two runs -------------------------------------------------------------------------------------------


def change_bytes(path, offset, content):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def flip_bit(instance, slot_bytes):
    arena = instance / "arena"
    (byte,) = arena.read_bytes()[3 * slot_bytes + 999 : 3 * slot_bytes + 1000]
    change_bytes(arena, 3 * slot_bytes + 999, bytes([byte ^ 4]))


def swap_slots(instance, slot_bytes):
    content = (instance / "arena").read_bytes()
    change_bytes(instance / "arena", 3 * slot_bytes, content[4 * slot_bytes : 5 * slot_bytes])
    change_bytes(instance / "arena", 4 * slot_bytes, content[3 * slot_bytes : 4 * slot_bytes])


def exchange_rows(instance, slot_bytes):
    """The hashes of two blocks change places."""
    with sqlite3.connect(instance / "index.sqlite") as connection:
        (three,), (four,) = connection.execute("SELECT hash FROM blocks WHERE slot IN (3, 4) ORDER BY slot").fetchall()
        for slot, sequence_hash in ((3, b"-" * len(three)), (4, three), (3, four)):
            connection.execute("UPDATE blocks SET hash = ? WHERE slot = ?", (sequence_hash, slot))
    connection.close()


def remove_index(instance, slot_bytes):
    for path in instance.glob("index.sqlite*"):
        path.unlink()


# What is done to a directory with slots of that size, how many tokens may still be found, and which counter tells.
DAMAGES = {
    "flipped bit": (flip_bit, LOADABLE - 16, "disk_checksum_failures"),
    "zeroed page": (
        lambda at, slot: change_bytes(at / "arena", 3 * slot + 4096, bytes(4096)),
        *(LOADABLE - 16, "disk_checksum_failures"),
    ),
    "swapped slots": (swap_slots, LOADABLE - 32, "disk_checksum_failures"),
    "zeroed arena": (lambda at, slot: change_bytes(at / "arena", 0, bytes(30 * slot)), 0, "disk_checksum_failures"),
    "exchanged rows": (exchange_rows, LOADABLE - 32, "disk_checksum_failures"),
    "truncated arena": (lambda at, slot: os.truncate(at / "arena", 3 * slot + 100), 3 * 16, None),
    "no arena": (lambda at, slot: (at / "arena").unlink(), 0, None),
    "spoilt index": (lambda at, slot: change_bytes(at / "index.sqlite", 0, bytes(4096)), 0, None),
    "no index": (remove_index, 0, None),
    "spoilt superblock": (lambda at, slot: change_bytes(at / "superblock", 60, b"\0\0\0\0"), 0, None),
    "truncated superblock": (lambda at, slot: os.truncate(at / "superblock", 30), 0, None),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_between_two_runs_changes_no_output(written, expected, name):
    damage, most_tokens, counter = DAMAGES[name]
    with engine_on(written) as engine:
        # Where the bytes of a slot begin in the file.
        slot_bytes = engine.leader._settings.block_bytes
    damage(instance_of(written), slot_bytes)
    with engine_on(written) as engine:
        first = engine.ask(prompt(1, LENGTH))
        assert_same([first.said()], [expected[1]])
        rest(engine)
        assert engine.counters.disk.onboard_blocks * 16 <= most_tokens
        assert counter is None or engine.counters.totals()[counter] > 0
        engine.forget_g1()
        again = engine.ask(prompt(1, LENGTH))
        assert_same([again.said()], [expected[1]])
        assert again.last.num_external_tokens == LOADABLE, "what was damaged has been written again"
        rest(engine)
    with engine_on(written) as engine:
        answer = engine.ask(prompt(1, LENGTH))
        assert_same([answer.said()], [expected[1]])
        assert answer.last.num_external_tokens == LOADABLE
        assert engine.counters.disk.checksum_failures == 0


def test_an_index_older_than_the_arena_costs_hits_and_no_output(tmp_path, expected):
    """As a restored backup would be: its rows name slots that other blocks lie in."""
    with engine_on(tmp_path, blocks=13) as engine:
        engine.ask(prompt(1, LENGTH))
    instance = instance_of(tmp_path)
    old = (instance / "index.sqlite").read_bytes()
    with engine_on(tmp_path, blocks=13) as engine:
        for seed in (2, 3, 4):
            engine.ask(prompt(seed, LENGTH))
            rest(engine)
    (instance / "index.sqlite").write_bytes(old)
    with engine_on(tmp_path, blocks=13) as engine:
        answer = engine.ask(prompt(1, LENGTH))
        assert_same([answer.said()], [expected[1]])
        assert answer.last.num_external_tokens < LOADABLE
        assert engine.counters.disk.checksum_failures > 0


# -- faults in service -------------------------------------------------------------------------------------------------

QUICK = {"errors_until_off": 3, "stall_s": 1.0, "probe_interval_s": 0.05}


class Faults:
    """Orders to the process that does the disk's I/O; see disk_faults/sitecustomize.py."""

    def __init__(self, path):
        self.path = path
        self.order()

    def order(self, **faults):
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"limits": QUICK, **faults}))
        os.replace(new, self.path)


@pytest.fixture
def faults(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "disk_faults"))
    monkeypatch.setenv("KVBM_TEST_DISK_FAULTS", str(tmp_path / "faults"))
    return Faults(tmp_path / "faults")


class Steps:
    """How long the engine's steps wait for something."""

    def __init__(self, engine):
        self._step = engine.engine.core.step
        self.longest_s = 0.0
        engine.engine.core.step = self

    def __call__(self):
        start_s = slept_s()
        try:
            return self._step()
        finally:
            self.longest_s = max(self.longest_s, slept_s() - start_s)


def wait_until(engine, condition, limit_s=30.0):
    """While the engine has something to do now and then, as the disk's state is looked at in its steps."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come to pass"
        engine.ask(prompt(99, 5), max_tokens=1)


def is_on(engine):
    return tier_of(engine.leader, Tier.DISK).disk.is_on


FAULTS = {
    "EIO": {"error": "EIO"},
    "no space": {"error": "ENOSPC"},
    "short": {"error": "short"},
    "read-only": {"error": "EROFS", "for": "write"},
    "wrong bytes": {"lie": True, "for": "read"},
    "slow": {"bytes_per_s": 2e6},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "wrong bytes" else pytest.mark.soak) for name in FAULTS]
)
def test_a_disk_that_fails_in_service_changes_no_output(tmp_path, expected, faults, name):
    """While blocks are written, and, when it has worked again, while they are read."""
    users, kind = 2, FAULTS[name].get("for", "both")
    wanted = expected[2][:users]
    with engine_on(tmp_path / "disk", host_blocks=24, num_blocks=24) as engine:
        counters = engine.counters
        for during in ("write", "read"):
            faults.order(**FAULTS[name])
            assert_same(conversations(engine, users=users, turns=3), wanted)
            if name != "slow" and kind in ("both", during):
                assert counters.disk.failed_blocks > 0
                assert counters.disk.io_errors + counters.disk.checksum_failures > 0
            faults.order()
            wait_until(engine, lambda: is_on(engine))
            before = counters.disk.onboard_blocks
            for _ in range(2):
                assert_same(conversations(engine, users=users, turns=3), wanted)
            assert counters.disk.onboard_blocks > before, "it is used again"
        rest(engine)
        check_leader(engine.leader)


@pytest.mark.parametrize("policy", ["auto", "always"])
def test_a_disk_that_hangs_holds_up_no_step_and_no_other_request(written, expected, faults, policy):
    with engine_on(written, policy=policy) as engine:
        other = engine.ask(prompt(2, LENGTH)).said()
        rest(engine)
        steps = Steps(engine)
        faults.order(hold=True)
        hung_s = time.monotonic()
        waiting = engine.submit(prompt(1, LENGTH))
        for _ in range(3):
            assert_same([engine.ask(prompt(2, LENGTH)).said()], [other])
        assert_same([waiting.wait().said()], [expected[1]])
        assert waiting.last.num_external_tokens < LOADABLE, "it was computed, at least in part"
        wait_until(engine, lambda: not is_on(engine))
        assert not engine.between_steps(lambda: engine.leader.has_pending()), "an engine can rest though its disk hangs"
        time.sleep(max(0.0, hung_s + 3.0 - time.monotonic()))
        assert steps.longest_s < LONGEST_STEP_S, "a step waited for the disk"
        faults.order()
        wait_until(engine, lambda: is_on(engine))
        assert engine.counters.disk.times_off >= 1
        engine.forget_g1()
        assert_same([engine.ask(prompt(1, LENGTH)).said()], [expected[1]])


def test_a_reset_while_the_disk_hangs_is_not_undone_by_a_kill(written, faults):
    """The tier stays off until the reset is durable; a kill before that leaves the old blocks, which are told in the
    log, and one after it leaves nothing."""
    with engine_on(written) as engine:
        faults.order(hold=True)
        assert not engine.engine.begin_reset().result(), "it is not durable yet"
        faults.order()
        wait_until(engine, lambda: is_on(engine))
        copy = cut_off(written, written.with_name("copy"))
        assert engine.ask(prompt(1, LENGTH)).last.num_external_tokens == 0
    with engine_on(copy) as engine:
        assert engine.leader.blocks()[Tier.DISK]["evictable"] == 0


# -- a disk process that is killed -------------------------------------------------------------------------------------


def kill_disk(engine):
    pid = tier_of(engine.leader, Tier.DISK).disk.process.pid
    assert pid > 0, "the disk process has not started"
    with suppress(ProcessLookupError):  # it has ended, and the engine does not know it yet
        os.kill(pid, signal.SIGKILL)
    return pid


def forget_memory(engine):
    """What is on disk stays."""
    engine.forget_g1()
    engine.between_steps(lambda: engine.leader.host.store.reset() or True)


def test_an_engine_whose_disk_process_is_killed_goes_on_and_has_its_disk_again(written, expected):
    with engine_on(written) as engine:
        pid = kill_disk(engine)
        wait_until(engine, lambda: engine.counters.disk.off)
        assert_same([engine.ask(prompt(1, LENGTH)).said()], [expected[1]])
        wait_until(engine, lambda: not engine.counters.disk.off)
        assert engine.counters.disk.restarts == 1
        assert not Path(f"/proc/{pid}").exists(), "nor is it a zombie"
        forget_memory(engine)
        answer = engine.ask(prompt(1, LENGTH))
        assert_same([answer.said()], [expected[1]])
        assert answer.last.num_external_tokens == LOADABLE
        assert engine.counters.disk.onboard_blocks == LOADABLE // 16
    with engine_on(written) as engine:
        assert engine.ask(prompt(1, LENGTH)).last.num_external_tokens == LOADABLE


def test_a_disk_process_killed_while_the_engine_rests_is_back_with_all_its_blocks(written, expected):
    with engine_on(written) as engine:
        pid = kill_disk(engine)
        # The next process is ready before a request asks for it.
        eventually(lambda: tier_of(engine.leader, Tier.DISK).disk._next is not None)
        assert not Path(f"/proc/{pid}").exists()
        wait_until(engine, lambda: engine.counters.disk.restarts and not engine.counters.disk.off)
        answer = engine.ask(prompt(1, LENGTH))
        assert answer.last.num_external_tokens == LOADABLE
        assert_same([answer.said()], [expected[1]])


def test_an_engine_that_rests_after_a_kill_has_its_disk_again_by_itself(written):
    with engine_on(written) as engine:
        forget_memory(engine)
        waiting = engine.submit(prompt(1, LENGTH), max_tokens=60)
        assert waiting.started.wait(240)
        kill_disk(engine)
        waiting.wait()
        eventually(lambda: engine.counters.disk.restarts and not engine.counters.disk.off, "it waits for a request")


@pytest.mark.parametrize(
    "to_disk", ["always", *(pytest.param(one, marks=pytest.mark.soak) for one in ("frequency", "on_evict"))]
)
def test_disk_processes_killed_under_load_change_no_output(tmp_path, expected, to_disk, monkeypatch):
    """Again and again, at any moment of reads and writes."""
    monkeypatch.setattr("kvbm.child.deadlines.FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr("kvbm.child.deadlines.LONGEST_PAUSE_S", 0.2)
    chosen, kills = random.Random(to_disk), 0
    with engine_on(tmp_path, host_blocks=24, num_blocks=32, to_disk=to_disk) as engine:
        steps = Steps(engine)
        assert_same(conversations(engine), expected[0])
        with ThreadPoolExecutor(1) as pool:
            for _ in range(3):
                talking = pool.submit(conversations, engine)
                while not talking.done():
                    if not engine.counters.disk.off:
                        kills += 1
                        kill_disk(engine)
                    time.sleep(chosen.uniform(0.02, 0.6))
                assert_same(talking.result(), expected[0])
        wait_until(engine, lambda: not engine.counters.disk.off)
        assert engine.counters.disk.restarts >= 2
        assert engine.counters.disk.checksum_failures == 0
        before = engine.counters.disk.onboard_blocks
        for _ in range(2):
            assert_same(conversations(engine), expected[0])
        assert engine.counters.disk.onboard_blocks > before, "it is used again"
        rest(engine)
        check_leader(engine.leader)
        assert steps.longest_s < LONGEST_STEP_S, "a step waited for a process"
    with engine_on(tmp_path, host_blocks=24, num_blocks=32) as engine:
        assert_same(conversations(engine), expected[0])
        assert engine.counters.disk.checksum_failures == 0


def test_a_reset_between_two_disk_processes_is_durable(written):
    with engine_on(written) as engine:
        kill_disk(engine)
        engine.engine.begin_reset().result()
        wait_until(engine, lambda: engine.counters.disk.restarts and not engine.counters.disk.off)
        assert engine.leader.blocks()[Tier.DISK]["evictable"] == 0
        assert engine.ask(prompt(1, LENGTH)).last.num_external_tokens == 0


# -- a disk process that is stopped ------------------------------------------------------------------------------------


@contextmanager
def stopped_disk(engine):
    pid = tier_of(engine.leader, Tier.DISK).disk.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def rows_of(directory):
    connection = sqlite3.connect(f"file:{instance_of(directory)}/index.sqlite?mode=ro", uri=True)
    try:
        return connection.execute("SELECT count(*) FROM blocks").fetchone()[0]
    finally:
        connection.close()


@pytest.mark.parametrize("policy", ["auto", "always"])
def test_a_stopped_disk_process_costs_one_deadline_and_no_block(written, expected, policy):
    rows = rows_of(written)
    with engine_on(written, policy=policy) as engine:
        steps = Steps(engine)
        with stopped_disk(engine):
            started_s = time.monotonic()
            waiting = [engine.submit(prompt(1, LENGTH)) for _ in range(3)]
            for request in waiting:
                assert_same([request.wait().said()], [expected[1]])
            assert time.monotonic() - started_s < 60, "2 s for all three, the rest is a busy machine"
            for seed in range(2, 5):
                forget_memory(engine)
                engine.ask(prompt(seed, LENGTH))
                assert_same([engine.ask(prompt(1, LENGTH)).said()], [expected[1]])
            eventually(lambda: not engine.between_steps(lambda: engine.leader.has_pending()), "it cannot rest")
        assert steps.longest_s < LONGEST_STEP_S, "a step waited for the process"
        wait_until(engine, lambda: not engine.counters.disk.off)
        assert engine.counters.disk.restarts == 0
        assert engine.counters.disk.checksum_failures == 0
        forget_memory(engine)
        answer = engine.ask(prompt(1, LENGTH))
        assert_same([answer.said()], [expected[1]])
        if policy == "always":  # otherwise the disk counts as slow
            assert answer.last.num_external_tokens == LOADABLE
        rest(engine)
        check_leader(engine.leader)
    assert rows_of(written) >= rows


def test_a_reset_does_not_wait_for_a_stopped_disk_process(written):
    with engine_on(written) as engine:
        steps = Steps(engine)
        with stopped_disk(engine):
            for limit_s in (5 * deadlines.ANSWER_LIMIT_S, deadlines.ANSWER_LIMIT_S, deadlines.ANSWER_LIMIT_S):
                started_s = time.monotonic()
                assert not engine.engine.begin_reset().result(), "it is not durable yet"
                assert time.monotonic() - started_s < limit_s
            assert engine.ask(prompt(1, LENGTH)).last.num_external_tokens == 0
        wait_until(engine, lambda: not engine.counters.disk.off)
        assert engine.counters.disk.onboard_blocks == 0
        assert steps.longest_s < LONGEST_STEP_S


@contextmanager
def started_without_disk(directory, monkeypatch):
    """An engine whose disk process has been stopped since before it opened its files, and the process."""
    start, stopped = service.start_child, []

    def start_and_stop(module, what):
        child, channel = start(module, what)
        os.kill(child.pid, signal.SIGSTOP)
        stopped.append(child.pid)
        return child, channel

    with monkeypatch.context() as patch:
        patch.setattr(deadlines, "START_LIMIT_S", 0.5)
        patch.setattr(service, "start_child", start_and_stop)
        with engine_on(directory) as engine:
            yield engine, stopped[0]


def test_an_engine_starts_without_a_disk_that_does_not_answer(written, monkeypatch, caplog):
    with started_without_disk(written, monkeypatch) as (engine, pid):
        assert "starting without the disk tier" in caplog.text
        engine.ask(prompt(2, LENGTH))
        engine.settle()
        engine.forget_g1()
        assert engine.ask(prompt(2, LENGTH)).last.num_external_tokens == LOADABLE, "host memory is used"
        assert engine.counters.disk.off == 1
        stopped_s = time.monotonic()
    assert time.monotonic() - stopped_s < LONGEST_STOP_S
    assert not Path(f"/proc/{pid}").exists()
    with engine_on(written) as engine:
        assert engine.ask(prompt(1, LENGTH)).last.num_external_tokens == LOADABLE


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_disk_that_answers_after_the_start_is_used(written, monkeypatch, expected, is_reset):
    """Unless the cache was reset meanwhile: what is on disk is forgotten first."""
    with started_without_disk(written, monkeypatch) as (engine, pid):
        if is_reset:
            assert not engine.engine.begin_reset().result(), "the blocks on disk are still there"
        os.kill(pid, signal.SIGCONT)
        wait_until(engine, lambda: not engine.counters.disk.off)
        answer = engine.ask(prompt(1, LENGTH))
        assert_same([answer.said()], [expected[1]])
        assert answer.last.num_external_tokens == (0 if is_reset else LOADABLE)
        engine.ask(prompt(2, LENGTH))
        rest(engine)
        assert engine.counters.disk.offload_blocks > 0
        check_leader(engine.leader)


def test_an_engine_ends_although_its_disk_process_is_stopped(written, expected, caplog):
    caplog.set_level("INFO")
    with engine_on(written, to_disk="frequency") as engine:
        engine.ask(prompt(1, LENGTH))
        engine.ask(prompt(2, LENGTH))
        rest(engine)
        pid = tier_of(engine.leader, Tier.DISK).disk.process.pid
        os.kill(pid, signal.SIGSTOP)
        started_s = time.monotonic()
    assert time.monotonic() - started_s < LONGEST_STOP_S
    assert "the disk confirmed 0 blocks of host memory before exit; 12 may not be there" in caplog.text
    assert not Path(f"/proc/{pid}").exists()
    with engine_on(written) as engine:
        assert_same([engine.ask(prompt(1, LENGTH)).said()], [expected[1]])
