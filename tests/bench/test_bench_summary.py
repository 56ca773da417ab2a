"""The summary from records that were made up, so that every number is known exactly; caveats and goodput."""

import copy
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_rig import WORKLOAD
from experiments import FASTER, SIX, Experiment, Turns, in_turn, rewrite_lines, summary_in
from rich.console import Console
from terminal import assert_entry

from kvbm.engines import engine_kind
from kvbm.engines.installation import Installation
from kvbm.errors import UsageError
from kvbm_cli.bench.arms import comparison_of
from kvbm_cli.bench.cells import Cell
from kvbm_cli.bench.result.directory import PLAN, REQUESTS, RUNS, BenchDirectory
from kvbm_cli.bench.result.results import Results
from kvbm_cli.bench.setup import Setup, caveats_of
from kvbm_cli.bench.show.terminal import show
from kvbm_cli.bench.summary import interrupted_summary
from kvbm_cli.bench.workload.slo import Slo
from kvbm_cli.system.machine import usable_cpu_count


def faster(**changes: Turns) -> Experiment:
    return Experiment({**FASTER, **changes})


def changed(arm: str, *, number: int | None = None, **values: Any) -> Experiment:
    """With other values in the records of an arm, or in one of them. A function gets the value that was there."""
    made = faster()
    records = made.runs[f"small.1.{arm}"].records
    for record in records if number is None else records[number : number + 1]:
        for name, value in values.items():
            setattr(record, name, value(record) if callable(value) else value)
    return made


def with_tiers_of_the_engine() -> Experiment:
    made = changed("kvbm", g1_tokens=None, g2_tokens=None, g3_tokens=None)
    made.runs["small.1.kvbm"].facts["server"]["prompt_tokens"] = {"g1": 192, "g2": 2400, "g3": 0, "computed": 2916}
    return made


def without_answers() -> Experiment:
    made = changed("kvbm", error="the engine ended", token_ids=[], first_token_ms=None)
    made.runs["small.1.kvbm"].facts["engine_ended"] = True
    return made


def with_other_probabilities(**differences: tuple[int, int, float]) -> Experiment:
    """By arm: the number of a request, the number of a token, and what is added."""
    made = faster()
    for arm, (number, token, difference) in differences.items():
        made.runs[f"small.1.{arm}"].records[number].logprobs[token] += difference
    return made


def kvbm_takes(later_ms: float, tokens: tuple[int, int] = (32, 400)) -> Experiment:
    return faster(kvbm=Turns(later_ms, tokens, first_ms=500.0))


CASES: dict[str, Callable[[], Experiment]] = {
    "a known run": faster,
    "less than the possible gain": lambda: kvbm_takes(20.0),
    "more than the possible gain is noise": lambda: kvbm_takes(14.0),
    "less than nothing of the possible gain": lambda: kvbm_takes(415.0),
    "equal times are the same": lambda: kvbm_takes(400.0),
    "longer times are slower": lambda: kvbm_takes(800.0),
    "shorter times are faster": lambda: kvbm_takes(200.0),
    "a gain without a loaded block is invalid": lambda: kvbm_takes(20.0, (432, 0)),
    "one other token is wrong and named": lambda: changed("kvbm", number=7, token_ids=[1, 2, 3, 4, 5, 7]),
    "the same tokens with other probabilities are wrong": lambda: with_other_probabilities(
        kvbm=(7, 3, 0.02), floor=(7, 3, -1e-5)
    ),
    "probabilities that also differ without kvbm are no error of kvbm": lambda: with_other_probabilities(
        kvbm=(7, 3, 0.02), baseline=(2, 0, 0.01)
    ),
    "an error is counted in its turn and leaves its pair out": lambda: changed("baseline", number=6, error="HTTP 503"),
    "a late client is invalid": lambda: changed("kvbm", launched_ms=lambda record: record.intended_ms + 60.0),
    "tiers that only the counters of the engine have are known for the whole arm": with_tiers_of_the_engine,
    "a summary of an arm without answers is still whole": without_answers,
}
FIXED = ("cells", "arms", "digest", "seed", "workload", "order", "plan")


def lines_of(summary: dict[str, Any]) -> list[str]:
    """A line for each number."""
    (cell,) = summary["cells"]
    arms = {f"{arm}, {key}": value for arm, found in cell["arms"].items() for key, value in found.items()}
    shown = {key: value for found in (summary, cell) for key, value in found.items() if key not in FIXED}
    return [f"{key}: {json.dumps(value, allow_nan=False)}\n" for key, value in {**shown, **arms}.items()]


