"""Whole experiments with engines of equal speed, and with one that is 10 % slower: how often the verdict is right.

The fast test replaces only the load client: a simulated one writes records whose times have the noise of real engines,
between runs and between requests. The soak test sends real requests to mock engines.
"""

import math
import random
import time
from collections import Counter
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from bench_rig import PATIENT, MockEngines, SilentProgress, launched, setup_of, without_sampler  # noqa: F401
from mock_engine import MockEngine, Options

from kvbm_cli.bench.experiment import run_experiment
from kvbm_cli.bench.load.drive import DriveResult
from kvbm_cli.bench.load.process import ClientHealth
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import Results
from kvbm_cli.bench.summary import summarise
from kvbm_cli.bench.workload.schema import Conversations, Schedule

COMMANDS = 20
LEAST_FOUND = 18
SLOWER = 1.10
RUN_DEVIATION, REQUEST_DEVIATION = 0.015, 0.08
WORKLOAD = Conversations(
    name="even",
    users=8,
    turns=4,
    system_tokens=16,
    history_tokens=64,
    question_tokens=8,
    answer_tokens=3,
    history="canned",
    schedule=Schedule(interval_s=1.0, pairs=5),
)
HEALTH = ClientHealth((0.05,), 0.1, 0.2, 0.5, 0.1, 0.2, 0)


def simulated_drive(seed: int, slower: float):
    """A client whose records follow from the seed: the arm `kvbm` takes `slower` times as long as the others."""
    noise = random.Random(seed)

    async def drive(plan, targets, *, on_record):
        records = {}
        for target in targets:
            factor = math.exp(noise.gauss(0, RUN_DEVIATION)) * (slower if target.arm == "kvbm" else 1.0)
            found = []
            for request in plan.requests:
                record = target.record_of(request)
                record.intended_ms = record.launched_ms = 1e3 * request.intended_s
                ttft_ms = (40 + 0.5 * request.prompt_tokens) * factor * math.exp(noise.gauss(0, REQUEST_DEVIATION))
                record.first_token_ms = record.intended_ms + ttft_ms
                record.last_token_ms = record.end_ms = record.first_token_ms + 20
                record.token_ids, record.logprobs = [1, 2, 3], [-0.5] * 3
                record.first_chunk_tokens, record.token_gaps_ms = 1, [10.0, 10.0]
                record.prompt_tokens, record.output_tokens = request.prompt_tokens, 3
                found.append(record)
                on_record(record)
            records[target.run] = tuple(found)
        return DriveResult(records, HEALTH, time.time(), time.perf_counter_ns(), plan.duration_s)

    return drive


def verdict_of(directory: Path, engines, workload: Conversations) -> str:
    with closing(BenchDirectory.create(directory)) as opened:
        run_experiment(setup_of(workload), engines, opened, SilentProgress())
        summary = summarise(Results.read(opened), surroundings={}, limits=PATIENT)
    return str(summary["verdict"])


@pytest.mark.usefixtures("without_sampler")
@pytest.mark.parametrize(
    ("slower", "expected", "least"),
    [(1.0, "same", 18), pytest.param(SLOWER, "slower", LEAST_FOUND, marks=pytest.mark.soak)],
)
def test_verdicts_with_a_simulated_client(tmp_path, monkeypatch, slower, expected, least):
    with MockEngine(Options()) as engine:

        @contextmanager
        def shared(arm, log, room):
            yield launched(engine)

        found: Counter[str] = Counter()
        for seed in range(COMMANDS):
            monkeypatch.setattr("kvbm_cli.bench.experiment.drive", simulated_drive(seed, slower))
            workload = WORKLOAD.model_copy(update={"seed": seed})
            found[verdict_of(tmp_path / str(seed), shared, workload)] += 1
    assert found[expected] >= least, found


@pytest.mark.soak
@pytest.mark.usefixtures("without_sampler")
@pytest.mark.parametrize(("slower", "expected", "least"), [(1.0, "same", 18), (SLOWER, "slower", LEAST_FOUND)])
def test_verdicts_with_mock_engines(tmp_path, slower, expected, least):
    """Every request takes 40 ms and more; the planted engine takes 10 % longer in everything."""
    found: Counter[str] = Counter()
    for seed in range(COMMANDS):
        even = Options(base_ms=40.0, computed_token_ms=0.2)
        kvbm = Options(base_ms=40.0 * slower, computed_token_ms=0.2 * slower)
        engines = MockEngines(recording=even, baseline=even, floor=even, kvbm=kvbm)
        workload = WORKLOAD.model_copy(update={"seed": seed, "schedule": Schedule(interval_s=0.12, pairs=3)})
        found[verdict_of(tmp_path / str(seed), engines, workload)] += 1
    assert found[expected] >= least, found
