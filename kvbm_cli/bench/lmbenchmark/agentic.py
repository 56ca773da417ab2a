"""LMBenchmark's agentic program: several agents per user that read each other's questions and answers. No warm-up.

`AgenticSchedule` is a state machine without a clock. A trace file belongs to one user and has one JSON object per
round:

    {"round_id": 1, "agent_id": [0, 1], "output_tokens": [10, 5], "input_from": [[[0, 0, "input"]], [[0, 1, "both"]]]}

An entry of `input_from` names [round, agent, input|output|both]. All agents of a round are launched together. The next
round follows at the first tick after the interval at which all of them have answered. `round_id` is ignored: the
position of the line counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbm.config.files import require_file
from kvbm.errors import UsageError
from kvbm.text.reading import parse_json
from kvbm_cli.bench.lmbenchmark.exchange import (
    AgentAnswer,
    FaithfulResult,
    OnRecord,
    ProgramRequest,
    ProgramServer,
    RecordWriter,
    RunClock,
    agentic_csv,
    notes_on,
)
from kvbm_cli.bench.lmbenchmark.multi_round import TICK_S
from kvbm_cli.bench.lmbenchmark.presets import CHAT_PATH, AgenticParameters, Message, chat_body

QUESTION = "hihihihihi"
PARTS = {"input": ("user",), "output": ("assistant",), "both": ("user", "assistant")}


async def run_agentic(server: ProgramServer, parameters: AgenticParameters, on_record: OnRecord) -> FaithfulResult:
    traces = [read_agent_trace(Path(file)) for file in parameters.trace_files]
    schedule = AgenticSchedule(parameters, traces)
    writer = RecordWriter(server.target, len(traces), on_record)
    answers: dict[int, list[AgentAnswer]] = {}
    clock = RunClock()

    async def send(launch: AgentLaunch, tick_ms: float) -> None:
        record = writer.launched(launch.user, launch.turn, has_history=bool(launch.task.inputs))
        record.intended_ms = tick_ms
        request = ProgramRequest(record, clock, clock.now_ms())
        body = chat_body(server.model, launch.messages, launch.task.answer_tokens)
        await server.post(request, CHAT_PATH, body, user=launch.user)
        if request.is_ok:
            schedule.answered(launch, record.text)
            answers.setdefault(launch.user, []).append(_row(launch, request))
        else:
            schedule.failed(launch)
        writer.ended(request)

    async with asyncio.TaskGroup() as tasks:
        while not schedule.is_over:
            tick_ms = clock.now_ms()
            for launch in schedule.step(clock.wall_s(tick_ms)):
                tasks.create_task(send(launch, tick_ms))
            await asyncio.sleep(TICK_S)
    return FaithfulResult(
        records=tuple(writer.main),
        csv=agentic_csv([(user, answers.get(user, [])) for user in schedule.users]),
        notes=notes_on(writer.main, ()),
        started_unix_s=clock.start_unix_s,
        duration_s=clock.now_ms() / 1e3,
        warm_up_requests=0,
    )


def _row(launch: AgentLaunch, request: ProgramRequest) -> AgentAnswer:
    messages = str(list(launch.messages))  # the column has the list as Python prints it
    return AgentAnswer(request.measured(), launch.round, launch.task.agent, messages, request.record.text)


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What one agent does in one round. `inputs` are (round, agent, part)."""

    agent: int
    answer_tokens: int
    inputs: tuple[tuple[int, int, str], ...]


AgentTrace = tuple[tuple[AgentTask, ...], ...]


@dataclass(frozen=True, slots=True)
class AgentLaunch:
    """One request. `turn` counts the launches of its user from 1, `round` from 0."""

    user: int
    turn: int
    round: int
    task: AgentTask
    messages: tuple[Message, ...]


class SimulatedAgents:
    """The session of one user: all its agents, with one history."""

    def __init__(self, user: int, trace: AgentTrace, interval_s: float) -> None:
        self._user = user
        self._trace = trace
        self._interval_s = interval_s
        self._history: list[Message] = []
        self._round = 0
        self._turn = 0
        self._in_flight = 0
        self._last_launch_s: float | None = None

    @property
    def is_over(self) -> bool:
        return self._round >= len(self._trace) and not self._in_flight

    def step(self, now: float) -> list[AgentLaunch]:
        is_due = self._last_launch_s is None or now - self._last_launch_s > self._interval_s
        if not is_due or self._in_flight:
            return []
        launches = [self._launch(task) for task in self._trace[self._round]]
        self._last_launch_s = now
        self._in_flight = len(launches)
        self._round += 1
        return launches

    def _launch(self, task: AgentTask) -> AgentLaunch:
        self._turn += 1
        self._note("user", task.agent, self._round, QUESTION)
        own = (self._round, task.agent, "input")
        messages = [message for named in (*task.inputs, own) for message in self._messages(*named)]
        return AgentLaunch(self._user, self._turn, self._round, task, tuple(messages))

    def _messages(self, round: int, agent: int, part: str) -> list[Message]:
        name = _name(agent, round)
        return [
            message
            for role in PARTS[part]
            for message in self._history
            if message["role"] == role and message["name"] == name
        ]

    def answered(self, launch: AgentLaunch, text: str) -> None:
        self._note("assistant", launch.task.agent, launch.round, text)
        self._in_flight -= 1

    def failed(self) -> None:
        self._in_flight -= 1

    def _note(self, role: str, agent: int, round: int, text: str) -> None:
        self._history.append({"role": role, "name": _name(agent, round), "content": text})


class AgenticSchedule:
    """All sessions of one run. At most one user joins per step."""

    def __init__(self, parameters: AgenticParameters, traces: Sequence[AgentTrace]) -> None:
        self._parameters = parameters
        self._waiting = list(enumerate(traces, start=1))
        self._last_join_s = 0.0
        self._active: dict[int, SimulatedAgents] = {}  # in the order of creation
        self._retired: list[int] = []  # in the order of removal

    @property
    def users(self) -> list[int]:
        """All users so far, in the order of their rows in the CSV file."""
        return [*self._retired, *self._active]

    @property
    def is_over(self) -> bool:
        return not self._waiting and not self._active

    def step(self, now: float) -> list[AgentLaunch]:
        if self._waiting and now - self._last_join_s > self._parameters.new_user_interval_s:
            user, trace = self._waiting.pop(0)
            self._active[user] = SimulatedAgents(user, trace, self._parameters.request_interval_s)
            self._last_join_s = now
        over = [user for user, session in self._active.items() if session.is_over]
        launches = [launch for session in self._active.values() if not session.is_over for launch in session.step(now)]
        for user in over:
            del self._active[user]
        self._retired += over
        return launches

    def answered(self, launch: AgentLaunch, text: str) -> None:
        self._active[launch.user].answered(launch, text)

    def failed(self, launch: AgentLaunch) -> None:
        """Count the agent as done, without an answer. LMBenchmark's run would never end."""
        self._active[launch.user].failed()


def _name(agent: int, round: int) -> str:
    return f"agent{agent}-{round}"


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
