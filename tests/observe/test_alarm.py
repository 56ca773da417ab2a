"""The alarm that wakes an idle engine at a time that was set."""

import threading
import time

from kvbm.observe import alarm
from kvbm.observe.alarm import Alarm

LIMIT_S = 60


def test_it_wakes_at_each_time_in_order_and_not_before():
    woken, began_s = threading.Semaphore(0), time.monotonic()
    one = Alarm(woken.release)
    one.after(0.3)
    one.after(0.0)
    assert woken.acquire(timeout=LIMIT_S)
    assert woken.acquire(timeout=LIMIT_S)
    assert time.monotonic() - began_s >= 0.3
    one.close()


def test_it_ends_while_it_waits_and_sets_nothing_afterwards():
    woken = threading.Event()
    one = Alarm(woken.set)
    one.after(3600)
    # `close` must end it.
    thread = one._thread
    one.close()
    assert not thread.is_alive()
    one.after(0)
    assert not woken.wait(0.05)


def test_times_are_bounded(monkeypatch):
    monkeypatch.setattr(alarm, "MOST_TIMES", 3)
    one = Alarm(lambda: None)
    for _ in range(5):
        one.after(3600)
    # The memory that it takes.
    assert len(one._times_s) == 3
    one.close()


def test_a_process_that_can_have_no_more_threads_is_not_woken(monkeypatch, caplog):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("kvbm.host.threads.start", refuse)
    one = Alarm(lambda: None)
    one.after(0.0)
    one.after(0.0)
    one.close()
    assert caplog.text.count("does not read ahead") == 1
