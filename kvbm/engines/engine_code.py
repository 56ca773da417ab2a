"""The code of an engine, as kvbm meets it in the engine's process: modules that may be missing, methods without a hook.

Engines have no hook for much of what kvbm must know. Then kvbm replaces a method by one that does more, once per class.
It has the name and the signature of the original, because engines decode arguments by them. Imports no engine.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

ORIGINAL = "_kvbm_original"  # attribute of a method that replaces another


def module_if_installed(path: str) -> Any | None:
    """Return a module of an engine, None without the engine. Raises what fails in the module."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path + ".").startswith(error.name + "."):
            raise  # the module exists, and something that it imports does not
        return None


def owner_of(module: str, name: str) -> Any | None:
    """Return the class `name` of a module of an engine, or the module itself without a name. None if it is missing."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    return getattr(found, name, None) if name else found


def replace(owner: Any, name: str, changed: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of a class, or a function of a module, by `changed(method)`, unless it was replaced before. Does
    nothing if there is no such class or method."""
    original = getattr(owner, name, None)
    if owner is not None and callable(original) and not hasattr(original, ORIGINAL):
        method = functools.wraps(original)(changed(original))
        setattr(method, ORIGINAL, original)
        setattr(owner, name, method)


def call_before(owner: Any, name: str, note: Callable[..., object]) -> None:
    """Call `note` before each call of a method, with its object and its arguments. Like `replace`."""

    def changed(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*arguments: Any, **keys: Any) -> Any:
            note(*arguments, **keys)
            return original(*arguments, **keys)

        return method

    replace(owner, name, changed)


def device_name() -> str:
    """Return the name of the computing device: different kernels compute different bytes."""
    import torch

    from kvbm.identity.machine import cpu_features

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else f"cpu {cpu_features()}"
