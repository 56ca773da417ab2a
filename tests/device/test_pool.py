"""One suite for both pools: the contract that a worker relies on."""

import ctypes
import os
import threading
from functools import partial

import pytest
from manual_pool import ManualPool

from kvbm.device.pool import TransferPool, shares_of
from kvbm.errors import TransferError

LIMIT_S = 30.0


class ThreadHands:
    """Runs a TransferPool and waits for its results."""

    def __init__(self, thread_count=1, **settings):
        self.pool = TransferPool(thread_count, name="test", **settings)

    def ended(self, count):
        finished = []
        pause = threading.Event()
        for _ in range(int(LIMIT_S * 1000)):
            finished += self.pool.poll()
            if len(finished) >= count:
                break
            pause.wait(0.001)
        assert len(finished) == count
        return finished

    def wait_until_idle(self, thread_count):
        """A thread that looks for its next copy takes one that was meant for another thread."""
        pause = threading.Event()
        while sum(map(len, self.pool._idle)) < thread_count:
            pause.wait(0.001)

    def close(self):
        self.pool.close(LIMIT_S)


class ManualHands:
    def __init__(self):
        self.pool = ManualPool()

    def ended(self, count):
        while self.pool.waiting():
            self.pool.run_next()
        finished = self.pool.poll()
        assert len(finished) == count
        return finished

    def close(self):
        self.pool.close(0)


@pytest.fixture(params=[ThreadHands, ManualHands])
def hands(request):
    hands = request.param()
    yield hands
    hands.close()


def fail(error):
    raise error


def test_a_copy_that_returns_has_no_error(hands):
    ticket = hands.pool.submit(lambda: None)
    (end,) = hands.ended(1)
    assert (end.ticket, end.error) == (ticket, None)


def test_tickets_are_unique_and_each_is_reported_exactly_once(hands):
    tickets = [hands.pool.submit(lambda: None) for _ in range(20)]
    assert sorted(end.ticket for end in hands.ended(20)) == sorted(set(tickets))
    assert hands.pool.poll() == []


def test_a_ticket_is_outstanding_until_it_has_been_polled(hands):
    ticket = hands.pool.submit(lambda: None)
    assert hands.pool.is_outstanding(ticket)
    hands.ended(1)
    assert not hands.pool.is_outstanding(ticket)
    assert not hands.pool.is_outstanding(ticket + 1)


@pytest.mark.parametrize(
    "error",
    [TransferError("short"), ValueError("odd"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), MemoryError()],
)
def test_whatever_a_copy_raises_ends_its_ticket_and_the_next_copy_runs(hands, error):
    failed = hands.pool.submit(lambda: fail(error))
    after = hands.pool.submit(lambda: None)
    assert {end.ticket: end.error for end in hands.ended(2)} == {failed: error, after: None}
    assert hands.pool.poll() == []


def test_what_is_submitted_after_close_ends_as_failed(hands):
    hands.pool.close(LIMIT_S)
    ticket = hands.pool.submit(lambda: None)
    (end,) = hands.pool.poll()
    assert end.ticket == ticket
    assert isinstance(end.error, TransferError)


def test_closing_twice_is_closing_once(hands):
    hands.pool.close(LIMIT_S)
    hands.pool.close(LIMIT_S)
    assert hands.pool.poll() == []


class Gate:
    """A copy that runs until it is opened."""

    def __init__(self):
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.entered.set()
        assert self.opened.wait(LIMIT_S)


def test_copies_begin_in_the_order_in_which_they_were_submitted():
    for hands in (ThreadHands(), ManualHands()):
        gate, order = Gate(), []
        if isinstance(hands, ThreadHands):
            hands.pool.submit(gate)
            assert gate.entered.wait(LIMIT_S)
        for number in range(5):
            hands.pool.submit(partial(order.append, number))
        gate.opened.set()
        hands.ended(5 + isinstance(hands, ThreadHands))
        assert order == [0, 1, 2, 3, 4]
        hands.close()


