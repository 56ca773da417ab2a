"""Runner: the forward pass of one step over the packed row, and sampling of the next tokens."""

from __future__ import annotations

from kvbm.embedded.engine import sampling
from kvbm.embedded.engine.attention import Batch, PackedSequence
from kvbm.embedded.engine.kv_pool import KVPool
from kvbm.embedded.engine.model import LoadedModel
from kvbm.embedded.engine.request import TokenLogprobs
from kvbm.embedded.engine.scheduler import Step

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
