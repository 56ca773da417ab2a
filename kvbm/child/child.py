"""The child's side of a process pair: its log goes to the leader, and it exits with the leader. The child of a service
opens a storage, executes the orders of one leader on it, and reports what has ended:

main of the process ──▶ serve_leader ──▶ StorageServer: disk and shared tier have a subclass each
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from kvbm.child import deadlines
from kvbm.child.channel import Channel, ChannelClosed
from kvbm.errors import EnvironmentProblem, TierProblem
from kvbm.host.log_queue import use_queued_stderr
from kvbm.text.log_limit import LogLimit


class Opening(NamedTuple):
    """Heartbeat while the child opens what it serves, sent every BEAT_S. It says nothing about progress."""


class Problem(NamedTuple):
    """What the child should serve cannot be opened. `can_pass`: a TierProblem."""

    message: str
    hint: str | None
    can_pass: bool = False


class Status(NamedTuple):
    """Orders that have ended, and the state of what is served. Sent at least every BEAT_S while results are due.

    `moved_s`: until when there was progress, in the clock of `time.monotonic`, which all processes share; 0 if the
    leader judges that.
    """

    results: Sequence[Any]
    off_because: str | None
    counters: Any
    moved_s: float


@dataclass(slots=True)
class ServiceCounters:
    """What a process counts from its start on. `times_off` counts its silences too, for the leader."""

    times_off: int = 0

    def plus(self, other: Self) -> Self:
        return type(self)(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})


class Close(NamedTuple):
    """Finish within `timeout_s`, and exit."""

    timeout_s: float


class Logged(NamedTuple):
    name: str
    level: int
    text: str


class LogRelay(logging.Handler):
    """Collects log records of all threads until they are sent; drops most of many similar ones."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.addFilter(LogLimit(burst=1))
        self.kept: deque[Logged] = deque()

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(Logged(record.name, record.levelno, self.format(record)))

    def send(self, send: Callable[[object], None]) -> None:
        while self.kept:
            send(self.kept.popleft())


def outlive_signals() -> None:
    """Ignore the signals that end the parent, which may still need this process, and then closes the channel. A log
    that no process reads does not stop it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    use_queued_stderr()


def begin() -> LogRelay:
    """Prepare a child process of a leader; return the log that it sends to it. Call first."""
    outlive_signals()
    log = LogRelay()
    logging.getLogger("kvbm").addHandler(log)
    logging.getLogger("kvbm").setLevel(logging.INFO)
    threading.Thread(target=_exit_with, args=(os.getppid(),), daemon=True).start()
    return log


def end_of_channel() -> Channel:
    """Return this process's end of the channel to its parent."""
    return Channel(socket.socket(fileno=int(sys.argv[1])))


@contextmanager
def beating(channel: Channel) -> Iterator[Callable[[object], None]]:
    """Send heartbeats from a thread while the child opens what it serves. Yields the function to send other
    messages with meanwhile."""
    lock, has_ended = threading.Lock(), threading.Event()

    def send(message: object) -> None:
        with lock:
            channel.send(message)

    def beat() -> None:
        with suppress(ChannelClosed):  # the other thread notices it
            while not has_ended.wait(deadlines.BEAT_S):
                send(Opening())

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield send
    finally:
        has_ended.set()
        thread.join()


def send_all(channel: Channel) -> None:
    while channel.has_more_to_send():
        channel.wait(deadlines.IDLE_INTERVAL_S)


def _exit_with(parent: int) -> None:
    """Exit with the leader, also during a long call and if another process holds the leader's end of the channel."""
    while os.getppid() == parent:
        time.sleep(deadlines.PARENT_INTERVAL_S)
    os._exit(0)


Send = Callable[[object], None]


class ServedStorage(Protocol):
    """`off_because` is None while it is on. `on_result` is called in any thread when `poll` has something."""

    on_result: Callable[[], None]

    @property
    def off_because(self) -> str | None: ...

    @property
    def counters(self) -> Any: ...

    def submit(self, order: Any, /) -> None: ...

    def poll(self) -> Sequence[Any]: ...

    def close(self, timeout_s: float, /) -> None: ...


class OpenOrder(Protocol):
    """The first message of a leader. The process runs on `cores`."""

    @property
    def cores(self) -> frozenset[int]: ...


Storage = TypeVar("Storage", bound=ServedStorage)
Order = TypeVar("Order", bound=OpenOrder)


class StorageServer(Generic[Storage]):
    """Serves one leader. `_in_flight_count` orders have no result yet."""

    def __init__(self, channel: Channel, storage: Storage, log: LogRelay) -> None:
        self._channel = channel
        self._storage = storage
        self._log = log
        self._in_flight_count = 0
        self._next_beat_s = 0.0
        self._reported_off_because = storage.off_because
        self._result_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        storage.on_result = partial(os.eventfd_write, self._result_event, 1)

    def serve(self) -> None:
        """Run until the leader sends Close. Raises ChannelClosed if the leader exits without."""
        while True:
            interval_s = deadlines.BUSY_INTERVAL_S if self._is_busy() else deadlines.IDLE_INTERVAL_S
            self._channel.wait(interval_s, or_readable=(self._result_event,))
            with suppress(BlockingIOError):
                os.eventfd_read(self._result_event)
            for message in self._channel.receive():
                if isinstance(message, Close):
                    self._storage.close(message.timeout_s)
                    return
                self._handle(message)
            self._report()

    def _handle(self, message: object) -> None:
        """Take a message that is not Close. A service calls `_submit` for orders."""

    def _submit(self, order: object) -> None:
        self._in_flight_count += 1
        self._storage.submit(order)

    def _is_busy(self) -> bool:
        return self._in_flight_count > 0

    def _moved_s(self, now_s: float) -> float:
        """Return until when there was progress, as in Status."""
        return 0.0

    def _report(self) -> None:
        results, now = self._storage.poll(), time.monotonic()
        is_beat_due = self._is_busy() and now >= self._next_beat_s
        self._in_flight_count -= len(results)
        off_because = self._storage.off_because
        if results or is_beat_due or off_because != self._reported_off_because:
            self._next_beat_s = now + deadlines.BEAT_S
            self._reported_off_because = off_because
            self._channel.send(Status(results, off_because, self._storage.counters, self._moved_s(now)))
        self._report_more()
        self._log.send(self._channel.send)

    def _report_more(self) -> None:
        """Send what the service says beside Status."""


def serve_leader(
    kind: type[Order],
    open_storage: Callable[[Order, Send, LogRelay], tuple[Storage, object]],
    server: Callable[[Channel, Storage, LogRelay], StorageServer[Storage]],
) -> int:
    """Open a storage as the leader's first message says, which is of this kind, and serve. Return the exit code: 0
    after Close, 1 if the storage could not be opened. If the leader exits, the process exits at once.

    `open_storage` may raise EnvironmentProblem, and returns the storage and the message that it is open.
    """
    log = begin()
    channel = end_of_channel()
    try:
        order = channel.receive_one(kind)
        os.sched_setaffinity(0, order.cores)
        try:
            with beating(channel) as send:
                storage, opened = open_storage(order, send, log)
        except EnvironmentProblem as error:
            channel.send(Problem(error.message, error.hint, isinstance(error, TierProblem)))
            send_all(channel)
            return 1
        channel.send(opened)
        server(channel, storage, log).serve()
        send_all(channel)
    except ChannelClosed:
        os._exit(0)
    return 0
