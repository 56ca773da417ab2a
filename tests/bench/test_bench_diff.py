"""`kvbm bench diff A B`: what it prints, what it refuses, and its exit code."""

import copy
import json
import re
from typing import Any

import pytest
from bench_rig import in_turn
from experiments import SIX, SURROUNDINGS, made, summary_in

from kvbm.errors import UsageError
from kvbm_cli.bench.diff import diff


def compared(capsys, one, other) -> dict[str, Any]:
    found: dict[str, Any] = {"exit_code": diff(one, other, as_json=True)}
    return found | json.loads(capsys.readouterr().out)


def of_arm(result: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(change for change in result["changes"] if change["arm"] == name)
    return found


def refusal(one, other) -> UsageError:
    with pytest.raises(UsageError) as caught:
        diff(one, other, as_json=False)
    assert caught.value.exit_code == 2
    return caught.value


def test_equal_directories_are_the_same(tmp_path, capsys):
    one = made(tmp_path / "a")
    result = compared(capsys, one, one)
    assert (result["exit_code"], result["verdict"], result["judged_arms"]) == (0, "same", ["kvbm"])
    assert sorted(change["arm"] for change in result["changes"]) == ["baseline", "floor", "kvbm"]
    for change in result["changes"]:
        assert change["ttft_speedup_paired"]["geometric_mean"] == 1.0
        assert change["answers"]["different"] == 0
    assert (result["differences"], result["notes"]) == ([], [])


@pytest.mark.parametrize(("second_ms", "verdict", "exit_code"), [(80.0, "slower", 10), (20.0, "faster", 0)])
def test_the_verdict_is_that_of_the_measured_arm(tmp_path, capsys, second_ms, verdict, exit_code):
    one = made(tmp_path / "a")
    other = made(tmp_path / "b", times={"kvbm": second_ms, "floor": 300.0})
    result = compared(capsys, one, other)
    assert (result["exit_code"], result["verdict"]) == (exit_code, verdict)
    kvbm = of_arm(result, "kvbm")
    assert kvbm["ttft_speedup_paired"]["geometric_mean"] == pytest.approx(40 / second_ms, abs=1e-3)
    assert (kvbm["ttft_speedup_paired"]["runs"], kvbm["ttft_speedup_paired"]["pairs"]) == (2, 12)
    assert kvbm["second_ttft_p50_ms"] == pytest.approx(second_ms, rel=0.05)
    assert of_arm(result, "baseline")["verdict"] == "same"
    assert of_arm(result, "floor")["verdict"] == "slower"


def test_the_page_shows_times_verdict_answers_and_differences(tmp_path, capsys):
    changed: dict[str, Any] = copy.deepcopy(SURROUNDINGS)
    changed["machine"] |= {"cpu_count": 4, "load_average": 9.0, "time_unix_s": 2.0}
    changed["versions"]["vllm"] = "0.32"
    changed["profile"]["tiers"]["host"]["capacity"] = "1GiB\x1b[31m"
    one, other = made(tmp_path / "a"), made(tmp_path / "b", times={"kvbm": 80.0}, surroundings=changed)
    assert diff(one, other, as_json=False) == 10
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match(r"small +kvbm +41\.\d ms +82\.\d ms   slower, 0\.50 times as fast \(", line) for line in lines)
    assert sum("same answers (24 compared)" in line for line in lines) == 2
    assert lines[-4:] == [
        "slower: kvbm, TTFT of the primary requests, paired by request",
        "  differs: machine.cpu_count: 2 and 4",
        "  differs: versions.vllm: nothing and 0.32",
        "  differs: profile.tiers.host.capacity: 256MiB and 1GiB\\x1b[31m",
    ]


