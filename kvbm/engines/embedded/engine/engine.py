"""Engine: a thread that owns model, scheduler, KV pool and connector, with a thread-safe interface.

`submit`, `abort`, `begin_reset`, `stats` and `stop` may be called from any thread. Orders reach the engine
thread through one queue. Outputs go to each request's callback, which runs in the engine thread and must neither wait
nor raise. Every submitted request gets exactly one output with a finish reason, also if the engine is stopped or dies.

The thread executes steps while a request is open or the connector has transfers in flight. It waits a millisecond after
a step in which nothing could run, and otherwise sleeps until an order arrives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvbm import hashing
from kvbm.engines.embedded.engine import model as models
from kvbm.engines.embedded.engine.block_pool import BlockPool
from kvbm.engines.embedded.engine.connector import Connector
from kvbm.engines.embedded.engine.engine_core import EngineCore, Runner
from kvbm.engines.embedded.engine.kv_pool import KVPool
from kvbm.engines.embedded.engine.request import FinishReason, Request, RequestOutput, SamplingParams
from kvbm.engines.embedded.engine.scheduler import EngineCounters, Scheduler, SchedulerLimits
from kvbm.errors import EngineError, ProfileError

if TYPE_CHECKING:
    from kvbm.engines.embedded.engine.config import EngineConfig

IDLE_WAIT_S = 0.001
BATCHED_TOKENS_CPU = 1024
BATCHED_TOKENS_CUDA = 2048
MAX_REQUESTS = 64
STOP_TIMEOUT_S = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Current load of the engine and its counters since the start. `kv_cache_usage` is 0 to 1."""

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float
    counters: EngineCounters


def _running_future() -> Future[bool | None]:
    """Return a future that its waiter cannot cancel: the engine thread sets its result."""
    future: Future[bool | None] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(frozen=True, slots=True)
class _Order:
    """A function to run between two steps, and the future of its result."""

    run: Callable[[], bool | None]
    done: Future[bool | None] = field(default_factory=_running_future)

    def execute(self) -> None:
        """Run the function. An error is set on the future, then ends the engine thread."""
        try:
            self.done.set_result(self.run())
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            self.done.set_exception(EngineError(f"the engine failed while executing this order: {reason}"))
            raise


