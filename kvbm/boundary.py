"""Boundary: the only place where exceptions of kvbm end before they reach an engine.

Each method that an engine calls while it serves is decorated, and so is the worker's work per transfer. An exception is
counted in `kvbm_faults`, logged with its traceback, and the method returns its neutral answer:

    @hook(answer)          decides or moves blocks. After an exception the cache is off (`kvbm_disabled`), because its
                           metadata may be damaged. While the cache is off, the method is skipped, unless `when_off`
    @contained(answer)     reports, or executes one transfer. After an exception only this call has failed

Methods of the start-up are not decorated: a start may fail. Threads of kvbm end their own exceptions, as results.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

LOG_INTERVAL_S = 60.0

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Counts(Protocol):
    faults: int
    disabled: int


class Boundary:
    """State of one boundary: whether the cache `is_off`, and the `counters` of faults, if there are any."""

    def __init__(self) -> None:
        self.is_off = False
        self.faults = 0
        self.counters: _Counts | None = None
        self._logged_s = float("-inf")

    def attempt(self, name: str, run: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
        """Run it; return (its result, None), or (None, the exception that it raised)."""
        try:
            return run(), None
        except Exception as error:
            self.caught(name, error)
            return None, error

    def caught(self, name: str, error: Exception, *, turns_off: bool = False) -> None:
        """Count and log an exception of the method `name`. Logs the first one, and one per LOG_INTERVAL_S."""
        self.faults += 1
        is_news = turns_off and not self.is_off
        self.is_off |= turns_off
        if self.counters is not None:
            self.counters.faults = self.faults
            self.counters.disabled |= self.is_off
        if not is_news and time.monotonic() - self._logged_s < LOG_INTERVAL_S:
            return
        self._logged_s = time.monotonic()
        effect = "the engine continues without the cache until it is restarted" if self.is_off else "continuing"
        log.error("kvbm: exception %d in `%s`; %s", self.faults, name, effect, exc_info=error)


def hook(
    answer: Any = None, *, when_off: bool = False
) -> Callable[[Callable[Concatenate[Any, _P], _T]], Callable[Concatenate[Any, _P], _T]]:
    """Decorate a method of an object with a `boundary`. After an exception, and while the cache is off, it returns
    `answer`, or calls it if it is a function. With `when_off`, it runs although the cache is off."""

    def decorate(method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
        return _guarded(method, answer, turns_off=True, when_off=when_off)

    return decorate


def contained(
    answer: Any = None,
) -> Callable[[Callable[Concatenate[Any, _P], _T]], Callable[Concatenate[Any, _P], _T]]:
    """Decorate a method of an object with a `boundary`. After an exception it returns `answer`; the cache stays on."""

    def decorate(method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
        return _guarded(method, answer, turns_off=False, when_off=True)

    return decorate


def forwarded(
    to: str, method: Callable[Concatenate[Any, _P], _T], answer: Any = None, *, turns_off: bool = True
) -> Callable[Concatenate[Any, _P], _T]:
    """Return a method that calls `method` of the attribute `to` of its object. It is a hook, or with `turns_off` False
    a contained method."""
    find = cast(Callable[[Any], Callable[_P, _T]], operator.attrgetter(f"{to}.{method.__name__}"))
    return _guarded(method, answer, turns_off=turns_off, when_off=not turns_off, find=find)


def _guarded(
    method: Callable[Concatenate[Any, _P], _T],
    answer: Any,
    *,
    turns_off: bool,
    when_off: bool,
    find: Callable[[Any], Callable[_P, _T]] | None = None,
) -> Callable[Concatenate[Any, _P], _T]:
    """`find` returns the method of another object that is called instead; no frame is added for that."""

    def ended(self: Any, error: Exception) -> _T:
        self.boundary.caught(method.__qualname__, error, turns_off=turns_off)
        return neutral()

    def neutral() -> _T:
        return cast(_T, answer() if callable(answer) else answer)

    @functools.wraps(method)
    def guarded(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not when_off and self.boundary.is_off:
            return neutral()
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            return ended(self, error)

    @functools.wraps(method)
    def guarded_without_arguments(self: Any) -> _T:
        if not when_off and self.boundary.is_off:
            return neutral()
        try:
            return plain(self)
        except Exception as error:
            return ended(self, error)

    @functools.wraps(method)
    def forwarding(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        assert find is not None
        if not when_off and self.boundary.is_off:
            return neutral()
        try:
            return find(self)(*args, **kwargs)
        except Exception as error:
            return ended(self, error)

    if find is not None:
        return forwarding
    plain = cast(Callable[[Any], _T], method)
    takes_arguments = len(inspect.signature(method).parameters) > 1  # passing none on takes a third of the time
    return guarded if takes_arguments else cast(Callable[Concatenate[Any, _P], _T], guarded_without_arguments)
