"""LimitedCalls: calls of a file system that may hang, each in a thread, so that their callers wait for a limited time.

A call that is late is left to itself. While there is one, no other call begins: all of them would hang.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class LimitedCalls:
    """See the module's text. At most `threads` calls run at a time. Any thread may use it."""

    def __init__(self, threads: int, limit_s: float, name: str) -> None:
        self.limit_s = limit_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._lock = threading.Lock()  # of `_late`
        self._late: list[Future[Any]] = []

    def run(
        self, function: Callable[..., Result], *arguments: Any, drop: Callable[[Result], None] | None = None
    ) -> Result:
        """Return what a function returns, or raise what it raises. Raises TimeoutError if it takes too long, or if an
        earlier call does. `drop` gets the result of a late call, in its thread."""
        if self._has_late():
            raise _no_answer()
        return self.result(self.begin(function, *arguments), drop=drop)

    def result(self, call: Future[Result], *, drop: Callable[[Result], None] | None = None) -> Result:
        """Wait for a call of `begin`, as `run`; do not wait if an earlier call is late."""
        try:
            return call.result(0.0 if self._has_late() else self.limit_s)
        except TimeoutError:
            if call.done():
                raise  # of the function itself
        with self._lock:
            self._late.append(call)
        if drop is not None:
            call.add_done_callback(lambda done: None if done.exception() else drop(done.result()))
        raise _no_answer()

    def begin(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Begin a call, also while others are late. Raises OSError if no thread can be started."""
        try:
            return self._pool.submit(function, *arguments)
        except (RuntimeError, MemoryError) as error:
            raise OSError(errno.EAGAIN, "no thread can be started") from error

    def _has_late(self) -> bool:
        with self._lock:
            self._late = [call for call in self._late if not call.done()]
            return bool(self._late)


def _no_answer() -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, "the file system does not answer")
