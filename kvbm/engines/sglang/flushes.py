"""Flushes: SGLang may empty its cache at any moment.

`/flush_cache` waits 10 s for each of SGLang's storage threads. If one still works then, SGLang raises in its scheduler,
which ends the server. So two things must not hold such a thread:

    the extension that hashes pages   SGLang compiles it when it is first used, which takes a minute: `build_hashes`
                                      does it when the storage opens
    a question to kvbm                may wait longer for a slow disk: it is given up when SGLang stops its threads
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from kvbm.engines.engine_code import owner_of, replace
from kvbm.engines.sglang.versions import TO_COMPILE
from kvbm.errors import EnvironmentProblem

HASHES = "sglang.srt.mem_cache.cpp_utils.native_hash"
CONTROLLER = ("sglang.srt.managers.cache_controller", "HiCacheController")
STOP = "_stop_storage_threads"


class Asker(Protocol):
    """Called in the thread of the scheduler."""

    def refuse_questions(self) -> None: ...

    def accept_questions(self) -> None: ...


_ASKERS: weakref.WeakSet[Asker] = weakref.WeakSet()


def build_hashes() -> None:
    """Build and load the extension with which SGLang hashes pages. Raises EnvironmentProblem."""
    try:
        hashes = importlib.import_module(HASHES)
    except ModuleNotFoundError:
        return  # a version that has none
    try:
        hashes.get_native_hash([0], None, 1)
    except Exception as error:
        cause = str(error.__cause__ or error).strip().splitlines()
        raise EnvironmentProblem(
            f"SGLang cannot build the extension that names its pages: {cause[0] if cause else type(error).__name__}",
            hint=f"install {TO_COMPILE}, and run `kvbm doctor`",
        ) from error


def watch(asker: Asker) -> None:
    """Let `asker` refuse questions while SGLang stops its storage threads, for as long as it lives."""
    _ASKERS.add(asker)
    replace(owner_of(*CONTROLLER), STOP, _refusing)


def _refusing(stop: Callable[..., None]) -> Callable[..., None]:
    def stopping(self: Any) -> None:
        askers = list(_ASKERS)
        for asker in askers:
            asker.refuse_questions()
        try:
            stop(self)
        finally:
            for asker in askers:
                asker.accept_questions()

    return stopping
