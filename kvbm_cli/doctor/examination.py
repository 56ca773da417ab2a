"""Examination: runs groups of checks, collects what they find, and shows each at once unless JSON is wanted.

Within `at_most` an alarm of the kernel ends whatever check is at work when the time is up, also one that waits for
another process. That check and all later ones are skipped. `say_remedy` is how remedies are put.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from kvbm_cli.doctor.display import show_check, show_group
from kvbm_cli.doctor.result import Check, skipped
from kvbm_cli.terminal.progress import ProgressDisplay

QUICK_S = 20.0
OVER = f"--quick allows {QUICK_S:.0f} s"

Returned = TypeVar("Returned")


class _TimeIsUp(BaseException):
    """Not an Exception, so that no check takes it for its own."""


class Examination:
    """See the module's text. `groups` has the checks by the name of their group, in order."""

    def __init__(self, progress: ProgressDisplay, *, as_json: bool, say_remedy: Callable[[str], str] = str) -> None:
        self._progress = progress
        self._as_json = as_json
        self._say_remedy = say_remedy
        self._is_at_work = False
        self._is_over = False
        self.groups: dict[str, list[Check]] = {}

    @contextlib.contextmanager
    def at_most(self, seconds: float | None) -> Iterator[None]:
        if seconds is None:
            yield
            return
        before = signal.signal(signal.SIGALRM, self._alarm)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _alarm(self, *ignored: object) -> None:
        self._is_over = True
        if self._is_at_work:
            raise _TimeIsUp

    def in_time(self, action: Callable[[], Returned]) -> Returned | None:
        """What the action returns, None if the time is up before."""
        try:
            try:
                self._is_at_work = not self._is_over
                return action() if self._is_at_work else None
            finally:
                self._is_at_work = False
        except _TimeIsUp:
            return None

    def group(
        self, name: str, checks: Generator[Check, None, Returned] | Iterator[Check], *, about: str | None = None
    ) -> Returned | None:
        """Shows the checks below `name` and what they are about.

        Returns what their generator returns, None if the time is up before.
        """
        self.groups[name] = []
        if not self._as_json:
            self._progress.clear()
            show_group(name, about, is_first=len(self.groups) == 1)
        self._progress.report(name)
        while (check := self.in_time(lambda: _next(checks))) is not None:
            if isinstance(check, _End):
                returned: Returned = check.value
                return returned
            self._add(name, check)
        self._add(name, skipped("the rest", OVER, "`kvbm doctor` without --quick"))
        return None

    def _add(self, group: str, check: Check) -> None:
        if check.remedy is not None:
            check = replace(check, remedy=self._say_remedy(check.remedy))
        self.groups[group].append(check)
        if not self._as_json:
            self._progress.clear()
            show_check(check)


class _End:
    """Of a generator, with what it returned."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _next(checks: Iterator[Check]) -> Check | _End:
    try:
        return next(checks)
    except StopIteration as end:
        return _End(end.value)
