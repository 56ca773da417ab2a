"""The log queue: nothing that writes a log waits for its reader, and what was dropped is counted."""

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from kvbm.host.log_queue import LogQueue, queue_log

WAIT_S = 20


class SlowReader:
    """Takes entries while it is open."""

    def __init__(self):
        self.taken = []
        self.is_open = threading.Event()
        self.has_begun = threading.Event()

    def __call__(self, entry):
        self.has_begun.set()
        self.is_open.wait()
        self.taken.append(entry)


@pytest.fixture
def reader():
    reader = SlowReader()
    yield reader
    reader.is_open.set()


def note(dropped):
    return f"{dropped} dropped"


def test_entries_are_written_in_order(reader):
    queue = LogQueue(reader, note)
    reader.is_open.set()
    for number in range(500):
        queue.put_nowait(str(number))
    queue.drain(WAIT_S)
    assert reader.taken == [str(number) for number in range(500)]


def test_a_full_queue_drops_counts_and_reports_once(reader):
    queue = LogQueue(reader, note, capacity=10)
    queue.put_nowait("first")
    assert reader.has_begun.wait(WAIT_S)
    for number in range(100):
        queue.put_nowait(str(number))
    reader.is_open.set()
    while "90 dropped" not in reader.taken:
        time.sleep(0.001)
    queue.put_nowait("later")
    queue.drain(WAIT_S)
    assert reader.taken == ["first", *map(str, range(10)), "90 dropped", "later"]


def test_a_drain_does_not_wait_for_a_reader_that_does_not_read(reader):
    queue = LogQueue(reader, note)
    queue.drain()
    queue.put_nowait("entry")
    began_s = time.monotonic()
    queue.drain(0.1)
    assert 0.1 <= time.monotonic() - began_s < WAIT_S
    assert reader.taken == []


def test_records_reach_the_handlers_of_another_logger_with_their_traceback(reader):
    class Handler(logging.Handler):
        def emit(self, record):
            reader(self.format(record))

    ours, theirs = logging.Logger("ours"), logging.Logger("theirs")
    theirs.addHandler(Handler())
    queue_log(ours, theirs)
    queue_log(ours, theirs)
    assert len(ours.handlers) == 1
    try:
        raise ValueError("a reason")
    except ValueError:
        ours.warning("it %s", "failed", exc_info=True)
    reader.is_open.set()
    ours.handlers[0].queue.drain(WAIT_S)
    (text,) = reader.taken
    assert text.startswith("it failed\nTraceback")
    assert text.endswith("ValueError: a reason")


PROGRAM = """
import os, sys, threading
from kvbm.host.log_queue import use_queued_stderr
use_queued_stderr()
"""


def program(text, **arguments):
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM + text]  # Python 3.12 warns of a fork with threads
    return subprocess.Popen(command, text=True, stderr=subprocess.PIPE, **arguments)


def test_everything_written_before_an_exit_arrives():
    child = program("for i in range(900): print(i, file=sys.stderr)\nraise RuntimeError('the end')")
    _, text = child.communicate(timeout=WAIT_S)
    lines = text.splitlines()
    assert lines[:900] == [str(number) for number in range(900)]
    assert lines[-1] == "RuntimeError: the end"


def test_a_process_ends_although_its_log_is_not_read():
    child = program("print('x' * 10_000_000, file=sys.stderr)\nprint('end', file=sys.stderr)")
    try:
        assert child.wait(WAIT_S) == 0
    finally:
        child.kill()
        child.communicate()


def test_a_forked_child_writes_too():
    text = "print('parent', file=sys.stderr)\nif (child := os.fork()) == 0:\n print('child', file=sys.stderr)\n"
    child = program(text + "else:\n os.waitpid(child, 0)")
    assert sorted(child.communicate(timeout=WAIT_S)[1].split()) == ["child", "parent"]


def test_a_closed_pipe_does_not_end_the_process():
    child = program("sys.stdin.read()\nfor i in range(9): print(i, file=sys.stderr)", stdin=subprocess.PIPE)
    child.stderr.close()
    child.stdin.close()
    assert child.wait(WAIT_S) == 0


def test_a_process_without_stderr_starts():
    child = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", PROGRAM], timeout=WAIT_S)
    assert child.returncode == 0


def test_a_pipe_that_another_process_made_non_blocking_loses_nothing():
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(theirs, False)
    text = "for i in range(900): print(f'{i:050}', file=sys.stderr)"
    child = subprocess.Popen([sys.executable, "-W", "ignore", "-c", PROGRAM + text], stderr=theirs)
    os.close(theirs)
    with open(ours) as read:
        assert [int(line) for line in read] == list(range(900))
    assert child.wait(WAIT_S) == 0
