"""Shared by the tests of `kvbm bench`: a small workload, mock engines by arm, and limits for a busy machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from mock_engine import MockEngine, Options

from kvbm.engines.launch_plan import LaunchPlan
from kvbm.engines.table import KINDS
from kvbm_cli.bench import command
from kvbm_cli.bench.arms import Comparison, comparison_of
from kvbm_cli.bench.cells import Cell
from kvbm_cli.bench.engines import NeededRoom, RunningEngine
from kvbm_cli.bench.experiment import run_experiment
from kvbm_cli.bench.judge.verdict import VerdictLimits
from kvbm_cli.bench.metrics.engine_metrics import SampleLine
from kvbm_cli.bench.metrics.summary import summarise as summarise_samples
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import RequestRecord, Results
from kvbm_cli.bench.setup import Setup
from kvbm_cli.bench.summary import summarise
from kvbm_cli.bench.workload.schema import Conversations, Schedule, Workload

WORKLOAD = Conversations(
    name="small",
    users=3,
    turns=2,
    system_tokens=32,
    history_tokens=400,
    question_tokens=16,
    answer_tokens=6,
    schedule=Schedule(arms="interleaved", interval_s=0.12, pairs=1),
    request_timeout_s=5.0,
)
REQUESTS = 6
# With steady engines, a busy machine changes no verdict: it adds some 50 ms to a request, and times differ by 200 ms.
STEADY_S = 0.5
STEADY_WORKLOAD = WORKLOAD.model_copy(update={"schedule": Schedule(arms="interleaved", interval_s=STEADY_S, pairs=1)})
STEADY_OPTIONS: dict[str, Any] = {"base_ms": 60.0, "computed_token_ms": 0.4}
SLOW_G2_TOKEN_MS = 0.9
PATIENT = VerdictLimits(lateness_ms=2000.0, client_cpu_share=2.0, collapse_utilisation=1.1, collapse_queue_share=1.1)
SMALL_G1_BLOCKS = 60
MOCK = Path(__file__).with_name("mock_engine.py")
COMPUTED_TOKEN_MS = 0.1

# For tests of verdicts that follow from measured times: the machine may have been busy.
timed = pytest.mark.flaky(reruns=2)


def in_turn(workload: Workload = WORKLOAD, *, pairs: int = 1, interval_s: float | None = 0.05) -> Workload:
    return workload.model_copy(update={"schedule": Schedule(arms="in_turn", interval_s=interval_s, pairs=pairs)})


def workload_file(directory: Path, workload: Workload = WORKLOAD) -> str:
    path = directory / "small.yaml"
    path.write_text(yaml.safe_dump(workload.model_dump(mode="json")))
    return str(path)


def launched(engine: MockEngine, model: str = "mock") -> RunningEngine:
    """A mock as if kvbm had started it."""
    return RunningEngine(engine.url, model, 0.0, engine.has_ended, traits=KINDS["embedded"].traits)


class MockEngines:
    """One mock engine per arm: G1 holds two of the three conversations, except where it has room for everything."""

    def __init__(self, **changes: Options) -> None:
        small = Options(g1_blocks=SMALL_G1_BLOCKS, computed_token_ms=COMPUTED_TOKEN_MS)
        roomy = Options(computed_token_ms=COMPUTED_TOKEN_MS)
        self.options = {
            "recording": roomy,
            "baseline": small,
            "kvbm": replace(small, g2_blocks=10_000),
            "floor": roomy,
            **changes,
        }
        self.started: list[str] = []
        self.ended: list[MockEngine] = []
        self.with_next: set[str] = set()  # arms whose first engine is followed by another one, as with a shared tier
        self.rooms: list[NeededRoom] = []
        self.running = self.most_at_once = 0

    @contextmanager
    def __call__(self, arm: str, log: Path, room: NeededRoom) -> Iterator[RunningEngine]:
        self.started.append(arm)
        self.rooms.append(room)
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            with MockEngine(self.options[arm]) as engine:
                next_engine = partial(self._next, arm) if arm in self.with_next else None
                model = self.options[arm].model
                yield replace(launched(engine, model), next_engine=next_engine)
                self.ended.append(engine)
        finally:
            self.running -= 1

    @contextmanager
    def _next(self, arm: str) -> Iterator[RunningEngine]:
        self.started.append(f"{arm} again")
        with MockEngine(self.options[arm]) as engine:
            yield launched(engine, self.options[arm].model)
            self.ended.append(engine)

    @classmethod
    def steady(cls) -> MockEngines:
        return cls(**{arm: replace(options, **STEADY_OPTIONS) for arm, options in cls().options.items()})

    def changed(self, arm: str, **changes: Any) -> MockEngines:
        return MockEngines(**{**self.options, arm: replace(self.options[arm], **changes)})

    def renamed(self, **names: str) -> MockEngines:
        """Other arms with the engines of these: `renamed(demo="kvbm")`."""
        return MockEngines(**{**self.options, **{new: self.options[old] for new, old in names.items()}})


class SilentProgress:
    """Collects what it receives."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.records: list[RequestRecord] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def request_ended(self, record: RequestRecord) -> None:
        self.records.append(record)


