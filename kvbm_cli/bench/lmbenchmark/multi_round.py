"""LMBenchmark's multi-round program: engine warm-up, warm-up run, main run.

The schedule decides what is launched at each tick; every launch is a task. At the end of the time the program waits for
all open answers, without a limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvbm_cli.bench.lmbenchmark import prompts
from kvbm_cli.bench.lmbenchmark.exchange import ApiServer, Exchange
from kvbm_cli.bench.lmbenchmark.presets import LmbenchmarkParameters
from kvbm_cli.bench.lmbenchmark.records import Record, RecordWriter
from kvbm_cli.bench.lmbenchmark.result import FaithfulResult, notes_on, require_an_answer
from kvbm_cli.bench.lmbenchmark.result_csv import MeasuredAnswer, multi_round_csv
from kvbm_cli.bench.lmbenchmark.schedule import TICK_S, MultiRoundLaunch, MultiRoundSchedule


async def run_multi_round(
    server: ApiServer, parameters: LmbenchmarkParameters, on_record: Callable[[Record], None]
) -> FaithfulResult:
    writer = RecordWriter(parameters.users, on_record)
    warm_up: list[Exchange] = []

    def take_warm_up(launch: MultiRoundLaunch, tick_s: float) -> Callable[[Exchange], None]:
        writer.warmed(launch.user)
        return warm_up.append

    def take(launch: MultiRoundLaunch, tick_s: float) -> Callable[[Exchange], None]:
        record = writer.launched(launch.user, launch.turn) | {"question": launch.question}
        return lambda exchange: writer.ended(record, exchange, tick_s)

    if (parameters_of_warm_up := parameters.warm_up()) is not None:
        await MultiRoundRun(server, parameters_of_warm_up, take_warm_up).run()
    main = MultiRoundRun(server, parameters, take, on_start=writer.start)
    await main.run()
    return FaithfulResult(
        records=tuple(writer.records),
        csv=main.csv(),
        notes=notes_on(writer.records, warm_up, delayed=main.delayed),
        started_unix_s=main.started_s,
        duration_s=server.clock.now() - main.started_s,
        warm_up_requests=len(warm_up),
    )


class MultiRoundRun:
    """One run of the program. `on_launch` gets a launch and its tick, and returns what takes the ended exchange."""

    def __init__(
        self,
        server: ApiServer,
        parameters: LmbenchmarkParameters,
        on_launch: Callable[[MultiRoundLaunch, float], Callable[[Exchange], None]],
        on_start: Callable[[float], None] = lambda start_s: None,
    ) -> None:
        self.started_s = 0.0
        self.delayed = 0
        self._server = server
        self._parameters = parameters
        self._on_launch = on_launch
        self._on_start = on_start
        self._schedule = MultiRoundSchedule(parameters)
        self._answers: dict[int, list[MeasuredAnswer]] = {}

    async def run(self) -> None:
        await self._warm_engine_up()
        clock = self._server.clock
        self.started_s = clock.now()
        self._on_start(self.started_s)
        async with asyncio.TaskGroup() as tasks:
            while True:
                tick_s = clock.now()
                for launch in self._schedule.step(tick_s):
                    self.delayed += launch.is_delayed
                    tasks.create_task(self._send(launch, self._on_launch(launch, tick_s)))
                await asyncio.sleep(TICK_S)
                if clock.now() - self.started_s > self._parameters.duration_s:
                    break

    def csv(self) -> str:
        return multi_round_csv([(user, self._answers.get(user, [])) for user in self._schedule.users])

    async def _warm_engine_up(self) -> None:
        async def one(position: int) -> Exchange:
            exchange = Exchange(self._server.clock.now())
            message = {"role": "user", "content": prompts.engine_warm_up(position)}
            path, body = self._request((message,), prompts.ENGINE_WARM_UP_ANSWER_TOKENS)
            await self._server.post(exchange, path, body)
            return exchange

        require_an_answer(await asyncio.gather(*map(one, range(prompts.ENGINE_WARM_UP_REQUESTS))))

    async def _send(self, launch: MultiRoundLaunch, on_end: Callable[[Exchange], None]) -> None:
        exchange = Exchange(self._server.clock.now())
        path, body = self._request(launch.messages, self._parameters.answer_tokens)
        await self._server.post(exchange, path, body, user=launch.user)
        if exchange.error is None:
            self._schedule.answered(launch.user, exchange.text)
            self._answers.setdefault(launch.user, []).append(exchange.measured())
        else:
            self._schedule.failed(launch.user)
        on_end(exchange)

    def _request(self, messages: tuple[prompts.Message, ...], max_tokens: int) -> tuple[str, bytes]:
        if self._parameters.is_chat:
            return prompts.CHAT_PATH, prompts.chat_body(self._server.model, messages, max_tokens)
        prompt = prompts.joined(messages)
        return prompts.COMPLETIONS_PATH, prompts.completions_body(self._server.model, prompt, max_tokens)
