"""Compares the answers of an arm with the recorded ones: tokens and their log-probabilities. Pure.

Equal tokens are a weak test: a greedy answer often stays the same although a block of its prompt held the KV of
another request. The log-probabilities of its tokens change. The arms without kvbm show how much log-probabilities
differ anyway, which is close to zero in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbm_cli.bench.request_record import RequestRecord
from kvbm_cli.bench.schedule import Plan, RecordedAnswer


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """`answers` has user and turn of every answer with different tokens.

    `logprob` is the largest difference of a token's log-probability while all earlier tokens of the answer are equal;
    `None` if the engine sent no logprobs.
    """

    compared_count: int
    answers: tuple[tuple[int, int], ...]
    logprob: float | None


def compare_outputs(plan: Plan, records: Sequence[RequestRecord]) -> OutputDifference:
    """Compare all complete answers of an arm with the recorded ones."""
    recorded = {request.key: request.answer for request in plan.requests}
    answered = [record for record in records if record.is_ok]
    differences = [_logprob_difference(recorded[record.key], record) for record in answered]
    known = [difference for difference in differences if difference is not None]
    return OutputDifference(
        compared_count=len(answered),
        answers=tuple(record.key for record in answered if tuple(record.token_ids) != recorded[record.key].token_ids),
        logprob=max(known) if known else None,
    )


def _logprob_difference(recorded: RecordedAnswer, record: RequestRecord) -> float | None:
    """Largest difference up to the first different token; after it the two answers continue different texts."""
    if not recorded.logprobs or len(record.logprobs) != len(record.token_ids):
        return None
    largest = 0.0
    tokens = zip(recorded.token_ids, record.token_ids, recorded.logprobs, record.logprobs, strict=False)
    for recorded_id, token_id, recorded_logprob, logprob in tokens:
        if recorded_id != token_id:
            break
        largest = max(largest, abs(recorded_logprob - logprob))
    return largest
