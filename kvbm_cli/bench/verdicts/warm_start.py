"""Whether the cache of a server was empty at the start of a run, from what its requests found in it.

A cold request finds at most what requests sent that were launched before its first token. That order is read from the
records: requests with equal launch times run in any order, and a busy engine delays them further.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import takewhile

from kvbm_cli.bench.records.request_record import RequestRecord
from kvbm_cli.bench.records.results import RunResult
from kvbm_cli.bench.workload.content import Content
from kvbm_cli.bench.workload.plan import Plan, PlannedRequest
from kvbm_cli.bench.workload.script import Phase

COLD_SHARE = 0.5  # of a prompt, at most, that requests earlier in the script sent
TOLERANCE = 0.1  # for the inexact lengths of prompts that are text


def warm_start(run: RunResult, plan: Plan) -> str | None:
    """Return what shows that the cache was not empty, or None. The shared tier has what another engine computed."""
    for record in run.records:
        cached, prompt = (record.cached_tokens or 0) - (record.g4_tokens or 0), record.prompt_tokens or 0
        if record.phase != Phase.COLD or cached <= (COLD_SHARE + TOLERANCE) * prompt:
            continue
        known = max(COLD_SHARE, _share_sent(record, run.records, plan))
        if cached > (known + TOLERANCE) * prompt:
            return (
                f"the cache was not empty at the start of {run.run}: turn {record.turn} of session {record.session} "
                f"found {cached} of its {prompt} prompt tokens there, and at most "
                f"{'half' if known == COLD_SHARE else f'{known:.0%}'} were sent before"
            )
    return None


def _share_sent(record: RequestRecord, records: Sequence[RequestRecord], plan: Plan) -> float:
    """Return the largest part of the prompt with which another request begins that was launched before the first
    token."""
    prompt = [one for part in _parts(plan.requests[record.index]) for one in part]
    until_ms = record.first_token_ms if record.first_token_ms is not None else float("inf")
    earlier = (
        plan.requests[one.index]
        for one in records
        if one is not record and one.launched_ms is not None and one.launched_ms < until_ms
    )
    return max((_common_length(prompt, other) for other in earlier), default=0) / max(1, len(prompt))


def _common_length(prompt: Sequence[int | str], other: PlannedRequest) -> int:
    """Tokens or characters with which both begin. `other` has its answer behind its prompt."""
    length = 0
    for part in _parts(other):
        mine = prompt[length : length + len(part)]
        if mine != list(part):
            pairs = zip(mine, part, strict=False)
            return length + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        length += len(part)
    return length


def _parts(request: PlannedRequest) -> Iterator[Content]:
    """Yield the prompt, and the answer if it is planned. A fixed body has its prompt among its fields."""
    if request.parts:
        yield from request.parts
    else:
        fields = dict(request.fields)
        prompt = fields.get("prompt")
        yield prompt if isinstance(prompt, str) else json.dumps([fields.get("tools"), prompt, fields.get("messages")])
    if request.answer is not None:
        yield request.answer.content
