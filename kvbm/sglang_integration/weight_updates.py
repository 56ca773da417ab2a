"""Weight updates: notices what can change the weights of a running SGLang, before it happens.

SGLang has no hook for a storage backend there. All ways lead through two classes in the process of the scheduler, whose
methods this module wraps:

    WeightUpdater                   of each model: from disk, from tensors, from another process, from a training job
    SchedulerWeightUpdaterManager   /release_memory_occupation, which may give the weights away

`begin` is called before the model is loaded (loads.py). So a storage that is attached to a running server also knows
what happened before.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from typing import Any, Protocol

UPDATER = ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater")
MANAGER = ("sglang.srt.managers.scheduler_components.weight_updater", "SchedulerWeightUpdaterManager")
UPDATES = (
    *("update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc"),
    *("begin_weight_update", "init_weights_update_group", "load_weights_from_distributed"),
)
RELEASES = ("release_memory_occupation",)


class UpdateListener(Protocol):
    """Called in the thread of the scheduler."""

    def weights_may_change(self, cause: str) -> None: ...


class _Watch:
    """The watch of this process. `cause` is the first change since it began. `is_whole`: it missed none."""

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


def begin() -> None:
    """Begin to watch, before the model is loaded."""
    found = [(_class(*UPDATER), UPDATES), (_class(*MANAGER), RELEASES)]
    _WATCH.is_whole = all(callable(getattr(owner, name, None)) for owner, names in found for name in names)
    for owner, names in found if _WATCH.is_whole else ():
        if owner is not None and owner not in _WATCH.wrapped:
            _WATCH.wrapped.add(owner)
            for name in names:
                _wrap(owner, name)


def watch(listener: UpdateListener) -> str:
    """Call `listener` before the weights may change, for as long as it lives. Return why the files of the model may not
    describe the weights, empty if they do."""
    _WATCH.listeners.add(listener)
    if not _WATCH.is_whole:
        return "kvbm does not notice changes of the weights in this SGLang: is `kvbm` missing in `SGLANG_PLUGINS`?"
    return "" if _WATCH.cause is None else f"`{_WATCH.cause}` can have changed the weights"


def _class(module: str, name: str) -> type | None:
    try:
        owner: type | None = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return owner


def _wrap(owner: type, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *arguments: Any, **keys: Any) -> Any:
        _WATCH.note(name)
        return original(self, *arguments, **keys)

    setattr(owner, name, method)
