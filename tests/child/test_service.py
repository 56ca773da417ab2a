"""The leader's end of a child process: what an answer, silence, an end and garbage mean, for all services."""

import os
import signal
import socket
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from waiting import eventually, is_gone

sys.path.insert(0, str(Path(__file__).parent))

from fake_messages import Answer, Ask, FakeCounters, FakeOpened, OpenFake

from kvbm.child import deadlines
from kvbm.child.channel import HEADER
from kvbm.child.service import ChildService, ServiceProcess
from kvbm.errors import EnvironmentProblem
from kvbm.host.threads import allowed_cores

HANGS_S = 120.0  # no test is slower than that on a machine that works


class FakeProcess(ServiceProcess):
    tier, module = "fake", "fake_service"

    def __init__(self):
        super().__init__(FakeCounters(), lambda order, why: Answer(order.ticket, False))

    def _handle(self, message):
        self._is_open |= isinstance(message, FakeOpened)
        super()._handle(message)


class FakeService(ChildService):
    def _open_next(self):
        return started()


def started(problem=None):
    process = FakeProcess()
    process.start(OpenFake(frozenset(allowed_cores()), problem), "here", None, lambda: False)
    return process


@pytest.fixture(autouse=True)
def fake_module_of_children(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def process():
    process = started()
    yield process
    process.close(0)


@pytest.fixture
def service():
    named = Future()
    named.set_result("name")
    service = FakeService(FakeProcess(), named, "here")
    service.await_opening()
    eventually(lambda: service.poll() or service.is_on)
    yield service
    service.close(0)


def ask(process, what="answer", ticket=1):
    process.submit(Ask(ticket, what))


def test_an_order_is_answered(process):
    ask(process)
    assert eventually(process.poll) == [Answer(1, True)]
    assert (process.is_on, process.counters.answers) == (True, 1)


def test_a_silent_process_is_off_until_it_answers(process, monkeypatch):
    monkeypatch.setattr(deadlines, "ANSWER_LIMIT_S", 0.2)
    ask(process, "stop")
    eventually(lambda: process.poll() or process.is_silent)
    assert (process.is_on, process.is_alive, process.counters.times_off) == (False, True, 1)
    os.kill(process.pid, signal.SIGCONT)
    assert eventually(process.poll) == [Answer(1, True)]
    eventually(lambda: process.poll() or process.is_on)


def test_a_process_that_stays_silent_is_killed_and_its_orders_fail(process, monkeypatch):
    monkeypatch.setattr(deadlines, "REPLACE_AFTER_S", 0.2)
    ask(process, "stop")
    assert eventually(process.poll) == [Answer(1, False)]
    assert (process.is_alive, process.wait_for_end()) == (False, -signal.SIGKILL)


def test_the_orders_of_a_process_that_dies_fail_also_later_ones(process):
    ask(process, "die")
    assert eventually(process.poll) == [Answer(1, False)]
    assert (process.is_on, process.off_because) == (False, "the fake process has exited")
    ask(process, ticket=2)
    assert process.poll() == [Answer(2, False)]


def test_a_process_that_owes_no_answer_is_never_silent(process, monkeypatch):
    monkeypatch.setattr(deadlines, "ANSWER_LIMIT_S", 0.1)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.3)
    assert process.poll() == []
    assert process.is_on


BAD_OBJECT = b"cos\nnothing_of_this_name\n."
NO_MESSAGES = {
    "a length that no message has": HEADER.pack(1 << 60),
    "bytes that do not unpickle": HEADER.pack(3) + b"\x80\x05X",
    "an object that fails": HEADER.pack(len(BAD_OBJECT)) + BAD_OBJECT,
}


@pytest.mark.parametrize("what", ["end of the channel", *NO_MESSAGES])
def test_a_process_with_a_broken_channel_is_killed_before_its_orders_fail(process, what):
    """It may write into host memory until it has ended."""
    os.kill(process.pid, signal.SIGSTOP)
    ask(process)
    if what in NO_MESSAGES:
        process._channel._incoming += NO_MESSAGES[what]
    else:
        process._channel.socket.shutdown(socket.SHUT_RD)
    assert eventually(process.poll) == [Answer(1, False)]
    assert is_gone(process.pid)


def test_a_process_that_cannot_open_says_why():
    with pytest.raises(EnvironmentProblem, match="no such store"):
        started("no such store")


def test_a_closed_process_exits_by_itself(process):
    process.close(HANGS_S)
    assert process.wait_for_end() == 0


@pytest.mark.parametrize("what", ["die", "garbage"])
def test_a_process_that_has_ended_is_replaced(service, what):
    ask(service)
    assert eventually(service.poll) == [Answer(1, True)]
    first = service.process.pid
    ask(service, what, ticket=2)
    assert eventually(service.poll) == [Answer(2, False)]
    eventually(lambda: service.poll() or service.restarts)
    assert (service.losses, service.restarts, service.process.pid == first) == (1, 1, False)
    ask(service, ticket=3)
    assert eventually(service.poll) == [Answer(3, True)]
    assert service.counters.answers >= 2


def test_a_closed_service_starts_no_other_process(service):
    service.close(HANGS_S)
    assert service.restarts == 0
    assert not service.is_on
