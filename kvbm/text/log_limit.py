"""Limits of a log: 10,000 damaged blocks must not write 10,000 lines, and no client decides how long a line is.

LogLimit says how often one kind of message passes, how long a value in a line is, and how much all lines have together.
Every handler that writes for kvbm has one.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from numbers import Number

from kvbm.text.outside import MAX_SHOWN, one_line, shortened, shown, without_secrets

INTERVAL_S = 10.0
MAX_KINDS = 1000
BURST = 10  # lines of one kind in an interval that LogLimit passes
MAX_ARGUMENT = 600
MAX_MESSAGE = 2000
MAX_TRACEBACK = 6000
BUDGET = 60_000  # characters that all lines may have at once
BUDGET_PER_S = 1000.0

_VARYING = re.compile(r"0x[0-9a-f]+|\d+")


class LogLimit(logging.Filter):
    """Passes `burst` messages of one logger, level and format string per INTERVAL_S, with the number of those dropped.
    Shortens each value of a message in one line, hides secrets, and drops what is too much altogether.

    A value has MAX_ARGUMENT characters at most: reasons in kvbm's own words pass. Text from outside is quoted with
    `shown` where it is quoted. A traceback has MAX_TRACEBACK characters. Any thread may log. `clock` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, burst: int = BURST) -> None:
        super().__init__()
        self._clock = clock
        self._burst = burst
        self._lock = threading.Lock()
        self._last: dict[tuple[str, int, str], tuple[float, int]] = {}  # kind -> (interval's begin, seen since)
        self._left, self._filled_s, self._left_out = float(BUDGET), clock(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        _shorten_arguments(record)
        if not self._is_rare(record):
            return False
        text = without_secrets(shortened(_message(record), MAX_MESSAGE))
        if record.exc_info and not record.exc_text:
            record.exc_text = _traceback(record.exc_info)
        if not self._takes(len(text) + len(record.exc_text or "")):
            return False
        left_out, self._left_out = self._left_out, 0
        record.msg, record.args = f"{text} ({left_out} other messages dropped)" if left_out else text, ()
        return True

    def _is_rare(self, record: logging.LogRecord) -> bool:
        """Count a message of its kind. False if there are too many of them."""
        kind, now = _kind(record), self._clock()
        with self._lock:
            began_s, seen = self._last.get(kind, (float("-inf"), 0))
            if now - began_s < INTERVAL_S:
                self._last[kind] = began_s, seen + 1
                return seen < self._burst
            if len(self._last) >= MAX_KINDS:
                self._last.clear()
            self._last[kind] = now, 1
        if (dropped := seen - self._burst) > 0:
            record.msg, record.args = f"{record.getMessage()} ({dropped} similar messages dropped)", ()
        return True

    def _takes(self, size: int) -> bool:
        """Take the characters of a line from the budget. False if it has too few."""
        now = self._clock()
        with self._lock:
            self._left = min(float(BUDGET), self._left + (now - self._filled_s) * BUDGET_PER_S)
            self._filled_s = now
            has_room = size <= self._left
            self._left -= size if has_room else 0
            self._left_out += not has_room
        return has_room


class Lines(str):
    """Text of kvbm itself, of several lines, as an argument of a message: it is not shortened."""

    __slots__ = ()


def _kind(record: logging.LogRecord) -> tuple[str, int, str]:
    """Messages without arguments may have numbers and addresses of objects in their text."""
    text = str(record.msg)
    return record.name, record.levelno, text if record.args else _VARYING.sub("#", text[:MAX_SHOWN])


def _shorten_arguments(record: logging.LogRecord) -> None:
    arguments = record.args
    if isinstance(arguments, Mapping):
        record.args = {name: _argument(value) for name, value in arguments.items()}
    elif arguments:
        record.args = tuple(map(_argument, arguments))
    if not isinstance(record.msg, str):
        record.msg = shown(record.msg, MAX_MESSAGE).replace("%", "%%" if record.args else "%")


def _argument(value: object) -> object:
    """Return a value that formats as before if it is short, and otherwise its beginning."""
    if value is None or (isinstance(value, Number) and not isinstance(value, int)) or isinstance(value, Lines):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 64 else shown(value)
    if isinstance(value, str) and len(value) <= MAX_ARGUMENT and value.isprintable():
        return value
    return shown(value, MAX_ARGUMENT)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError):  # arguments that do not fit the format
        return str(record.msg)


def _traceback(raised: object) -> str:
    error = raised[1] if isinstance(raised, tuple) else None
    lines = "".join(traceback.format_exception(error)).splitlines()
    text = "\n".join(shortened(one_line(line), 2 * MAX_SHOWN) for line in lines)
    half = MAX_TRACEBACK // 2 - 5
    return without_secrets(text if len(text) <= MAX_TRACEBACK else f"{text[:half]}\n  ...\n{text[-half:]}")
