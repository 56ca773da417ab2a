"""The trace files of LMBenchmark's agentic scenario: several agents that read each other's questions and answers.

A trace file belongs to one user and has one JSON object per round:

    {"round_id": 1, "agent_id": [0, 1], "output_tokens": [10, 5], "input_from": [[[0, 0, "input"]], [[0, 1, "both"]]]}

An entry of `input_from` names [round, agent, input|output|both]. `round_id` is ignored: the position of the line
counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm.config.files import require_file
from kvbm.errors import UsageError
from kvbm.text.reading import parse_json

PARTS = ("input", "output", "both")


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What one agent does in one round. `inputs` are (round, agent, part)."""

    agent: int
    answer_tokens: int
    inputs: tuple[tuple[int, int, str], ...]


AgentTrace = tuple[tuple[AgentTask, ...], ...]


def read_agent_trace(path: Path) -> AgentTrace:
    """Read one trace file. Raises UsageError; LMBenchmark skips lines that are not JSON."""
    require_file(path, "trace")
    rounds: list[tuple[AgentTask, ...]] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rounds.append(_tasks(parse_json(line), this_round=len(rounds)))
        except (ValueError, KeyError, TypeError) as error:
            reason = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{path}:{number}: {reason}") from error
    if not rounds:
        raise UsageError(f"{path}: the trace has no rounds")
    return tuple(rounds)


def _tasks(line: dict[str, Any], *, this_round: int) -> tuple[AgentTask, ...]:
    columns = [line[key] for key in ("agent_id", "output_tokens", "input_from")]
    if not all(isinstance(column, list) for column in columns) or len({len(column) for column in columns}) != 1:
        raise ValueError("`agent_id`, `output_tokens` and `input_from` must be lists of the same length")
    if not columns[0]:
        raise ValueError("`agent_id` is empty; a round requires at least one agent")
    return tuple(_task(*values, this_round=this_round) for values in zip(*columns, strict=True))


def _task(agent: Any, tokens: Any, inputs: Any, *, this_round: int) -> AgentTask:
    if not _is_at_least(agent, 0):
        raise ValueError(f"`agent_id` has {agent!r}; it must be an integer, 0 or more")
    if not _is_at_least(tokens, 1):
        raise ValueError(f"`output_tokens` has {tokens!r}; it must be an integer above 0")
    for one in inputs:
        if not (isinstance(one, list) and len(one) == 3 and all(_is_at_least(number, 0) for number in one[:2])):
            raise ValueError(f"`input_from` has {one!r}; it must be [round, agent, input|output|both]")
        if one[2] not in PARTS or one[0] > this_round:
            raise ValueError(
                f"`input_from` has {one!r}; the part must be one of {', '.join(PARTS)}, "
                f"the round at most {this_round}, as this line"
            )
    return AgentTask(agent, tokens, tuple((round, source, part) for round, source, part in inputs))


def _is_at_least(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
