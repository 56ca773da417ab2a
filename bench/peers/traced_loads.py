"""Connectors that note the moments of every load, for kvbm and for vLLM's own offloading alike.

    --kv-transfer-config '{"kv_connector": "TracedKvbm", "kv_connector_module_path": "traced_loads", ...}'

This directory must be on PYTHONPATH and TRACE_DIRECTORY must be set. Each process writes one line of JSON per moment to
a file of its own there; `load_split.py` reads them. Times come from the system's monotonic clock, which all processes
share. Both classes note the same hooks of vLLM's interface; only the copying threads are reached in different ways.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import native_on_cpu
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvbm.engines.vllm.connector import DynamoConnector
from kvbm.engines.vllm.worker_side import WorkerSide


class Moments:
    """The file of this process. Any thread may note."""

    def __init__(self) -> None:
        self._file = (Path(os.environ["TRACE_DIRECTORY"]) / f"{os.getpid()}.jsonl").open("w", buffering=1)

    def note(self, moment: str, **fields: Any) -> None:
        self._file.write(json.dumps({"moment": moment, "at": time.monotonic(), **fields}) + "\n")

    def copy(self, began: float, cpu_s: float) -> None:
        cpu_s = time.thread_time() - cpu_s
        self.note("copied", began=began, cpu_s=cpu_s, core=current_core())


def current_core() -> int:
    """The core of the calling thread: field 39 of its stat."""
    return int(Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36])


MOMENTS = Moments()


class TracedHooks:
    """Notes the hooks of a connector, which is the next class in the order of resolution."""

    def on_new_request(self, request: Any) -> None:
        MOMENTS.note("arrived", id=request.request_id)
        super().on_new_request(request)  # type: ignore[misc]

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        orders = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        MOMENTS.note("ordered", tokens=dict(scheduler_output.num_scheduled_tokens))
        return orders

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)  # type: ignore[misc]
        if connector_output.finished_recving:
            MOMENTS.note("reported", ids=sorted(connector_output.finished_recving))

    def take_events(self) -> Any:
        events = super().take_events()  # type: ignore[misc]
        MOMENTS.note("ended")
        return events

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        MOMENTS.note("bound")
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]


class TracedCopier:
    """kvbm's copier; notes every onboard."""

    def __init__(self, copier: Any) -> None:
        self._copier = copier
        self.fence, self.offload = copier.fence, copier.offload

    def onboard(self, slots: Sequence[int], block_ids: Sequence[int], fence: object | None) -> None:
        began, cpu_s = time.monotonic(), time.thread_time()
        self._copier.onboard(slots, block_ids, fence)
        MOMENTS.copy(began, cpu_s)


class TracedWorkerOfKvbm(WorkerSide):
    def create_worker(self, layout: Any, storages: Any) -> Any:
        worker = super().create_worker(layout, storages)
        worker.copier = TracedCopier(worker.copier)
        return worker


class TracedKvbm(TracedHooks, DynamoConnector):
    @classmethod
    def worker_side_class(cls) -> type[WorkerSide]:
        return TracedWorkerOfKvbm


class TracedNative(TracedHooks, OffloadingConnector):
    def register_kv_caches(self, kv_caches: Any) -> None:
        copy = native_on_cpu.copy

        def traced_copy(job_id: int, moves: Any) -> Any:
            began, cpu_s = time.monotonic(), time.thread_time()
            result = copy(job_id, moves)
            if threading.current_thread().name.startswith("load"):
                MOMENTS.copy(began, cpu_s)
            return result

        native_on_cpu.copy = traced_copy
        super().register_kv_caches(kv_caches)
