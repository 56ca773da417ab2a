"""LMBenchmark's multi-round program: engine warm-up, warm-up run, main run.

The schedule decides what is launched at each tick; every launch is a task. At the end of the time the program waits for
all open answers, without a limit.
"""

from __future__ import annotations

import asyncio

from kvbm_cli.bench.lmbenchmark import prompts
from kvbm_cli.bench.lmbenchmark.exchange import ProgramRequest, ProgramServer, RunClock
from kvbm_cli.bench.lmbenchmark.presets import LmbenchmarkParameters
from kvbm_cli.bench.lmbenchmark.record_writer import OnRecord, RecordWriter
from kvbm_cli.bench.lmbenchmark.result import FaithfulResult, notes_on, require_an_answer
from kvbm_cli.bench.lmbenchmark.result_csv import MeasuredAnswer, multi_round_csv
from kvbm_cli.bench.lmbenchmark.schedule import TICK_S, MultiRoundLaunch, MultiRoundSchedule


async def run_multi_round(
    server: ProgramServer, parameters: LmbenchmarkParameters, on_record: OnRecord
) -> FaithfulResult:
    writer = RecordWriter(server.target, parameters.users, on_record)
    if (of_warm_up := parameters.warm_up()) is not None:
        await MultiRoundRun(server, of_warm_up, writer, is_warm_up=True).run()
    main = MultiRoundRun(server, parameters, writer)
    await main.run()
    return FaithfulResult(
        records=tuple(writer.main),
        csv=main.csv(),
        notes=notes_on(writer.main, writer.warm_up, delayed=main.delayed),
        started_unix_s=main.clock.start_unix_s,
        duration_s=main.clock.now_ms() / 1e3,
        warm_up_requests=len(writer.warm_up),
    )


class MultiRoundRun:
    """One run of the program."""

    def __init__(
        self,
        server: ProgramServer,
        parameters: LmbenchmarkParameters,
        writer: RecordWriter,
        *,
        is_warm_up: bool = False,
    ) -> None:
        self.delayed = 0
        self.clock = RunClock()
        self._server = server
        self._parameters = parameters
        self._writer = writer
        self._is_warm_up = is_warm_up
        self._schedule = MultiRoundSchedule(parameters)
        self._answers: dict[int, list[MeasuredAnswer]] = {}

    async def run(self) -> None:
        await self._warm_engine_up()
        clock = self.clock = RunClock()
        async with asyncio.TaskGroup() as tasks:
            while True:
                tick_ms = clock.now_ms()
                for launch in self._schedule.step(clock.wall_s(tick_ms)):
                    self.delayed += launch.is_delayed
                    tasks.create_task(self._send(launch, tick_ms))
                await asyncio.sleep(TICK_S)
                if clock.now_ms() > self._parameters.duration_s * 1e3:
                    break

    def csv(self) -> str:
        return multi_round_csv([(user, self._answers.get(user, [])) for user in self._schedule.users])

    async def _warm_engine_up(self) -> None:
        writer = RecordWriter(self._server.target, 1, lambda record: None)

        async def one(position: int) -> None:
            record = writer.launched(position, 1, is_warm_up=True)
            message = {"role": "user", "content": prompts.engine_warm_up(position)}
            request = ProgramRequest(record, self.clock, self.clock.now_ms())
            await self._server.post(request, *self._path_and_body((message,), prompts.ENGINE_WARM_UP_ANSWER_TOKENS))
            writer.ended(request)

        await asyncio.gather(*map(one, range(prompts.ENGINE_WARM_UP_REQUESTS)))
        require_an_answer(writer.warm_up)

    async def _send(self, launch: MultiRoundLaunch, tick_ms: float) -> None:
        record = self._writer.launched(launch.user, launch.turn, is_warm_up=self._is_warm_up)
        record.intended_ms = tick_ms
        request = ProgramRequest(record, self.clock, self.clock.now_ms())
        path, body = self._path_and_body(launch.messages, self._parameters.answer_tokens)
        await self._server.post(request, path, body, user=launch.user)
        if request.is_ok:
            self._schedule.answered(launch.user, record.text)
            self._answers.setdefault(launch.user, []).append(request.measured())
        else:
            self._schedule.failed(launch.user)
        self._writer.ended(request)

    def _path_and_body(self, messages: tuple[prompts.Message, ...], max_tokens: int) -> tuple[str, bytes]:
        if self._parameters.is_chat:
            return prompts.CHAT_PATH, prompts.chat_body(self._server.model, messages, max_tokens)
        prompt = prompts.joined(messages)
        return prompts.COMPLETIONS_PATH, prompts.completions_body(self._server.model, prompt, max_tokens)
