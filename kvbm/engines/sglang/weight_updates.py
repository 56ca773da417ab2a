"""Weight updates: notices what can change the weights of a running SGLang, before it happens.

SGLang has no hook for a storage backend there. So this module wraps what all ways lead through, in the process of the
scheduler. SGLang looks these names up at each call, so that a storage that is attached later notices them, too:

    WeightUpdater            of each model: from disk, from tensors, from another process, from a training job
    WeightChecker            `/weights_checker` can give all parameters random values
    _export_static_state     `/release_memory_occupation` gives the weights away
    UnifiedRadixCache        takes what a prefetch has brought: nothing, if the weights have changed meanwhile

`begin` is called before the model is loaded (loads.py). So a storage that is attached to a running server also knows
what happened before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from kvbm.engines.engine_code import call_before, owner_of, replace

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater"
UPDATER = ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater")
CHECKER = ("sglang.srt.utils.weight_checker", "WeightChecker")
TREE = ("sglang.srt.mem_cache.unified_radix_cache", "UnifiedRadixCache")
UPDATES = (
    *("update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc"),
    *("begin_weight_update", "init_weights_update_group", "load_weights_from_distributed"),
)
# Where, and what is called there -> what a user calls it.
CHANGES: Mapping[tuple[str, str], Mapping[str, str]] = {
    UPDATER: {name: name for name in UPDATES},
    CHECKER: {"_reset_tensors": "weights_checker"},
    (MANAGER, ""): {"_export_static_state": "release_memory_occupation"},
}
PREFETCHES = ("check_prefetch_progress", "_handle_prefetch_result")
UNKNOWN = "kvbm does not notice changes of the weights in this SGLang"
MISSED = f"{UNKNOWN}: is `kvbm` missing in `SGLANG_PLUGINS`?"


class UpdateListener(Protocol):
    """Called in the thread of the scheduler."""

    def weights_may_change(self, cause: str) -> None: ...


class _Watch:
    """The watch of this process. `cause`: the first change since it began, a sentence. `is_whole`: it missed none."""

    def __init__(self) -> None:
        self.listeners: weakref.WeakSet[UpdateListener] = weakref.WeakSet()
        self.cause: str | None = None
        self.is_whole = False

    def note(self, cause: str) -> None:
        self.cause = self.cause or cause
        for listener in list(self.listeners):
            listener.weights_may_change(cause)

    def forbids_prefetches(self) -> bool:
        """Return whether what a prefetch has brought was computed by other weights."""
        return self.cause is not None and len(self.listeners) > 0


_WATCH = _Watch()


def begin() -> None:
    """Begin to watch, before the model is loaded."""
    _WATCH.is_whole = _wrap_all()


def watch(listener: UpdateListener, *, is_attached: bool) -> str:
    """Call `listener` before the weights may change, for as long as it lives. Return why the files of the model may not
    describe the weights, empty if they do. `is_attached`: SGLang was started without this storage.

    Pages that SGLang still has from former weights would be stored as those of the present ones. So the listener is
    called at once if the weights may have changed before.
    """
    _WATCH.listeners.add(listener)
    if _WATCH.cause is not None:
        listener.weights_may_change(_WATCH.cause)
    elif not _wrap_all():
        _WATCH.note(UNKNOWN)
    elif not _WATCH.is_whole and is_attached:
        _WATCH.note(MISSED)
    return _WATCH.cause or ("" if _WATCH.is_whole else MISSED)


def _wrap_all() -> bool:
    """Wrap what is not wrapped yet. Return False, and wrap nothing, if this SGLang lacks any of it."""
    found = {owner_of(*place): names for place, names in CHANGES.items()}
    tree = owner_of(*TREE)
    wanted: list[tuple[Any, Iterable[str]]] = [*found.items(), (tree, PREFETCHES)]
    if not all(callable(getattr(owner, name, None)) for owner, names in wanted for name in names):
        return False
    for owner, names in found.items():
        for name, cause in names.items():
            call_before(owner, name, functools.partial(_note, cause))
    call_before(tree, "check_prefetch_progress", _release)
    replace(tree, "_handle_prefetch_result", _dropping)
    return True


def _note(cause: str, *_: Any, **__: Any) -> None:
    _WATCH.note(f"`{cause}` can have changed the weights")


def _release(tree: Any, request: Any) -> None:
    """Without host memory of its own (`buffer_only`), SGLang holds pages of a prefetch until the request runs."""
    if _WATCH.forbids_prefetches() and tree.buffer_pipeline is not None:
        tree.buffer_pipeline.release_staged_hold(request)


def _dropping(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, operation: Any) -> Any:
        if _WATCH.forbids_prefetches():
            return self.release_aborted_request(operation.handle)
        return original(self, operation)

    return method
