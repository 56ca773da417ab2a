"""Weight updates: notices what can change the weights of a running SGLang, before it happens.

SGLang has no hook for a storage backend there. All ways lead through two classes in the process of the scheduler, whose
methods this module wraps:

    WeightUpdater                   of each model: from disk, from tensors, from another process, from a training job
    SchedulerWeightUpdaterManager   /release_memory_occupation, which may give the weights away

A backend that is attached to a running server does not know what happened before, unless one was attached at the start.
"""

from __future__ import annotations

import functools
import importlib
import sys
import weakref
from typing import Any, Protocol

UPDATER = ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater")
MANAGER = ("sglang.srt.managers.scheduler_components.weight_updater", "SchedulerWeightUpdaterManager")
SCHEDULER = "sglang.srt.managers.scheduler"
UPDATES = (
    *("update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc"),
    *("begin_weight_update", "init_weights_update_group", "load_weights_from_distributed"),
)
RELEASES = ("release_memory_occupation",)


class UpdateListener(Protocol):
    """Called in the thread of the scheduler."""

    def weights_may_change(self, cause: str) -> None: ...


class _Watch:
    """The watch of this process. `cause` is the first change. `is_whole`: it began before the server ran."""

    def __init__(self) -> None:
        self.listeners: weakref.WeakSet[UpdateListener] = weakref.WeakSet()
        self.wrapped: set[type] = set()
        self.cause: str | None = None
        self.is_whole = False

    def note(self, cause: str) -> None:
        self.cause = self.cause or cause
        for listener in list(self.listeners):
            listener.weights_may_change(cause)


_WATCH = _Watch()


def watch(listener: UpdateListener) -> str:
    """Call `listener` before the weights may change, for as long as it lives. Return why the files of the model may not
    describe the weights, empty if they do."""
    found = [(_class(*UPDATER), UPDATES), (_class(*MANAGER), RELEASES)]
    if any(owner is None or not callable(getattr(owner, name, None)) for owner, names in found for name in names):
        return "this version of SGLang does not report changes of the weights in memory"
    if not _WATCH.wrapped:
        _WATCH.is_whole = _is_starting()
    for owner, names in found:
        if owner is not None and owner not in _WATCH.wrapped:
            _WATCH.wrapped.add(owner)
            for name in names:
                _wrap(owner, name)
    _WATCH.listeners.add(listener)
    if not _WATCH.is_whole:
        return "the storage was attached to a running server, whose weights may have changed"
    return "" if _WATCH.cause is None else f"`{_WATCH.cause}` can have changed the weights"


def _class(module: str, name: str) -> type | None:
    try:
        owner: type | None = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return owner


def _is_starting() -> bool:
    """Whether the scheduler of this process is being created."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "__init__" and frame.f_globals.get("__name__") == SCHEDULER:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _wrap(owner: type, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *arguments: Any, **keys: Any) -> Any:
        _WATCH.note(name)
        return original(self, *arguments, **keys)

    setattr(owner, name, method)
