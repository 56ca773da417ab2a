"""TracedConnector: DynamoConnector that traces its hooks, their times, and its copies.

    --kv-transfer-config '{"kv_connector": "TracedConnector", "kv_connector_module_path": "traced_connector", ...}'

This directory must be on PYTHONPATH and TRACE_DIRECTORY must be set. Each side writes one line of JSON per event to its
own file there; `trace_file.py` reads them. Times come from the system's monotonic clock, which all processes share.

A step of the scheduler side ends with `take_events`, a step of a worker with `clear_connector_metadata`. Hooks are
timed at vLLM's call; a hook inside another hook counts as part of it. The time of a hook includes the tracing between
the two clock readings, under a microsecond per call. `hooks_cpu_ns` is the CPU time of the thread in all hooks.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvbm.engines.vllm.connector import DynamoConnector
from kvbm.engines.vllm.worker_side import WorkerSide

SCHEDULER_HOOKS = (
    *("on_new_request", "get_num_new_matched_tokens", "get_loaded_kv_cache_group_ids", "update_state_after_alloc"),
    *("get_external_cache_hit_sources", "build_connector_meta", "update_connector_output", "get_kv_connector_stats"),
    *("take_events", "request_finished", "request_finished_all_groups", "has_pending_push_work"),
)
WORKER_HOOKS = (
    *("handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer"),
    *("wait_for_save", "get_transfer_results", "get_block_ids_with_load_errors", "build_connector_worker_meta"),
    *("get_kv_connector_kv_cache_events", "finish_forward", "clear_connector_metadata"),
)
STEPS_UNTIL_REFERENCE = 3  # after a load: the request that waited for it has its first token by then


class Trace:
    """One trace file, and the time spent in hooks since the last step ended."""

    def __init__(self, side: str) -> None:
        path = Path(os.environ["TRACE_DIRECTORY"]) / f"{side}-{os.getpid()}.jsonl"
        self._file = path.open("w", buffering=1)
        self.depth = 0
        self.hook_ns: dict[str, int] = {}
        self.hooks_cpu_ns = 0

    def write(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}) + "\n")

    def end_step(self, **fields: Any) -> None:
        self.write("step", ended=time.monotonic(), hook_ns=self.hook_ns, hooks_cpu_ns=self.hooks_cpu_ns, **fields)
        self.hook_ns, self.hooks_cpu_ns = {}, 0


class TimedConnector(DynamoConnector):
    """DynamoConnector whose hooks add their time to the trace."""

    trace: Trace


def timed(name: str) -> Callable[..., Any]:
    hook = getattr(DynamoConnector, name)

    @functools.wraps(hook)
    def call(self: TimedConnector, *args: Any, **kwargs: Any) -> Any:
        trace = self.trace
        trace.depth += 1
        cpu = time.thread_time_ns()
        started = time.perf_counter_ns()
        try:
            return hook(self, *args, **kwargs)
        finally:
            taken = time.perf_counter_ns() - started
            trace.depth -= 1
            if trace.depth == 0:
                trace.hook_ns[name] = trace.hook_ns.get(name, 0) + taken
                trace.hooks_cpu_ns += time.thread_time_ns() - cpu

    return call


for _name in (*SCHEDULER_HOOKS, *WORKER_HOOKS):
    setattr(TimedConnector, _name, timed(_name))


class TracedConnector(TimedConnector):
    """Traces both sides. `_step` is the event that the scheduler side writes when the step ends."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.trace = Trace(role.name.lower())
        self._step: dict[str, Any] = {}
        super().__init__(vllm_config, role, kv_cache_config)
        if self._worker is not None:
            self._worker.trace = self.trace

    @classmethod
    def worker_side_class(cls) -> type[WorkerSide]:
        return TracedWorkerSide

    def on_new_request(self, request: Any) -> None:
        self.trace.write("request", at=time.monotonic(), id=request.request_id, prompt_tokens=request.num_prompt_tokens)
        super().on_new_request(request)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        orders = super().build_connector_meta(scheduler_output)
        started = time.perf_counter_ns()
        size = len(pickle.dumps(orders, protocol=pickle.HIGHEST_PROTOCOL))
        self._step = {
            "step": orders.plan.step,
            "built": time.monotonic(),
            "tokens": dict(scheduler_output.num_scheduled_tokens),
            "onboard_blocks": [len(order.block_ids) for order in orders.plan.onboards],
            "offload_blocks": [len(order.block_ids) for order in orders.plan.offloads],
            "failed_loads": len(orders.failed_loads),
            "orders_bytes": size,
            "orders_pickle_ns": time.perf_counter_ns() - started,
        }
        return orders

    def take_events(self) -> Any:
        events = super().take_events()
        is_pending = self._scheduler is not None and self._scheduler.has_pending()
        self.trace.end_step(**self._step, is_pending=is_pending)
        return events

    def clear_connector_metadata(self) -> None:
        step = self._worker.bound_step if self._worker is not None else 0
        super().clear_connector_metadata()
        self.trace.end_step(step=step)
        if self._worker is not None:
            self._worker.step_ended()


