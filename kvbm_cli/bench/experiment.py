"""One experiment from start to end: record, plan, then run every arm in its own engine.

    recording   the engine without kvbm, with a G1 that holds everything. Its tokenizer counts the users' tokens, its
                greedy answers become the history of every arm, and its cold prompts determine the interval
    reference   the engine without kvbm (`baseline`), or the engine of another profile with kvbm
    measured    the engine with kvbm
    floor       the engine without kvbm, with a G1 that holds everything: the TTFT of a cache of unlimited size

Nothing changes after the plan is written. Every arm starts cold: a new process, a warm-up with a prompt that no
measured request contains, then an empty cache. Interleaved arms run at the same time, with their launches spread over
the interval, so that other load on the machine affects all of them. Otherwise one arm runs after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol

from kvbm.errors import EngineError
from kvbm_cli.bench.analysis.statistics import percentile
from kvbm_cli.bench.client import DriveResult, Target, drive, open_session, send
from kvbm_cli.bench.comparison import AGAINST_BASELINE, BASELINE, RECORDING, Comparison
from kvbm_cli.bench.control import Control, MetricsDelta, ScrapedMetrics
from kvbm_cli.bench.output_directory import OutputDirectory
from kvbm_cli.bench.request_record import RequestRecord
from kvbm_cli.bench.schedule import Plan, PlannedRequest, RecordedAnswer, Script, request_body
from kvbm_cli.profile.workload import Workload

SMALLEST_INTERVAL_S = 0.05

Answers = tuple[tuple[RecordedAnswer, ...], ...]


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine that serves; the context manager that yields it starts and stops it."""

    base_url: str
    model: str
    startup_s: float
    has_ended: Callable[[], bool]
    admin_token: str | None = None


Engines = Callable[[str], AbstractContextManager[RunningEngine]]


class ExperimentProgress(Protocol):
    """Receives the progress of an experiment. `remaining_s` is the time left after this phase, if it is known."""

    def phase(self, text: str, *, expected_s: float | None = None, remaining_s: float | None = None) -> None: ...
    def request_ended(self, record: RequestRecord) -> None: ...


@dataclass(frozen=True, slots=True)
class Recording:
    """`answers` are indexed by user, then by turn - 1.

    `cold_ms` are the end-to-end times of first turns, whose system prompt may be cached. `ready_s` is the time from the
    engine's start to the end of its warm-up, which is about the same for every arm.
    """

    script: Script
    answers: Answers
    cold_ms: tuple[float, ...]
    ready_s: float


@dataclass(frozen=True, slots=True)
class ArmResult:
    """`client_cpu_share` covers the whole drive, so arms that ran at the same time have the same value."""

    name: str
    records: tuple[RequestRecord, ...]
    client_cpu_share: float
    started_unix_s: float
    duration_s: float
    metrics: MetricsDelta | None
    startup_s: float
    engine_ended: bool


@dataclass(frozen=True, slots=True)
class Experiment:
    comparison: Comparison
    plan: Plan
    recording: Recording
    arms: dict[str, ArmResult]


def run_experiment(
    workload: Workload,
    engines: Engines,
    directory: OutputDirectory,
    progress: ExperimentProgress,
    comparison: Comparison = AGAINST_BASELINE,
) -> Experiment:
    """Run all arms to the end. EngineError if an engine does not start or refuses the recording."""
    run = _Run(workload, engines, directory, progress)
    recording, model = run.make_recording()
    plan = Plan.make(
        workload,
        recording.script,
        model=model,
        answers=recording.answers,
        interval_s=workload.schedule.interval_s or _interval_s(workload, recording.cold_ms),
    )
    names = comparison.arms
    groups = (names,) if workload.schedule.arms == "interleaved" else tuple((name,) for name in names)
    directory.write_json("plan.json", {**plan.to_json(), "arms": [list(group) for group in groups]}, indent=None)
    arms: dict[str, ArmResult] = {}
    for position, group in enumerate(groups, start=1):
        later_s = sum(len(later) * recording.ready_s + plan.duration_s for later in groups[position:])
        arms |= run.measure(group, plan, recording=recording, later_s=later_s)
    return Experiment(comparison, plan, recording, arms)


