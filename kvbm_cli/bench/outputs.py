"""Whether an arm answered as the recording did: the tokens, and how probable the engine thought them. Pure.

Tokens alone are a weak test. A greedy answer often stays the same although a block of its prompt held someone else's
KV; the probability of its tokens does not. The engine without kvbm shows how far probabilities differ by themselves,
which is nothing or nearly nothing in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbm_cli.bench.request_record import RequestRecord
from kvbm_cli.bench.schedule import Plan, RecordedAnswer


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """`answers` are user and turn of those with other tokens. The logprob is the largest difference of a token that
    was generated after the same tokens in both; `None` where the engine sent no logprobs."""

    compared_count: int
    answers: tuple[tuple[int, int], ...]
    logprob: float | None


def compare_outputs(plan: Plan, records: Sequence[RequestRecord]) -> OutputDifference:
    """All complete answers of an arm against the recorded ones."""
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
    """Up to the first token that differs; from there on the two answers continue different texts."""
    if not recorded.logprobs or len(record.logprobs) != len(record.token_ids):
        return None
    largest = 0.0
    tokens = zip(recorded.token_ids, record.token_ids, recorded.logprobs, record.logprobs, strict=False)
    for recorded_id, token_id, recorded_logprob, logprob in tokens:
        if recorded_id != token_id:
            break
        largest = max(largest, abs(recorded_logprob - logprob))
    return largest
