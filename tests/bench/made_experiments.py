"""Writes the directory of an experiment from records that are made up, so that every number is known exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench_rig import WORKLOAD, in_turn, setup_of

from kvbm_cli.bench.result.directory import PLAN, REQUESTS, RUNS, SUMMARY, BenchDirectory
from kvbm_cli.bench.result.results import RequestRecord, Results
from kvbm_cli.bench.setup import Setup
from kvbm_cli.bench.summary import summarise
from kvbm_cli.bench.workload.build import build_script
from kvbm_cli.bench.workload.plan import Dialect, Launches, Plan, RecordedAnswer
from kvbm_cli.bench.workload.schema import Workload
from kvbm_cli.bench.workload.script import TokenWriter

ANSWER = RecordedAnswer((1, 2, 3, 4, 5, 6), (-0.5,) * 6)
SIX = WORKLOAD.model_copy(update={"users": 6})
# arm -> time to first token of turn 2 in ms; turn 1 always takes 500 ms
TIMES = {"baseline": 400.0, "kvbm": 40.0, "floor": 30.0}
SURROUNDINGS: dict[str, Any] = {
    "command": ["kvbm", "bench", "--workload", "small"],
    "profile": {"name": "demo", "engine": {"kind": "embedded"}, "tiers": {"host": {"capacity": "256MiB"}}},
    "machine": {"cpu_count": 2, "load_average": 0.5, "time_unix_s": 1.0},
    "versions": {"python": "3.11.7", "vllm": None},
}

Change = Callable[[RequestRecord], None]


@cache
def plan_of(workload: Workload, *, seed: int = 0, is_recorded: bool = True) -> Plan:
    script = build_script(workload, TokenWriter(lambda text: list(text.encode()), seed=seed), seed=seed)
    answers = [ANSWER] * len(script.requests) if is_recorded else ()
    return Plan.make(script, Launches(interval_s=1.0), Dialect("m"), answers=answers, request_timeout_s=5.0)


def records_of(plan: Plan, run: str, arm: str, cell: str, pair: int, later_ms: float) -> Iterator[RequestRecord]:
    """Sessions differ by some percent, and pairs, too."""
    for request in plan.requests:
        intended_ms = (request.intended_s or 0.0) * 1e3
        share = 1 + 0.01 * request.session + 0.002 * pair
        first_token_ms = intended_ms + (500.0 if request.turn == 1 else later_ms * share)
        g2 = 400 if request.turn == 2 and arm == "kvbm" else 0
        yield RequestRecord(
            run=run,
            arm=arm,
            cell=cell,
            pair=pair,
            index=request.index,
            session=request.session,
            turn=request.turn,
            phase=request.phase.value,
            intended_ms=intended_ms,
            http_status=200,
            launched_ms=intended_ms + 1.0,
            first_token_ms=first_token_ms,
            last_token_ms=first_token_ms + 50,
            end_ms=first_token_ms + 51,
            first_chunk_tokens=1,
            token_gaps_ms=[10.0] * 5,
            token_ids=list(ANSWER.token_ids),
            logprobs=list(ANSWER.logprobs),
            output_tokens=6,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=g2,
            g1_tokens=0,
            g2_tokens=g2,
            g3_tokens=0,
        )


def run_line(cell: str, arm: str, pair: int, position: int) -> dict[str, Any]:
    return {
        "run": f"{cell}.{pair}.{arm}",
        "arm": arm,
        "cell": cell,
        "pair": pair,
        "position": position,
        "together": 1,
        "started_unix_s": 1000.0 * pair + position,
        "duration_s": 12.0,
        "startup_s": 2.0,
        "client": {"cpu_share": 0.05, "loop_lag_p99_ms": 0.5, "lateness_p99_ms": 1.0, "workers": 1},
        "server": {"queue_wait_ms": 1.0},
        "engine_ended": False,
    }


@cache
def _setup(workloads: tuple[Workload, ...], compare: tuple[str, ...]) -> Setup:
    return setup_of(*workloads, compare=compare)


@dataclass
class Made:
    """An experiment: `times` by arm; only arms in it run. `last_run` ends it early, as an interruption does."""

    times: Mapping[str, float]
    workloads: Sequence[Workload] = (in_turn(SIX, pairs=2),)
    seed: int = 0
    last_run: str | None = None
    change: Change = lambda record: None
    compare: Sequence[str] = ()
    is_recorded: bool = True

    def write(self, path: Path, *, surroundings: Mapping[str, Any] = SURROUNDINGS) -> Path:
        setup = _setup(tuple(self.workloads), tuple(self.compare))
        with closing(BenchDirectory.create(path)) as directory:
            directory.write_json(PLAN, setup.to_json())
            for cell in setup.cells:
                plan = plan_of(cell.workload, seed=self.seed, is_recorded=self.is_recorded)
                directory.write_json(f"cells/{cell.name}/plan.json", {**plan.to_json(), "can_reset": True})
            self._write_runs(setup, directory)
            summary = summarise(Results.read(directory), surroundings=surroundings, caveats=["a caveat"])
            directory.write_json(SUMMARY, summary)
        return path

    def _write_runs(self, setup: Setup, directory: BenchDirectory) -> None:
        for cell in setup.cells:
            plan = plan_of(cell.workload, seed=self.seed, is_recorded=self.is_recorded)
            for position, group in enumerate(setup.groups(cell), start=1):
                for arm in group.arms:
                    if arm not in self.times:
                        continue
                    line = run_line(cell.name, arm, group.pair, position)
                    for record in records_of(plan, line["run"], arm, cell.name, group.pair, self.times[arm]):
                        self.change(record)
                        directory.append(REQUESTS, record.to_json())
                    directory.append(RUNS, line)
                    if line["run"] == self.last_run:
                        return


def made(path: Path, *, surroundings: Mapping[str, Any] = SURROUNDINGS, **changes: Any) -> Path:
    times = {**TIMES, **changes.pop("times", {})}
    return Made({arm: time for arm, time in times.items() if time is not None}, **changes).write(
        path, surroundings=surroundings
    )


def summary_in(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / SUMMARY).read_text())
    return found


def rewrite_lines(file: Path, number: int, **changes: Any) -> None:
    """Change fields of one line, counted from 1; `None` removes the field."""
    lines = file.read_text().splitlines()
    content = {**json.loads(lines[number - 1]), **changes}
    lines[number - 1] = json.dumps({name: value for name, value in content.items() if value is not None})
    file.write_text("\n".join(lines) + "\n")