def _interval_s(workload: Workload, cold_ms: tuple[float, ...]) -> float:
    """The interval at which computing every prompt takes `target_utilisation` of the time."""
    service_s = _service_s(workload, cold_ms)
    return max(SMALLEST_INTERVAL_S, round(service_s / workload.schedule.target_utilisation, 2))


def _service_s(workload: Workload, cold_ms: tuple[float, ...]) -> float:
    """Time of a request that computes its whole prompt, scaled from first turns to the mean length of all turns."""
    typical_ms = percentile(cold_ms, 75)
    assert typical_ms is not None
    mean_tokens = sum(workload.prompt_tokens(turn) for turn in range(1, workload.turns + 1)) / workload.turns
    return typical_ms / 1e3 * mean_tokens / workload.prompt_tokens(1)


def _drive_s(group: Sequence[str], plan: Plan, recording: Recording) -> float:
    """Duration of a group's requests: as planned, or longer if the baseline cannot keep up with the schedule."""
    service_s = _service_s(plan.workload, recording.cold_ms) if BASELINE in group else 0.0
    return max(plan.duration_s, len(plan.requests) * service_s)


def _require_empty_disk(before: ScrapedMetrics) -> None:
    """EngineError if the disk tier holds blocks of an earlier run, which would count as hits of this one."""
    found = sum(before.total("kvbm_disk_blocks", state=state) or 0 for state in ("pinned", "evictable"))
    if found:
        raise EngineError(f"the disk tier holds {found:g} blocks before the run, but it must be empty")


@dataclass(frozen=True, slots=True)
class _ReadyArm:
    """An arm that is ready to be measured: warmed up, with an empty cache."""

    name: str
    engine: RunningEngine
    control: Control
    before: ScrapedMetrics


