"""Wakes an idle engine, so that it takes a step for a message to kvbm.

vLLM's EngineCore waits for its input queue when it has no work. It asks the connector (`has_pending_push_work`)
before it waits again. vLLM has no hook with which a connector could end the wait, so this module wraps the method that
waits, and remembers whose it is. An empty list of aborts in the queue ends the wait, in every version of vLLM.

An engine inside the user's own process (`LLM` without a process of its own) has no such loop, and cannot be woken.
"""

from __future__ import annotations

import importlib
import weakref
from typing import Any

from kvbm.engines.engine_code import call_before

CORE = "vllm.v1.engine.core"

_CORES: weakref.WeakSet[Any] = weakref.WeakSet()  # that have waited; one in a process


def watch_cores() -> None:
    """Remember each engine core that waits for input from now on."""
    call_before(importlib.import_module(CORE).EngineCoreProc, "_process_input_queue", _CORES.add)


def wake() -> None:
    """Let the engine cores of this process ask for work. Any thread may call it."""
    abort = importlib.import_module("vllm.v1.engine").EngineCoreRequestType.ABORT
    for core in list(_CORES):
        core.input_queue.put_nowait((abort, []))
