"""`kvbm bench --find-limit`: the rate at which an engine keeps limits of its times, and the ratio of two engines."""

import importlib.util
import json
import math
import random
import re
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_rig import WORKLOAD, MockEngines, SilentProgress, setup_of, without_sampler  # noqa: F401

from kvbm.errors import EngineError, UsageError
from kvbm_cli.bench import command
from kvbm_cli.bench.find_limit import ArmLimit, find_limits, require_searchable, result_of, show_limits
from kvbm_cli.bench.judge.limit import (
    SURELY_ABOVE,
    Bounds,
    Condition,
    LimitOutcome,
    find_limit,
    outcome_of,
    parse_conditions,
    ratio_of,
)
from kvbm_cli.bench.result.arm_result import wilson_interval
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import RequestRecord
from kvbm_cli.bench.workload.schema import Schedule

pytestmark = pytest.mark.usefixtures("without_sampler")
TTFT = Condition("ttft", 90.0, 800.0)


def record(ttft_ms: float, gaps_ms=(), error=None) -> RequestRecord:
    return RequestRecord(
        *("run", "arm", "cell", 1, 0, 0, 1, "cold"),
        intended_ms=0.0,
        first_token_ms=ttft_ms,
        token_gaps_ms=list(gaps_ms),
        error=error,
    )


# -- conditions


def test_limits_are_read_with_their_units():
    assert parse_conditions("ttft_p90<800ms, itl_p99.9 < 0.06 s,tpot_p50<5ms,e2e_p90<2s") == (
        TTFT,
        Condition("itl", 99.9, 60.0),
        Condition("tpot", 50.0, 5.0),
        Condition("e2e", 90.0, 2000.0),
    )


@pytest.mark.parametrize(
    "text",
    ["", "ttft<800ms", "ttft_p90<800", "ttft_p90>800ms", "ttft_p0<1ms", "ttft_p90<0ms", "x_p90<1s", "ttft_p90<1s,"],
)
def test_other_texts_are_refused_with_an_example(text):
    with pytest.raises(UsageError) as caught:
        parse_conditions(text)
    assert "ttft_p90<800ms" in caught.value.hint


def test_one_percentile_has_one_limit():
    with pytest.raises(UsageError, match="two limits of one percentile"):
        parse_conditions("ttft_p90<800ms,ttft_p90<1s")


@pytest.mark.parametrize(
    ("fast", "slow", "outcome"),
    [
        (72, 0, LimitOutcome.HOLDS),
        (70, 2, LimitOutcome.HOLDS),
        (66, 6, LimitOutcome.UNCLEAR),
        (58, 14, LimitOutcome.FAILS),
    ],
)
def test_only_an_interval_on_one_side_is_an_answer(fast, slow, outcome):
    assert outcome_of([TTFT], [record(799.9)] * fast + [record(800.0)] * slow) is outcome


def test_a_failed_request_keeps_no_limit():
    records = [record(1.0)] * 50 + [record(1.0, error="HTTP 500")] * 50
    assert TTFT.exceeded_share(records) == 0.5
    assert outcome_of([TTFT], records) is LimitOutcome.FAILS


def test_one_limit_that_fails_decides():
    records = [record(1.0, gaps_ms=[1.0, 100.0])] * 100
    assert outcome_of([TTFT, Condition("itl", 90.0, 60.0)], records) is LimitOutcome.FAILS


def test_the_fewest_requests_are_those_that_can_be_clear():
    for percent in (50.0, 90.0, 99.0):
        one = Condition("ttft", percent, 1.0)
        assert wilson_interval(0, one.least_requests)[1] <= 1 - percent / 100
        assert wilson_interval(0, one.least_requests - 1)[1] > 1 - percent / 100


# -- search


class Queue:
    """A server of one request at a time, in a time of its own: `capacity` requests per second, with some noise."""

    def __init__(self, capacity: float, seed: int, *, requests: int = 120) -> None:
        self.capacity, self.requests = capacity, requests
        self.random = random.Random(seed)
        self.probes = 0

    def judge(self, rate: float) -> LimitOutcome:
        records: list[RequestRecord] = []
        for _ in range(3):
            records += self.run(rate)
            outcome = outcome_of([Condition("ttft", 90.0, 2500 / self.capacity)], records)
            if outcome is not LimitOutcome.UNCLEAR:
                break
        return outcome

    def run(self, rate: float) -> list[RequestRecord]:
        self.probes += 1
        free_s, records = 0.0, []
        for index in range(self.requests):
            start_s = max(free_s, index / rate)
            free_s = start_s + self.random.lognormvariate(0, 0.1) / self.capacity
            records.append(record((free_s - index / rate) * 1e3))
        return records