def test_answers_that_changed_are_counted_and_change_no_exit_code(tmp_path, capsys):
    def change(record):
        if record.arm == "kvbm" and record.session == 3 and record.turn == 2:
            record.token_ids[4] = 99
        record.logprobs[0] -= 0.25 if record.arm == "floor" else 0.0

    one = made(tmp_path / "a")
    other = made(tmp_path / "b", change=change)
    (other / "summary.json").write_text(json.dumps({**summary_in(other), "verdict": "faster"}))
    result = compared(capsys, one, other)
    assert result["exit_code"] == 0
    assert of_arm(result, "kvbm")["answers"] == {"compared": 24, "different": 2, "largest_logprob_difference": 0.0}
    assert of_arm(result, "baseline")["answers"]["different"] == 0
    assert of_arm(result, "floor")["answers"] == {"compared": 12, "different": 0, "largest_logprob_difference": 0.25}
    diff(one, other, as_json=False)
    assert "2 of 24 answers differ, although the engine is the same" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["versions", "profile"])
def test_answers_of_another_engine_may_differ(tmp_path, capsys, key):
    changed: dict[str, Any] = copy.deepcopy(SURROUNDINGS)
    changed["versions"]["vllm"] = "0.33" if key == "versions" else None
    changed["profile"]["engine"]["kind"] = "vllm" if key == "profile" else "embedded"

    def change(record):
        record.token_ids[4] = 99

    diff(made(tmp_path / "a"), made(tmp_path / "b", change=change, surroundings=changed), as_json=False)
    page = capsys.readouterr().out
    assert "24 of 24 answers differ" in page
    assert "although" not in page


@pytest.mark.parametrize("wrong", ["a", "b"])
def test_wrong_outputs_on_either_side_end_with_12(tmp_path, capsys, wrong):
    def change(record):
        if record.arm == "kvbm" and record.index == 7:
            record.token_ids[5] = 99

    one, other = (made(tmp_path / name, **({"change": change} if name == wrong else {})) for name in "ab")
    assert summary_in(tmp_path / wrong)["verdict"] == "wrong"
    result = compared(capsys, one, other)
    assert (result["exit_code"], result["verdict"]) == (12, "wrong")
    (note,) = result["notes"]
    assert note.startswith(f"{tmp_path / wrong} is wrong: the outputs are not equal")


def test_invalid_and_incomplete_experiments_are_named(tmp_path, capsys):
    def fail(record):
        if record.arm == "baseline" and record.index == 7:
            record.error, record.first_token_ms = "HTTP 503", None

    one, other = made(tmp_path / "a", change=fail), made(tmp_path / "b")
    (other / "summary.json").write_text(json.dumps({**summary_in(other), "complete": False}))
    result = compared(capsys, one, other)
    assert result["exit_code"] == 0
    assert [note.split(": ")[0] for note in result["notes"]] == [f"{one} is invalid", f"{other} is faster"]
    assert of_arm(result, "baseline")["ttft_speedup_paired"]["pairs"] == 10


def test_several_cells_are_compared_each_and_the_worst_decides(tmp_path, capsys):
    workloads = [in_turn(SIX).model_copy(update={"name": name}) for name in ("one", "two")]

    def slow(record):
        if record.cell == "two" and record.turn == 2 and record.arm == "kvbm":
            record.first_token_ms += 100.0

    one = made(tmp_path / "a", workloads=workloads)
    result = compared(capsys, one, made(tmp_path / "b", workloads=workloads, change=slow))
    verdicts = {(change["cell"], change["arm"]): change["verdict"] for change in result["changes"]}
    assert verdicts["one", "kvbm"] == "same"
    assert verdicts["two", "kvbm"] == "slower"
    assert (result["verdict"], result["exit_code"]) == ("slower", 10)


def test_only_arms_in_common_are_compared(tmp_path, capsys):
    one, other = made(tmp_path / "a"), made(tmp_path / "b", times={"floor": None})
    result = compared(capsys, one, other)
    assert {change["arm"] for change in result["changes"]} == {"baseline", "kvbm"}
    assert result["notes"] == [f"only {one} has runs of the arms `floor`"]


def test_without_a_measured_arm_in_common_all_others_decide(tmp_path, capsys):
    one = made(tmp_path / "a")
    other = made(tmp_path / "b", times={"kvbm": None, "baseline": 900.0})
    result = compared(capsys, one, other)
    assert sorted(result["judged_arms"]) == ["baseline", "floor"]
    assert result["exit_code"] == 10


