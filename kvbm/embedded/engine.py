"""The engine: one thread that owns model, scheduler, pool and connector, and a few calls that others may make.

`submit`, `abort`, `reset_prefix_cache`, `stats` and `stop` may be called from any thread. Orders reach the engine
thread through one queue, and outputs leave it by each request's callback, which runs in the engine thread and must
neither wait nor raise. Every submitted request gets exactly one output with a finish reason, also when the engine is
stopped or dies.

The thread steps while a request lives or the connector has something under way, waits a millisecond after a step in
which nothing could run, and otherwise sleeps until an order comes.
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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvbm import hashing
from kvbm.embedded import model as models
from kvbm.embedded.blocks import BlockPool
from kvbm.embedded.connector import SchedulerSide, WorkerSide
from kvbm.embedded.kv import KVPool
from kvbm.embedded.request import FinishReason, Request, RequestOutput, SamplingParams
from kvbm.embedded.runner import Runner
from kvbm.embedded.scheduler import EngineCounters, Scheduler, SchedulerLimits
from kvbm.errors import EngineError, ProfileError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvbm.embedded.config import EngineConfig

IDLE_WAIT_S = 0.001
BATCHED_TOKENS_CPU = 1024
BATCHED_TOKENS_CUDA = 2048
STOP_TIMEOUT_S = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A glance at the engine. `counters` is live: its numbers only grow, and are read without a lock."""

    is_healthy: bool
    running_requests: int
    waiting_requests: int
    block_count: int
    block_size: int
    used_blocks: int
    registered_blocks: int
    counters: EngineCounters

    @property
    def kv_cache_usage(self) -> float:
        return self.used_blocks / self.block_count


@dataclass(frozen=True, slots=True)
class _Order:
    """Something to do between two steps, and whom to tell."""

    run: Callable[[], bool]
    done: Future[bool]


