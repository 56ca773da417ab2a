"""The summary from records that were made up, so that every number is known exactly; caveats and goodput."""

import copy
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_rig import WORKLOAD
from experiments import FASTER, Experiment, Turns, rewrite_lines, summary_in
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvbm.errors import UsageError
from kvbm_cli.bench import command
from kvbm_cli.bench.arms import comparison_of
from kvbm_cli.bench.cells import Cell
from kvbm_cli.bench.result.arm_result import RequestTimes, Slo, goodput
from kvbm_cli.bench.result.directory import PLAN, REQUESTS, RUNS, BenchDirectory
from kvbm_cli.bench.result.results import RequestRecord, Results
from kvbm_cli.bench.setup import caveats_of
from kvbm_cli.bench.show.terminal import show
from kvbm_cli.bench.summary import interrupted_summary
from kvbm_cli.system.machine import usable_cpu_count


def faster(**changes: Turns) -> Experiment:
    return Experiment({**FASTER, **changes})


def records_of(made: Experiment, arm: str) -> tuple[RequestRecord, ...]:
    return made.runs[f"small.1.{arm}"].records


def of_arm(summary: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = summary["cells"][0]["arms"][name]
    return found


def compared(summary: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = summary["cells"][0]["comparisons"][0]
    return found


def test_every_number_of_a_known_run(tmp_path):
    summary = faster().summary(surroundings={"machine": {"cpu_count": 2}}, caveats=["busy"])
    assert (summary["format"], summary["complete"], summary["verdict"]) == (2, True, "faster")
    assert summary["compared"] == {"measured": "kvbm", "reference": "baseline"}
    assert summary["ttft_speedup"] == 20.0
    assert summary["ttft_speedup_paired"] == {
        "geometric_mean": 20.0,
        "interval_95": [20.0, 20.0],
        "covers_runs": False,
        "pairs": 6,
        "sessions": 6,
        "runs": 1,
    }
    assert summary["outputs_equal"] is True
    assert summary["share_of_possible_gain"]["value"] == pytest.approx(380 / 384, abs=1e-3)
    assert summary["machine"] == {"cpu_count": 2}
    assert summary["caveats"] == ["busy"]
    assert summary["arms"]["kvbm"]["kind"] == "kvbm"
    cell = summary["cells"][0]
    assert cell["plan"] == {
        "digest": faster().results().cells[0].digest,
        "requests": 12,
        "sessions": 6,
        "turns": 2,
        "duration_s": 12.0,
        "interval_s": 1.0,
        "burstiness": None,
        "concurrency": None,
        "primary": "steady",
    }
    assert (cell["pairs_done"], cell["stopped_early"]) == (1, False)
    kvbm, baseline = of_arm(summary, "kvbm"), of_arm(summary, "baseline")
    assert (kvbm["ttft_ms"]["p50"], kvbm["ttft_ms"]["mean"], kvbm["ttft_ms"]["count"]) == (20.0, 20.0, 6)
    assert kvbm["ttft_ms"]["p90"] is None  # 6 requests do not carry it
    assert kvbm["ttft_from_launch_ms"]["mean"] == 19.0
    assert kvbm["phases"]["cold"]["ttft_ms"]["mean"] == 520.0
    assert kvbm["itl_ms"]["p50"] == 10.0
    assert kvbm["tpot_ms"]["mean"] == 10.0
    assert kvbm["end_to_end_ms"]["mean"] == 71.0
    assert kvbm["prompt_tokens"] == {"g1": 192, "g2": 2400, "g3": 0, "g4": 0, "computed": 6 * 448 + 6 * 470 - 2592}
    assert [turn["ttft_ms"]["mean"] for turn in kvbm["turns"]] == [520.0, 20.0]
    assert kvbm["turns"][1]["prompt_tokens"] == {"g1": 192, "g2": 2400, "g3": 0, "g4": 0, "computed": 228}
    assert kvbm["turns"][0]["errors"] == 0
    assert baseline["utilisation"] == pytest.approx((6 * 550 + 6 * 450) / 11450, abs=1e-3)
    assert baseline["queue_wait_ms"] == 1.0
    assert baseline["client"]["lateness_ms"]["mean"] == 1.0
    assert baseline["startup_s"] == 2.0
    assert baseline["throughput"]["requests_per_s"] == pytest.approx(12 / 11.45, abs=1e-3)
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize(
    ("later_ms", "share", "is_noise"), [(20.0, 380 / 384, False), (14.0, 1.0, True), (415.0, -15 / 384, False)]
)
def test_more_than_the_possible_gain_is_noise(tmp_path, later_ms, share, is_noise):
    summary = faster(kvbm=Turns(later_ms, (32, 400), first_ms=520.0)).summary()
    assert summary["share_of_possible_gain"]["value"] == pytest.approx(share, abs=1e-3)
    assert summary["share_of_possible_gain"]["is_noise"] is is_noise


@pytest.mark.parametrize(("later_ms", "verdict"), [(400.0, "same"), (800.0, "slower"), (200.0, "faster")])
def test_the_verdict_follows_the_times(tmp_path, later_ms, verdict):
    summary = faster(kvbm=Turns(later_ms, (32, 400), first_ms=500.0)).summary()
    assert (summary["verdict"], summary["ttft_speedup"]) == (verdict, 400.0 / later_ms)


def test_a_gain_without_a_loaded_block_is_invalid(tmp_path):
    summary = faster(kvbm=Turns(20.0, (432, 0))).summary()
    assert summary["verdict"] == "invalid"
    assert "loaded no block" in summary["explanation"]
    assert summary["outputs_equal"] is None
    assert summary["share_of_possible_gain"] is None


def test_one_other_token_is_wrong_and_named(tmp_path):
    made = faster()
    records_of(made, "kvbm")[7].token_ids[5] += 1
    summary = made.summary()
    assert (summary["verdict"], summary["outputs_equal"]) == ("wrong", False)
    assert compared(summary)["outputs"]["requests_that_differ"] == [[1, 2]]
    assert summary["share_of_possible_gain"] is None
    assert summary["cells"][0]["answers"]["baseline"]["different"] == 0


def test_the_same_tokens_with_other_probabilities_are_wrong(tmp_path):
    made = faster()
    records_of(made, "kvbm")[7].logprobs[3] += 0.02
    records_of(made, "floor")[7].logprobs[3] -= 1e-5
    summary = made.summary()
    assert (summary["verdict"], summary["outputs_equal"]) == ("wrong", False)
    assert compared(summary)["outputs"]["largest_logprob_difference"] == 0.02
    assert "differ by up to 0.02, without kvbm by 1e-05" in summary["explanation"]


def test_probabilities_that_also_differ_without_kvbm_are_no_error_of_kvbm(tmp_path):
    made = faster()
    records_of(made, "kvbm")[7].logprobs[3] += 0.02
    records_of(made, "baseline")[2].logprobs[0] += 0.01
    assert made.summary()["verdict"] == "faster"


def test_an_error_is_counted_in_its_turn_and_leaves_its_pair_out(tmp_path):
    made = faster()
    records_of(made, "baseline")[6].error = "HTTP 503"
    summary = made.summary()
    assert summary["verdict"] == "invalid"
    assert of_arm(summary, "baseline")["errors"] == 1
    assert [turn["errors"] for turn in of_arm(summary, "baseline")["turns"]] == [0, 1]
    assert compared(summary)["ttft_speedup_paired"]["pairs"] == 5
    assert summary["outputs_equal"] is True


def test_a_late_client_is_invalid_in_a_compared_arm(tmp_path):
    made = faster()
    for record in records_of(made, "kvbm"):
        record.launched_ms = record.intended_ms + 60.0
    summary = made.summary()
    assert summary["verdict"] == "invalid"
    assert "launched requests late in small.1.kvbm: 60 ms at p90, the limit is 40 ms" in summary["explanation"]


def test_tiers_that_only_the_counters_of_the_engine_have_are_known_for_the_whole_arm(tmp_path):
    made = faster()
    for record in records_of(made, "kvbm"):
        record.g1_tokens = record.g2_tokens = record.g3_tokens = None
    made.runs["small.1.kvbm"].facts["server"]["prompt_tokens"] = {"g1": 192, "g2": 2400, "g3": 0, "computed": 2916}
    summary = made.summary()
    assert of_arm(summary, "kvbm")["prompt_tokens"]["g2"] == 2400
    assert of_arm(summary, "kvbm")["prompt_tokens_by_usage"]["g2"] is None
    assert of_arm(summary, "kvbm")["turns"][1]["prompt_tokens"]["g2"] is None
    assert summary["verdict"] == "faster"


def test_a_summary_of_an_arm_without_answers_is_still_whole(tmp_path):
    made = faster()
    for record in records_of(made, "kvbm"):
        record.error, record.token_ids, record.first_token_ms = "the engine ended", [], None
    made.runs["small.1.kvbm"].facts["engine_ended"] = True
    summary = made.summary()
    assert (summary["verdict"], summary["outputs_equal"]) == ("invalid", None)
    assert summary["ttft_speedup"] is None
    assert of_arm(summary, "kvbm")["ttft_ms"]["p50"] is None
    assert of_arm(summary, "kvbm")["engine_ended"] is True
    json.dumps(summary, allow_nan=False)


def test_a_run_that_never_ended_does_not_count(tmp_path):
    summary = summary_in(faster().write(tmp_path / "made", without_end=["small.1.floor"]))
    assert set(summary["cells"][0]["arms"]) == {"baseline", "kvbm"}
    assert summary["share_of_possible_gain"] is None


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
    made = faster()
    records_of(made, "baseline")[6].error = "HTTP 503 [/bold] \x1b[31m"
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
URL = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def load(monkeypatch):
    """Sets the load of the machine; it is idle before."""

    def set_load(average: float) -> None:
        monkeypatch.setattr(os, "getloadavg", lambda: (average, 0.0, 0.0))

    set_load(0.0)
    return set_load


def caveats(profile: str | None = "demo", *compare: str, overrides: Sequence[str] = ()) -> list[str]:
    return caveats_of(
        command._setup(
            comparison_of(() if profile is None else (profile,), overrides, compare), (Cell("small", WORKLOAD),)
        )
    )


def test_the_embedded_engine_is_a_reference_implementation():
    assert caveats() == [EMBEDDED]


def test_vllm_on_a_cpu_is_no_gpu(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert caveats("vllm-cpu-demo") == ["vLLM computes on a CPU: the speed-up on a GPU is different"]


def test_an_engine_without_a_prefix_cache_has_a_slow_baseline():
    assert caveats(overrides=["engine.arguments.prefix_caching=false"]) == [EMBEDDED, CACHE_OFF]


def test_servers_have_no_profile_to_judge():
    assert caveats(None, URL, "http://127.0.0.1:10") == []


def test_a_reference_with_another_engine_is_not_judged(tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text("extends: demo\nengine: {arguments: {num_blocks: 99}}\n")
    found = caveats("demo", str(path), "baseline", "demo-disk")
    (caveat,) = [one for one in found if "differs" in one]
    assert caveat.startswith("the engine of other differs in `engine.arguments.num_blocks`")
    assert caveat.endswith("; its answers were not judged")


def test_a_busy_machine_is_named_above_one_thread_per_core(load):
    cores = usable_cpu_count()
    load(float(cores))
    assert caveats() == [EMBEDDED]
    load(cores + 0.5)
    assert caveats() == [EMBEDDED, f"the machine was busy: load {cores + 0.5:.1f} on {cores} cores"]


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft:500", Slo(ttft_ms=500)),
        ("ttft:500,tpot:50", Slo(ttft_ms=500, tpot_ms=50)),
        (" e2e: 3000 , ttft: 0.5 ", Slo(ttft_ms=0.5, e2e_ms=3000)),
    ],
)
def test_slo_is_read_from_text(text, slo):
    assert Slo.parse(text) == slo


@given(st.builds(Slo, *[st.integers(1, 99999)] * 3))
def test_slo_reads_what_it_writes(slo):
    assert Slo.parse(str(slo)) == slo


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not a limit"),
        ("ttft", "'ttft' is not a limit"),
        ("ttft:500,", "'' is not a limit"),
        ("itl:5", "'itl:5' is not a limit"),
        ("ttft:fast", "`ttft` is 'fast', which is not a number of milliseconds"),
        ("ttft:0", "`ttft` is 0, but it must be more than 0 ms"),
        ("ttft:-5", "more than 0 ms"),
        ("ttft:nan", "more than 0 ms"),
        ("ttft:inf", "more than 0 ms"),
        ("ttft:1,ttft:2", "`ttft` is given twice"),
    ],
)
def test_a_wrong_slo_is_the_users_mistake(text, words):
    with pytest.raises(UsageError) as caught:
        Slo.parse(text)
    assert words in caught.value.message
    assert caught.value.hint is not None


def test_goodput_counts_requests_that_meet_all_limits():
    requests = [
        RequestTimes(400, 40, 1000),
        RequestTimes(600, 40, 1000),
        RequestTimes(400, 60, 1000),
        RequestTimes(400, None, 400),  # one token
        RequestTimes(None, None, None),  # failed
    ]
    found = goodput(requests, Slo(ttft_ms=500, tpot_ms=50), duration_s=4)
    assert (found.good_count, found.request_count, found.share, found.requests_per_s) == (2, 5, 0.4, 0.5)
    assert (found.low, found.high) == pytest.approx((0.1176, 0.7693), abs=1e-4)


def test_a_request_that_failed_after_its_first_token_is_not_good():
    found = goodput([RequestTimes(10, 5, None)], Slo(ttft_ms=500), duration_s=1)
    assert found.good_count == 0


def test_goodput_of_nothing_is_nothing():
    assert goodput([], Slo(ttft_ms=500), duration_s=1) is None
    found = goodput([RequestTimes(10, 5, 20)], Slo(e2e_ms=500), duration_s=0)
    assert found.requests_per_s is None
