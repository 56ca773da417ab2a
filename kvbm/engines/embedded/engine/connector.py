"""The contract between this engine and a KV connector: two Protocols and the values that pass between them.

The scheduler connector decides, in the engine thread, and sees no bytes. The worker connector copies bytes. They share
no object: the engine pickles what `build_connector_meta` returns before the worker connector receives it. One engine
step calls:

    get_num_new_matched_tokens, update_state_after_alloc    per request that is considered, that begins a load
    build_connector_meta                                    once, also when nothing is scheduled
    start_load_kv                                           before the forward pass
    wait_for_save, take_results                             after the forward pass
    update_connector_output                                 the engine acts on what it returns
    request_finished                                        per request that ended

Rules of the contract:

- A lookup happens while `num_computed_tokens` is 0, and again after a preemption. None defers the request to the next
  step and does not delay those behind it. At least one token of every request is computed.
- Loads are asynchronous: their blocks are neither scheduled nor findable until the request is in `finished_recving`.
  The connector reports an id only after the copy has stopped, or with all blocks that it may still write to as failed
  ones.
- Failed blocks are reported no later than the end of their load. They and the tokens behind them are computed again.
  The engine releases them, and computes in other blocks. A connector that may still write to them must hold them in the
  block pool.
- `request_finished` is called once per request, also after an abort, before its blocks are freed. A connector that
  still copies from or to blocks of a finished or preempted request must hold them in the block pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvbm.engines.embedded.engine.block_pool import BlockPool
    from kvbm.engines.embedded.engine.kv_pool import KVPool
    from kvbm.engines.embedded.engine.request import Request


@dataclass(slots=True)
class Step:
    """One step: the scheduled requests in batch order, with their tokens, and those that lost their blocks in it."""

    budget: int
    scheduled: dict[Request, int] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)

    def add(self, request: Request, token_count: int) -> None:
        self.scheduled[request] = token_count
        self.budget -= token_count

    def remove(self, request: Request) -> None:
        self.budget += self.scheduled.pop(request, 0)

    @property
    def sampled(self) -> list[Request]:
        """The requests whose last token is in this step, in batch order: each gets a next token."""
        return [request for request, count in self.scheduled.items() if count == request.num_uncomputed_tokens]


@dataclass(slots=True)
class ConnectorOutput:
    """Results of one step: ids of requests whose load has ended, and blocks that could not be loaded.

    Unknown request ids are ignored.
    """

    finished_recving: set[str] = field(default_factory=set)
    failed_block_ids: set[int] = field(default_factory=set)


class SchedulerConnector(Protocol):
    """Called in the engine thread only; every call should take microseconds."""

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """Any thread may call `wake`: the engine then asks `has_pending_work`, although it has nothing to do."""

    def bind_block_pool(self, pool: BlockPool, identity: Mapping[str, object], doubt: str) -> None:
        """Begin to serve. The worker connector has registered the KV pool."""

    def on_new_request(self, request: Request) -> None: ...
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None: ...
    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None: ...
    def lower_tier_tokens(self, request: Request) -> tuple[int, int]: ...
    def build_connector_meta(self, step: Step) -> object: ...
    def update_connector_output(self, output: ConnectorOutput) -> ConnectorOutput: ...
    def request_finished(self, request: Request) -> None: ...
    def has_pending_work(self) -> bool: ...
    def reset_cache(self) -> bool: ...
    def shutdown(self) -> None: ...


class WorkerConnector(Protocol):
    """Called in the engine thread; copies run in threads or streams of its own."""

    def register_kv_pool(self, pool: KVPool) -> None: ...
    def start_load_kv(self, meta: object) -> None: ...
    def wait_for_save(self, meta: object) -> None: ...
    def take_results(self) -> ConnectorOutput: ...
    def shutdown(self) -> None: ...


Connector = tuple[SchedulerConnector, WorkerConnector]