def test_turns_alternate_and_keep_their_own_order():
    """A short order waits for one part of a long one, not for all of them."""
    for hands in (ThreadHands(), ManualHands()):
        gate, order = Gate(), []
        if isinstance(hands, ThreadHands):
            hands.pool.submit(gate)
            assert gate.entered.wait(LIMIT_S)
        for name, turn in ("long 1", 7), ("long 2", 7), ("long 3", 7), ("short 1", 8), ("short 2", 8), ("last 1", 9):
            hands.pool.submit(partial(order.append, name), turn)
        gate.opened.set()
        hands.ended(6 + isinstance(hands, ThreadHands))
        assert order == ["long 1", "short 1", "last 1", "long 2", "short 2", "long 3"]
        hands.close()


def test_an_order_has_a_limited_number_of_threads_and_leaves_the_others_to_the_next_order():
    hands, gates = ThreadHands(3, parts_at_once=2), [Gate() for _ in range(5)]
    for gate, turn in zip(gates, (7, 7, 7, 8, 8), strict=True):
        hands.pool.submit(gate, turn)
    for index in (0, 1, 3):
        assert gates[index].entered.wait(LIMIT_S)
    gates[3].opened.set()
    assert gates[4].entered.wait(LIMIT_S)
    assert not gates[2].entered.is_set()
    gates[0].opened.set()
    assert gates[2].entered.wait(LIMIT_S)
    for gate in gates:
        gate.opened.set()
    assert [end.error for end in hands.ended(5)] == [None] * 5
    hands.close()


def test_a_free_thread_takes_the_next_order_before_more_of_one_at_its_limit():
    hands, gates = ThreadHands(3, parts_at_once=2), [Gate() for _ in range(3)]
    for gate in gates:
        hands.pool.submit(gate, 7)
    assert gates[0].entered.wait(LIMIT_S)
    assert gates[1].entered.wait(LIMIT_S)
    for _ in range(2):  # turns alternate: in their place, or between them, the third thread would take the third gate
        hands.pool.submit(lambda: None, 8)
    assert [end.error for end in hands.ended(2)] == [None] * 2
    assert not gates[2].entered.is_set()
    for gate in gates:
        gate.opened.set()
    hands.ended(3)
    hands.close()


def test_a_turn_that_waits_for_its_limit_runs_when_its_copy_has_ended():
    hands, gates = ThreadHands(2, parts_at_once=1), [Gate() for _ in range(3)]
    hands.pool.submit(gates[0], 7)
    hands.pool.submit(gates[1], 7)
    assert gates[0].entered.wait(LIMIT_S)
    hands.pool.submit(gates[2], 8)
    assert gates[2].entered.wait(LIMIT_S)
    gates[0].opened.set()
    assert gates[1].entered.wait(LIMIT_S)
    for gate in gates:
        gate.opened.set()
    hands.ended(3)
    hands.close()


def test_a_copy_that_is_withdrawn_never_runs_and_leaves_its_turn():
    hands, gate, order = ThreadHands(), Gate(), []
    running = hands.pool.submit(gate)
    assert gate.entered.wait(LIMIT_S)
    first, second, other = (
        hands.pool.submit(partial(order.append, name), turn) for name, turn in (("a1", 7), ("a2", 7), ("b1", 8))
    )
    assert not hands.pool.withdraw(running)
    assert hands.pool.withdraw(first)
    assert hands.pool.withdraw(other)
    assert not hands.pool.withdraw(other)
    gate.opened.set()
    assert [end.ticket for end in hands.ended(2)] == [running, second]
    assert order == ["a2"]
    hands.close()


def test_closing_fails_what_waits_and_waits_for_what_runs():
    hands, gate = ThreadHands(), Gate()
    running = hands.pool.submit(gate)
    assert gate.entered.wait(LIMIT_S)
    waiting = hands.pool.submit(lambda: None)
    closing = threading.Thread(target=hands.close)
    closing.start()
    (end,) = hands.ended(1)
    assert end.ticket == waiting
    assert isinstance(end.error, TransferError)
    assert closing.is_alive()
    gate.opened.set()
    closing.join()
    (end,) = hands.pool.poll()
    assert (end.ticket, end.error) == (running, None)