class Engine:
    """Loads everything when it is made (EnvironmentProblem, ProfileError), serves from `start` to `stop`."""

    def __init__(self, config: EngineConfig, *, connector: tuple[SchedulerSide, WorkerSide] | None = None) -> None:
        self.config = config
        self.model = models.load(config)
        self.block_size = config.block_size
        self.max_model_len = _max_model_len(config, self.model.max_positions)
        self.threads = config.threads or _default_threads(self.model.parameter_count)
        self._pool = KVPool(
            self.model.geometry,
            block_count=config.num_blocks,
            block_size=config.block_size,
            kv_layout=config.kv_layout,
            device=self.model.device,
        )
        self._blocks = BlockPool(config.num_blocks)
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        if connector is not None:
            self._scheduler_side, self._worker_side = connector
        if self._worker_side is not None:
            self._worker_side.register_kv_pool(self._pool)
        if self._scheduler_side is not None:
            self._scheduler_side.bind_block_pool(self._blocks)
        self._scheduler = Scheduler(self._blocks, _limits(config, self.model.device), self._scheduler_side)
        self._runner = Runner(self.model, self._pool, self._worker_side)
        self._thread = threading.Thread(target=self._main, name="kvbm-engine", daemon=True)
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the four attributes below, which submitters and the engine thread touch
        self._in_flight: dict[str, Request] = {}
        self._seeds = random.Random(config.seed)
        self._is_stopping = False
        self._failure: str | None = None

    # -- any thread ----------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """None for a directory without one: the engine then takes token ids only."""
        return self.model.tokenizer

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
        """Queue a request. ValueError if it cannot be served, EngineError if the engine does not serve (any more)."""
        self._require_servable(prompt_token_ids)
        with self._lock:
            if self._failure is not None or self._is_stopping:
                raise EngineError(f"the engine does not take requests: {self._failure or 'it is stopping'}")
            if request_id in self._in_flight:
                raise ValueError(f"request `{request_id}` is being served already")
            seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
            request = self._new_request(request_id, prompt_token_ids, params, on_output, seed)
            self._in_flight[request_id] = request
            self._orders.put(_Order(lambda: self._add(request), Future()))

    def abort(self, request_id: str) -> None:
        """End a request with finish reason "abort". One that has ended already is left alone."""
        self._orders.put(_Order(lambda: self._abort(request_id), Future()))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix, in G1 and in the connector; waits until it is done. EngineError if it is not."""
        return self._order(self._scheduler.reset_prefix_cache)

    def stats(self) -> EngineStats:
        return EngineStats(
            is_healthy=self.is_healthy,
            running_requests=self._scheduler.running_count,
            waiting_requests=self._scheduler.waiting_count,
            block_count=self._blocks.block_count,
            block_size=self.block_size,
            used_blocks=self._blocks.used_count,
            registered_blocks=self._blocks.registered_count,
            counters=self._scheduler.counters,
        )

    def stop(self) -> None:
        """Abort what is in flight, shut the connector down and free the pool. Safe to call twice."""
        with self._lock:
            is_first = not self._is_stopping
            self._is_stopping = True
        if self._thread.is_alive():
            self._orders.put(_Order(lambda: True, Future()))
            self._thread.join(STOP_TIMEOUT_S)
        if is_first and not self._thread.is_alive():
            self._shut_down()

    # -- callers' side of an order -------------------------------------------------------------------------------------

    def _order(self, run: Callable[[], bool]) -> bool:
        order = _Order(run, Future())
        with self._lock:
            if not self.is_healthy:
                raise EngineError(f"the engine does not run: {self._failure or 'it was stopped or not started'}")
            self._orders.put(order)
        return order.done.result()

    def _require_servable(self, prompt_token_ids: list[int]) -> None:
        if not prompt_token_ids:
            raise ValueError("the prompt is empty")
        if len(prompt_token_ids) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt_token_ids)} tokens; with its output it may have {self.max_model_len}"
            )
        if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= self.model.vocabulary_size:
            raise ValueError(f"the prompt has a token id outside 0 to {self.model.vocabulary_size - 1}")

    def _new_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        on_output: Callable[[RequestOutput], None],
        seed: int,
    ) -> Request:
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            on_output=on_output,
            block_size=self.block_size,
            hash_root=hashing.root(self.model.namespace, salt=params.cache_salt),
            sampling_seed=seed,
            max_output_tokens=min(params.max_tokens, self.max_model_len - len(prompt_token_ids)),
        )

    # -- engine thread -------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        """Whatever ends this thread, nobody is left waiting for an answer."""
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
            self._take_orders(may_sleep=not self._has_work, was_idle=was_idle)
            if self._has_work and not self._is_stopping:
                was_idle = not self._step()

    @property
    def _has_work(self) -> bool:
        return self._scheduler.has_requests or self._scheduler.has_news_for_connector

    def _take_orders(self, *, may_sleep: bool, was_idle: bool) -> None:
        """Carry out all waiting orders; wait for the first one as long as there is nothing else to do."""
        timeout_s = None if may_sleep else IDLE_WAIT_S if was_idle else 0.0
        with contextlib.suppress(queue.Empty):
            order = self._orders.get(timeout=timeout_s) if timeout_s != 0.0 else self._orders.get_nowait()
            while True:
                order.done.set_result(order.run())
                order = self._orders.get_nowait()

    def _step(self) -> bool:
        """One step. Returns whether anything was computed."""
        step = self._scheduler.schedule()
        output = self._scheduler.output(step)
        side = self._scheduler_side
        meta = None if side is None else side.build_connector_meta(output)
        sampled, connector_output = self._runner.execute(step, meta, output.finished_ids)
        if side is not None:
            connector_output = side.update_connector_output(connector_output)
            side.take_events()  # nobody listens here; left alone they would pile up
        stop_token_ids = self.model.stop_token_ids
        for request, request_output in self._scheduler.update(step, sampled, stop_token_ids, connector_output):
            self._tell(request, request_output)
        return bool(step.scheduled)

    def _add(self, request: Request) -> bool:
        self._scheduler.add(request)
        return True

    def _abort(self, request_id: str) -> bool:
        request = self._scheduler.get(request_id)
        if request is None:
            return False
        self._scheduler.finish(request, FinishReason.ABORT)
        self._tell(request, request.last_output(FinishReason.ABORT))
        return True

    def _tell(self, request: Request, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            with self._lock:
                self._in_flight.pop(request.request_id, None)
        request.on_output(output)

    def _end_all(self, reason: FinishReason, failure: str | None) -> None:
        """Take no more requests, and give every one that is in flight its last output."""
        with self._lock:
            self._failure = failure
            self._is_stopping = True
            requests, self._in_flight = list(self._in_flight.values()), {}
        for request in requests:
            if reason is FinishReason.ABORT and self._scheduler.get(request.request_id) is request:
                self._scheduler.finish(request, reason)
            # A callback that raises may be what killed the engine: the others must hear of it all the same.
            with contextlib.suppress(Exception):
                request.on_output(request.last_output(reason, error=failure))
        with contextlib.suppress(queue.Empty):
            while True:
                order = self._orders.get_nowait()
                order.done.set_exception(EngineError(failure or "the engine was stopped"))

    def _shut_down(self) -> None:
        if self._worker_side is not None:
            self._worker_side.shutdown()
        if self._scheduler_side is not None:
            self._scheduler_side.shutdown()
        self._pool.close()


def _limits(config: EngineConfig, device: str) -> SchedulerLimits:
    default = BATCHED_TOKENS_CPU if device == "cpu" else BATCHED_TOKENS_CUDA
    return SchedulerLimits(
        block_size=config.block_size,
        max_batched_tokens=config.max_num_batched_tokens or default,
        max_requests=config.max_num_seqs,
        prefix_caching=config.prefix_caching,
    )


def _max_model_len(config: EngineConfig, max_positions: int) -> int:
    """The longest request: no longer than the model can, nor than G1 holds, since a request runs wholly in G1."""
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
    """Small models lose more to thread barriers than they gain, above all where other processes run beside them."""
    if parameter_count < models.ONE_THREAD_PARAMETERS:
        return 1
    return min(int(torch.get_num_threads()), len(os.sched_getaffinity(0)))