@pytest.mark.parametrize("start", [0.1, 4.0, 300.0])
def test_the_limit_of_a_known_server_is_found_within_5_percent(start):
    bounds = [find_limit(Queue(10.0, seed).judge, start, least=0.01) for seed in range(20)]
    assert all(one.is_known for one in bounds)
    assert sum(abs(one.middle / 10.0 - 1) < 0.05 for one in bounds) >= 18


def test_the_interval_of_the_ratio_holds_the_truth():
    def bounds(capacity: float, seed: int) -> Bounds:
        return find_limit(Queue(capacity, seed).judge, 3.0, least=0.01)

    ratios = [ratio_of(bounds(20.0, seed), bounds(10.0, seed + 100)) for seed in range(20)]
    assert sum(one.low <= 2 <= one.high for one in ratios) >= 18
    assert all(one.is_clear for one in ratios)


@pytest.mark.parametrize("stalled", [{1}, {1, 2}, {3}, {4, 5}])
def test_a_stall_that_outlasts_all_probes_of_a_rate_is_no_limit(stalled):
    """Rates that would hold fail. `stalled` are the judgements that fall into a stall."""
    queue, count = Queue(10.0, 1), iter(range(1, 1000))

    def judge(rate: float) -> LimitOutcome:
        return LimitOutcome.FAILS if next(count) in stalled else queue.judge(rate)

    found = find_limit(judge, 2.0, least=0.01)
    assert found.is_known
    assert abs(found.middle / 10.0 - 1) < 0.05


def test_a_machine_that_stalls_again_and_again_knows_no_limit():
    """Every rate fails, except those that are judged at the end of a search."""
    calls: list[float] = []

    def judge(rate: float) -> LimitOutcome:
        calls.append(rate)
        is_check = any(math.isclose(rate, SURELY_ABOVE * one) for one in calls)
        return LimitOutcome.HOLDS if rate < 2.0 or is_check else LimitOutcome.FAILS

    assert not find_limit(judge, 4.0, least=0.01).is_known


def test_a_search_takes_few_probes():
    queue = Queue(10.0, 1)
    find_limit(queue.judge, 4.0, least=0.01)
    assert queue.probes < 25


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (LimitOutcome.HOLDS, (1024.0, math.inf)),
        (LimitOutcome.FAILS, (0.0, 1 / 1024)),
        (LimitOutcome.UNCLEAR, (0.0, math.inf)),
    ],
)
def test_a_limit_out_of_reach_is_not_known(outcome, expected):
    found = find_limit(lambda rate: outcome, 1.0, least=1 / 1024)
    assert (found.low, found.high) == expected
    assert not found.is_known


def test_noise_forbids_an_answer():
    """Between 1 and 100 requests per second, nothing is clear."""

    def judge(rate: float) -> LimitOutcome:
        return LimitOutcome.HOLDS if rate < 1 else LimitOutcome.FAILS if rate > 100 else LimitOutcome.UNCLEAR

    found = find_limit(judge, 10.0, least=0.01)
    assert 0.97 < found.low < 1
    assert 100 < found.high < 103
    assert not found.is_known


# -- the command


MANY = WORKLOAD.model_copy(update={"users": 20, "turns": 6})
CAPACITY = {"baseline": 10.0, "kvbm": 20.0}