@pytest.fixture(scope="module")
def known() -> list[str]:
    return lines_of(faster().summary())


@pytest.mark.parametrize("name", CASES)
def test_summary(name, known):
    """All numbers of the known run, and the other ones of other runs."""
    lines = lines_of(CASES[name]().summary())
    text = "".join(lines if name == "a known run" else [line for line in lines if line not in known])
    assert_entry("bench/summaries", name, text, names=CASES)


def test_a_summary_has_its_plan_its_machine_and_its_caveats():
    made = faster()
    summary = made.summary(surroundings={"machine": {"cpu_count": 2}}, caveats=["busy"])
    assert (summary["machine"], summary["caveats"]) == ({"cpu_count": 2}, ["busy"])
    assert summary["arms"]["kvbm"]["kind"] == "kvbm"
    plan = summary["cells"][0]["plan"]
    assert plan.pop("digest") == made.results().cells[0].digest
    assert plan == {
        "requests": 12,
        "sessions": 6,
        "turns": 2,
        "duration_s": 12.0,
        "interval_s": 1.0,
        "primary": "steady",
        "ramp_to_s": None,
        "burstiness": None,
        "concurrency": None,
    }


def test_equal_results_give_an_equal_summary(tmp_path):
    one, two = (faster().write(tmp_path / name, surroundings={}) for name in ("one", "two"))
    assert summary_in(one) == summary_in(two) == faster().summary()


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (PLAN, None, "{path} is not the directory of a run: it has no plan.json"),
        (PLAN, "{", "{path}/plan.json is not JSON: "),
        (PLAN, "[]", "{path}/plan.json must be a JSON object"),
        (PLAN, '{"requests": []}', "{path}/plan.json: `format` is missing, this version reads 2"),
        (PLAN, '{"format": 2}', "{path} is damaged: KeyError: 'cells'"),
        ("cells/small/plan.json", "{", "{path}/cells/small/plan.json is not JSON: "),
        ("cells/small/plan.json", "{}", "{path} is damaged: KeyError"),
        (REQUESTS, "x\ny\n", "{path}/requests.jsonl, line 1: not JSON"),
        (REQUESTS, "[]\n", "{path}/requests.jsonl, line 1: must be a JSON object"),
        (REQUESTS, (4, {"first_token_ms": "soon"}), "{path}/requests.jsonl, line 4: `first_token_ms` is 'soon', not "),
        (REQUESTS, (5, {"session": None}), "{path}/requests.jsonl, line 5: "),
        (REQUESTS, Path.mkdir, "cannot read {path}/requests.jsonl: "),
        (RUNS, (2, {"arm": None}), "{path}/runs.jsonl, line 2: `arm` is missing"),
        (RUNS, (3, {"client": []}), "{path}/runs.jsonl, line 3: `client` is []"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, damage, message):
    """`damage` is a new text, a line with other fields, or what is in place of the file."""
    path = faster().write(tmp_path / "made")
    file = path / name
    if isinstance(damage, tuple):
        rewrite_lines(file, damage[0], **damage[1])
    elif isinstance(damage, str):
        file.write_text(damage)
    else:
        file.unlink()
        (damage or Path.exists)(file)
    with pytest.raises(UsageError) as caught:
        Results.read(BenchDirectory.open(path))
    assert caught.value.message.startswith(message.format(path=path))


def test_an_interrupted_summary_has_the_keys_of_a_whole_one(tmp_path):
    whole = faster().summary()
    part = interrupted_summary("interrupted", {})
    assert part["complete"] is False
    assert part.keys() <= whole.keys()


def test_the_page_shows_any_result(tmp_path):
    made = changed("baseline", number=6, error="HTTP 503 [/bold] \x1b[31m")
    console = Console(file=io.StringIO(), width=80, markup=False)
    show(made.summary(), console, directory=tmp_path)
    shown = console.file.getvalue()
    assert "invalid: the result cannot be used: 1 of 12 requests of arm baseline failed" in " ".join(shown.split())
    assert "arms: in turn, one engine after the other" in shown
    assert "possible gain" not in shown
    assert "\x1b" not in shown


def test_the_table_of_many_arms_cuts_no_name_and_no_number(tmp_path):
    summary = faster().summary()
    arms = summary["cells"][0]["arms"]
    names = [f"a-long-name-{number}" for number in range(6)]
    arms |= {name: copy.deepcopy(arms["kvbm"]) for name in names}
    for name in names:
        arms[name]["prompt_tokens"]["computed"] = 12_345_678
    console = Console(file=io.StringIO(), width=80, markup=False)
    show(summary, console, directory=tmp_path)
    shown = console.file.getvalue()
    assert "…" not in shown
    assert shown.count("12345678") == len(names)
    assert all(name in shown for name in names)


