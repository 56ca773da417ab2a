"""Two vLLM engines run at the same time on one real store; what serves them is killed and stopped under load.

`nox -s shared_vllm` runs this where Ceph or Mooncake is installed.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "shared"))

import servers
from engine_process import EngineProcess
from mooncake_pool import mooncake_pool
from mortal_stores import Ceph, Mooncake
from pairs import Faults
from traffic import assert_equal, conversations, take_turns
from vllm_server import BLOCK_TOKENS, CONNECTOR, HERE

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1200)]
PRESET = "vllm-25m"
ENGINE = {"dtype": "float32", "block_size": BLOCK_TOKENS, "max_model_len": 2048, "num_gpu_blocks_override": 40}
TALKS = conversations(38, turns=2, seed=18)  # 76 requests, some 300 blocks
HOST_BLOCKS = 40
DEADLINE_S = 120.0  # for all requests of a call of `answer`, which raises then


def with_mooncake():
    """The engines get a small environment: tell them where it is, if this process has it from elsewhere."""
    import mooncake

    path = (str(HERE), str(HERE.parent.parent), str(Path(mooncake.__file__).parent.parent))
    return {"PYTHONPATH": os.pathsep.join(path)}


@contextmanager
def store_of(kind, home):
    if kind == "mooncake":
        pytest.importorskip("mooncake.store", exc_type=ImportError)
        with mooncake_pool(home) as pool:
            store = Mooncake(pool)
            store.environment = with_mooncake()
            yield store
        return
    pytest.importorskip("boto3")
    try:
        with servers.running("ceph", home / "ceph") as server:
            yield Ceph(server)
    except servers.NotInstalled as missing:
        pytest.skip(f"needs {missing}")


@pytest.fixture(scope="module", params=["ceph", "mooncake"])
def store(request, tmp_path_factory):
    with store_of(request.param, tmp_path_factory.mktemp(request.param)) as store:
        yield store


class Engines:
    """Processes with an engine each; a killed one is replaced by `start`."""

    def __init__(self, store, directory):
        self._store, self._directory, self._made = store, directory, 0
        self._stack = ExitStack()

    def process(self):
        self._made += 1
        home = self._directory / str(self._made)
        home.mkdir()
        core = str(self._made % 2)
        environment = self._store.environment
        return self._stack.enter_context(EngineProcess(home, Faults(home).path, core=core, environment=environment))

    def start(self, url):
        engine = self.process()
        cache = {
            "tiers": {"host": {"blocks": HOST_BLOCKS}, "shared": {"url": url}},
            "offload": {"to_shared": "always"},
            "onboard": {"policy": "always"},
        }
        engine.start(PRESET, connector=CONNECTOR, cache=cache, **ENGINE)
        return engine

    def close(self):
        self._stack.close()


@pytest.fixture(scope="module")
def engines(store, tmp_path_factory):
    engines = Engines(store, tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()


@pytest.fixture(scope="module")
def truth(engines):
    """What an engine without any cache says."""
    engine = engines.process()
    engine.start(PRESET, enable_prefix_caching=False, **ENGINE)
    said = take_turns(engine.answer, TALKS)
    engine.stop()
    engine.kill()
    return said


def load(engines, truth, requests):
    """Ask all engines the same at the same time; they answer in time, and as the engine without a cache does."""

    def answered(engine):
        return dict(zip(requests, engine.answer(requests), strict=True))

    begun = time.monotonic()
    with ThreadPoolExecutor(len(engines)) as pool:
        for said in pool.map(answered, engines):
            assert_equal(said, {request: truth[request] for request in requests})
    return time.monotonic() - begun


def loaded(engine):
    return engine.totals().get("onboard_shared_blocks", 0)


def tell(what, engines, took):
    for engine in engines:
        totals = {k: v for k, v in engine.totals().items() if "shared" in k or "hits" in k}
        print(what, f"{took:.1f} s", totals, flush=True)


def assert_hits_return(engines, truth, requests, what, limit_s=120.0):
    begun, before = time.monotonic(), [loaded(engine) for engine in engines]
    while any(loaded(engine) <= old for engine, old in zip(engines, before, strict=True)):
        assert time.monotonic() - begun < limit_s, f"no hits {what}: {[engine.totals() for engine in engines]}"
        load(engines, truth, requests)
    tell(f"hits return {what}", engines, time.monotonic() - begun)


FAULTS = {Ceph: ["kill_gateway restart_gateway", "stop_gateway resume_gateway"]}
FAULTS[Mooncake] = ["stop_owner resume_owner", "kill_master restart_master"]


def test_two_engines_answer_as_one_without_a_cache_whatever_is_killed(store, engines, truth):
    requests = list(truth)
    first = engines.start(store.url)
    longest = max(requests, key=lambda request: len(request.prompt))
    load([first], truth, [longest])
    first.rest()
    time.sleep(2)  # its run is written
    second = engines.start(store.url)
    load([second], truth, [longest])
    assert second.totals()["hits"] > 0, "the first request hits what the other engine has computed"
    tell("first request", [second], 0)
    both = [first, second]
    took = load(both, truth, requests) + load(both, truth, requests)
    assert all(loaded(engine) > 0 for engine in both)
    tell("304 requests", both, took)
    for pair in FAULTS[type(store)]:
        fault, cure = pair.split()
        getattr(store, fault)()
        tell(fault, both, load(both, truth, requests[:24]))
        getattr(store, cure)()
        assert_hits_return(both, truth, requests[24:], f"after {cure}")
    with ThreadPoolExecutor(1) as pool:
        dying = pool.submit(lambda: second.answer(requests[:40]))
        time.sleep(1.0)  # under load
        second._process.kill()
        with pytest.raises((AssertionError, OSError)):
            dying.result()
    third = engines.start(store.url)
    load([first, third], truth, requests[:40])
    assert third.totals()["hits"] > 0
    tell("after kill -9 of an engine", [first, third], 0)
