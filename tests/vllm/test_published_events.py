"""What a router hears of a real vLLM over ZMQ agrees with what the engine has, in each tier and after a restart."""

import queue
import struct
import tempfile
import threading
import time
from random import Random

import pytest
import zmq
from routers import Dynamo, Llmd, decoded
from traffic import Request, conversations, take_turns, tokens
from vllm.config import KVEventsConfig
from vllm_server import BLOCK_TOKENS, CONNECTOR

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
PRESET = "vllm-25m"
ENGINE = {"dtype": "float32", "block_size": BLOCK_TOKENS, "max_model_len": 2048, "num_gpu_blocks_override": 30}
TALKS = conversations(5, turns=2, seed=8)
LONG = Request(tokens(Random("events"), 9 * BLOCK_TOKENS + 5), 8)
TIERS = {"gpu": "gpu", "host": "cpu", "disk": "storage"}  # Dynamo's names and llm-d's
QUIET_S = 1.0


class Subscriber:
    """Hears all events of the engines, in two routers."""

    def __init__(self, path):
        endpoint = f"ipc://{path}"
        self._batches = queue.Queue()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._receive, args=(endpoint,))
        self._thread.start()
        self.config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, topic="kv")
        self.begin_again()

    def _receive(self, endpoint):
        """A socket connects to the next engine only while somebody waits for it."""
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.subscribe("kv")
            socket.connect(endpoint)
            while not self._is_closed.is_set():
                if socket.poll(100):
                    self._batches.put(socket.recv_multipart())

    def begin_again(self):
        self.dynamo, self.llmd, self.expected = Dynamo(BLOCK_TOKENS), Llmd(), 0
        self.media = set()

    def hear(self):
        """Accept everything that has been sent."""
        while True:
            try:
                topic, number, payload = self._batches.get(timeout=QUIET_S)
            except queue.Empty:
                return
            assert topic == b"kv"
            assert struct.unpack(">q", number)[0] == self.expected, "no batch may be lost"
            self.expected += 1
            events = decoded(payload)
            self.media |= {(event.get("medium"), event.get("locality")) for event in events}
            self.dynamo.accept(events)
            self.llmd.accept(events)

    def close(self):
        self._is_closed.set()
        self._thread.join()


@pytest.fixture
def subscriber():
    with tempfile.TemporaryDirectory() as directory:  # the path of a socket is short
        subscriber = Subscriber(f"{directory}/events")
        yield subscriber
        subscriber.close()


def start(engine, directory, subscriber):
    tiers = {
        "host": {"blocks": 24},
        "disk": {"directory": str(directory / "disk"), "blocks": 60},
        "shared": {"url": f"file://{directory}/objects"},
    }
    cache = {"tiers": tiers, "offload": {"to_disk": "always", "to_shared": "always"}, "onboard": {"policy": "always"}}
    engine.start(PRESET, connector=CONNECTOR, cache=cache, kv_events_config=subscriber.config, **ENGINE)


def names_with_all_parents(router):
    """llm-d ignores a block whose parent it has never heard of. No request can use such a block either."""
    parents = {name: known[0] for tier in router.tiers.values() for name, known in tier.items()}
    usable = {None}
    while found := {name for name, parent in parents.items() if parent in usable} - usable:
        usable |= found
    return usable


def assert_agrees(engine, subscriber):
    deadline_s = time.monotonic() + 30
    while True:
        engine.rest()
        engine.step(40)  # announcements are spread over steps
        subscriber.hear()
        present = engine.present()
        heard = {tier: subscriber.dynamo.names(tier) for tier in TIERS}
        if heard == present:
            break
        missing = {tier: (len(present[tier] - heard[tier]), len(heard[tier] - present[tier])) for tier in TIERS}
        assert time.monotonic() < deadline_s, f"not heard, heard and gone: {missing}"
    usable = names_with_all_parents(subscriber.dynamo)
    for tier, other in TIERS.items():
        known = subscriber.llmd.names(other)
        assert known <= present[tier], tier
        assert present[tier] & usable <= known, tier
    assert not subscriber.dynamo.dropped
    return present


def test_routers_know_what_is_in_each_tier_also_after_a_restart(process, subscriber, tmp_path):
    engine, _ = process
    start(engine, tmp_path, subscriber)
    take_turns(engine.answer, TALKS)
    engine.answer([LONG])
    present = assert_agrees(engine, subscriber)
    assert len(present["host"]) == 24, "full, so that blocks were removed from it"
    assert present["disk"] - present["host"]
    assert sum(subscriber.dynamo.matched(LONG.prompt).values()) == 9
    assert subscriber.media == {("GPU", None), ("CPU", "LOCAL"), ("STORAGE", "LOCAL")}, "nothing of the shared tier"

    engine.forget_g1()
    engine.answer([LONG])  # comes back from host memory or disk
    assert_agrees(engine, subscriber)
    engine.stop()

    subscriber.begin_again()  # a router that knows nothing
    start(engine, tmp_path, subscriber)
    engine.answer([Request(LONG.prompt[:300], 2)])
    found = assert_agrees(engine, subscriber)
    assert len(found["disk"]) >= len(present["disk"]) - 2, "what the engine before has left"
    assert sum(subscriber.dynamo.matched(LONG.prompt).values()) == 9
    engine.forget()
    emptied = assert_agrees(engine, subscriber)
    assert not emptied["host"]
    engine.stop()
