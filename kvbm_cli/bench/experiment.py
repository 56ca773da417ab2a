"""One comparison from start to end: record, plan, then every arm in an engine of its own.

    recording   engine without kvbm, G1 for everything: its tokenizer counts the users' tokens, its greedy answers
                become the history of every arm, and the time of its cold prompts fixes the interval
    baseline    the profile's engine without kvbm
    kvbm        the same engine with kvbm
    floor       without kvbm, G1 for everything: what a cache of unlimited size in device memory would reach

Nothing is decided after the plan is written. Every arm starts cold: a fresh process, a warm-up with a prompt that is
in no measured request, and an emptied cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from kvbm.errors import EngineError
from kvbm_cli.bench.client import DriveResult, Row, drive, open_session, send
from kvbm_cli.bench.control import Control, Metrics, MetricsDelta
from kvbm_cli.bench.run_directory import RunDirectory
from kvbm_cli.bench.schedule import Plan, PlannedRequest, Script, request_body
from kvbm_cli.bench.statistics import percentile
from kvbm_cli.bench.workload import Workload

RECORDING = "recording"
BASELINE, KVBM, FLOOR = "baseline", "kvbm", "floor"
ARMS = (BASELINE, KVBM, FLOOR)
SMALLEST_INTERVAL_S = 0.05
ARM_OVERHEAD_S = 3.0


class RunningEngine(Protocol):
    """An engine that serves. Started and stopped by whoever made it."""

    @property
    def base_url(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def startup_s(self) -> float: ...
    def has_ended(self) -> bool: ...


Engines = Callable[[str], AbstractContextManager[RunningEngine]]


class Progress(Protocol):
    """What someone who watches is told. `remaining_s` is the time that is left after this phase, where it is known."""

    def phase(self, text: str, *, expected_s: float | None = None, remaining_s: float | None = None) -> None: ...
    def row(self, row: Row) -> None: ...


@dataclass(frozen=True, slots=True)
class Recording:
    """`answers[user][turn - 1]`; `cold_ms` are end-to-end times of first turns, of which the system may be cached."""

    script: Script
    answers: tuple[tuple[tuple[int, ...], ...], ...]
    cold_ms: tuple[float, ...]
    startup_s: float


@dataclass(frozen=True, slots=True)
class ArmResult:
    name: str
    drive: DriveResult
    metrics: MetricsDelta | None
    startup_s: float
    engine_ended: bool


@dataclass(frozen=True, slots=True)
class Experiment:
    plan: Plan
    recording: Recording
    arms: dict[str, ArmResult]


def run_experiment(workload: Workload, engines: Engines, directory: RunDirectory, progress: Progress) -> Experiment:
    """Blocks until the last arm has ended. EngineError if an engine does not start or refuses the recording."""
    recording, model = _record(workload, engines, progress)
    plan = Plan.make(
        workload,
        recording.script,
        model=model,
        answers=recording.answers,
        interval_s=workload.schedule.interval_s or _interval_s(workload, recording.cold_ms),
    )
    directory.write_json("plan.json", plan.to_json(), indent=None)
    arm_s = plan.duration_s + ARM_OVERHEAD_S + recording.startup_s
    arms: dict[str, ArmResult] = {}
    for position, name in enumerate(ARMS):
        after_s = (len(ARMS) - position - 1) * arm_s
        progress.phase(
            f"{name}: starting the engine",
            expected_s=recording.startup_s,
            remaining_s=plan.duration_s + ARM_OVERHEAD_S + after_s,
        )
        with engines(name) as engine, Control(engine.base_url, engine.model) as control:
            arms[name] = _measure(name, plan, engine, control, directory, progress, after_s=after_s)
    return Experiment(plan, recording, arms)


def _interval_s(workload: Workload, cold_ms: tuple[float, ...]) -> float:
    """Such that computing every prompt takes `target_utilisation` of the time. Later prompts are longer."""
    typical_ms = percentile(cold_ms, 75)
    assert typical_ms is not None
    mean_tokens = sum(workload.prompt_tokens(turn) for turn in range(1, workload.turns + 1)) / workload.turns
    service_s = typical_ms / 1e3 * mean_tokens / workload.prompt_tokens(1)
    return max(SMALLEST_INTERVAL_S, round(service_s / workload.schedule.target_utilisation, 2))


def _record(workload: Workload, engines: Engines, progress: Progress) -> tuple[Recording, str]:
    progress.phase("recording: starting the engine")
    with engines(RECORDING) as engine, Control(engine.base_url, engine.model) as control:
        progress.phase("recording: writing the conversations")
        script = Script.write(workload, control.tokenize)
        _warm_up(workload, script, engine, control)
        progress.phase(f"recording: {workload.request_count} answers without kvbm")
        answers, cold_ms = asyncio.run(_record_answers(workload, script, engine, progress))
        return Recording(script, answers, cold_ms, engine.startup_s), engine.model


async def _record_answers(
    workload: Workload, script: Script, engine: RunningEngine, progress: Progress
) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], tuple[float, ...]]:
    """One request at a time, everyone's first turn, then everyone's second, ..."""
    answers: list[list[tuple[int, ...]]] = [[] for _ in range(workload.users)]
    cold_ms: list[float] = []
    async with open_session() as session:
        for turn in range(1, workload.turns + 1):
            for user in range(workload.users):
                request = _unplanned(workload, engine.model, script.prompt(user, turn, answers[user]), user, turn)
                row = await send(session, engine.base_url, request, workload=workload, arm=RECORDING)
                if row.error is not None:
                    raise EngineError(f"recording turn {turn} of user {user} failed: {row.error}")
                answers[user].append(tuple(row.token_ids))
                if turn == 1 and row.end_to_end_ms is not None:
                    cold_ms.append(row.end_to_end_ms)
                progress.row(row)
    return tuple(tuple(of_user) for of_user in answers), tuple(cold_ms)


def _unplanned(workload: Workload, model: str, prompt: list[int], user: int, turn: int) -> PlannedRequest:
    """A request outside the schedule: the recording's, the warm-up's."""
    body = request_body(model, prompt, answer_tokens=workload.answer_tokens)
    return PlannedRequest(0, user, turn, 0.0, len(prompt), (), body)


def _warm_up(workload: Workload, script: Script, engine: RunningEngine, control: Control) -> None:
    """The first long prompt of a process pays for memory and threads; it should not be a measured one."""

    async def once() -> Row:
        async with open_session() as session:
            request = _unplanned(workload, engine.model, list(script.warmup), 0, 0)
            return await send(session, engine.base_url, request, workload=workload, arm="warm-up")

    row = asyncio.run(once())
    if row.error is not None:
        raise EngineError(f"the warm-up request failed: {row.error}")
    control.reset_cache()


def _measure(
    name: str,
    plan: Plan,
    engine: RunningEngine,
    control: Control,
    directory: RunDirectory,
    progress: Progress,
    *,
    after_s: float,
) -> ArmResult:
    progress.phase(f"{name}: warming up", expected_s=ARM_OVERHEAD_S, remaining_s=plan.duration_s + after_s)
    _warm_up(plan.workload, plan.script, engine, control)
    before = _keep(control.metrics(), directory, name, "before")

    def on_row(row: Row) -> None:
        directory.append_request(row.to_json())
        progress.row(row)

    progress.phase(f"{name}: {len(plan.requests)} requests", expected_s=plan.duration_s, remaining_s=after_s)
    result = asyncio.run(drive(plan, engine.base_url, arm=name, on_row=on_row, engine_has_ended=engine.has_ended))
    ended = engine.has_ended()
    delta = None if ended else MetricsDelta(before, _keep(control.metrics(), directory, name, "after"))
    return ArmResult(name, result, delta, engine.startup_s, ended)


def _keep(metrics: Metrics, directory: RunDirectory, arm: str, when: str) -> Metrics:
    (directory.arm(arm) / f"metrics-{when}.txt").write_text(metrics.text, encoding="utf-8")
    return metrics
