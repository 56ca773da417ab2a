"""The child's side of a process pair: its log goes to the leader, and it exits with the leader."""

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
from typing import Any, NamedTuple, Self

from kvbm.child import deadlines
from kvbm.child.channel import Channel, ChannelClosed
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