def test_closing_gives_up_on_a_copy_that_never_ends():
    hands, gate = ThreadHands(), Gate()
    ticket = hands.pool.submit(gate)
    assert gate.entered.wait(LIMIT_S)
    hands.pool.close(0.01)
    assert hands.pool.is_outstanding(ticket)
    gate.opened.set()
    hands.ended(1)


def test_submit_and_poll_do_not_wait_for_a_copy():
    hands, gate = ThreadHands(), Gate()
    hands.pool.submit(gate)
    assert gate.entered.wait(LIMIT_S)
    hands.pool.submit(lambda: None)
    assert hands.pool.poll() == []
    gate.opened.set()
    hands.ended(2)
    hands.close()


def test_copies_run_in_as_many_threads_as_were_asked_for():
    hands = ThreadHands(3)
    together = threading.Barrier(3)
    for _ in range(3):
        hands.pool.submit(lambda: together.wait(LIMIT_S))
    assert [end.error for end in hands.ended(3)] == [None] * 3
    hands.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_copies_may_run_where_the_parent_may_though_the_engine_bound_itself():
    everywhere = os.sched_getaffinity(0)
    one = {min(everywhere)}
    seen = []
    os.sched_setaffinity(0, one)
    try:
        hands = ThreadHands()
        hands.pool.submit(lambda: seen.append(os.sched_getaffinity(0)))
        assert [end.error for end in hands.ended(1)] == [None]
        hands.close()
        assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, everywhere)
    assert seen == [os.sched_getaffinity(os.getppid()) | one]


@pytest.mark.parametrize(
    ("cores", "count", "shares"),
    [
        ({0, 1}, 2, [{0}, {1}]),
        ({3, 5, 7}, 2, [{3, 7}, {5}]),
        ({0, 1, 2, 3}, 1, [{0, 1, 2, 3}]),
        ({4}, 2, [{4}]),
    ],
)
def test_shares_of_cores_are_disjoint_and_fewer_than_asked_for_if_cores_are_few(cores, count, shares):
    assert shares_of(cores, count) == shares


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_two_copies_submitted_together_run_on_different_cores():
    hands, together = ThreadHands(4, share_count=2), threading.Barrier(2)
    for _ in range(20):
        hands.wait_until_idle(4)
        seen = []

        def note(seen=seen):
            together.wait(LIMIT_S)
            seen.append(os.sched_getaffinity(0))

        tickets = [hands.pool.submit(note) for _ in range(2)]
        assert sorted((end.ticket, end.error) for end in hands.ended(2)) == [(ticket, None) for ticket in tickets]
        assert not seen[0] & seen[1]
    hands.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_share_whose_threads_are_busy_leaves_copies_to_the_others():
    hands, gate = ThreadHands(2, share_count=2), Gate()
    hands.wait_until_idle(2)
    hands.pool.submit(gate)
    assert gate.entered.wait(LIMIT_S)
    for _ in range(4):
        hands.pool.submit(lambda: None)
        hands.ended(1)
    gate.opened.set()
    hands.ended(1)
    hands.close()


def raise_in(thread, error):
    """What a debugger or an engine's watchdog may do to a thread, at any of its instructions."""
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error)) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_while_it_waited_is_replaced():
    hands = ThreadHands()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "test")
    raise_in(thread, SystemExit)
    hands.pool.submit(lambda: None)  # wakes it, and it dies before or after it has taken the copy
    hands.ended(1)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    after = hands.pool.submit(lambda: None)
    (end,) = hands.ended(1)
    assert (end.ticket, end.error) == (after, None)
    hands.close()


def test_a_thread_that_is_killed_inside_a_copy_fails_the_ticket():
    hands, gate = ThreadHands(), Gate()
    hands.pool.submit(gate)
    assert gate.entered.wait(LIMIT_S)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "test")
    raise_in(thread, SystemExit)
    gate.opened.set()
    (end,) = hands.ended(1)
    assert isinstance(end.error, SystemExit)
    hands.close()
