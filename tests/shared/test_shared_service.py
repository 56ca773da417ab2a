"""The process of the shared tier: the same runs through its client, and what happens when either process ends."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import servers
from conftest import fresh_place, set_environment
from fault_proxy import FaultProxy
from storage_rig import HASH_BYTES, NAMESPACE, make_hash, pattern

from kvbm.child import deadlines, service
from kvbm.child.channel import Channel
from kvbm.child.child import Opening
from kvbm.child.parent import is_gone
from kvbm.errors import EnvironmentProblem
from kvbm.host.layout import BlockLayout
from kvbm.host.region import Region
from kvbm.host.segment import Segment
from kvbm.tiers.shared.orders import Get, Outcome, Probe, Put
from kvbm.tiers.shared.presence import DIGEST
from kvbm.tiers.shared.service.client import BlockShape, SharedClient
from kvbm.tiers.shared.settings import SharedSettings
from kvbm.types import SlotState

SLOTS, BLOCK_BYTES, GENERATION = 32, 8192, 7
LIMIT_S = 20.0
ENGINE = """
import os, sys
from test_shared_service import opened
with opened(sys.argv[1]) as rig:
    print(rig.client.process.pid, flush=True)
    os.read(0, 1)
"""


class ClientRig:
    """A client, the host memory of one rank, and its tickets. An object holds one block."""

    def __init__(self, client, region):
        self.client = client
        self.region = region
        self.shard = region.shards[0]
        self.last_ticket = 0
        self.ended = {}

    def submit(self, kind, *arguments):
        self.last_ticket += 1
        self.client.submit(kind(self.last_ticket, *arguments))
        return self.last_ticket

    def start_put(self, number, slot=0):
        self.shard[slot, :BLOCK_BYTES] = pattern(make_hash(number), BLOCK_BYTES)
        self.region.write_slots([slot], GENERATION, SlotState.READY)
        return self.submit(Put, (make_hash(number),), (slot,), (GENERATION,))

    def start_get(self, number, slot):
        return self.submit(Get, (make_hash(number),), (slot,))

    def put(self, number):
        return self.wait(self.start_put(number))

    def get(self, number, slot=1):
        return self.wait(self.start_get(number, slot))

    def holds(self, number, slot=1):
        return bool(np.array_equal(self.shard[slot, :BLOCK_BYTES], pattern(make_hash(number), BLOCK_BYTES)))

    def poll(self):
        for result in self.client.poll():
            assert result.ticket not in self.ended, f"ticket {result.ticket} ended twice"
            self.ended[result.ticket] = result

    def await_that(self, is_so):
        deadline_s = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < deadline_s, f"not within {LIMIT_S} s"
            self.client.process.wait(0.02)
            self.poll()

    def wait(self, ticket):
        self.await_that(lambda: ticket in self.ended)
        return self.ended[ticket]


NAME = NAMESPACE, {"model": "a model"}


@contextmanager
def opened(url, *, named=None, **options):
    """A client. With `named`, it starts its process when that future is done."""
    layout = BlockLayout.block_contiguous(block_count=1, block_bytes=BLOCK_BYTES)
    segment = Segment.create(rank=0, layout=layout, slot_count=SLOTS)
    region = Region.map([segment.info])
    try:
        settings = SharedSettings(url, **options)
        if named is None:
            named = Future()
            named.set_result(NAME)
        client = SharedClient(named, settings, [segment.info], BlockShape(HASH_BYTES, 16, has_extents=False))
        client.await_opening()
        try:
            yield ClientRig(client, region)
        finally:
            client.close(1.0)
    finally:
        region.close()
        segment.close()


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/objects"


def test_runs_come_back_through_the_process(url):
    with opened(url) as rig:
        assert rig.put(0).outcome is Outcome.GOOD
        assert rig.get(0).outcome is Outcome.GOOD
        assert rig.holds(0)
        assert rig.wait(rig.submit(Probe, [make_hash(0), make_hash(1)])).present == 1
        assert rig.client.counters.probes == 1


def test_a_store_whose_blocks_get_their_name_later_has_the_runs_of_that_name(url):
    with opened(url) as rig:
        rig.put(0)
    named = Future()
    with opened(url, named=named) as rig:
        rig.poll()
        assert (rig.client.is_on, rig.client.extent_blocks, rig.client.process.pid) == (False, 0, 0)
        named.set_result(NAME)
        rig.await_that(lambda: rig.client.is_on)
        assert (rig.client.extent_blocks, rig.client.restarts, rig.client.counters.times_off) == (1, 0, 0)
        assert rig.get(0).outcome is Outcome.GOOD
        assert rig.holds(0)
        pid = rig.client.process.pid
        os.kill(pid, signal.SIGKILL)
        rig.await_that(lambda: rig.client.restarts == 1 and rig.client.is_on)
        assert rig.get(0).outcome is Outcome.GOOD


@pytest.mark.parametrize("name", [None, "never"])
def test_a_store_whose_blocks_get_no_name_stays_off_and_ends_at_once(url, name):
    named = Future()
    with opened(url, named=named) as rig:
        if name is None:
            named.set_result(None)
            rig.client._thread.join(LIMIT_S)
        rig.poll()
        assert not rig.client.is_on
    rig.client._thread.join(LIMIT_S)
    assert not rig.client._thread.is_alive()


def test_a_listing_that_comes_with_the_answer_to_the_start_is_not_lost(url, monkeypatch):
    def wait_long(channel, *arguments, **options):
        wait(channel, *arguments, **options)
        time.sleep(1.0)  # as on a busy machine: the listing comes meanwhile

    with opened(url) as rig:
        assert rig.put(0).outcome is Outcome.GOOD
    wait = Channel.wait
    monkeypatch.setattr(Channel, "wait", wait_long)
    with opened(url) as rig:
        monkeypatch.setattr(Channel, "wait", wait)
        rig.poll()
        listing = rig.client.take_listing()
    assert listing is not None
    assert len(listing.names) == DIGEST.itemsize


def test_the_first_listing_comes_with_the_start(url):
    """And not when the idle process looks around next. One of three, because the machine may be busy."""
    with opened(url) as rig:
        rig.put(0)
    delays_s = []
    for _ in range(3):
        with opened(url) as rig:
            began_s = time.monotonic()
            while (listing := rig.client.take_listing()) is None:
                rig.client.process.wait(deadlines.IDLE_INTERVAL_S)
                rig.poll()
            delays_s.append(time.monotonic() - began_s)
        assert len(listing.names) == DIGEST.itemsize
    assert min(delays_s) < deadlines.IDLE_INTERVAL_S / 2


def test_an_engine_that_does_nothing_gets_one_listing_and_not_all_of_them(url):
    with opened(url, list_interval_s=0.01) as rig:
        rig.put(0)
        time.sleep(1.0)
        rig.poll()
        found = 0
        while rig.client.take_listing() is not None:
            found += 1
        assert found == 1
        rig.await_that(lambda: rig.client.take_listing() is not None)


@pytest.mark.parametrize("is_named_later", [False, True])
def test_a_process_that_starts_again_with_another_secret_stays_off(url, tmp_path, caplog, is_named_later):
    key_file = tmp_path / "key"
    key_file.write_text("a" * 32)
    named = Future() if is_named_later else None
    with opened(url, named=named, protection="hmac", key_file=key_file) as rig:
        if named is not None:
            named.set_result(NAME)
            rig.await_that(lambda: rig.client.is_on)
        rig.put(0)
        key_file.write_text("b" * 32)
        os.kill(rig.client.process.pid, signal.SIGKILL)
        rig.await_that(lambda: "secret" in caplog.text)
        assert not rig.client.is_on
        key_file.write_text("a" * 32)
        rig.await_that(lambda: rig.client.is_on)
        assert rig.get(0).outcome is Outcome.GOOD


def test_a_killed_process_fails_its_orders_once_and_is_replaced(server_of, monkeypatch):
    server = server_of("moto")
    with FaultProxy(server.port) as proxy:
        set_environment(monkeypatch, server.through(proxy.port))
        with opened(fresh_place(server)) as rig:
            rig.put(0)
            assert rig.put(0).outcome is Outcome.EXISTS
            proxy.fault = "hang"
            tickets = [rig.start_get(0, slot) for slot in range(1, 9)]
            os.kill(rig.client.process.pid, signal.SIGKILL)
            results = [rig.wait(ticket) for ticket in tickets]
            assert {result.outcome for result in results} == {Outcome.FAILED}
            assert not any(result.outcome is Outcome.GOOD for result in results)
            assert not rig.client.is_on
            assert rig.get(0).outcome is Outcome.FAILED  # at once, without a process
            proxy.fault = None
            rig.await_that(lambda: rig.client.is_on)
            assert rig.client.restarts == 1
            assert rig.get(0).outcome is Outcome.GOOD
            assert rig.holds(0)
            assert rig.client.counters.writes_saved == 1  # of both processes


def test_a_stopped_process_keeps_its_orders_and_is_used_again_when_it_continues(url):
    with opened(url) as rig:
        rig.put(0)
        pid = rig.client.process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            ticket = rig.start_get(0, 1)
            began_s = time.monotonic()
            rig.await_that(lambda: not rig.client.is_on)
            assert time.monotonic() - began_s < deadlines.ANSWER_LIMIT_S + 1
            assert ticket not in rig.ended  # it may still write into the slot
        finally:
            os.kill(pid, signal.SIGCONT)
        assert rig.wait(ticket).outcome is Outcome.GOOD
        assert rig.holds(0)
        assert rig.client.is_on
        assert (rig.client.process.pid, rig.client.restarts) == (pid, 0)


def test_the_process_exits_with_a_killed_engine(url):
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": paths}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", ENGINE, url], env=environment, **pipes) as engine:
        pid = int(engine.stdout.readline())
        engine.kill()
    deadline_s = time.monotonic() + LIMIT_S
    while is_running(pid):
        assert time.monotonic() < deadline_s, "the process outlives its engine"
        time.sleep(0.02)


def is_running(pid):
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_store_that_does_not_answer_at_the_start_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{servers.free_port()}")
    with pytest.raises(EnvironmentProblem, match="s3://kv-cache/team"), opened("s3://kv-cache/team"):
        pass


@pytest.fixture
def stopped(monkeypatch):
    """Processes that are stopped before they open their store."""
    start, pids = service.start_child, []

    def start_and_stop(module, what):
        child, channel = start(module, what)
        os.kill(child.pid, signal.SIGSTOP)
        pids.append(child.pid)
        return child, channel

    monkeypatch.setattr(deadlines, "START_LIMIT_S", 0.5)
    monkeypatch.setattr(service, "start_child", start_and_stop)
    return pids


def test_an_engine_starts_without_a_store_that_hangs_and_uses_it_when_it_answers(url, stopped, caplog):
    with opened(url) as rig:
        assert f"{url} does not answer: starting without the shared tier" in caplog.text
        assert not rig.client.is_on
        os.kill(stopped[0], signal.SIGCONT)
        rig.await_that(lambda: rig.client.is_on)
        assert rig.put(1).outcome is Outcome.GOOD
        assert rig.client.restarts == 0


def test_an_engine_ends_at_once_although_its_store_has_not_answered_since_the_start(url, stopped):
    with opened(url):
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 5.0
    assert not is_running(stopped[0])


def test_a_process_whose_read_never_ends_is_replaced(url, monkeypatch):
    """A stopped process stands for one with a call that never returns."""
    monkeypatch.setattr(deadlines, "REPLACE_AFTER_S", 1.0)
    with opened(url) as rig:
        rig.put(0)
        pid = rig.client.process.pid
        os.kill(pid, signal.SIGSTOP)
        receive = rig.client.process._channel.receive
        heartbeats = lambda: receive() if is_gone(pid) else [Opening()]  # noqa: E731
        monkeypatch.setattr(rig.client.process._channel, "receive", heartbeats)
        assert rig.wait(rig.start_get(0, 1)).outcome is Outcome.FAILED
        assert not is_running(pid)
        rig.await_that(lambda: rig.client.is_on)
        assert rig.get(0).outcome is Outcome.GOOD


def test_credentials_are_neither_in_arguments_nor_in_messages_nor_in_the_log(server_of, monkeypatch, caplog):
    server = server_of("moto")
    set_environment(monkeypatch, server.environment)
    caplog.set_level("DEBUG")
    with opened(fresh_place(server)) as rig:
        rig.put(0)
        command = Path(f"/proc/{rig.client.process.pid}/cmdline").read_bytes()
    with pytest.raises(EnvironmentProblem) as caught, opened("s3://no-such-bucket/team"):
        pass
    shown = f"{command!r} {caught.value!r} {caught.value.message} {caught.value.hint} {caplog.text}"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert server.environment[name] not in shown
