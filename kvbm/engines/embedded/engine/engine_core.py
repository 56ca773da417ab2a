"""EngineCore: executes engine steps in the thread that owns it. It has no queue and no lock, and never waits.

    schedule -> build_connector_meta -> [ worker: loads | forward pass | saves | results ] -> update -> outputs

The connector's metadata is pickled on its way to the worker connector, so that its two parts share no object.
"""

from __future__ import annotations

import pickle

from kvbm.engines.embedded.engine import sampling
from kvbm.engines.embedded.engine.attention import Batch, PackedSequence
from kvbm.engines.embedded.engine.connector import (
    Connector,
    ConnectorOutput,
    SchedulerConnector,
    Step,
    WorkerConnector,
)
from kvbm.engines.embedded.engine.kv_pool import KVPool
from kvbm.engines.embedded.engine.model import LoadedModel
from kvbm.engines.embedded.engine.request import FinishReason, Request, TokenLogprobs
from kvbm.engines.embedded.engine.scheduler import Scheduler

Sampled = list[tuple[int, TokenLogprobs | None]]


class Runner:
    """Borrows the model and the KV pool; keeps no state between steps."""

    def __init__(self, model: LoadedModel, pool: KVPool) -> None:
        self._model = model
        self._pool = pool

    def run(self, step: Step) -> Sampled:
        """Compute the step's tokens; returns the next token of each of `step.sampled`."""
        if not step.scheduled:
            return []
        token_ids: list[int] = []
        positions: list[int] = []
        sequences: list[PackedSequence] = []
        last_rows: list[int] = []
        for request, count in step.scheduled.items():
            start, end = request.num_computed_tokens, request.num_computed_tokens + count
            sequences.append(PackedSequence(len(token_ids), count, end, request.block_ids))
            token_ids += request.all_token_ids[start:end]
            positions += range(start, end)
            if end == request.num_tokens:
                last_rows.append(len(token_ids) - 1)
        logits = self._model.forward(Batch(self._pool, sequences), token_ids, positions, last_rows or [0])
        return sampling.sample(logits, step.sampled, self._model.stop_token_ids) if last_rows else []


class EngineCore:
    """Combines scheduler, runner and connector. Outputs go to the callback of each request."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, *, stop_token_ids: frozenset[int], connector: Connector | None
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._stop_token_ids = stop_token_ids
        self._connector = connector

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request in any state. Returns False if no request has this id."""
        request = self.scheduler.get(request_id)
        if request is None:
            return False
        self.scheduler.finish(request)
        request.on_output(request.last_output(FinishReason.ABORT))
        return True

    def step(self) -> bool:
        """Execute one step. Returns whether the step computed something or a load has ended."""
        step = self.scheduler.schedule()
        if self._connector is None:
            sampled, connector_output = self._runner.run(step), ConnectorOutput()
        else:
            sampled, connector_output = self._run_with_connector(*self._connector, step)
        for request, news in self.scheduler.update(step, sampled, self._stop_token_ids, connector_output):
            request.on_output(news)
        return bool(step.scheduled or connector_output.finished_recving)

    def _run_with_connector(
        self, scheduler_connector: SchedulerConnector, worker_connector: WorkerConnector, step: Step
    ) -> tuple[Sampled, ConnectorOutput]:
        meta = pickle.loads(pickle.dumps(scheduler_connector.build_connector_meta(step)))
        worker_connector.start_load_kv(meta)
        sampled = self._runner.run(step)
        worker_connector.wait_for_save(meta)
        return sampled, scheduler_connector.update_connector_output(worker_connector.take_results())