def test_more_pairs_on_one_side_are_left_out(tmp_path, capsys):
    def others(record):
        if record.pair == 3:
            record.token_ids[0] = 99

    one = made(tmp_path / "a", workloads=[in_turn(SIX, pairs=2)])
    other = made(tmp_path / "b", workloads=[in_turn(SIX, pairs=3)], change=others)
    kvbm = of_arm(compared(capsys, one, other), "kvbm")
    assert (kvbm["ttft_speedup_paired"]["runs"], kvbm["answers"]["compared"]) == (2, 24)
    assert kvbm["answers"]["different"] == 0


def test_one_session_has_no_interval(tmp_path, capsys):
    workloads = [in_turn(SIX.model_copy(update={"users": 1}))]
    one, other = made(tmp_path / "a", workloads=workloads), made(tmp_path / "b", workloads=workloads)
    assert diff(one, other, as_json=False) == 0
    assert "1.00 times as fast (one session, so no interval)" in capsys.readouterr().out


def test_an_arm_without_an_answer_in_both_is_invalid(tmp_path, capsys):
    def fail(record):
        if record.arm == "kvbm":
            record.error, record.first_token_ms = "HTTP 503", None

    one, other = made(tmp_path / "a"), made(tmp_path / "b", change=fail)
    assert diff(one, other, as_json=False) == 11
    page = capsys.readouterr().out
    assert "no request was answered in both" in page
    assert "no answers to compare" in page


def test_different_requests_are_refused_with_the_cell_and_what_to_set(tmp_path):
    one, other = made(tmp_path / "a"), made(tmp_path / "b", seed=1)
    error = refusal(one, other)
    assert error.message == f"{one} and {other} cannot be compared: they sent different requests in `small`"
    assert "`history: canned`" in (error.hint or "")


def test_different_requests_of_a_later_pair_are_refused(tmp_path):
    one, other = made(tmp_path / "a"), made(tmp_path / "b")
    for path, digest in ((one, "1"), (other, "2")):
        plan = json.loads((path / "cells/small/plan.json").read_text())
        (path / "cells/small/plan-2.json").write_text(json.dumps({**plan, "digest": digest}))
    assert "they sent different requests in `small`" in refusal(one, other).message


def test_a_cell_of_one_side_is_refused_and_named(tmp_path):
    workloads = [in_turn(SIX).model_copy(update={"name": name}) for name in ("one", "two")]
    one = made(tmp_path / "a", workloads=workloads)
    other = made(tmp_path / "b", workloads=workloads, last_run="one.1.floor")
    for pair in ((one, other), (other, one)):
        assert refusal(*pair).message.endswith(f"cannot be compared: {other} has no run of `two`")


def test_requests_that_follow_the_answers_are_refused(tmp_path):
    one = made(tmp_path / "a")
    (one / "cells/small/plan.json").unlink()
    assert "the requests of `small` follow the answers" in refusal(one, one).message


def test_no_arm_in_common_is_refused(tmp_path):
    one = made(tmp_path / "a", times={"floor": None, "baseline": None})
    other = made(tmp_path / "b", times={"kvbm": None, "baseline": None})
    assert refusal(one, other).message.endswith("they have no arm in common: `kvbm` and `floor`")


def test_nothing_that_has_ended_is_refused(tmp_path):
    one = made(tmp_path / "a")
    (one / "runs.jsonl").write_text("")
    assert refusal(one, one).message.endswith("no run has ended")


def test_a_missing_summary_is_refused_with_the_command_that_writes_it(tmp_path):
    one = made(tmp_path / "a")
    (one / "summary.json").unlink()
    error = refusal(one, one)
    assert error.message == f"{one} has no summary.json"
    assert error.hint == f"`kvbm bench report {one}` writes it"


def test_a_path_that_cannot_be_read_is_refused(tmp_path):
    assert refusal(tmp_path / ("a" * 300), tmp_path).message.startswith("cannot read ")


def test_a_damaged_summary_is_named(tmp_path):
    one = made(tmp_path / "a")
    (one / "summary.json").write_text('{"complete"')
    assert refusal(one, one).message.startswith(f"{one}/summary.json is not JSON: ")
