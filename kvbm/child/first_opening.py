"""FirstOpening: how long the start of an engine waits until the child process of a tier has opened its files or store.

A thread opens the tier. The engine waits for it as long as there is progress, and starts without a tier that hangs: the
thread continues, so that a tier that answers later is used later. The same holds for a disk in a state that does not
allow it (TierProblem). Another problem that is found in time, as a wrong setting, ends the start. Two tiers are opened
in parallel: if both hang, the start takes no longer than with one.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

from kvbm.child import deadlines
from kvbm.errors import TierProblem

log = logging.getLogger(__name__)


class FirstOpening:
    """The thread that opens calls `heard`, `succeed` and `fail`, the thread that starts the engine `wait`."""

    def __init__(self, tier: str, place: object) -> None:
        """`tier` and `place` are for the log."""
        self._names = place, tier
        self._lock = threading.Lock()
        self._end: Future[bool] = Future()
        self._until_s = time.monotonic() + deadlines.START_LIMIT_S
        self._has_begun = False
        self._is_awaited = True

    def heard(self, *, has_moved: bool) -> None:
        """Note messages of the child. Without `has_moved` they were heartbeats."""
        if has_moved or not self._has_begun:
            self._has_begun = True
            self._until_s = time.monotonic() + deadlines.PROGRESS_LIMIT_S

    def succeed(self) -> None:
        with self._lock:
            self._is_awaited = False
            self._end.set_result(True)

    def fail(self, error: Exception) -> bool:
        """Return whether the start of the engine ends with this error. Otherwise the opening is tried again."""
        with self._lock:
            ends_start, self._is_awaited = self._is_awaited and not isinstance(error, TierProblem), False
            if ends_start:
                self._end.set_exception(error)
            elif not self._end.done():
                self._end.set_result(False)
            return ends_start

    def wait(self) -> bool:
        """Return whether it is open; if it takes too long, log it and return False. Raises the error of `fail`."""
        while not self._end.done():
            wait_for([self._end], deadlines.START_CHECK_S)
            with self._lock:
                if time.monotonic() > self._until_s and not self._end.done():
                    self._is_awaited = False
                    log.warning("kvbm: %s does not answer: starting without the %s tier, until it does", *self._names)
                    return False
        return self._end.result()