@pytest.fixture
def simulated(monkeypatch):
    """Engines start and record; their probes run in the time of a queue. Arms in the set refuse every request. With
    `late` in it, requests wait in the client; with `lags`, its event loop does not get a core in time."""
    given: set[str] = set()

    async def drive(plan, targets, *, on_record):
        (target,) = targets
        times = Queue(CAPACITY[target.arm], 1, requests=len(plan.requests)).run(1 / plan.launches.interval_s)
        records = []
        for request, time in zip(plan.requests, times, strict=True):
            assert request.intended_s == pytest.approx(request.index * plan.launches.interval_s, abs=1e-6)
            records.append(target.record_of(request))
            records[-1].intended_ms = request.intended_s * 1e3
            records[-1].launched_ms = records[-1].intended_ms + (time.ttft_ms if "late" in given else 0.0)
            records[-1].first_token_ms = records[-1].intended_ms + time.ttft_ms
            records[-1].token_ids = list(request.answer.token_ids)
            records[-1].error = "HTTP 500: no" if target.arm in given else None
            on_record(records[-1])
        health = SimpleNamespace(loop_lag_p99_ms=90.0 if "lags" in given else 1.0, cpu_share=0.1)
        return SimpleNamespace(records={target.run: tuple(records)}, health=health)

    monkeypatch.setattr("kvbm_cli.bench.find_limit.drive", drive)
    return given


def limits_in(path):
    return json.loads((path / "run" / "limit.json").read_text())