@dataclass(frozen=True, slots=True)
class _Run:
    """The inputs that every step of an experiment uses."""

    workload: Workload
    engines: Engines
    directory: OutputDirectory
    progress: ExperimentProgress

    def make_recording(self) -> tuple[Recording, str]:
        """Record all answers without kvbm. Returns the recording and the name of the model."""
        self.progress.phase("recording: starting the engine")
        with self.engines(RECORDING) as engine:
            control = Control(engine.base_url, engine.model, admin_token=engine.admin_token)
            self.progress.phase("recording: writing the conversations")
            script = Script.write(self.workload, control.tokenize)
            warm_up_s = self._warm_up(script, engine, control)
            self.progress.phase(f"recording: {self.workload.request_count} answers without kvbm")
            answers, cold_ms = asyncio.run(self._record_answers(script, engine))
            return Recording(script, answers, cold_ms, engine.startup_s + warm_up_s), engine.model

    async def _record_answers(self, script: Script, engine: RunningEngine) -> tuple[Answers, tuple[float, ...]]:
        """Send one request at a time: the first turn of every user, then the second of every user, and so on."""
        answers: list[list[RecordedAnswer]] = [[] for _ in range(self.workload.users)]
        cold_ms: list[float] = []
        async with open_session() as session:
            for turn in range(1, self.workload.turns + 1):
                for user in range(self.workload.users):
                    request = self._unplanned(engine.model, script.prompt(user, turn, answers[user]), user, turn)
                    record = await send(session, engine.base_url, request, workload=self.workload, arm=RECORDING)
                    if record.error is not None:
                        raise EngineError(f"recording turn {turn} of user {user} failed: {record.error}")
                    answers[user].append(RecordedAnswer(tuple(record.token_ids), tuple(record.logprobs)))
                    if turn == 1 and record.end_to_end_ms is not None:
                        cold_ms.append(record.end_to_end_ms)
                    self.progress.request_ended(record)
        return tuple(map(tuple, answers)), tuple(cold_ms)

    def measure(
        self, group: Sequence[str], plan: Plan, *, recording: Recording, later_s: float
    ) -> dict[str, ArmResult]:
        """Run the arms of a group at the same time, each in its own engine. `later_s` is the time of later groups."""
        drive_s = _drive_s(group, plan, recording)
        with ExitStack() as stack:
            ready: list[_ReadyArm] = []
            for position, name in enumerate(group, start=1):
                rest_s = (len(group) - position) * recording.ready_s + drive_s + later_s
                self.progress.phase(f"{name}: starting the engine", expected_s=recording.ready_s, remaining_s=rest_s)
                engine = stack.enter_context(self.engines(name))
                control = Control(engine.base_url, engine.model, admin_token=engine.admin_token)
                self._warm_up(plan.script, engine, control)
                before = self._save_metrics(control.metrics(), name, "before")
                _require_empty_disk(before)
                ready.append(_ReadyArm(name, engine, control, before))
            text = f"{', '.join(group)}: {len(plan.requests) * len(group)} requests"
            self.progress.phase(text, expected_s=drive_s, remaining_s=later_s)
            offsets = (position * plan.interval_s / len(group) for position in range(len(group)))
            targets = [
                Target(arm.name, arm.engine.base_url, offset_s, arm.engine.has_ended)
                for arm, offset_s in zip(ready, offsets, strict=True)
            ]
            result = asyncio.run(drive(plan, targets, on_record=self._keep_record))
            return {arm.name: self._arm_result(arm, result) for arm in ready}

    def _arm_result(self, arm: _ReadyArm, result: DriveResult) -> ArmResult:
        ended = arm.engine.has_ended()
        return ArmResult(
            name=arm.name,
            records=result.records[arm.name],
            client_cpu_share=result.client_cpu_share,
            started_unix_s=result.started_unix_s,
            duration_s=result.duration_s,
            metrics=None if ended else self._metrics_after(arm),
            startup_s=arm.engine.startup_s,
            engine_ended=ended,
        )

    def _metrics_after(self, arm: _ReadyArm) -> MetricsDelta | None:
        """`None` if the engine hangs or has just died; its requests then have records with errors."""
        try:
            return MetricsDelta(arm.before, self._save_metrics(arm.control.metrics(), arm.name, "after"))
        except EngineError:
            return None

    def _warm_up(self, script: Script, engine: RunningEngine, control: Control) -> float:
        """Send one long prompt unmeasured: the first one of a process pays for memory and threads. Returns seconds."""
        started = time.monotonic()

        async def once() -> RequestRecord:
            async with open_session() as session:
                request = self._unplanned(engine.model, list(script.warmup), 0, 0)
                return await send(session, engine.base_url, request, workload=self.workload, arm="warm-up")

        record = asyncio.run(once())
        if record.error is not None:
            raise EngineError(f"the warm-up request failed: {record.error}")
        control.reset_cache()
        return time.monotonic() - started

    def _unplanned(self, model: str, prompt: list[int], user: int, turn: int) -> PlannedRequest:
        """A request of the recording or of the warm-up, which has no place in the schedule."""
        body = request_body(model, prompt, answer_tokens=self.workload.answer_tokens)
        return PlannedRequest(0, user, turn, 0.0, len(prompt), RecordedAnswer(()), body)

    def _keep_record(self, record: RequestRecord) -> None:
        self.directory.append_request(record.to_json())
        self.progress.request_ended(record)

    def _save_metrics(self, metrics: ScrapedMetrics, arm: str, when: str) -> ScrapedMetrics:
        (self.directory.arm(arm) / f"metrics-{when}.txt").write_text(metrics.text, encoding="utf-8")
        return metrics
