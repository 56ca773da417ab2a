"""The runner: executes one step on the device, with the connector's worker side around it.

Per step, also an empty one: hand over the connector's metadata, start its loads, run the packed forward pass, sample,
let the connector take what it saves, and collect what it reports.
"""

from __future__ import annotations

import pickle

import torch

from kvbm.embedded import sampling
from kvbm.embedded.attention import Batch, PackedSequence
from kvbm.embedded.connector import ConnectorOutput, WorkerSide
from kvbm.embedded.kv import KVPool
from kvbm.embedded.model import LoadedModel
from kvbm.embedded.request import Request, TokenLogprobs
from kvbm.embedded.scheduler import Step

Sampled = list[tuple[int, TokenLogprobs | None]]


class Runner:
    """Borrows the model, the pool and the worker side; keeps nothing between steps."""

    def __init__(self, model: LoadedModel, pool: KVPool, worker: WorkerSide | None) -> None:
        self._model = model
        self._pool = pool
        self._worker = worker

    def execute(self, step: Step, meta: object, finished_ids: list[str]) -> tuple[Sampled, ConnectorOutput]:
        """Returns the tokens of `step.sampled`, and what the worker side reported."""
        if self._worker is None:
            return self._forward(step), ConnectorOutput()
        meta = pickle.loads(pickle.dumps(meta))
        self._worker.handle_preemptions(meta)
        self._worker.bind_connector_metadata(meta)
        self._worker.start_load_kv()
        sampled = self._forward(step)
        self._worker.wait_for_save()
        sending, recving = self._worker.get_finished(set(finished_ids))
        failed = self._worker.get_block_ids_with_load_errors()
        self._worker.clear_connector_metadata()
        return sampled, ConnectorOutput(set(sending or ()), set(recving or ()), set(failed))

    def _forward(self, step: Step) -> Sampled:
        if not step.scheduled:
            return []
        token_ids: list[int] = []
        positions: list[int] = []
        sequences: list[PackedSequence] = []
        last_rows: list[int] = []
        sampled = step.sampled
        is_sampled = set(sampled)
        for request, count in step.scheduled.items():
            start, end = request.num_computed_tokens, request.num_computed_tokens + count
            sequences.append(PackedSequence(len(token_ids), count, end, request.block_ids))
            token_ids += request.all_token_ids[start:end]
            positions += range(start, end)
            if request in is_sampled:
                last_rows.append(len(token_ids) - 1)
        logits = self._model.forward(self._batch(sequences), token_ids, positions, last_rows or [0])
        return self._sample(logits, sampled)

    def _batch(self, sequences: list[PackedSequence]) -> Batch:
        if self._worker is None:
            return Batch(self._pool, sequences)
        return Batch(self._pool, sequences, self._worker.wait_for_layer_load, self._worker.save_kv_layer)

    def _sample(self, logits: torch.Tensor, sampled: list[Request]) -> Sampled:
        return sampling.sample(logits, sampled, self._model.stop_token_ids) if sampled else []