def test_the_command_ends_with_the_sentence_that_compares_both_arms(tmp_path, capsys, simulated):
    directory = BenchDirectory.create(tmp_path / "run")
    conditions = parse_conditions("ttft_p90<200ms")
    assert command.search(setup_of(MANY), conditions, directory, as_json=False, engines=MockEngines()) == 0
    found = limits_in(tmp_path)
    (ratio,) = found["ratios"]
    assert ratio["ratio"]["low"] <= 2 <= ratio["ratio"]["high"]
    assert re.fullmatch(
        r"kvbm serves [12]\.\d\d times the users of baseline under ttft_p90<200ms \(1\.\d\d to 2\.\d\d\)",
        ratio["sentence"],
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert ratio["sentence"] in shown
    assert "note: a probe at the limit of baseline takes 12 s" in shown
    assert [one["doubt"] for one in found["arms"]] == [None, None]
    assert command.report(tmp_path / "run", as_json=False) == 0
    assert " ".join(capsys.readouterr().out.split()) == shown
    for one in found["arms"]:
        assert one["answers"] == {"compared": one["probes"] * 120, "different": 0}
    probes = [json.loads(line) for line in (tmp_path / "run" / "probes.jsonl").read_text().splitlines()]
    assert sum(one["probes"] for one in found["arms"]) == len(probes)


def test_json_has_what_the_file_has_and_a_damaged_file_is_named(tmp_path, capsys, simulated):
    directory = BenchDirectory.create(tmp_path / "run")
    command.search(setup_of(MANY), (TTFT,), directory, as_json=True, engines=MockEngines())
    printed = json.loads(capsys.readouterr().out)
    assert printed.items() <= limits_in(tmp_path).items()
    (tmp_path / "run" / "limit.json").write_text('{"arms": 3}')
    with pytest.raises(UsageError, match=r"no result of `--find-limit` that can be read"):
        command.report(tmp_path / "run", as_json=True)


@pytest.mark.parametrize(
    ("low", "high", "doubt", "text"),
    [
        (0.0, math.inf, None, "none holds"),
        (0.0, 2.0, None, "none holds, 2 fails"),
        (8.0, math.inf, None, "8 holds, none fails"),
        (10.0, 10.2, None, "10 to 10.2"),
        (10.0, 10.2, "late", "10 to 10.2: doubtful"),
        (1.0, 100.0, None, "1 to 100: noise forbids an answer"),
    ],
)
def test_the_table_says_what_is_known_of_a_limit(capsys, low, high, doubt, text):
    arm = ArmLimit("kvbm", Bounds(low, high), probes=3, compared=0, different=0, doubt=doubt)
    show_limits(result_of((TTFT,), "small", 120, [arm], "kvbm"), "run", as_json=False)
    shown = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", shown[1]) == ["kvbm", text, "3", "0 of 0"]
    assert ("note: the limit of kvbm is doubtful: late" in shown) == (doubt is not None)


@pytest.mark.parametrize(("problem", "late_ms"), [("late", r"2\d\d"), ("lags", "90")])
def test_a_client_that_was_late_forbids_an_answer(tmp_path, simulated, problem, late_ms):
    simulated.add(problem)
    conditions = parse_conditions("ttft_p90<200ms")
    with closing(BenchDirectory.create(tmp_path / "run")) as directory:
        found = find_limits(setup_of(MANY), conditions, MockEngines(), directory, SilentProgress())
    assert found["ratios"][0]["sentence"].startswith("the limit of baseline and kvbm is not known")
    doubts = [note for note in found["notes"] if "doubtful" in note]
    assert len(doubts) == 2
    assert re.search(rf"the load client was {late_ms} ms late and used 10% of a core", doubts[0])


def test_a_stall_in_one_probe_is_no_failure(tmp_path, monkeypatch, simulated):
    """The first probe of every rate that would hold fails."""
    seen: set[float] = set()
    usual = Condition.outcome

    def outcome(self, records):
        rate = records[-1].index / (records[-1].intended_ms / 1e3)
        found = usual(self, records)
        if found is LimitOutcome.HOLDS and rate not in seen:
            seen.add(rate)
            return LimitOutcome.FAILS
        return found

    monkeypatch.setattr(Condition, "outcome", outcome)
    with closing(BenchDirectory.create(tmp_path / "run")) as directory:
        found = find_limits(setup_of(MANY), (TTFT,), MockEngines(), directory, SilentProgress())
    assert found["ratios"][0]["ratio"]["low"] > 1.7


def test_an_engine_that_fails_without_load_ends_the_search(tmp_path, simulated):
    simulated.add("kvbm")
    with (
        closing(BenchDirectory.create(tmp_path / "run")) as directory,
        pytest.raises(EngineError, match=r"kvbm failed 120 of 120 requests at 8.33 requests/s: HTTP 500: no"),
    ):
        find_limits(setup_of(MANY), (TTFT,), MockEngines(), directory, SilentProgress())


@pytest.mark.parametrize(
    ("workloads", "message"),
    [
        ((MANY, MANY.model_copy(update={"name": "other"})), "one workload at one pressure"),
        ((MANY.model_copy(update={"schedule": Schedule(concurrency=2)}),), "has no rate"),
        ((MANY.model_copy(update={"schedule": Schedule(interval_s=1, ramp_to_s=2)}),), "has no rate"),
    ],
)
def test_what_has_no_rate_is_refused(workloads, message):
    with pytest.raises(UsageError, match=message):
        require_searchable(setup_of(*workloads))


def test_too_few_requests_are_refused_before_the_first_probe(tmp_path):
    with closing(BenchDirectory.create(tmp_path / "run")) as directory, pytest.raises(UsageError, match="at least 381"):
        find_limits(setup_of(MANY), parse_conditions("ttft_p99<1s"), MockEngines(), directory, SilentProgress())


# -- bench/client/find_limit.py


@pytest.fixture(scope="module")
def client():
    """Its modules by name. Other folders have modules of the same names."""
    before = list(sys.path)
    folder = Path(__file__).resolve().parents[2] / "bench" / "client"
    found = {}
    for name in ("server", "find_limit"):
        spec = importlib.util.spec_from_file_location(f"client_{name}", folder / f"{name}.py")
        found[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    sys.path[:] = before
    return SimpleNamespace(**found)


def test_slots_serve_as_many_requests_as_their_capacity(client):
    slots = client.server.Slots(4, 0.1, 0.2, seed=1)
    ends = [slots.end_of(index / 100) for index in range(4000)]
    assert 4000 / max(ends) == pytest.approx(40, rel=0.02)
    assert client.server.Slots(4, 0.1, 0.0, seed=1).end_of(5.0) == pytest.approx(5.1)


def test_seeds_with_right_limits_and_right_ratios_are_counted(client):
    script = client.find_limit

    def found(small: Bounds, large: Bounds, doubt: str | None = None):
        arms = (ArmLimit("large", large, 12, 0, 0), ArmLimit("small", small, 12, 0, 0, doubt))
        return result_of((TTFT,), "known", 160, arms, "large")

    right, wide = Bounds(9.9, 10.1), Bounds(10.8, 11.0)
    given = [(right, Bounds(19.8, 20.2), None), (wide, Bounds(21.6, 22.0), None), (right, Bounds(19.8, 20.2), "late")]
    seeds = [script.judged(number, found(*one), 1.0) for number, one in enumerate(given)]
    assert [one["are_limits_right"] for one in seeds] == [True, False, False]
    assert [one["is_ratio_right"] for one in seeds] == [True, True, False]
    assert script.summary(seeds)["seeds_with_right_limits"] == 1
    assert not script.summary(seeds)["is_enough"]
    assert script.summary(seeds[:1] * 18 + seeds[1:])["is_enough"]
