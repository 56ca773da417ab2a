"""Requests that wait for a load when vLLM, which is paused, resets its prefix cache.

`/pause?mode=keep` and `/sleep?mode=keep` preempt the requests that run, and then reset the cache. vLLM refuses the
reset while a request has blocks that is not running, and only a load gives blocks to such a request. So before the
reset, such requests are preempted here too: their loads have ended, and they begin again when the engine resumes.
vLLM completes a pause only when the connector has no work, so loads have ended then. If one has not, vLLM refuses the
reset.

vLLM has no hook for a connector there, so this module wraps a method of its scheduler. What it changes in a request is
what vLLM changes after a load that failed.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvbm.engines.engine_code import call_before

SCHEDULER = "vllm.v1.core.sched.scheduler"
LOADING = "WAITING_FOR_REMOTE_KVS"
RESUMABLE = ("WAITING", "PREEMPTED")


def preempt_before_resets(connector_class: type) -> None:
    """Let schedulers whose connector is of this class preempt waiting requests before they reset a paused engine."""

    def preempt(scheduler: Any, reset_running_requests: bool = False, *_: Any, **__: Any) -> None:
        if reset_running_requests and isinstance(scheduler.connector, connector_class):
            preempt_waiting(scheduler)

    call_before(importlib.import_module(SCHEDULER).Scheduler, "reset_prefix_cache", preempt)


def preempt_waiting(scheduler: Any) -> None:
    """Take the blocks of requests that have loaded and do not run. Does nothing while the engine is not paused: a step
    may then be under way, and report a load."""
    state, failed = getattr(scheduler, "pause_state", None), getattr(scheduler, "failed_recving_kv_req_ids", None)
    if state is None or state.name == "UNPAUSED" or failed is None:
        return
    loading = [request for request in scheduler.requests.values() if request.status.name == LOADING]
    if any(request.request_id not in scheduler.finished_recving_kv_req_ids for request in loading):
        return
    failed.update(request.request_id for request in loading)
    loaded = [
        request
        for request in getattr(scheduler, "kv_holding_waiting", ())
        if request.status.name in RESUMABLE and request.num_computed_tokens
    ]
    for request in (*loading, *loaded):
        scheduler.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
