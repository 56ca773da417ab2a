"""Loads: what the files of a model were before SGLang loaded them, and after.

SGLang has no hook for a storage backend before it loads a model. So `register` is an entry point of the group
`sglang.srt.plugins`, which SGLang calls in each of its processes. It wraps the constructor of the scheduler, which
loads the model and then creates the storage. There the first look begins, and the watch for changes of the weights. The
storage ends the look. An engine without kvbm pays nothing.

If SGLang did not call `register` (`SGLANG_PLUGINS` leaves it out, or kvbm is not installed as a package), changes of
the weights could have been missed, and no page outlives the engine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbm.engines.engine_code import call_before
from kvbm.engines.sglang import weight_updates

if TYPE_CHECKING:
    from kvbm.identity.digests import Unidentified
    from kvbm.identity.loading import FileContent, Loading

SCHEDULER = "sglang.srt.managers.scheduler"
OURS = "kvbm.sglang_integration"  # in the command line

_BEGUN: dict[str, Loading | Unidentified] = {}  # by the absolute path of the directory
_LOADED: dict[str, FileContent | Unidentified] = {}


def register() -> None:
    """Look at the model's files before each scheduler of this process loads them, and watch its weights."""
    call_before(getattr(sys.modules.get(SCHEDULER), "Scheduler", None), "__init__", _note_load)


def _note_load(_scheduler: Any, server_args: Any, *_: Any, **__: Any) -> None:
    if OURS in str(getattr(server_args, "hicache_storage_backend_extra_config", None)):
        _begin(server_args)
    elif getattr(server_args, "enable_hierarchical_cache", False):  # a storage can be attached later
        weight_updates.begin()


def content_of(directory: Path, *, every: bool) -> FileContent:
    """Return the content of the files that SGLang has loaded from a directory, with `every` of all that it has.

    Raises Unidentified or OSError.
    """
    from kvbm.identity import loading

    path = os.path.abspath(directory)
    if (begun := _BEGUN.pop(path, None)) is not None:
        _LOADED[path] = loading.ended(begun)
    return loading.content_of(directory, _LOADED.get(path), every=every)


def _begin(server_args: Any) -> None:
    """Begin to look and to watch. Raises nothing: SGLang loads whatever happens here."""
    from kvbm.identity.digests import Unidentified
    from kvbm.identity.loading import begun
    from kvbm.identity.snapshot import snapshot_of

    weight_updates.begin()
    try:
        names = (getattr(server_args, name, None) for name in ("revision", "download_dir"))
        directory = snapshot_of(str(server_args.model_path), *names)
    except (Unidentified, OSError):
        return  # the files are not there yet; the storage says why nothing is kept
    _BEGUN[os.path.abspath(directory)] = begun(directory, every=bool(getattr(server_args, "trust_remote_code", False)))
