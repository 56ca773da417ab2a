"""Weight updates: notices what can change the weights of a running vLLM, before it happens.

    reset_prefix_cache(reset_connector=True), sleep, /pause     vLLM calls `reset_cache` of the connector, unless the
                                                                caller keeps the connector's cache
    collective_rpc: reload_weights, update_weights, own code    no call of the connector: noticed here
    add_lora, also load_lora_adapter with load_inplace          no call of the connector: noticed here

All of these pass through EngineCore, in the process and the thread of the scheduler. vLLM has no hook for a connector
there, so this module wraps three methods of that class. An RPC that is not known to leave the weights alone counts as
one that changes them. Code that reaches into a worker of an engine in its own process is not noticed.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvbm.engines.engine_code import call_before
from kvbm.text.outside import shown

CORE = "vllm.v1.engine.core"
HARMLESS = frozenset(  # RPCs that leave the weights alone
    {"check_health", "compute_weight_checksums", "execute_dummy_batch", "get_model_inspection", "get_supported_tasks"}
    | {"init_weight_transfer_engine", "list_loras", "pin_lora", "profile", "report_health", "reset_encoder_cache"}
    | {"reset_mm_cache", "save_sharded_state", "shutdown_weight_transfer_engine", "supports_draft_weight_updates"}
    | {"synchronize_device"}
)


class Listener(Protocol):
    """Called in the thread of the scheduler."""

    def weights_may_change(self, cause: str) -> None: ...
    def adapter_is_loaded(self, adapter: Any) -> None: ...


_LISTENERS: weakref.WeakSet[Listener] = weakref.WeakSet()


def watch(listener: Listener) -> None:
    """Call `listener` before the weights may change, for as long as it lives."""
    _LISTENERS.add(listener)
    for name, note in WATCHED.items() if reports_weight_updates() else ():
        call_before(_core(), name, note)


def reports_weight_updates() -> bool:
    """Return whether vLLM has the methods that `watch` wraps."""
    return all(callable(getattr(_core(), name, None)) for name in WATCHED)


def _core() -> type:
    core: type = importlib.import_module(CORE).EngineCore
    return core


def _note_rpc(_engine: Any, method: Any, *_: Any, **__: Any) -> None:
    name = method if isinstance(method, str) else getattr(method, "__qualname__", type(method).__name__)
    if not isinstance(method, str) or name not in HARMLESS:
        for listener in list(_LISTENERS):
            listener.weights_may_change(f"the RPC `{shown(name)}`")


def _note_sleep(_engine: Any, level: int = 1, *_: Any, **keys: Any) -> None:
    """Note a sleep. Level 1 brings the same weights back, but the caller may replace them meanwhile. Only a caller who
    keeps the caches of connectors says that they stay (an argument of vLLM after 0.33)."""
    keeps_weights = level == 1 and keys.get("clear_connector_cache") is False
    if level > 0 and not keeps_weights:
        for listener in list(_LISTENERS):
            listener.weights_may_change(f"sleep level {level}")


def _note_adapter(_engine: Any, lora_request: Any, *_: Any, **__: Any) -> None:
    for listener in list(_LISTENERS):
        listener.adapter_is_loaded(lora_request)


WATCHED: Mapping[str, Callable[..., None]] = {
    "collective_rpc": _note_rpc,
    "sleep": _note_sleep,
    "add_lora": _note_adapter,
}
