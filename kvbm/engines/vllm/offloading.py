"""Requests of an engine that offloads by itself, as kvbm's tier below its host memory must know them.

A tier gets only the name of a request from vLLM's OffloadingConnector. Whether its blocks have the weights of the
engine depends on more: with which blocks it began, whether it was preempted, which adapter it has. So this module wraps
methods of that connector, in the process of the scheduler:

    bind_gpu_block_pool         the blocks of G1
    on_new_request              a request, and its adapter
    update_state_after_alloc    with which blocks of G1 it begins
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvbm.boundary import Boundary, hook
from kvbm.engines.engine_code import call_before
from kvbm.engines.vllm.adapters import Adapters
from kvbm.engines.vllm.former_weights import FormerWeights
from kvbm.text.outside import shown

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"

_WATCHING: weakref.WeakSet[OffloadedRequests] = weakref.WeakSet()


class OffloadedRequests:
    """See the module's text. `changed(why)` is called when an adapter has other weights than before. After an exception
    the `boundary` is off."""

    def __init__(self, boundary: Boundary, changed: Callable[[str], object]) -> None:
        self.boundary = boundary
        self._changed = changed
        self._former = FormerWeights()
        self._adapters = Adapters()
        self._requests: dict[str, Request] = {}
        self._uncertain: set[str] = set()  # requests whose adapter may be another one
        self._pool: BlockPool | None = None
        self._connector: Any = None
        _WATCHING.add(self)
        connector_class = importlib.import_module(CONNECTOR).OffloadingConnector
        for name, note in _NOTES.items():
            call_before(connector_class, name, note)

    def is_stale(self, request_id: str) -> bool:
        """Return whether no block of a request may be stored any more."""
        request = self._requests.get(request_id)
        return request is None or request_id in self._uncertain or self._former.is_stale(request)

    @hook(when_off=True)
    def change(self) -> None:
        """Note that the weights change now. Blocks of G1 are not found any more, and those that requests have are not
        stored."""
        if self._pool is not None:
            self._former.change()

    def reset_host_memory(self) -> None:
        """Let vLLM forget the blocks in its host memory. Raises what vLLM raises."""
        if self._connector is not None:
            self._connector.reset_cache()

    @hook()
    def adapter_is_loaded(self, adapter: Any) -> None:
        if self._adapters.load(adapter):
            self._changed(f"adapter `{shown(adapter.lora_name)}` was loaded again")

    @hook(when_off=True)
    def end(self, request_id: str) -> None:
        """Note that no block of a request will be stored any more."""
        self._former.end(request_id)
        self._requests.pop(request_id, None)
        self._uncertain.discard(request_id)

    @hook()
    def bind(self, connector: Any, pool: BlockPool) -> None:
        self._connector, self._pool = connector, pool
        self._former.bind(pool)

    @hook()
    def begin(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._former.begin(request)
        adapter = request.lora_request
        if adapter is None:
            return
        if self._adapters.use(adapter):
            self._changed(f"adapter `{shown(adapter.lora_name)}` changed")
        if not self._adapters.is_certain(adapter):
            self._uncertain.add(request.request_id)

    @hook()
    def inherit(self, request: Request, blocks: KVCacheBlocks) -> None:
        if self._former.has_changed:
            self._former.inherit(request, [block_id for table in blocks.get_block_ids() for block_id in table])


def _note_pool(connector: Any, gpu_block_pool: BlockPool) -> None:
    for one in list(_WATCHING):
        one.bind(connector, gpu_block_pool)


def _note_request(_connector: Any, request: Request) -> None:
    for one in list(_WATCHING):
        one.begin(request)


def _note_blocks(_connector: Any, request: Request, blocks: KVCacheBlocks, *_: Any) -> None:
    for one in list(_WATCHING):
        one.inherit(request, blocks)


_NOTES: dict[str, Callable[..., None]] = {
    "bind_gpu_block_pool": _note_pool,
    "on_new_request": _note_request,
    "update_state_after_alloc": _note_blocks,
}
