"""The real connector with a copier that obeys a file, so that a test can make copies fail in a server that runs.

The file, named by KVBM_TEST_FAULTS, holds a JSON object; what is absent from it does not happen:

    {"fail_every": 20}    every 20th copy of each direction fails: by turns before it began, half-way, and with an error
                          that nobody expects
    {"hold": "onboard"}   copies of this direction wait until the file says otherwise; "offload" likewise
    {"lie": true}         onboards bring other bytes than they should and report success
    {"leave_out": "snapshots"}   onboards bring no snapshot of a state and report success
    {"bug": "settle"}     from now on, this method of the leader raises

Snapshots are recognised only where scheduler and worker are in one process, as with one rank.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from kvbm.device.worker import Worker
from kvbm.engines.vllm.connector import DynamoConnector
from kvbm.engines.vllm.worker_side import WorkerSide
from kvbm.errors import TransferError

FAULTS_FILE = "KVBM_TEST_FAULTS"
POLL_S = 0.01
LIMIT_S = 120.0
SNAPSHOTS: Counter[str] = Counter()  # "snapshots": blocks of states that onboards have brought
_state_blocks: set[int] = set()  # G1 blocks that loads fill with a snapshot; changed between steps


class FaultyConnector(DynamoConnector):
    def __init__(self, vllm_config, role, kv_cache_config) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._has_states = [
            type(group.kv_cache_spec).__name__ == "MambaSpec" for group in kv_cache_config.kv_cache_groups
        ]
        SNAPSHOTS.clear()

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        for table, has_states in zip(blocks.get_block_ids(), self._has_states, strict=True):
            (_state_blocks.update if has_states else _state_blocks.difference_update)(table)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        if (bug := json.loads(Path(os.environ[FAULTS_FILE]).read_text()).get("bug")) is not None:
            setattr(self._scheduler.blocks.leader.leader, bug, _raise)
        return super().build_connector_meta(scheduler_output)

    @classmethod
    def worker_side_class(cls) -> type[WorkerSide]:
        return FaultyWorkerSide


def _raise(*arguments, **keywords):
    raise ZeroDivisionError("a bug in the leader")


class FaultyWorkerSide(WorkerSide):
    def create_worker(self, *arguments) -> Worker:
        worker = super().create_worker(*arguments)
        worker.copier = ObedientCopier(worker.copier, Path(os.environ[FAULTS_FILE]))
        return worker


class ObedientCopier:
    """The real copier behind the file's orders. Called from several threads."""

    def __init__(self, copier, orders: Path) -> None:
        self._copier = copier
        self._orders = orders
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()

    def fence(self) -> object | None:
        return self._copier.fence()

    def offload(self, block_ids: Sequence[int], slots: Sequence[int], fence: object | None) -> None:
        self._obey("offload", self._copier.offload, block_ids, slots, fence)

    def onboard(self, slots: Sequence[int], block_ids: Sequence[int], fence: object | None) -> None:
        if self._ordered().get("lie"):
            self._copier.onboard([slot ^ 1 for slot in slots], block_ids, fence)  # there is an even number of them
            return
        if self._ordered().get("leave_out") == "snapshots":
            kept = [pair for pair in zip(slots, block_ids, strict=True) if pair[1] not in _state_blocks]
            slots, block_ids = [slot for slot, _ in kept], [block_id for _, block_id in kept]
        self._obey("onboard", self._copier.onboard, slots, block_ids, fence)
        with self._lock:
            SNAPSHOTS["snapshots"] += len(_state_blocks.intersection(block_ids))

    def _ordered(self) -> dict:
        return json.loads(self._orders.read_text())

    def _obey(
        self, kind: str, copy: Callable[..., None], first: Sequence[int], second: Sequence[int], fence: object | None
    ) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self._ordered().get("hold") == kind:
            assert time.monotonic() < deadline, "a held copy was never released"
            time.sleep(POLL_S)
        fail_every = self._ordered().get("fail_every")
        with self._lock:
            self._calls[kind] += 1
            call = self._calls[kind]
        if fail_every and call % fail_every == 0:
            self._fail(call // fail_every, copy, first, second, fence)
        else:
            copy(first, second, fence)

    def _fail(
        self, failure: int, copy: Callable[..., None], first: Sequence[int], second: Sequence[int], fence: object | None
    ) -> None:
        if failure % 3 == 0:
            raise TransferError("fault: copy failed before it began")
        if failure % 3 == 1:
            half = len(first) // 2
            copy(first[:half], second[:half], fence)
            raise TransferError(f"fault: copied {half} of {len(first)} blocks")
        raise ValueError("fault: nobody expects this")
