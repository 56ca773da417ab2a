"""Watched engines: reads their metrics at each tick, and follows runs that end, start again, or are added.

An engine that does not answer, or that has ended, stays in the list with the reason. Nothing here raises for what an
engine, its log or its run directory contains.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kvbm.errors import KvbmError
from kvbm.text.outside import one_line, shortened
from kvbm_cli.engine.engine_log import MOST_EXAMINED, end_of
from kvbm_cli.runs.run_client import engine_metrics_of, metrics_of
from kvbm_cli.runs.run_directory import EngineRun, Runs
from kvbm_cli.runs.run_facts import RunState
from kvbm_cli.system.http_client import get_metrics
from kvbm_cli.system.metrics_page import MetricsPage
from kvbm_cli.top.figures import NAMES, Reading, engines_of

TIMEOUT_S = 1.0
PARALLEL = 16
TAIL_BYTES = 1 << 16
LAST_WARNINGS = 3
_WARNING = re.compile(
    r"\b(WARNING|ERROR|CRITICAL)\b.*kvbm|kvbm: .*\b(exception|is off|stays off|cannot|failed|without the cache)\b"
)


@dataclass(frozen=True, slots=True)
class MetricsTarget:
    """Where metrics are read: at `url`, or those of `run`. `state` is empty while the engine should answer, else why it
    does not."""

    name: str
    url: str
    state: str = ""
    logs: tuple[Path, ...] = ()
    run: EngineRun | None = None


@dataclass(slots=True)
class WatchedEngine:
    """One engine: its last two readings, oldest first, and why there is no newer one."""

    name: str
    readings: list[Reading] = field(default_factory=list)
    problem: str = ""

    @property
    def pair(self) -> tuple[Reading, Reading] | None:
        return (self.readings[0], self.readings[1]) if len(self.readings) == 2 else None


class EngineReader:
    """`targets` returns what to read, at each tick again."""

    def __init__(
        self, targets: Callable[[], Sequence[MetricsTarget]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._targets = targets
        self._clock = clock
        self._found: dict[str, WatchedEngine] = {}
        self.warnings: list[str] = []

    def read(self) -> list[WatchedEngine]:
        """Read every engine again, all at the same time."""
        targets = self._targets()
        with ThreadPoolExecutor(PARALLEL) as threads:
            answers = list(threads.map(self._answer, targets))
        seen: dict[str, WatchedEngine] = {}
        for target, (pages, problem, at_s) in zip(targets, answers, strict=True):
            seen |= self._note(target, pages, problem, at_s)
        self._found = seen
        self.warnings = [line for target in targets for line in last_warnings(target)][-LAST_WARNINGS:]
        return list(seen.values())

    def _answer(self, target: MetricsTarget) -> tuple[dict[str, MetricsPage], str, float]:
        if target.state:
            return {}, target.state, self._clock()
        run = target.run
        answer = get_metrics(target.url, timeout_s=TIMEOUT_S) if run is None else metrics_of(run, timeout_s=TIMEOUT_S)
        at_s = self._clock()
        if answer.status != 200:
            return {}, answer.failure or f"status {answer.status}", at_s
        text = answer.text()
        if run is not None and run.facts.metrics_url:
            own = engine_metrics_of(run, timeout_s=TIMEOUT_S)
            if own.failure:
                return {}, own.failure, at_s
            text += own.text() if own.status == 200 else ""  # the server of TensorRT-LLM has no such page
        pages = engines_of(MetricsPage.parse(text, NAMES))
        return pages, "" if pages else "no metrics of kvbm", at_s

    def _note(
        self, target: MetricsTarget, pages: dict[str, MetricsPage], problem: str, at_s: float
    ) -> dict[str, WatchedEngine]:
        if not pages:
            known = [name for name in self._found if name == target.name or name.startswith(f"{target.name}/")]
            for name in known or [target.name]:
                self._found.setdefault(name, WatchedEngine(name)).readings.clear()
                self._found[name].problem = one_line(shortened(problem))
            return {name: self._found[name] for name in known or [target.name]}
        found = {}
        for engine, page in pages.items():
            name = target.name if len(pages) == 1 else f"{target.name}/{engine}"
            one = found[name] = self._found.get(name) or WatchedEngine(name)
            one.problem = ""
            one.readings = [*one.readings[-1:], Reading(at_s, page)]
        return found


def of_url(url: str) -> Callable[[], list[MetricsTarget]]:
    address = url if "://" in url else f"http://{url}"
    if not address.rstrip("/").endswith("/metrics"):
        address = f"{address.rstrip('/')}/metrics"
    name = address.removeprefix("http://").removesuffix("/metrics")
    return lambda: [MetricsTarget(name, address)]


def of_runs(reference: str | None) -> Callable[[], list[MetricsTarget]]:
    """Return the running engines, or those of a run or a profile. Raises UsageError if there is no such run; later,
    runs that have ended are shown as such."""
    runs = Runs.of_user()
    runs.require_readable(reference)
    runs.find(reference, ended=True)
    seen: dict[str, EngineRun] = {}

    def targets() -> list[MetricsTarget]:
        try:
            living = runs.find(reference, ended=reference is not None)
        except KvbmError:
            living = []  # its directory was removed
        seen.update((run.name, run) for run in living)
        for name, run in list(seen.items()):
            seen[name] = run.again()
        newest = {(run.facts.profile, run.facts.is_baseline): run for run in seen.values()}
        shown = [run for run in seen.values() if run.is_living or run in newest.values()]
        return [_target(run) for run in shown]

    return targets


def _target(run: EngineRun) -> MetricsTarget:
    facts = run.facts
    state = "" if run.state is RunState.HEALTHY else run.state.value
    if run.state is RunState.ENDED:
        state = f"ended with exit code {facts.exit_code}"
    if facts.is_baseline:
        state = "no cache: this is the baseline"
    return MetricsTarget(facts.name, "", state, tuple(facts.log_paths.values()), run)


def last_warnings(target: MetricsTarget) -> list[str]:
    """Return the last warnings and errors of kvbm in the logs of a run."""
    found = []
    for path in target.logs:
        lines = [line[:MOST_EXAMINED] for line in end_of(path, TAIL_BYTES).splitlines()]
        found += [f"{target.name}: {one_line(line)}" for line in lines if _WARNING.search(line)]
    return found[-LAST_WARNINGS:]
