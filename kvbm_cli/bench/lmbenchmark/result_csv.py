"""The CSV files of LMBenchmark's programs, byte for byte as pandas writes them.

A table is the concatenation of one table per session. Therefore a column of integers becomes floats as soon as one
session has no rows or has a float in it: its numbers then end with `.0`. Floats have the shortest digits that give the
same number again. Lines end with a line feed.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MULTI_ROUND_COLUMNS = (
    *("prompt_tokens", "generation_tokens", "ttft", "generation_time"),
    *("user_id", "question_id", "launch_time", "finish_time"),
)
SHAREGPT_COLUMNS = ("prompt_tokens", "generation_tokens", "ttft", "generation_time", "launch_time", "finish_time")
AGENTIC_COLUMNS = (
    *("prompt_tokens", "generation_tokens", "ttft", "generation_time"),
    *("user_id", "round_id", "launch_time", "finish_time", "agentID", "input", "output"),
)

Cell = int | float | str


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """One complete answer. Times are wall-clock seconds; `ttft_s` and `generation_s` are the integer 0 without text."""

    prompt_tokens: int
    generation_tokens: int
    ttft_s: float
    generation_s: float
    launched_s: float
    finished_s: float


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """One complete answer of an agent. `messages` is the request as Python prints it."""

    answer: MeasuredAnswer
    round: int
    agent: int
    messages: str
    text: str


def multi_round_csv(sessions: Sequence[tuple[int, Sequence[MeasuredAnswer]]]) -> str:
    """`sessions` are (user, rows in the order of completion), retired users first."""
    rows: list[list[Cell]] = [
        [*_measured(row), user, position, row.launched_s, row.finished_s]
        for user, answers in sessions
        for position, row in enumerate(answers, start=1)
    ]
    if any(not answers for _, answers in sessions):
        rows = [[*map(float, row[:4]), *row[4:]] for row in rows]
    return _text(MULTI_ROUND_COLUMNS, rows)


def sharegpt_csv(answers: Iterable[MeasuredAnswer]) -> str:
    ordered = sorted(answers, key=lambda row: row.launched_s)
    return _text(SHAREGPT_COLUMNS, [[*_measured(row), row.launched_s, row.finished_s] for row in ordered])


def agentic_csv(sessions: Sequence[tuple[int, Sequence[AgentAnswer]]]) -> str:
    rows: list[list[Cell]] = [
        [
            *(*_measured(row.answer), user, row.round, row.answer.launched_s, row.answer.finished_s),
            *(row.agent, row.messages, row.text),
        ]
        for user, answers in sessions
        for row in answers
    ]
    if any(not answers for _, answers in sessions):
        rows = [[*map(float, row[:4]), row[4], float(row[5]), *row[6:8], float(row[8]), *row[9:]] for row in rows]
    return _text(AGENTIC_COLUMNS, rows)


def _measured(row: MeasuredAnswer) -> list[Cell]:
    return [row.prompt_tokens, row.generation_tokens, row.ttft_s, row.generation_s]


def _text(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    columns_of_cells = [_as_one_type(column) for column in zip(*rows, strict=True)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns_of_cells, strict=True))
    return out.getvalue()


def _as_one_type(column: Sequence[Cell]) -> Sequence[Cell]:
    """Return a column of one type: one with a float has only floats."""
    if any(isinstance(cell, float) for cell in column):
        return [float(cell) for cell in column]
    return column