class Engine:
    """Loads model and KV pool in the constructor, and serves from `start` to `stop`.

    Raises EnvironmentProblem or ProfileError.
    """

    def __init__(self, config: EngineConfig, *, connector: Connector | None = None) -> None:
        self.config = config
        self.model = models.load(config)
        self.block_size = config.block_size
        self.max_model_len = _max_model_len(config, self.model.max_positions)
        self.threads = config.threads or _default_threads(self.model.parameter_count)
        self.blocks = BlockPool(config.num_blocks)
        self.pool = KVPool(
            self.model.geometry,
            block_count=config.num_blocks,
            block_size=config.block_size,
            kv_layout=config.kv_layout,
            device=self.model.device,
        )
        self._connector = connector
        self.core = self._create_core()
        self._thread = threading.Thread(target=self._main, name="kvbm-engine", daemon=True)
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the attributes below, which submitters and the engine thread share
        self._in_flight: dict[str, Request] = {}
        self._seeds = random.Random(config.seed)
        self._is_stopping = False
        self._is_shut_down = False
        self._failure: str | None = None

    def _create_core(self) -> EngineCore:
        scheduler_connector = None
        if self._connector is not None:
            scheduler_connector, worker_connector = self._connector
            worker_connector.register_kv_pool(self.pool)
            scheduler_connector.bind_wake(self._wake)
            scheduler_connector.bind_block_pool(self.blocks, self.model.identity, self.model.doubt)
        return EngineCore(
            Scheduler(self.blocks, _limits(self.config, self.model.device), scheduler_connector),
            Runner(self.model, self.pool),
            stop_token_ids=self.model.stop_token_ids,
            connector=self._connector,
        )

    # -- any thread ----------------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        return self.config.model_name

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_alive() and self._failure is None and not self._is_stopping

    @property
    def failure(self) -> str | None:
        """Why the engine thread died, or None."""
        return self._failure

    def start(self) -> None:
        self._thread.start()

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        on_output: Callable[[RequestOutput], None],
    ) -> None:
        """Queue a request whose id no other one has, with 1 to `max_model_len` - 1 tokens of the vocabulary. Raises
        EngineError if the engine is not running."""
        with self._lock:
            self._require_running()
            seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
            request = self.new_request(request_id, prompt_token_ids, params, self._forgetting(on_output), seed=seed)
            self._in_flight[request_id] = request
            self._orders.put(_Order(lambda: self.core.add(request)))

    def _wake(self) -> None:
        self._orders.put(_Order(lambda: None))

    def abort(self, request_id: str) -> None:
        """End a request with finish reason "abort". Ignores a request that has ended."""
        self._orders.put(_Order(lambda: self.core.abort(request_id)))

    def begin_reset(self) -> Future[bool | None]:
        """Start to clear the prefix cache in G1 and in the connector. The future fails with EngineError if the engine
        dies; so does this call if it has died."""
        order = _Order(lambda: self.core.scheduler.reset_prefix_cache())
        with self._lock:
            self._require_running()
            self._orders.put(order)
        return order.done

    def stats(self) -> EngineStats:
        """Read counters without a lock: each number is correct, but they may differ by a step."""
        scheduler, usage = self.core.scheduler, self.blocks.used_count / self.blocks.block_count
        return EngineStats(scheduler.running_count, scheduler.waiting_count, usage, scheduler.counters)

    def stop(self) -> None:
        """Abort open requests, shut the connector down and free the pool. Safe to call twice."""
        with self._lock:
            self._is_stopping = True
        if self._thread.is_alive():
            self._orders.put(_Order(lambda: None))
            self._thread.join(STOP_TIMEOUT_S)
        with self._lock:
            is_mine = not self._is_shut_down and not self._thread.is_alive()
            self._is_shut_down |= is_mine
        if is_mine:
            self._shut_down()

    # -- callers' side of an order -------------------------------------------------------------------------------------

    def _require_running(self) -> None:
        if not self.is_healthy:
            raise EngineError(f"the engine is not running: {self._failure or 'it was stopped or not started'}")

    def new_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        on_output: Callable[[RequestOutput], None],
        *,
        seed: int,
    ) -> Request:
        """Create a request for `EngineCore.add`; callers without the engine thread step the core themselves."""
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            on_output=on_output,
            block_size=self.block_size,
            hash_root=hashing.root(self.model.namespace, salt=params.cache_salt),
            sampling_seed=seed,
            max_output_tokens=min(params.max_tokens, self.max_model_len - len(prompt_token_ids)),
            tenant=hashing.tenant(params.cache_salt),
        )

    def _forgetting(self, on_output: Callable[[RequestOutput], None]) -> Callable[[RequestOutput], None]:
        """Wrap the callback: the last output of a request first removes it from `_in_flight`."""

        def deliver(output: RequestOutput) -> None:
            if output.finish_reason is not None:
                with self._lock:
                    self._in_flight.pop(output.request_id, None)
            on_output(output)

        return deliver

    # -- engine thread -------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        """Run the engine; however this thread ends, every open request gets its last output."""
        try:
            torch.set_num_threads(self.threads)
            with torch.inference_mode():
                self._serve()
        except BaseException as error:
            log.exception("the engine thread died")
            self._end_all(FinishReason.ERROR, f"the engine died: {type(error).__name__}: {error}")
        else:
            self._end_all(FinishReason.ABORT, None)

    def _serve(self) -> None:
        was_idle = False
        while not self._is_stopping:
            self._take_orders(may_sleep=not self.core.has_work, was_idle=was_idle)
            if self.core.has_work and not self._is_stopping:
                was_idle = not self.core.step()

    def _take_orders(self, *, may_sleep: bool, was_idle: bool) -> None:
        """Execute the orders that are queued now; wait for the first one if there is no other work.

        Orders that arrive meanwhile wait for the next step: callers who repeat them must not hold up requests.
        """
        timeout_s = None if may_sleep else IDLE_WAIT_S if was_idle else 0.0
        with contextlib.suppress(queue.Empty):
            order = self._orders.get(timeout=timeout_s) if timeout_s != 0.0 else self._orders.get_nowait()
            queued = self._orders.qsize()
            order.execute()
            for _ in range(queued):
                self._orders.get_nowait().execute()

    def _end_all(self, reason: FinishReason, failure: str | None) -> None:
        """Accept no more requests, and send every open request its last output."""
        with self._lock:
            self._failure = failure
            self._is_stopping = True
            requests, self._in_flight = list(self._in_flight.values()), {}
        for request in requests:
            if reason is FinishReason.ABORT and self.core.scheduler.get(request.request_id) is request:
                self.core.scheduler.finish(request)
            # A callback that raises may have killed the engine: the other requests still get their last output.
            with contextlib.suppress(Exception):
                request.on_output(request.last_output(reason, error=failure))
        with contextlib.suppress(queue.Empty):
            while True:
                self._orders.get_nowait().done.set_exception(EngineError(failure or "the engine was stopped"))

    def _shut_down(self) -> None:
        if self._connector is not None:
            scheduler_connector, worker_connector = self._connector
            scheduler_connector.shutdown()
            worker_connector.shutdown()
        self.pool.close()


def _limits(config: EngineConfig, device: str) -> SchedulerLimits:
    default = BATCHED_TOKENS_CPU if device == "cpu" else BATCHED_TOKENS_CUDA
    return SchedulerLimits(
        block_size=config.block_size,
        max_batched_tokens=config.max_num_batched_tokens or default,
        max_requests=config.max_num_seqs or MAX_REQUESTS,
        prefix_caching=config.prefix_caching,
    )


def _max_model_len(config: EngineConfig, max_positions: int) -> int:
    """Return the maximum length of a request, limited by the model and by G1, which must hold the whole request."""
    capacity = config.num_blocks * config.block_size
    if config.max_model_len is None:
        return min(max_positions, capacity)
    for limit, holder in ((max_positions, "the model takes"), (capacity, "G1 holds")):
        if config.max_model_len > limit:
            raise ProfileError(
                f"`max_model_len` is {config.max_model_len} tokens, but {holder} {limit}",
                hint="lower `engine.arguments.max_model_len`, or raise `engine.arguments.num_blocks`",
            )
    return config.max_model_len


def _default_threads(parameter_count: int) -> int:
    """Return 1 for small models: thread barriers cost them more than threads gain, in particular on a busy machine."""
    if parameter_count < models.ONE_THREAD_PARAMETERS:
        return 1
    return min(int(torch.get_num_threads()), len(os.sched_getaffinity(0)))
