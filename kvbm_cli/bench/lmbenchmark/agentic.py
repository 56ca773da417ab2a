"""LMBenchmark's agentic program: several agents per user that read each other's questions and answers. No warm-up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from kvbm_cli.bench.lmbenchmark import prompts
from kvbm_cli.bench.lmbenchmark.agentic_schedule import AgenticSchedule, AgentLaunch, read_agent_trace
from kvbm_cli.bench.lmbenchmark.exchange import ApiServer, Exchange
from kvbm_cli.bench.lmbenchmark.presets import AgenticParameters
from kvbm_cli.bench.lmbenchmark.records import Record, RecordWriter
from kvbm_cli.bench.lmbenchmark.result import FaithfulResult, notes_on
from kvbm_cli.bench.lmbenchmark.result_csv import AgentAnswer, agentic_csv
from kvbm_cli.bench.lmbenchmark.schedule import TICK_S


async def run_agentic(
    server: ApiServer, parameters: AgenticParameters, on_record: Callable[[Record], None]
) -> FaithfulResult:
    traces = [read_agent_trace(Path(file), agents=parameters.agents) for file in parameters.trace_files]
    schedule = AgenticSchedule(parameters, traces)
    writer = RecordWriter(len(traces), on_record)
    answers: dict[int, list[AgentAnswer]] = {}
    clock = server.clock

    async def send(launch: AgentLaunch, record: Record, tick_s: float) -> None:
        exchange = Exchange(clock.now())
        body = prompts.chat_body(server.model, launch.messages, launch.task.answer_tokens)
        await server.post(exchange, prompts.CHAT_PATH, body, user=launch.user)
        if exchange.error is None:
            schedule.answered(launch, exchange.text)
            answers.setdefault(launch.user, []).append(_row(launch, exchange))
        else:
            schedule.failed(launch)
        writer.ended(record, exchange, tick_s)

    started_s = clock.now()
    writer.start(started_s)
    async with asyncio.TaskGroup() as tasks:
        while not schedule.is_over:
            tick_s = clock.now()
            for launch in schedule.step(tick_s):
                record = writer.launched(launch.user, launch.turn)
                record |= {"round": launch.round, "agent": launch.task.agent}
                if not launch.task.inputs:
                    record["phase"] = "cold"
                tasks.create_task(send(launch, record, tick_s))
            await asyncio.sleep(TICK_S)
    return FaithfulResult(
        records=tuple(writer.records),
        csv=agentic_csv([(user, answers.get(user, [])) for user in schedule.users]),
        notes=notes_on(writer.records, ()),
        started_unix_s=started_s,
        duration_s=clock.now() - started_s,
        warm_up_requests=0,
    )


def _row(launch: AgentLaunch, exchange: Exchange) -> AgentAnswer:
    messages = str(list(launch.messages))  # the column has the list as Python prints it
    return AgentAnswer(exchange.measured(), launch.round, launch.task.agent, messages, exchange.text)
