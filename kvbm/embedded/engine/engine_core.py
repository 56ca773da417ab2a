"""EngineCore: one step after the other, in whatever thread owns it. No queue, no lock, no waiting.

    schedule -> build_connector_meta -> [ worker side: loads | forward pass | saves | reports ] -> update -> outputs

The connector's metadata is pickled on its way to the worker side, so that the two share nothing even in one process.
"""

from __future__ import annotations

import pickle

from kvbm.embedded.engine.connector import ConnectorOutput, SchedulerOutput, SchedulerSide, WorkerSide
from kvbm.embedded.engine.request import FinishReason, Request
from kvbm.embedded.engine.runner import Runner, Sampled
from kvbm.embedded.engine.scheduler import Scheduler, Step


class EngineCore:
    """Scheduler, runner and connector as one machine. Outputs go to each request's callback."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        stop_token_ids: frozenset[int],
        connector: tuple[SchedulerSide, WorkerSide] | None,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._stop_token_ids = stop_token_ids
        self._connector = connector

    @property
    def has_work(self) -> bool:
        """Whether a step is owed: to a request, or to the connector."""
        return self.scheduler.has_requests or self.scheduler.has_news_for_connector

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is. Returns False if there is none of this id (any more)."""
        request = self.scheduler.get(request_id)
        if request is None:
            return False
        self.scheduler.finish(request)
        request.on_output(request.last_output(FinishReason.ABORT))
        return True

    def step(self) -> bool:
        """Execute one step. Returns whether there was anything to compute, or is now, because a load has ended."""
        step = self.scheduler.schedule()
        output = self.scheduler.output(step)
        if self._connector is None:
            sampled, connector_output = self._runner.run(step), ConnectorOutput()
        else:
            sampled, connector_output = self._run_with_connector(*self._connector, step, output)
        for request, news in self.scheduler.update(step, sampled, self._stop_token_ids, connector_output):
            request.on_output(news)
        return bool(step.scheduled or connector_output.finished_recving)

    def _run_with_connector(
        self, scheduler_side: SchedulerSide, worker_side: WorkerSide, step: Step, output: SchedulerOutput
    ) -> tuple[Sampled, ConnectorOutput]:
        meta = pickle.loads(pickle.dumps(scheduler_side.build_connector_meta(output)))
        worker_side.handle_preemptions(meta)
        worker_side.bind_connector_metadata(meta)
        worker_side.start_load_kv()
        sampled = self._runner.run(step)
        worker_side.wait_for_save()
        sending, recving = worker_side.get_finished(set(output.finished_ids))
        failed = worker_side.get_block_ids_with_load_errors()
        worker_side.clear_connector_metadata()
        reported = ConnectorOutput(set(sending or ()), set(recving or ()), set(failed))
        settled = scheduler_side.update_connector_output(reported)
        scheduler_side.take_events()  # nobody listens here; left alone they would pile up
        return sampled, settled
