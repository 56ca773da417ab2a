"""Two embedded engines on one real store, both under load: equal answers, loads from the store, and every fault of the
store ends. `nox -s shared` runs this."""

import os
import signal
import sys
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from bookkeeping import tier_of

from kvbm.types import Tier

sys.path.append(str(Path(__file__).parent.parent / "shared"))

import servers
from kvbm_engine import assert_same, prompt, running
from mooncake_pool import mooncake_pool, wait_until
from mortal_stores import Ceph, Mooncake

from kvbm.tiers.shared.keys import KeySpace
from kvbm.tiers.shared.object_store import Outgoing
from kvbm.tiers.shared.orders import Outcome
from kvbm.tiers.shared.stores.open import open_store

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

SIZE = {"num_blocks": 100, "max_model_len": 1024}
HOST_BLOCKS = 120  # of 16 tokens, for prompts of some 2000 blocks together
PROMPTS = 75
TOGETHER = 4  # requests in each engine
DEADLINE_S = 30.0
RECOVERY_S = 90.0


class Directory:
    def __init__(self, url):
        self.url = url


@pytest.fixture
def store(request, tmp_path, monkeypatch):
    with STORES[request.param](tmp_path, monkeypatch) as store:
        yield store


@contextmanager
def directory(home, monkeypatch):
    yield Directory(f"file://{home}/objects")


@contextmanager
def ceph(home, monkeypatch):
    try:
        with servers.running("ceph", home / "ceph") as server:
            for name, value in server.environment.items():
                monkeypatch.setenv(name, value)
            yield Ceph(server)
    except servers.NotInstalled as missing:
        pytest.skip(f"needs {missing}")


@contextmanager
def mooncake(home, monkeypatch):
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    with mooncake_pool(home) as pool:
        await_owner(pool.url)
        yield Mooncake(pool)


STORES = {"directory": directory, "ceph": ceph, "mooncake": mooncake}


def await_owner(url):
    store = open_store(url, 1, KeySpace(bytes(16)), {}, writes=False)
    wait_until(lambda: store.put([Outgoing("first", [b"x"])])[0].outcome is Outcome.GOOD, "an owner is there")
    store.close()


def on(store, **shared):
    always = {"offload": {"to_shared": "always"}, "onboard": {"policy": "always"}}
    return running(host_blocks=HOST_BLOCKS, shared={"url": store.url, "drain_s": 1, **shared}, **SIZE, **always)


def prompts_of(start, count=PROMPTS):
    """A third begins with the same 260 tokens."""
    return [prompt(seed, 300 + 61 * seed % 340, shared=260 * (seed % 3 == 0)) for seed in range(start, start + count)]


@cache
def truth():
    """What an engine without the block manager and without a cache says."""
    said = []
    with running(**SIZE, prefix_caching=False) as plain:
        for one in prompts_of(0):
            said.append(plain.ask(one).said())
    return said


def load(engines, numbers, what):
    """Ask all engines the same, at the same time; returns the slowest answer in seconds."""
    slowest, prompts = 0.0, prompts_of(0)
    for first in range(0, len(numbers), TOGETHER):
        part = numbers[first : first + TOGETHER]
        begun = time.monotonic()
        asked = [(number, engine.submit(prompts[number])) for number in part for engine in engines]
        for number, answer in asked:
            left_s = max(0.0, begun + DEADLINE_S - time.monotonic())
            assert answer.done.wait(left_s), f"no answer in {DEADLINE_S} s to prompt {number}, {what}"
            assert_same([answer.said()], [truth()[number]])
        slowest = max(slowest, time.monotonic() - begun)
    return slowest


def fetched(engine):
    return engine.counters.shared.fetched_blocks


def tell(what, engines, **more):
    """For `pytest -s`."""
    names = ("offload_blocks", "fetched_blocks", "failed_blocks", "bad_objects", "failed_requests", "saved_writes")
    names += ("times_off", "restarts", "off")
    for engine in engines:
        print(what, {name: getattr(engine.counters.shared, name) for name in names}, more, flush=True)


@pytest.mark.parametrize("store", STORES, indirect=True)
def test_two_engines_answer_300_requests_as_one_without_a_cache(store):
    begun = time.monotonic()
    everything = list(range(PROMPTS))
    truth()
    with on(store) as first:
        load([first], everything[:1], "first")
        first.settle()
        with on(store) as second:
            load([second], everything[:1], "the same prompt in the second engine")
            assert fetched(second) > 0, "the first request hits what the other engine has computed"
            slowest = max(load([first, second], everything, f"round {number}") for number in range(2))
            tell(f"{store.url[:9]} 300 requests", [first, second], slowest=slowest, took=time.monotonic() - begun)
            for engine in (first, second):
                assert fetched(engine) > PROMPTS, "more blocks than one per prompt"
                assert engine.counters.shared.bad_objects == engine.counters.shared.failed_requests == 0
                assert not engine.counters.shared.off


FAULTS = [
    ("ceph", "kill_gateway", "restart_gateway"),
    ("ceph", "stop_gateway", "resume_gateway"),
    ("mooncake", "kill_master", "restart_master"),
    ("mooncake", "kill_owner", "restart_owner"),
    ("mooncake", "stop_owner", "resume_owner"),
]


@pytest.mark.parametrize(("store", "fault", "cure"), FAULTS, indirect=["store"])
def test_hits_return_after_a_fault_under_load(store, fault, cure):
    everything = list(range(PROMPTS))
    with on(store) as first, on(store) as second:
        engines = [first, second]
        load(engines, everything[:30], "before the fault")
        getattr(store, fault)()
        slowest = load(engines, everything[:30], f"during {fault}")
        tell(f"{fault}", engines, slowest=slowest)
        getattr(store, cure)()
        assert_hits_return(engines, f"after {cure}")


def assert_hits_return(engines, what):
    begun, before = time.monotonic(), [fetched(engine) for engine in engines]
    numbers = list(range(30, PROMPTS))
    while any(fetched(engine) == old for engine, old in zip(engines, before, strict=True)):
        if time.monotonic() - begun > RECOVERY_S:
            tell(f"FAILED {what}", engines)
            raise AssertionError(f"no hits in {RECOVERY_S} s, {what}")
        load(engines, numbers, what)
    tell(what, engines, recovery=time.monotonic() - begun)


@pytest.mark.parametrize("store", STORES, indirect=True)
def test_hits_return_after_the_process_of_the_shared_tier_was_killed(store):
    with on(store) as first, on(store) as second:
        engines = [first, second]
        load(engines, list(range(30)), "before")
        for engine in engines:
            os.kill(tier_of(engine.leader, Tier.SHARED).client.process.pid, signal.SIGKILL)
        load(engines, list(range(30)), "while the process is restarted")
        assert_hits_return(engines, "after the restart of the process")
        assert all(engine.counters.shared.restarts == 1 for engine in engines)


@pytest.mark.parametrize("store", STORES, indirect=True)
def test_an_engine_with_another_secret_loads_nothing(store, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name * 64)
        (tmp_path / name).chmod(0o600)
    for protection in ("hmac", "aes-gcm"):
        with on(store, protection=protection, key_file=str(tmp_path / "a")) as first:
            load([first], list(range(12)), "first secret")
            first.settle()
            with on(store, protection=protection, key_file=str(tmp_path / "b")) as second:
                load([second], list(range(12)), "other secret")
                tell(protection, [first, second])
                assert fetched(second) == 0
            with on(store, protection=protection, key_file=str(tmp_path / "a")) as third:
                load([third], list(range(12)), "same secret")
                assert fetched(third) > 0
