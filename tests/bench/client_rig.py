"""Shared by the tests of the load client: plans without a workload, and drives of them against the mock server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from openai_mock import MODEL, Answer, OpenAIMock

from kvbm_cli.bench.load.drive import DriveResult, drive
from kvbm_cli.bench.load.request import Target
from kvbm_cli.bench.result.results import RequestRecord
from kvbm_cli.bench.workload.plan import Dialect, Launches, Plan, PlannedRequest
from kvbm_cli.bench.workload.script import Phase

TOKENS = 6
IDS = Dialect(MODEL)
TEXT = Dialect(MODEL, has_token_ids=False, has_ignore_eos=False)


def planned(index: int = 0, *, dialect: Dialect = IDS, tokens: int = TOKENS, **changes: Any) -> PlannedRequest:
    """A request of a session of its own, due at once. `messages` makes it a chat."""
    fields = dialect.fields(tokens) | changes.pop("fields", {})
    parts: tuple[Any, ...] = (
        (tuple(range(index, index + 20)),) if dialect.has_token_ids else (f"prompt {index} of words",)
    )
    if messages := changes.pop("messages", None):
        fields, parts = {**fields, "messages": messages}, ()
    values: dict[str, Any] = {
        "index": index,
        "session": index,
        "turn": 1,
        "phase": Phase.COLD,
        "intended_s": None,
        "after": (),
        "delay_s": 0.0,
        "prompt_tokens": sum(map(len, parts)) if dialect.has_token_ids and parts else None,
        "answer_tokens": tokens,
        "answer": None,
        "path": "/v1/chat/completions" if messages else "/v1/completions",
        "parts": parts,
        "fields": tuple(fields.items()),
    }
    return PlannedRequest(**{**values, **changes})


def plan_of(requests: Iterable[PlannedRequest], *, timeout_s: float = 5.0, **launches: Any) -> Plan:
    return Plan(tuple(requests), Launches(**launches), timeout_s, None, 0, planned(0))


def open_loop(count: int, interval_s: float, **changes: Any) -> Plan:
    requests = [planned(index, intended_s=index * interval_s, **changes) for index in range(count)]
    return plan_of(requests, interval_s=interval_s)


def target_of(base_url: str, run: str = "cell.1.kvbm", **changes: Any) -> Target:
    return Target(run, run.rsplit(".", 1)[-1], "cell", 1, base_url, **changes)


def drive_plan(
    plan: Plan, answer: Answer | None = None, *, by_number: dict[int, Answer] | None = None, **options: Any
) -> tuple[DriveResult, tuple[RequestRecord, ...], OpenAIMock]:
    """The result, its records, and the mock with its arrivals. Each record was handed over once."""
    seen: list[RequestRecord] = []
    with OpenAIMock(answer or Answer(), by_number=by_number) as mock:
        target = target_of(mock.url)
        result = asyncio.run(drive(plan, [target], on_record=seen.append, **options))
    (records,) = result.records.values()
    assert sorted(record.index for record in seen) == [record.index for record in records]
    return result, records, mock