EMBEDDED = "the embedded engine is a reference implementation: compare the arms with each other only"
CACHE_OFF = "the engine's own prefix cache is off, so the baseline computes the whole of every prompt"
LOOKAHEAD = "per hit, one block less comes from G1 with kvbm than with the baseline"
URL = "http://127.0.0.1:9"
OTHER_ENGINE = "the engine of other differs in `engine.arguments.num_blocks`; its answers were not judged"


@pytest.fixture(autouse=True)
def load(monkeypatch):
    """Sets the load of the machine; it is idle before."""

    def set_load(average: float) -> None:
        monkeypatch.setattr(os, "getloadavg", lambda: (average, 0.0, 0.0))

    set_load(0.0)
    return set_load


def caveats(*compare: str, profiles: Sequence[str] = ("demo",), overrides: Sequence[str] = ()) -> list[str]:
    return caveats_of(Setup(comparison_of(profiles, overrides, compare), (Cell("small", WORKLOAD),)))


@pytest.mark.parametrize(
    ("compare", "given", "expected"),
    [
        ([], {}, [EMBEDDED]),
        ([], {"profiles": ["vllm-cpu-demo"]}, ["vLLM computes on a CPU: the speed-up on a GPU is different"]),
        ([], {"overrides": ["engine.arguments.prefix_caching=false"]}, [EMBEDDED, CACHE_OFF]),
        ([URL, "http://127.0.0.1:10"], {"profiles": []}, []),
        (["other.yaml", "baseline", "demo-disk"], {}, [EMBEDDED, OTHER_ENGINE]),
    ],
)
def test_caveats_of_the_engines(tmp_path, monkeypatch, compare, given, expected):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.chdir(tmp_path)
    Path("other.yaml").write_text("extends: demo\nengine: {arguments: {num_blocks: 99}}\n")
    assert caveats(*compare, **given) == expected


@pytest.mark.parametrize(
    ("version", "overrides", "is_named"),
    [
        ("0.33.0", ['engine.arguments.speculative_config={"method": "eagle", "model": "/drafter"}'], True),
        ("0.33.0", [], False),
        ("0.32.0", ['engine.arguments.speculative_config={"method": "eagle", "model": "/drafter"}'], False),
    ],
)
def test_the_block_that_a_connector_moves_from_g1_to_g2_with_a_drafter_is_named(
    monkeypatch, version, overrides, is_named
):
    installation = Installation(version, "vllm", None, has_kvbm=True)
    monkeypatch.setattr(engine_kind, "find", lambda *asked: installation)
    found = caveats(profiles=["vllm-cpu-demo"], overrides=overrides)
    assert any(LOOKAHEAD in one for one in found) is is_named


def test_a_busy_machine_is_named_above_one_thread_per_core(load):
    cores = usable_cpu_count()
    load(float(cores))
    assert caveats() == [EMBEDDED]
    load(cores + 0.5)
    assert caveats() == [EMBEDDED, f"the machine was busy: load {cores + 0.5:.1f} on {cores} cores"]


def test_goodput_is_the_share_of_all_requests_that_meet_the_limits():
    cell = Cell("small", in_turn(SIX.model_copy(update={"slo": "ttft:150"})))
    made = Experiment(FASTER, [cell])
    arms = made.summary()["cells"][0]["arms"]
    assert {name: arm["goodput"]["share"] for name, arm in arms.items()} == {"baseline": 0, "kvbm": 0.5, "floor": 0.5}
    made.runs["small.1.kvbm"].records[-1].error = "lost"
    assert made.summary()["cells"][0]["arms"]["kvbm"]["goodput"] == {
        "slo": "ttft:150",
        "share": round(5 / 12, 4),
        "interval_95": [0.1933, 0.6805],
        "requests_per_s": round(5 / 12, 4),
    }


def test_a_good_request_meets_all_limits():
    slo = Slo.parse("e2e:3000,ttft:500,tpot:50.5")
    assert slo == Slo(ttft_ms=500, tpot_ms=50.5, e2e_ms=3000)
    assert slo.is_met(500, 50.5, 3000)
    assert slo.is_met(400, None, 400), "an answer of one token"
    assert not any(slo.is_met(*times) for times in ((600, 40, 1000), (400, 60, 1000), (400, 40, 3001)))
    assert not any(Slo(tpot_ms=1).is_met(*times) for times in ((None, None, None), (10, None, None))), "failed requests"
