"""Log queue: log output goes through a bounded queue and a thread, so that a full pipe never blocks an engine step.

A write to a pipe that no process reads blocks forever. Here only the writer thread blocks. When the queue is full, it
drops everything until the pipe is read again and the queue is empty; then the log says how many entries were dropped.

    use_queued_stderr()     for processes of kvbm: replaces `sys.stderr`
    queue_log(...)          for processes of an engine that has its own log handlers
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import select
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from kvbm.host.threads import start
from kvbm.text.log_limit import LogLimit

CAPACITY = 1000  # log lines or records
DRAIN_S = 1.0

T = TypeVar("T")


class LogQueue(Generic[T]):
    """Passes entries to `write` in a thread, in order. `note(dropped)` makes the entry that reports dropped ones.

    Any thread may put entries. The thread starts with the first entry, also in a forked child. If two threads drop
    entries at the same moment, the number may be too low by one.
    """

    def __init__(self, write: Callable[[T], None], note: Callable[[int], T], *, capacity: int = CAPACITY) -> None:
        self._write = write
        self._note = note
        self._capacity = capacity
        self._entries: SimpleQueue[T | threading.Event] = SimpleQueue()
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def put_nowait(self, entry: T) -> None:
        """Queue an entry, or drop it while the queue is full and until it has been written."""
        if self._dropped or self._entries.qsize() >= self._capacity:
            self._dropped += 1
            return
        self._entries.put(entry)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="kvbm-log", daemon=True)
            with suppress(RuntimeError):  # no thread available: the next entry tries again
                start(self._thread)

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Wait until everything queued so far is written, for at most `timeout_s` seconds."""
        if self._thread is not None and self._thread.is_alive():
            reached = threading.Event()
            self._entries.put(reached)
            reached.wait(timeout_s)

    def _run(self) -> None:
        while True:
            entry = self._entries.get()
            if isinstance(entry, threading.Event):
                entry.set()
            else:
                self._write(entry)
            if self._dropped and self._entries.empty():
                dropped, self._dropped = self._dropped, 0
                self._write(self._note(dropped))


class _QueuedBytes(io.RawIOBase):
    """A binary stream that queues what is written to it for the descriptor `fd`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.queue: LogQueue[bytes] = LogQueue(self._write_all, lambda dropped: f"{_note(dropped)}\n".encode())

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any) -> int:
        copy = bytes(data)
        self.queue.put_nowait(copy)
        return len(copy)

    def _write_all(self, data: bytes) -> None:
        try:
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except BlockingIOError:  # another process has made the pipe non-blocking
                    poll = select.poll()
                    poll.register(self._fd, select.POLLOUT)
                    poll.poll()
        except OSError:
            return  # a full disk or a closed pipe: the process must continue without its log


def use_queued_stderr() -> Callable[[], None]:
    """Write `sys.stderr` of this process through a queue. Return a function that waits DRAIN_S for the queue at most;
    an exit of the interpreter calls it too."""
    if sys.stderr is None:  # it was closed when the process started
        return lambda: None
    queued = _QueuedBytes(sys.stderr.fileno())
    sys.stderr = io.TextIOWrapper(queued, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    atexit.register(queued.queue.drain)
    return queued.queue.drain


def queue_log(logger: logging.Logger, target: logging.Logger) -> None:
    """Pass the records of `logger` to the handlers of `target` through a queue, as far as LogLimit lets them. Ignored
    if `logger` has one already."""
    if any(isinstance(handler, QueueHandler) for handler in logger.handlers):
        return
    queue: LogQueue[logging.LogRecord] = LogQueue(target.callHandlers, _note_as_record)
    handler = QueueHandler(queue)  # type: ignore[arg-type]  # it only puts
    handler.addFilter(LogLimit())
    logger.handlers, logger.propagate = [handler], False
    atexit.register(queue.drain)


def _note(dropped: int) -> str:
    return f"kvbm: dropped {dropped} log entries, because the log was not read"


def _note_as_record(dropped: int) -> logging.LogRecord:
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, _note(dropped), (), None)