class TracedWorkerSide(WorkerSide):
    """Traces the submission, start and end of each onboard, and copies the same slots with memcpy some steps later."""

    trace: Trace
    bound_step = 0

    def create_worker(self, layout: Any, storages: Any) -> Any:
        worker = super().create_worker(layout, storages)
        self._payload, self._block_bytes = worker._segment.payload, layout.block_bytes
        self._submitted: dict[int, Order] = {}
        self._copies: list[Copy] = []
        self._awaiting: Order | None = None
        self._steps_left = 0
        worker.copier = TimedCopier(worker.copier, self)
        return worker

    def bind(self, orders: Any) -> None:
        self.bound_step = orders.plan.step
        for order in orders.plan.onboards:
            noted = Order(order.slots, time.monotonic())
            self._submitted.update(dict.fromkeys(order.slots, noted))
        super().bind(orders)

    def note_onboard(self, copy: Copy) -> None:
        """Called by copying threads."""
        self._copies.append(copy)

    def step_ended(self) -> None:
        """Trace ended onboards; run the reference memcpy once the request that waited is answered."""
        while self._copies:
            copy = self._copies.pop()
            order = self._submitted[copy.slots[0]]
            order.parts.append(copy)
            if sum(len(part.slots) for part in order.parts) < len(order.slots):
                continue
            self.trace.write(
                "onboard",
                bytes=len(order.slots) * self._block_bytes,
                submitted=order.submitted,
                began=min(part.began for part in order.parts),
                ended=max(part.ended for part in order.parts),
                cpu_s=sum(part.cpu_s for part in order.parts),
            )
            self._awaiting, self._steps_left = order, STEPS_UNTIL_REFERENCE
        if self._awaiting is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                for length in (self._block_bytes, len(self._awaiting.slots) * self._block_bytes):
                    self.trace.write("memcpy", **self._plain_copy(self._awaiting.slots, length))
                self._awaiting = None

    def _plain_copy(self, slots: Sequence[int], length: int) -> dict[str, float]:
        """memcpy the bytes of these slots, `length` at a time, to other memory."""
        count = len(slots)
        first = min(min(slots), len(self._payload) - count)
        source = self._payload[first : first + count]
        target = target_of(source.nbytes)
        to, of = target.ctypes.data, source.ctypes.data
        cpu, started = time.thread_time(), time.perf_counter()
        for offset in range(0, source.nbytes, length):
            ctypes.memmove(to + offset, of + offset, length)
        return {
            "bytes": source.nbytes,
            "call_bytes": length,
            "wall_s": time.perf_counter() - started,
            "cpu_s": time.thread_time() - cpu,
        }


@dataclass(frozen=True, slots=True)
class Copy:
    slots: Sequence[int]
    began: float
    ended: float
    cpu_s: float


@dataclass(slots=True)
class Order:
    """An onboard, and the copies of its parts that have ended."""

    slots: Sequence[int]
    submitted: float
    parts: list[Copy] = field(default_factory=list)


class TimedCopier:
    """The copier with a trace of its onboards."""

    def __init__(self, copier: Any, side: TracedWorkerSide) -> None:
        self._copier, self._side = copier, side
        self.fence, self.offload = copier.fence, copier.offload

    def onboard(self, slots: Sequence[int], block_ids: Sequence[int], fence: object | None) -> None:
        began, cpu = time.monotonic(), time.thread_time()
        self._copier.onboard(slots, block_ids, fence)
        self._side.note_onboard(Copy(slots, began, time.monotonic(), time.thread_time() - cpu))


@functools.cache
def target_of(byte_count: int) -> np.ndarray:
    """Memory that is prefaulted."""
    return np.ones(byte_count, np.uint8)
