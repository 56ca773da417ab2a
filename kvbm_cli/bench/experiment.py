"""One experiment from start to end: plan every cell, then run every arm in its own engine.

Nothing changes after the plan of a cell is written. Every run starts cold: a new process or an emptied server, a
warm-up with a prompt that no measured request contains, then an empty cache. An engine that only a restart empties
keeps the blocks of the warm-up. Interleaved arms run at the same time, with their launches spread over the interval,
so that other load on the machine affects all of them. Otherwise one arm runs after the other, in pairs of alternating
order, until the interval of the ratio is tight or all pairs are done. A floor that does not fit into the device is
left out; the recording then runs on the engine with its own G1.

All results are in the files of the directory; an experiment that was interrupted continues after the last run there.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from kvbm.errors import EngineError, UsageError
from kvbm_cli.bench.arms import RECORDING, ArmGroup
from kvbm_cli.bench.cells import Cell
from kvbm_cli.bench.engines import NeededRoom, NoRoomInG1, OpenArm, RunningEngine, running_server
from kvbm_cli.bench.load.drive import DriveResult, drive
from kvbm_cli.bench.metrics.sampler import Sampler
from kvbm_cli.bench.preparation import Capabilities, Preparation, capabilities_of, send_all, warm_up
from kvbm_cli.bench.result.directory import (
    LEFT_OUT,
    PLAN,
    REQUESTS,
    RUNS,
    SERVER_METRICS,
    BenchDirectory,
    cell_plan,
    run_name,
)
from kvbm_cli.bench.result.results import RequestRecord, Results
from kvbm_cli.bench.setup import SMALLEST_PAIRS, Setup
from kvbm_cli.bench.workload.plan import PATHS, Plan

SMALLEST_ROOM_TOKENS = 8192


class ExperimentProgress(Protocol):
    """Receives the progress of an experiment."""

    def phase(self, text: str) -> None: ...
    def request_ended(self, record: RequestRecord) -> None: ...


def run_experiment(setup: Setup, engines: OpenArm, directory: BenchDirectory, progress: ExperimentProgress) -> None:
    """Run all arms of all cells that have not run yet. EngineError if an engine does not start."""
    experiment = PlannedExperiment(setup, engines, directory, progress)
    experiment.prepare()
    experiment.run()


def _runs_of(cell: Cell, group: ArmGroup) -> dict[str, str]:
    """Return the names of the runs of a group by arm."""
    return {name: run_name(cell.name, group.pair, name) for name in group.arms}


def _require_same(old: Mapping[str, Any], new: Mapping[str, Any], directory: BenchDirectory) -> None:
    new = json.loads(json.dumps(new))
    if old != new:
        names = [name for name in {**new, **old} if name != "digest" and old.get(name) != new.get(name)]
        message = f"{directory.path} was made by another command: {', '.join(names) or 'its digest'} differs"
        raise UsageError(
            message,
            hint="`--resume` requires the options and the versions of the interrupted command, and its plan.json",
        )


@dataclass(frozen=True, slots=True)
class _Measurements:
    """Runs of one cell that are made at the same time: the name of each arm with the name of its run."""

    cell: Cell
    pair: int
    runs: Mapping[str, str]
    position: int
    place: str


class PlannedExperiment:
    """The files of an experiment, and the engines that make them. `prepare` precedes `run`."""

    def __init__(self, setup: Setup, engines: OpenArm, directory: BenchDirectory, progress: ExperimentProgress) -> None:
        self._setup, self._engines, self._directory, self._progress = setup, engines, directory, progress
        self._done: set[str] = set()  # runs that have ended or were left out
        self._no_room: tuple[int, NoRoomInG1] | None = None  # tokens that do not fit into G1, and the reason

    def prepare(self) -> None:
        """Write plan.json and the plans of all cells, where they are not there. EngineError as `run_experiment`."""
        directory, setup = self._directory, self._setup
        directory.lock()
        plan = setup.to_json()
        if directory.has(PLAN):
            _require_same(directory.read_json(PLAN), plan, directory)
        else:
            directory.write_json(PLAN, plan)
        left_out = {line["run"] for line in directory.lines(LEFT_OUT)}
        groups = [_runs_of(cell, group).values() for cell in setup.cells for group in setup.groups(cell)]
        self._done = left_out | directory.forget_unfinished([set(group) - left_out for group in groups])
        self._prepare([cell for cell in setup.cells if not self._is_planned(cell)])

    def run(self) -> None:
        for cell in self._setup.cells:
            self._run_cell(cell)

    def _is_planned(self, cell: Cell) -> bool:
        """Plans of later pairs are written after the first one."""
        first = cell_plan(cell.name)
        if not self._directory.has(first):
            return False
        if self._directory.read_json(first)["can_reset"]:
            return True
        pairs = range(2, self._setup.pairs(cell) + 1)
        return all(self._directory.has(cell_plan(cell.name, pair)) for pair in pairs)

    def _prepare(self, cells: Sequence[Cell]) -> None:
        """One engine makes all plans, if it can be emptied between them; otherwise each has an engine of its own."""
        if not cells:
            return
        if not self._setup.resets_cache and len(cells) > 1:
            for cell in cells:
                self._prepare([cell])
            return
        self._progress.phase("preparation: starting the engine")
        with ExitStack() as stack:
            engine = self._recording(stack, _room(cells))
            preparations: dict[str, Preparation] = {}
            for cell in cells:
                path = PATHS[cell.workload.endpoint]
                if path not in preparations:
                    preparations[path] = Preparation(engine, self._capabilities(engine, path))
                preparation = preparations[path]
                for pair in range(1, self._setup.pairs(cell) + 1):
                    if pair == 1 or not preparation.capabilities.can_reset:
                        self._make_plan(preparation, cell, pair)

    def _recording(self, stack: ExitStack, room: NeededRoom) -> RunningEngine:
        log = self._directory.run(RECORDING)
        try:
            return stack.enter_context(self._engines(RECORDING, log, room))
        except NoRoomInG1 as error:
            self._lacks_room(room, error)
            return stack.enter_context(self._engines(RECORDING, log, None))

    def _lacks_room(self, room: NeededRoom, error: NoRoomInG1) -> None:
        self._no_room = (room.tokens, error)
        self._progress.phase(_without_floor(error))

    def _capabilities(self, engine: RunningEngine, path: str) -> Capabilities:
        """Return what all servers have in common; the first engine is the one that tokenizes."""
        comparison = self._setup.comparison
        servers = [running_server(arm.url, comparison.ca_file) for arm in comparison.arms if arm.url is not None]
        others = [server for server in servers if server.base_url != engine.base_url]
        return capabilities_of([engine, *others], seed=self._setup.seed, path=path)

    def _make_plan(self, preparation: Preparation, cell: Cell, pair: int) -> None:
        self._progress.phase(f"preparation: writing the prompts of {cell.name}")
        script = preparation.script(cell, seed=cell.workload.seed + 1_000_003 * (pair - 1))
        self._progress.phase(f"preparation of {cell.name}: {len(script.requests)} requests")
        plan = preparation.plan(cell, script, self._progress.request_ended)
        if preparation.capabilities.can_reset:
            preparation.engine.try_reset()
        content = {**plan.to_json(), "can_reset": preparation.capabilities.can_reset}
        self._directory.write_json(cell_plan(cell.name, pair), content, indent=None)

    def _run_cell(self, cell: Cell) -> None:
        order = self._setup.groups(cell)
        for position, group in enumerate(order, start=1):
            runs = _runs_of(cell, group)
            if self._done.issuperset(runs.values()):
                continue
            is_first = position > 1 and order[position - 2].pair < group.pair
            if is_first and group.pair > SMALLEST_PAIRS and self._is_tight(cell):
                self._progress.phase(f"{cell.name}: the interval is tight after {group.pair - 1} pairs")
                return
            place = f"{cell.name}, run {position} of {len(order)}"
            self._run_group(_Measurements(cell, group.pair, runs, position, place))

    def _is_tight(self, cell: Cell) -> bool:
        cells = Results.read(self._directory).cells
        return self._setup.is_tight(next(one for one in cells if one.name == cell.name))

    def _run_group(self, group: _Measurements) -> None:
        """Run the arms of a group at the same time, each in its own engine."""
        own = cell_plan(group.cell.name, group.pair)
        data = self._directory.read_json(own if self._directory.has(own) else cell_plan(group.cell.name))
        plan = Plan.from_json(data)
        with ExitStack() as stack:
            engines: dict[str, RunningEngine] = {}
            for name, run in group.runs.items():
                try:
                    engines[name] = self._started(stack, name, group, plan, can_reset=data["can_reset"])
                except NoRoomInG1 as error:
                    self._directory.append(LEFT_OUT, {"run": run, "reason": _without_floor(error)})
            if not engines:
                return
            group = replace(group, runs={name: group.runs[name] for name in engines})
            text = f"{group.place}: {', '.join(engines)}, {len(plan.requests) * len(engines)} requests"
            self._progress.phase(text)
            result, servers = self._measured(engines, group, plan)
            for name, engine in engines.items():
                self._directory.append(RUNS, _run_line(name, engine, group, result, servers[name]))

    def _started(
        self, stack: ExitStack, name: str, group: _Measurements, plan: Plan, *, can_reset: bool
    ) -> RunningEngine:
        """Start the engine of an arm, warm it up, and empty its cache. NoRoomInG1 if it is a floor that does not fit.

        With a shared tier, a first engine answers all requests, and the measured one is the next that starts. Its cache
        is not emptied: that would turn the tier off.
        """
        room, floor = NeededRoom(plan.total_tokens, plan.session_count), self._setup.comparison.floor
        if self._no_room is not None and floor is not None and name == floor.name and room.tokens >= self._no_room[0]:
            raise self._no_room[1]
        self._progress.phase(f"{group.place}: starting {name}")
        try:
            engine = stack.enter_context(self._engines(name, self._directory.run(group.runs[name]), room))
        except NoRoomInG1 as error:
            self._lacks_room(room, error)
            raise
        if engine.next_engine is not None:
            self._progress.phase(f"{group.place}: a first engine of {name} fills the shared tier")
            send_all(engine, plan)
            self._progress.phase(f"{group.place}: starting {name} again")
            engine = stack.enter_context(engine.next_engine())
            warm_up(engine, plan)
            return engine
        warm_up(engine, plan)
        if can_reset and not engine.try_reset():
            raise EngineError(f"the server of arm {name} did not empty its cache")
        return engine

    def _measured(
        self, engines: Mapping[str, RunningEngine], group: _Measurements, plan: Plan
    ) -> tuple[DriveResult, dict[str, dict[str, Any]]]:
        """Send all requests while the server metrics are sampled."""
        start_ns = time.perf_counter_ns()
        files = {name: self._directory.run(run) / SERVER_METRICS for name, run in group.runs.items()}
        with ExitStack() as stack:
            samplers = {
                name: stack.enter_context(_sampler(files[name], engine, start_ns)) for name, engine in engines.items()
            }
            offset_s = (plan.launches.interval_s or 0.0) / len(engines)
            targets = [
                engine.target(group.runs[name], name, group.cell.name, group.pair, offset_s=number * offset_s)
                for number, (name, engine) in enumerate(engines.items())
            ]
            result = asyncio.run(drive(plan, targets, on_record=self._keep_record))
        return result, {name: sampler.summary() for name, sampler in samplers.items()}

    def _keep_record(self, record: RequestRecord) -> None:
        self._directory.append(REQUESTS, record.to_json())
        self._progress.request_ended(record)


def _without_floor(error: NoRoomInG1) -> str:
    ended, *why = (line.strip().removesuffix(", last lines:") for line in error.message.splitlines()[:2])
    return "; ".join([f"no floor: with a G1 that holds everything, {ended}", *why])


def _room(cells: Sequence[Cell]) -> NeededRoom:
    """Enough for the recordings of all cells, which need not fit exactly: an eviction changes no answer."""
    tokens = max((cell.workload.working_set_tokens or 0 for cell in cells), default=0)
    return NeededRoom(max(tokens, SMALLEST_ROOM_TOKENS), 64)


def _sampler(path: Path, engine: RunningEngine, start_ns: int) -> AbstractContextManager[Sampler]:
    return Sampler.start(
        path,
        base_url=engine.base_url if engine.has_metrics else None,
        kvbm_metrics_url=engine.metrics_url or None,
        pid=engine.pid,
        start_ns=start_ns,
        headers=engine.headers,
        ca_file=engine.ca_file,
    )


def _run_line(
    name: str, engine: RunningEngine, group: _Measurements, result: DriveResult, server: dict[str, Any]
) -> dict[str, Any]:
    return {
        "run": group.runs[name],
        "arm": name,
        "cell": group.cell.name,
        "pair": group.pair,
        "position": group.position,
        "together": len(group.runs),
        "started_unix_s": result.started_unix_s,
        "duration_s": result.duration_s,
        "startup_s": engine.startup_s,
        "client": result.health.to_json(),
        "server": server,
        "engine_ended": engine.has_ended(),
    }
