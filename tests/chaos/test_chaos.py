"""Chaos: a cache that is damaged at rest, disturbed in service, or flipped bit by bit never changes an answer.

An engine runs in a process of its own, with a disk tier on a real file system. Every answer is compared with an engine
without cache, tokens and log-probabilities. A case fails on a wrong answer, a late one, or a dead engine; and if the
disturbance did not happen, or the cache was not used.

Each case is drawn from KVBM_CHAOS_SEED and its number, and `pytest -m '' 'tests/chaos/test_chaos.py::NAME[NUMBER-...]'`
repeats it. Plain runs have a few cases; `-m soak` has all. KVBM_CHAOS_MINUTES is the length of the flips (30).
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from chaos_damages import DAMAGES, Caches, Damage, cases, flip, instance_of, spoiled
from chaos_engine import CALL_LIMIT_S, EngineProcess, Refused
from chaos_faults import FAULTS, Fault, Stage
from chaos_traffic import ANSWER_TOKENS, DEADLINE_S, LOADED_S, Load, Question, ask_all, questions
from kvbm_engine import prompt

SEED = os.environ.get("KVBM_CHAOS_SEED", "1")
DAMAGE_CASES = 2000
FAULT_CASES = 2 * len(FAULTS)
POLICIES = ("always", "auto")
SHORT_FAULTS = ("disk_killed", "disk_paused_briefly", "eio_at_calls")
MINUTES = float(os.environ.get("KVBM_CHAOS_MINUTES", "30"))
SHORT_MINUTES = 0.05
SHORTEST_SEGMENT_S, SEGMENT_S = 1.5, 20.0  # under flips, until the engine is restarted
NEW = 4
AUTO_TOKENS_PER_S = 600.0  # of the model; so slow that blocks are worth reading, also on a busy machine
HOST_BLOCKS = 24
DISK_BLOCKS = 112
LIMIT_S = 8.0
WARM_LIMIT_S = 20.0


def options(directory: Path, *, policy: str = "always", to_disk: str = "always", **more) -> dict:
    disk = {"directory": str(directory), "blocks": DISK_BLOCKS}
    defaults = {
        "host_blocks": HOST_BLOCKS,
        "disk": disk,
        "offload": {"to_disk": to_disk},
        "onboard": {"policy": policy},
        "tokens_per_s": AUTO_TOKENS_PER_S if policy == "auto" else None,
    }
    return defaults | more


@contextmanager
def repeatable(request):
    """A failure names the command that repeats its case."""
    try:
        yield
    except BaseException as error:
        variables = {name: value for name, value in os.environ.items() if name.startswith("KVBM_CHAOS_")}
        setting = " ".join(
            f"{name}={shlex.quote(value)}" for name, value in ({"KVBM_CHAOS_SEED": SEED} | variables).items()
        )
        error.add_note(f"repeat: {setting} pytest -n 0 -m '' {shlex.quote(request.node.nodeid)}")
        raise


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> list[Question]:
    return questions(tmp_path_factory.mktemp("plain") / "log")


# -- at rest -----------------------------------------------------------------------------------------------------------


def split(asked: list[Question]) -> tuple[list[Question], list[Question]]:
    """Questions whose blocks are in `Caches`, and questions of other users."""
    return asked[:-NEW], asked[-NEW:]


@pytest.fixture(scope="module")
def caches(tmp_path_factory, asked) -> Caches:
    home = tmp_path_factory.mktemp("caches")
    ended, killed, older, other = (home / name for name in ("ended", "killed", "older", "other"))
    with EngineProcess(home / "log", **options(ended)) as engine:
        for seed in range(500, 505):  # their slots are used again later
            engine.submit(prompt(seed, 200), ANSWER_TOKENS).result(CALL_LIMIT_S)
        written, _ = split(asked)
        ask_all(engine, written[: len(written) // 2])
        engine.call("settle")
        shutil.copytree(ended, older)
        ask_all(engine, written)
        engine.call("settle")
        shutil.copytree(ended, killed)
        engine.stop()
    with EngineProcess(home / "log", **options(other, seed=1)) as engine:
        for question in asked:
            engine.submit(question.prompt, ANSWER_TOKENS).result(CALL_LIMIT_S)
        engine.stop()
    arena_bytes = (instance_of(ended) / "arena").stat().st_size
    return Caches(ended, killed, older, other, arena_bytes // DISK_BLOCKS // 4096 * 4096)


@pytest.mark.slow
@pytest.mark.parametrize("number", list(cases([*DAMAGES.values()], DAMAGE_CASES)))
def test_damage_at_rest_changes_no_answer(request, tmp_path, caches, asked, number):
    with repeatable(request):
        damage = list(DAMAGES.values())[number % len(DAMAGES)]
        start_on_damage(damage, random.Random(f"{SEED}/{number}"), tmp_path, caches, asked)


def start_on_damage(damage: Damage, chosen: random.Random, home: Path, caches: Caches, asked: list[Question]) -> None:
    policy = damage.policy or chosen.choice(["always", "always", "auto"])
    directory, log = home / "disk", home / "log"
    with spoiled(damage, caches, directory, chosen) as site:
        written, new = split(asked)
        users = [*chosen.sample(written, 4), *chosen.sample(new, 2)]
        try:
            with EngineProcess(log, **options(directory, policy=policy, is_plain_user=damage.is_plain_user)) as engine:
                ask_all(engine, users, limit_s=LIMIT_S)
                engine.call("settle")
                from_disk = engine.counters()["onboard_disk_blocks"]
                assert from_disk or policy == "auto" or not damage.keeps, "nothing was found on disk"
                engine.call("forget_g1")
                assert ask_all(engine, users[-2:], limit_s=LIMIT_S), "nothing was found in host memory"
                engine.call("settle")
                engine.call("forget_memory")
                from_disk = engine.counters()["onboard_disk_blocks"]
                ask_all(engine, users[-2:], limit_s=LIMIT_S)
                is_used = engine.counters()["onboard_disk_blocks"] > from_disk
                assert is_used or policy == "auto" or damage.area == "names", "new blocks are not found on disk"
                engine.call("check")
                engine.stop()
        except Refused as refusal:
            if not site.may_refuse or str(directory) not in str(refusal):
                raise


# -- in service --------------------------------------------------------------------------------------------------------


def fault_cases():
    for number in range(FAULT_CASES):
        name = list(FAULTS)[number % len(FAULTS)]
        is_short = number < len(FAULTS) and name in SHORT_FAULTS
        yield pytest.param(number, id=f"{number}-{name}", marks=() if is_short else pytest.mark.soak)


@pytest.mark.slow
@pytest.mark.parametrize("number", list(fault_cases()))
def test_fault_in_service_changes_no_answer(request, tmp_path, caches, asked, number):
    with repeatable(request):
        fault, policy = list(FAULTS.values())[number % len(FAULTS)], POLICIES[number // len(FAULTS) % 2]
        disturb_and_restart(fault, policy, random.Random(f"{SEED}/{number}"), tmp_path, caches, asked)


def disturb_and_restart(
    fault: Fault, policy: str, chosen: random.Random, home: Path, caches: Caches, asked: list[Question]
) -> None:
    """A failure is one of the first engine, under disturbances, or of the next one in its directory."""
    directory, log, orders = home / "disk", home / "log", home / "orders"
    shutil.copytree(caches.ended, directory)
    orders.write_text("{}")
    policies = {"policy": policy, "to_disk": chosen.choice(["always", "frequency", "on_evict"])}
    host_blocks = chosen.choice([HOST_BLOCKS, HOST_BLOCKS, 8, 60])
    clients = chosen.choice([1, 2, 4, 8])
    print(fault.name, policies, host_blocks, clients)
    with EngineProcess(
        log, **options(directory, host_blocks=host_blocks, fault_file=str(orders), **policies, **fault.options)
    ) as engine:
        undisturbed = Load(engine, asked, clients, "undisturbed", limit_s=30.0).start()
        undisturbed.run_for(1.0)
        end_s = time.monotonic() + WARM_LIMIT_S
        while not undisturbed.external_tokens and time.monotonic() < end_s:
            undisturbed.run_for(0.2)
        undisturbed.finish()
        assert undisturbed.external_tokens, "the cache is not used before the disturbance"
        limit_s = DEADLINE_S + LOADED_S + 2 * undisturbed.longest_s
        load = Load(engine, asked, clients, "disturbed", limit_s, fault.is_aborting, may_die=fault.kills).start()
        fault.disturb(Stage(engine, load, instance_of(directory), orders, chosen))
        load.run_for(0.5)
        load.finish()
        print(f"longest {undisturbed.longest_s:.2f} s, disturbed {load.longest_s:.2f} s of {load.limit_s:.2f} s")
        if not fault.kills:
            engine.call("check")
            engine.stop()
    with EngineProcess(log, **options(directory)) as engine:
        assert_disk_is_used(engine, chosen.sample(asked, 6))
        engine.stop()
    shutil.rmtree(directory)


def assert_disk_is_used(engine: EngineProcess, users: list[Question]) -> None:
    ask_all(engine, users, limit_s=LIMIT_S)
    engine.call("settle")
    engine.call("forget_memory")
    before = engine.counters()["onboard_disk_blocks"]
    ask_all(engine, users, limit_s=LIMIT_S)
    assert engine.counters()["onboard_disk_blocks"] > before, "the disk is not used again"


# -- under flips -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(120 * MINUTES)
@pytest.mark.parametrize(
    "minutes", [SHORT_MINUTES, pytest.param(MINUTES, marks=pytest.mark.soak)], ids=["seconds", "minutes"]
)
def test_flipping_bits_change_no_answer(request, tmp_path, caches, asked, minutes):
    with repeatable(request):
        chosen = random.Random(f"{SEED}/{minutes}")
        shutil.copytree(caches.ended, tmp_path / "disk")
        end_s, counted = time.monotonic() + 60 * minutes, {}
        while (left_s := end_s - time.monotonic()) > 0 or (left_s > -WARM_LIMIT_S and not has_happened(counted)):
            segment_s = min(max(left_s, SHORTEST_SEGMENT_S), SEGMENT_S)
            under_flips(segment_s, chosen, tmp_path, asked, counted)
        print(counted)
        assert has_happened(counted), "no flipped block was read, or no other block of the disk"


def has_happened(counted: dict[str, int]) -> bool:
    return bool(counted["flips"] and counted["onboard_disk_blocks"] and counted["disk_checksum_failures"])


def under_flips(
    seconds: float, chosen: random.Random, home: Path, asked: list[Question], counted: dict[str, int]
) -> None:
    """One life of an engine, from start to its end by `stop` or SIGKILL, while a thread flips bits of its files."""
    flipper = Flipper(home / "disk", chosen.choice([5.0, 20.0, 50.0]), chosen.random())
    policies = {
        "policy": chosen.choice(["always", "always", "auto"]),
        "to_disk": chosen.choice(["always", "frequency"]),
    }
    with flipper, EngineProcess(home / "log", **options(home / "disk", **policies)) as engine:
        load = Load(engine, asked, chosen.choice([1, 3, 6]), chosen.random(), limit_s=LIMIT_S).start()
        load.run_for(seconds)
        load.finish()
        for name, count in {**engine.counters(), "flips": flipper.flips, "answers": load.answers, "engines": 1}.items():
            counted[name] = counted.get(name, 0) + count
        engine.call("check")
        if chosen.random() < 0.7:
            engine.stop()


class Flipper:
    """A thread that flips random bits: most in the arena, some in the index, its log, the superblock and the rates."""

    def __init__(self, directory: Path, per_s: float, seed: float) -> None:
        self.flips = 0
        self._directory = directory
        self._pause_s = 1 / per_s
        self._random = random.Random(seed)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Flipper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._pause_s):
            (name,) = self._random.choices(list(WEIGHTS), WEIGHTS.values())
            for path in self._directory.rglob(name):
                with suppress(FileNotFoundError, ValueError):  # it goes away meanwhile, or is empty
                    flip(path, 1, self._random)
                    self.flips += 1


WEIGHTS = {"arena": 93, "index.sqlite": 3, "index.sqlite-wal": 3, "superblock": 0.5, "rates.json": 0.5}  # of flips
