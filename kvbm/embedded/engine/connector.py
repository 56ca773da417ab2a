"""The contract between this engine and a KV connector: two Protocols and what passes between them.

The scheduler side decides, in the engine thread, and sees no bytes. The worker side moves bytes. They share no object:
what `build_connector_meta` returns is pickled before `bind_connector_metadata` gets it. One engine step calls

    get_num_new_matched_tokens, update_state_after_alloc    per request that is considered, admitted
    build_connector_meta                                    once, also when nothing is scheduled
    handle_preemptions, bind_connector_metadata, start_load_kv
      wait_for_layer_load(l), save_kv_layer(l)              around the attention of every layer
    wait_for_save, get_finished, get_block_ids_with_load_errors, clear_connector_metadata
    update_connector_output                                 what it returns is what the engine acts on
    request_finished                                        per request that ended

Rules that the engine keeps:

- A lookup happens while `num_computed_tokens` is 0, and again after a preemption. `(None, _)` puts the request off to
  the next step without holding up those behind it. At least one token of every request is computed.
- The blocks of an asynchronous load are neither scheduled nor findable before its id is in `finished_recving`, which
  must not come before the copier has stopped. A synchronous load has ended when `wait_for_layer_load` returns, and is
  not reported.
- Failed blocks arrive no later than the end of their load; they and the tokens behind them are computed again.
- `request_finished` is called once per request, also for an abort, before its blocks are freed. With True they stay
  until its id is in `finished_sending` or `finished_recving`. A connector that still touches blocks of a request for
  which it answered False, or of one that was preempted, must have taken a hold on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from kvbm.embedded.engine.blocks import BlockPool
    from kvbm.embedded.engine.kv import KVPool
    from kvbm.embedded.engine.request import Request


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one step computes: `scheduled` has (request id, number of tokens) for each request in the batch.

    `finished_ids` ended since the last step. `preempted_ids` lost their blocks in this step; `resumed_ids` run again
    after a preemption, with another block table.
    """

    step: int
    scheduled: list[tuple[str, int]]
    finished_ids: list[str]
    preempted_ids: list[str]
    resumed_ids: list[str]


@dataclass(slots=True)
class ConnectorOutput:
    """What the worker side reported in one step. Unknown request ids are ignored."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_block_ids: set[int] = field(default_factory=set)


class SchedulerSide(Protocol):
    """Called in the engine thread only; every call should take microseconds."""

    def bind_block_pool(self, pool: BlockPool, namespace: bytes) -> None: ...
    def on_new_request(self, request: Request) -> None: ...
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]: ...
    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None: ...
    def disk_tokens(self, request: Request) -> int: ...
    def build_connector_meta(self, output: SchedulerOutput) -> object: ...
    def update_connector_output(self, output: ConnectorOutput) -> ConnectorOutput: ...
    def request_finished(self, request: Request, block_ids: list[int]) -> bool: ...
    def has_pending_work(self) -> bool: ...
    def take_events(self) -> list[object]: ...
    def reset_cache(self) -> bool: ...
    def metrics(self) -> Collector | None: ...
    def shutdown(self) -> None: ...


class WorkerSide(Protocol):
    """Called in the engine thread; copies run in threads or streams of its own."""

    def register_kv_pool(self, pool: KVPool) -> None: ...
    def handle_preemptions(self, meta: object) -> None: ...
    def bind_connector_metadata(self, meta: object) -> None: ...
    def start_load_kv(self) -> None: ...
    def wait_for_layer_load(self, layer: int) -> None: ...
    def save_kv_layer(self, layer: int) -> None: ...
    def wait_for_save(self) -> None: ...
    def get_finished(self, finished_request_ids: set[str]) -> tuple[set[str] | None, set[str] | None]: ...
    def get_block_ids_with_load_errors(self) -> set[int]: ...
    def clear_connector_metadata(self) -> None: ...
    def shutdown(self) -> None: ...
