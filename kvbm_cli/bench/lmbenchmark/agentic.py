"""LMBenchmark's agentic program: several agents per user that read each other's questions and answers. No warm-up."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvbm_cli.bench.lmbenchmark import prompts
from kvbm_cli.bench.lmbenchmark.agentic_schedule import AgenticSchedule, AgentLaunch, read_agent_trace
from kvbm_cli.bench.lmbenchmark.exchange import ProgramRequest, ProgramServer, RunClock
from kvbm_cli.bench.lmbenchmark.presets import AgenticParameters
from kvbm_cli.bench.lmbenchmark.record_writer import OnRecord, RecordWriter
from kvbm_cli.bench.lmbenchmark.result import FaithfulResult, notes_on
from kvbm_cli.bench.lmbenchmark.result_csv import AgentAnswer, agentic_csv
from kvbm_cli.bench.lmbenchmark.schedule import TICK_S


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
        body = prompts.chat_body(server.model, launch.messages, launch.task.answer_tokens)
        await server.post(request, prompts.CHAT_PATH, body, user=launch.user)
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