def comparison(*compare: str) -> Comparison:
    return comparison_of(("demo",), (), compare)


def setup_of(*workloads: Workload, compare: Sequence[str] = ()) -> Setup:
    cells = tuple(Cell(one.name, one) for one in workloads or (WORKLOAD,))
    return Setup(comparison(*compare), cells)


def measure(
    tmp_path: Path,
    engines: MockEngines,
    *workloads: Workload,
    compare: Sequence[str] = (),
    as_json: bool = True,
    limits: VerdictLimits | None = PATIENT,
    resume: bool = False,
) -> int:
    """The command from its resolved arms on. Returns its exit code."""
    path = tmp_path / "run"
    directory = BenchDirectory.open(path) if resume else BenchDirectory.create(path)
    setup = setup_of(*workloads, compare=compare)
    return command.measure(setup, directory, as_json=as_json, engines=engines, limits=limits)


def run(
    tmp_path: Path, engines: MockEngines, *workloads: Workload, compare: Sequence[str] = ()
) -> tuple[dict[str, Any], SilentProgress]:
    """The summary of an experiment, and its progress."""
    progress = SilentProgress()
    with closing(BenchDirectory.create(tmp_path / "run")) as directory:
        run_experiment(setup_of(*workloads, compare=compare), engines, directory, progress)
        return summarise(Results.read(directory), surroundings={}, limits=PATIENT), progress


def summary_of(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text())
    return found


def lines_of(tmp_path: Path, name: str = "requests.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]


@pytest.fixture
def planned(monkeypatch):
    """Every engine of a profile is `mock_engine.py` in a process of its own. Collects what was planned."""
    found = []

    def plan(profile, *, connector, port):
        options = {
            "g1_blocks": SMALL_G1_BLOCKS if profile.engine.arguments.num_blocks == SMALL_G1_BLOCKS else 10_000,
            "g2_blocks": 10_000 if connector else 0,
            "computed_token_ms": COMPUTED_TOKEN_MS,
        }
        found.append((profile.engine.arguments.num_blocks, connector, profile.metrics.port))
        base_url = f"http://127.0.0.1:{port}"
        argv = (sys.executable, str(MOCK), "--port", str(port), "--options", json.dumps(options))
        return LaunchPlan(argv, {}, base_url, "mock")

    monkeypatch.setattr("kvbm.engines.embedded.launch.plan", plan)
    return found


@pytest.fixture
def without_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter runs: no process that samples server metrics, and less time before the first launch."""

    def sampler(path: Path, engine: RunningEngine, start_ns: int) -> nullcontext[SimpleNamespace]:
        path.write_text(json.dumps(SampleLine(t_ms=0.0, took_ms=0.0).to_json()) + "\n")
        return nullcontext(SimpleNamespace(summary=lambda: summarise_samples(path)))

    monkeypatch.setattr("kvbm_cli.bench.experiment._sampler", sampler)
    monkeypatch.setattr("kvbm_cli.bench.load.launcher.LEAD_S", 0.03)
