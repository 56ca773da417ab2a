"""Threads that cannot be started, because memory or the limit of processes is used up."""

from __future__ import annotations

import threading
import time

import pytest

from kvbm.host import threads
from kvbm.host.log_queue import LogQueue

LIMIT_S = 10.0


def test_a_thread_that_starts_has_run_its_first_step() -> None:
    done = threading.Event()
    threads.start(threading.Thread(target=done.set))
    assert done.wait(LIMIT_S)


@pytest.fixture
def dying(monkeypatch):
    """Every new thread ends before its first step, as one whose memory has run out."""
    monkeypatch.setattr(threads, "START_LIMIT_S", 0.1)
    monkeypatch.setattr(threading.Thread, "_bootstrap", lambda self: None)


def test_a_thread_that_dies_before_its_first_step_is_an_error_and_not_waited_for(dying) -> None:
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="ended before its first step"):
        threads.start(threading.Thread(target=print))
    assert time.monotonic() - began_s < LIMIT_S


def test_no_memory_for_a_thread_is_an_error_like_no_thread(monkeypatch) -> None:
    def start(self):
        raise MemoryError

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="no memory"):
        threads.start(threading.Thread(target=print))


def test_a_log_line_whose_thread_does_not_start_is_written_with_the_next(monkeypatch) -> None:
    written = []
    log = LogQueue(written.append, lambda dropped: f"{dropped} dropped", capacity=10)
    with monkeypatch.context() as dying:
        dying.setattr(threads, "START_LIMIT_S", 0.1)
        dying.setattr(threading.Thread, "_bootstrap", lambda self: None)
        log.put_nowait("one")
    log.put_nowait("two")
    log.drain()
    assert written == ["one", "two"]
