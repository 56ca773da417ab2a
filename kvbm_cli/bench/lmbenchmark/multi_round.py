"""LMBenchmark's multi-round program: engine warm-up, warm-up run, main run.

The schedule decides what is launched at each tick; every launch is a task. At the end of the time the program waits for
all open answers, without a limit.

The schedule is a state machine without a clock. The program calls `step` every 0.1 s with the wall clock; `answered`
and `failed` report the end of a request. A user:

    waiting -- step: never launched, or gap passed --> in flight -- answered --> waiting
    waiting -- step: question >= rounds --> retired

The first step creates `users` sessions of an intended age: their first request asks a later question, and their
history is empty. Then at most one user joins per step, by the clock and not by the number of active users. A late
answer postpones all later launches of its user. Comparisons and the order of float operations are LMBenchmark's.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvbm_cli.bench.lmbenchmark.exchange import (
    FaithfulResult,
    MeasuredAnswer,
    OnRecord,
    ProgramRequest,
    ProgramServer,
    RecordWriter,
    RunClock,
    multi_round_csv,
    notes_on,
    require_an_answer,
)
from kvbm_cli.bench.lmbenchmark.presets import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    ENGINE_WARM_UP_ANSWER_TOKENS,
    ENGINE_WARM_UP_REQUESTS,
    LmbenchmarkParameters,
    Message,
    chat_body,
    completions_body,
    engine_warm_up,
    joined,
    opening,
    question,
)

TICK_S = 0.1


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
            message = {"role": "user", "content": engine_warm_up(position)}
            request = ProgramRequest(record, self.clock, self.clock.now_ms())
            await self._server.post(request, *self._path_and_body((message,), ENGINE_WARM_UP_ANSWER_TOKENS))
            writer.ended(request)

        await asyncio.gather(*map(one, range(ENGINE_WARM_UP_REQUESTS)))
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

    def _path_and_body(self, messages: tuple[Message, ...], max_tokens: int) -> tuple[str, bytes]:
        if self._parameters.is_chat:
            return CHAT_PATH, chat_body(self._server.model, messages, max_tokens)
        prompt = joined(messages)
        return COMPLETIONS_PATH, completions_body(self._server.model, prompt, max_tokens)


@dataclass(frozen=True, slots=True)
class MultiRoundLaunch:
    """One request. `turn` counts the launches of its user from 1; `question` is the number in the prompt."""

    user: int
    turn: int
    question: int
    messages: tuple[Message, ...]
    is_delayed: bool


class SimulatedUser:
    """One session: its history and the time of its last launch."""

    def __init__(self, user: int, parameters: LmbenchmarkParameters) -> None:
        self.user = user
        self._parameters = parameters
        self._history: list[Message] = []
        self._question = 0
        self._turn = 0
        self._last_launch_s: float | None = None
        self._is_in_flight = False
        self._is_delayed = False

    def set_age(self, age_s: float, now: float) -> None:
        """Behave from now on like a session that started `age_s` ago, but with an empty history."""
        gap_s = self._parameters.gap_s
        self._question = int(age_s / gap_s) + 1
        self._last_launch_s = now - age_s + (self._question - 1) * gap_s

    @property
    def is_over(self) -> bool:
        return self._question >= self._parameters.rounds and not self._is_in_flight

    def step(self, now: float) -> MultiRoundLaunch | None:
        if self._last_launch_s is not None and not now - self._last_launch_s > self._parameters.gap_s:
            return None
        if self._is_in_flight:
            self._is_delayed = True
            return None
        return self._launch(now)

    def _launch(self, now: float) -> MultiRoundLaunch:
        self._question += 1
        self._turn += 1
        text = question(self._question)
        if not self._history:
            sizes = self._parameters
            text = opening(self.user, system_words=sizes.system_words, history_words=sizes.history_words) + text
        self._history.append({"role": "user", "content": text})
        launch = MultiRoundLaunch(self.user, self._turn, self._question, tuple(self._history), self._is_delayed)
        self._last_launch_s, self._is_in_flight, self._is_delayed = now, True, False
        return launch

    def answered(self, text: str) -> None:
        assert self._is_in_flight, f"user {self.user} has no request"
        self._history.append({"role": "assistant", "content": text})
        self._is_in_flight = False

    def failed(self) -> None:
        assert self._is_in_flight, f"user {self.user} has no request"
        self._history.pop()
        self._is_in_flight = False


class MultiRoundSchedule:
    """All sessions of one run."""

    def __init__(self, parameters: LmbenchmarkParameters) -> None:
        self._parameters = parameters
        self._last_user = parameters.first_user_id
        self._last_join_s = 0.0
        self._has_ramped_up = False
        self._active: dict[int, SimulatedUser] = {}  # in the order of creation
        self._retired: list[int] = []  # in the order of removal

    @property
    def users(self) -> list[int]:
        """All users so far, in the order of their rows in the CSV file."""
        return [*self._retired, *self._active]

    def step(self, now: float) -> list[MultiRoundLaunch]:
        """Everything that the program launches at a tick, in its order. `now` is the wall clock in seconds."""
        if not self._has_ramped_up:
            self._ramp_up(now)
        if self._can_join(now):
            self._add_user()
            self._last_join_s = now
        over = [user for user, session in self._active.items() if session.is_over]
        due = [session.step(now) for user, session in self._active.items() if not session.is_over]
        for user in over:
            del self._active[user]
        self._retired += over
        return [launch for launch in due if launch is not None]

    def answered(self, user: int, text: str) -> None:
        self._active[user].answered(text)

    def failed(self, user: int) -> None:
        """Withdraw the question of a failed request. The session continues: LMBenchmark's would hang for ever."""
        self._active[user].failed()

    def _ramp_up(self, now: float) -> None:
        ramp_up_s, between_s = self._parameters.ramp_up_s, self._parameters.gap_between_users_s
        for position in range(self._parameters.users):
            self._add_user().set_age(ramp_up_s - position * between_s, now)
        self._has_ramped_up = True

    def _can_join(self, now: float) -> bool:
        if now - self._last_join_s <= self._parameters.gap_between_users_s:
            return False
        return not self._parameters.strict_concurrent_users or len(self._active) < self._parameters.users

    def _add_user(self) -> SimulatedUser:
        self._last_user += 1
        session = self._active[self._last_user] = SimulatedUser(self._last_user, self._parameters)
        return session
