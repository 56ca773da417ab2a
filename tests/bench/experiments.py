"""Builds experiments whose every number is given: in memory, or as the directory that `kvbm bench` would write.

An `Experiment` has the plan of real workloads; its arms say how a request is answered. `Turns` gives the time to first
token by turn, and `GivenArm` derives it from where the prompt's tokens came from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

from bench_rig import WORKLOAD, comparison, in_turn

from kvbm_cli.bench.cells import Cell, Sweep, script_of
from kvbm_cli.bench.result.directory import PLAN, REQUESTS, RUNS, SUMMARY, BenchDirectory, run_name
from kvbm_cli.bench.result.results import TIERS, CellResult, Measurement, RequestRecord, Results
from kvbm_cli.bench.setup import Setup
from kvbm_cli.bench.show.page import build_report
from kvbm_cli.bench.summary import summarise
from kvbm_cli.bench.workload.plan import Dialect, Launches, Plan, PlannedRequest, RecordedAnswer
from kvbm_cli.bench.workload.schema import Conversations, Schedule, Unique, Workload
from kvbm_cli.bench.workload.script import TokenWriter

BLOCK = 16
ANSWER = RecordedAnswer((1, 2, 3, 4, 5, 6), (-0.5,) * 6)
SIX = WORKLOAD.model_copy(update={"users": 6})
SURROUNDINGS: dict[str, Any] = {
    "command": ["kvbm", "bench", "--workload", "small"],
    "profile": {"name": "demo", "engine": {"kind": "embedded"}, "tiers": {"host": {"capacity": "256MiB"}}},
    "machine": {"cpu_count": 2, "load_average": 0.5, "time_unix_s": 1.0},
    "versions": {"python": "3.11.7", "vllm": None},
    "prices": None,
}
CONVERSATIONS = Conversations(
    name="talk",
    users=6,
    turns=4,
    system_tokens=64,
    history_tokens=960,
    question_tokens=32,
    answer_tokens=16,
    history="canned",
    schedule=Schedule(interval_s=1.0, pairs=2),
)
UNIQUE = Unique(
    name="once", kind="unique", requests=24, prompt_tokens=1024, answer_tokens=16, schedule=Schedule(interval_s=1.0)
)
PROFILE: dict[str, Any] = {
    "tiers": {"host": {"capacity": "64MiB", "blocks": None}, "disk": None},
    "offload": {"to_disk": "frequency", "frequency_threshold": 2, "min_priority": 0},
    "onboard": {"policy": "auto"},
    "transfer": {"max_concurrent": 4},
}

Change = Callable[[RequestRecord], None]


class Arm(Protocol):
    def record(self, request: PlannedRequest, run: str, reusable: int) -> RequestRecord:
        """`reusable` are the tokens of the prompt that are whole blocks of the prompt of the turn before."""

    def facts(self, records: Sequence[RequestRecord]) -> dict[str, Any]:
        """What the line of the run has besides the common values."""


def answered(
    request: PlannedRequest,
    run: str,
    *,
    ttft_ms: float,
    tokens: Sequence[int] = (0, 0, 0),
    lateness_ms: float = 1.0,
    gaps_ms: Sequence[float] = (10.0,) * 5,
    **fields: Any,
) -> RequestRecord:
    """`tokens` are those of the prompt that came from G1, G2 and G3."""
    cell, pair, arm = run.rsplit(".", 2)
    intended_ms = 1e3 * (request.intended_s if request.intended_s is not None else float(request.index))
    first_ms = intended_ms + ttft_ms
    g1, g2, g3 = tokens
    known: dict[str, Any] = {
        "intended_ms": intended_ms,
        "http_status": 200,
        "launched_ms": intended_ms + lateness_ms,
        "first_token_ms": first_ms,
        "last_token_ms": first_ms + sum(gaps_ms),
        "end_ms": first_ms + sum(gaps_ms) + 1,
        "first_chunk_tokens": 1,
        "token_gaps_ms": list(gaps_ms),
        "token_ids": list(ANSWER.token_ids),
        "logprobs": list(ANSWER.logprobs),
        "output_tokens": len(ANSWER.token_ids),
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": sum(tokens),
        "g1_tokens": g1,
        "g2_tokens": g2,
        "g3_tokens": g3,
        "g4_tokens": 0,
    }
    place = (request.index, request.session, request.turn, request.phase.value)
    return RequestRecord(run, arm, cell, int(pair), *place, **{**known, **fields})


@dataclass(frozen=True)
class Turns:
    """Turn 1 takes `first_ms`, others `later_ms` and find `later_tokens` in G1 and G2. With `varies`, sessions differ
    by some percent, and pairs, too."""

    later_ms: float
    later_tokens: tuple[int, int] = (0, 0)
    first_ms: float = 500.0
    varies: bool = False

    def record(self, request: PlannedRequest, run: str, reusable: int) -> RequestRecord:
        if request.turn == 1:
            return answered(request, run, ttft_ms=self.first_ms)
        share = 1 + self.varies * (0.01 * request.session + 0.002 * int(run.rsplit(".", 2)[1]))
        return answered(request, run, ttft_ms=self.later_ms * share, tokens=(*self.later_tokens, 0))

    def facts(self, records: Sequence[RequestRecord]) -> dict[str, Any]:
        return {"server": {"queue_wait_ms": 1.0}}


# arm -> time to first token of turn 2, in ms
TIMES = {"baseline": 400.0, "kvbm": 40.0, "floor": 30.0}
# of turn 1, of turn 2, and the tokens of turn 2 (of 470) from G1 and G2
FASTER = {
    "baseline": Turns(400.0, (32, 0)),
    "kvbm": Turns(20.0, (32, 400), first_ms=520.0),
    "floor": Turns(16.0, (432, 0)),
}


@dataclass(frozen=True)
class GivenArm:
    """`found` are the parts of a prompt's reusable blocks that came from G1, G2 and G3; a request takes
    `base_ms + ms_per_token * computed tokens + load_ms`, times 1 + `spread` by turns of its session."""

    found: tuple[float, float, float] = (0.0, 0.0, 0.0)
    elsewhere: tuple[float, float, float] | None = None  # of every third session
    base_ms: float = 20.0
    ms_per_token: float = 0.5
    load_ms: float = 0.0
    spread: float = 0.0
    queue_wait_ms: float = 0.2
    end_ms: float = 10.0
    lateness_ms: float = 1.0
    client: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    states: Mapping[str, float] = field(default_factory=dict)
    g1_blocks: int = 200
    g2_blocks: int | None = None
    error: str | None = None

    def record(self, request: PlannedRequest, run: str, reusable: int) -> RequestRecord:
        found = self.elsewhere if self.elsewhere and request.session % 3 == 2 else self.found
        tokens = [round(part * reusable / BLOCK) * BLOCK for part in found]
        computed = (request.prompt_tokens or 0) - sum(tokens)
        factor = 1 + self.spread * (-1) ** (request.session + int(run.rsplit(".", 2)[1]))
        load_ms = self.load_ms if any(tokens[1:]) else 0.0
        ttft_ms = factor * (self.base_ms + self.ms_per_token * computed + load_ms)
        fields = {"error": self.error, "lateness_ms": self.lateness_ms, "gaps_ms": [self.end_ms / 5] * 5}
        return answered(request, run, ttft_ms=ttft_ms, tokens=tokens, **fields)

    def facts(self, records: Sequence[RequestRecord]) -> dict[str, Any]:
        totals = {tier: sum(getattr(one, f"{tier}_tokens") or 0 for one in records) for tier in TIERS}
        engine = {"block_size": BLOCK, "g1_blocks": self.g1_blocks, "g1_tokens": BLOCK * self.g1_blocks}
        return {
            "client": {"loop_lag_p99_ms": 1.0, "cpu_share": 0.1, **self.client},
            "server": {
                "prompt_tokens": totals,
                "queue_wait_ms": self.queue_wait_ms,
                "kvbm_counters": dict(self.counters),
                "kvbm_states": dict(self.states),
                "engine": engine | ({"g2_blocks": self.g2_blocks} if self.g2_blocks else {}),
            },
        }


BASELINE = GivenArm()
KVBM = GivenArm(
    found=(0.0, 1.0, 0.0),
    g2_blocks=1024,
    counters={"kvbm_offload_blocks_d2h": 400, "kvbm_evicted_blocks": 0, "kvbm_onboard_blocks_h2d": 1000},
    states={"kvbm_disabled": 0.0, "kvbm_disk_off": 0.0},
)


@cache
def plan_of(workload: Workload, launches: Launches | None = None, *, seed: int = 0, is_recorded: bool = False) -> Plan:
    script = script_of(workload, TokenWriter(lambda text: list(text.encode()), seed=seed), seed=seed)
    answers = [ANSWER] * len(script.requests) if is_recorded else ()
    launches = launches or Launches(interval_s=1.0)
    return Plan.make(script, launches, Dialect("m"), answers=answers, request_timeout_s=5.0)


@cache
def _setup(cells: tuple[Cell, ...], compare: tuple[str, ...]) -> Setup:
    return Setup(comparison(*compare), cells)


@dataclass
class Experiment:
    """Only the `arms` named here run. `last_run` ends it early, as an interruption does. The records and the facts of
    its `runs` may be changed before it is read or written."""

    arms: Mapping[str, Arm]
    cells: Sequence[Cell] = (Cell("small", in_turn(SIX)),)
    seed: int = 0
    last_run: str | None = None
    change: Change = lambda record: None
    compare: Sequence[str] = ()
    is_recorded: bool = True
    launches: Launches | None = None

    @cached_property
    def setup(self) -> Setup:
        return _setup(tuple(self.cells), tuple(self.compare))

    def plan(self, cell: Cell) -> Plan:
        return plan_of(cell.workload, self.launches, seed=self.seed, is_recorded=self.is_recorded)

    @cached_property
    def runs(self) -> dict[str, Measurement]:
        found: dict[str, Measurement] = {}
        for cell in self.setup.cells:
            for position, group in enumerate(self.setup.groups(cell), start=1):
                for arm in group.arms:
                    if arm not in self.arms:
                        continue
                    run = self._run(cell, arm, group.pair, position)
                    found[run.run] = run
                    if run.run == self.last_run:
                        return found
        return found

    def _run(self, cell: Cell, name: str, pair: int, position: int) -> Measurement:
        arm, run, sent, records = self.arms[name], run_name(cell.name, pair, name), {}, []
        for request in self.plan(cell).requests:
            length = request.prompt_tokens or 0
            reusable = min(sent.get((request.session, request.turn - 1), 0), length - 1) // BLOCK * BLOCK
            sent[request.session, request.turn] = length
            records.append(arm.record(request, run, reusable))
            self.change(records[-1])
        facts = {
            "run": run,
            "arm": name,
            "cell": cell.name,
            "pair": pair,
            "position": position,
            "together": 1,
            "started_unix_s": 1000.0 * pair + position,
            "duration_s": 12.0,
            "startup_s": 2.0,
            "client": {"cpu_share": 0.05, "loop_lag_p99_ms": 0.5, "lateness_p99_ms": 1.0, "workers": 1},
            "engine_ended": False,
            **arm.facts(records),
        }
        return Measurement(run, name, pair, facts, tuple(records))

    def results(self) -> Results:
        content, runs = self.setup.to_json(), self.runs.values()
        cells = [
            CellResult(definition, plan, plan.digest, tuple(run for run in runs if run.facts["cell"] == cell.name))
            for definition, cell in zip(content["cells"], self.cells, strict=True)
            for plan in [self.plan(cell)]
        ]
        return Results(content, tuple(cells))

    def summary(self, **options: Any) -> dict[str, Any]:
        return summarise(self.results(), **{"surroundings": {}, **options})

    def write(self, path: Path, *, without_end: Sequence[str] = (), **options: Any) -> Path:
        """Runs `without_end` have requests, and no line of their own. `options` are those of the summary."""
        with closing(BenchDirectory.create(path)) as directory:
            directory.write_json(PLAN, self.setup.to_json())
            for cell in self.cells:
                directory.write_json(f"cells/{cell.name}/plan.json", {**self.plan(cell).to_json(), "can_reset": True})
            for name, run in self.runs.items():
                for record in run.records:
                    directory.append(REQUESTS, record.to_json())
                if name not in without_end:
                    directory.append(RUNS, run.facts)
            summary = summarise(Results.read(directory), **{"surroundings": SURROUNDINGS, **options})
            directory.write_json(SUMMARY, summary)
        return path


def made(
    path: Path,
    *,
    times: Mapping[str, float | None] | None = None,
    workloads: Sequence[Workload] = (in_turn(SIX, pairs=2),),
    surroundings: Mapping[str, Any] = SURROUNDINGS,
    **changes: Any,
) -> Path:
    """The directory of an experiment in which only the times of turn 2 differ; an arm with None does not run."""
    arms = {
        arm: Turns(later_ms, (0, 400 if arm == "kvbm" else 0), varies=True)
        for arm, later_ms in {**TIMES, **(times or {})}.items()
        if later_ms is not None
    }
    cells = [Cell(workload.name, workload) for workload in workloads]
    return Experiment(arms, cells, **changes).write(path, surroundings=surroundings, caveats=["a caveat"])


def summary_of_arms(
    *,
    workload: Workload = CONVERSATIONS,
    profile: Mapping[str, Any] | None = PROFILE,
    pairs: int = 2,
    launches: Launches | None = None,
    pressure: float | None = None,
    g1_tokens: int | None = None,
    **arms: GivenArm,
) -> dict[str, Any]:
    """The summary of `kvbm` against `baseline`; the arm `floor` is optional."""
    launches = launches or Launches(interval_s=workload.schedule.interval_s)
    cell = Cell(workload.name, in_turn(workload, pairs=pairs), pressure, g1_tokens)
    arms = {"baseline": BASELINE, "kvbm": KVBM, **arms}
    found = Experiment(arms, [cell], seed=1, launches=launches, is_recorded=False)
    return found.summary(surroundings={"profile": profile})


# Each arm has all its tokens from one tier, except that every third session of kvbm has them on disk.
SAMPLE = {
    "baseline": GivenArm(spread=0.05),
    "kvbm": GivenArm(found=(0.2, 0.8, 0.0), elsewhere=(0.2, 0.0, 0.8), load_ms=20.0, spread=0.1),
    "floor": GivenArm(found=(1.0, 0.0, 0.0), spread=0.02),
}


WITHOUT_METRICS = {
    "samples": 0,
    "prompt_tokens": None,
    "gpu": [],
    "caveats": ["the engine has no metrics"],
    "peaks": {},
}


def write_sample(
    directory: Path,
    *,
    pressures: Sequence[float | None] = (0.8, 1.2, 2.0),
    arms: Sequence[str] = ("baseline", "kvbm", "floor"),
    sessions: int = 12,
    turns: int = 6,
    pairs: int = 3,
    server_metrics: bool = True,
    rates: tuple[float, ...] = (),
) -> dict[str, Any]:
    """Write an experiment as large as a real one, with metrics, and return its summary. `rates`: of a sweep."""
    changes = {"name": "conversations", "users": sessions, "turns": turns}
    workload = in_turn(CONVERSATIONS.model_copy(update=changes), pairs=pairs)
    workloads = Sweep("rate", rates).applied([workload]) if rates else [workload]
    cells = [
        Cell(one.name if pressure is None else f"{one.name}-x{pressure}", one, pressure, 19_200)
        for one in workloads
        for pressure in pressures
    ]
    found = Experiment({arm: SAMPLE[arm] for arm in arms}, cells)
    for run in found.runs.values():
        run.facts["server"] = _server_of(run.records) if server_metrics else WITHOUT_METRICS
    caveats = [
        "users take turns in a fixed order, which is the worst case for a G1 that is too small",
        "p99 requires 368 samples: it is not reported",
    ]
    found.write(directory, surroundings={**SURROUNDINGS, "command": None}, caveats=caveats)
    return summary_in(directory)


def _server_of(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """What is known of the server after a run, as of an engine that answers these requests and is sampled once a
    second."""
    has_kvbm, seconds = records[0].arm == "kvbm", int(max(one.end_ms or 0.0 for one in records) / 1000) + 1
    tokens = {tier: sum(one.tokens.get(tier, 0) for one in records) for tier in TIERS}
    written = tokens["computed"] * 600 if has_kvbm else 0
    return {
        "samples": seconds + 1,
        "prompt_tokens": tokens,
        "disk": {"read_bytes": tokens["g3"] * 1200, "written_bytes": written},
        "evictions": max(0, (tokens["computed"] - 20000) // BLOCK),
        "cpu_s": round(seconds * 1.3 + len(records) * 0.05, 2),
        "energy_j": None,
        "gpu": [],
        "caveats": [],
        "peaks": {"rss_bytes": int((1.1 + (0.9 if has_kvbm else 0.0)) * 2**30) + seconds * 40960},
    }


def build(directory: Path) -> Path:
    """Write report.html and return its path."""
    opened = BenchDirectory.open(directory)
    return build_report(opened, Results.read(opened), opened.read_json(SUMMARY))


def summary_in(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / SUMMARY).read_text())
    return found


def rewrite_lines(file: Path, number: int, **changes: Any) -> None:
    """Change fields of one line, counted from 1; `None` removes the field."""
    lines = file.read_text().splitlines()
    content = {**json.loads(lines[number - 1]), **changes}
    lines[number - 1] = json.dumps({name: value for name, value in content.items() if value is not None})
    file.write_text("\n".join(lines) + "\n")
