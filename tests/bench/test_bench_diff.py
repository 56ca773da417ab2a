"""`kvbm bench diff A B`: what it prints, what it refuses, and its exit code.

A case is what differs in the two directories, and an entry of `snapshots/bench/diff.txt`.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_rig import in_turn
from experiments import SIX, SURROUNDINGS, made, summary_in
from terminal import assert_entry, filtered

from kvbm.errors import UsageError
from kvbm_cli.bench.diff import diff
from kvbm_cli.bench.result.results import RequestRecord

TWO = [in_turn(SIX).model_copy(update={"name": name}) for name in ("one", "two")]
ONE_USER = [in_turn(SIX.model_copy(update={"users": 1}))]


def changing(what: Callable[[RequestRecord], None], **where: object) -> dict[str, Any]:
    """Changes the records with these values."""

    def change(record: RequestRecord) -> None:
        if all(getattr(record, name) == value for name, value in where.items()):
            what(record)

    return {"change": change}


def failing(record: RequestRecord) -> None:
    record.error, record.first_token_ms = "HTTP 503", None


def slower(record: RequestRecord) -> None:
    record.first_token_ms = (record.first_token_ms or 0.0) + 100.0


def other_token(position: int) -> Callable[[RequestRecord], None]:
    return lambda record: record.token_ids.__setitem__(position, 99)


def other_answers(record: RequestRecord) -> None:
    if record.arm == "kvbm" and (record.session, record.turn) == (3, 2):
        record.token_ids[4] = 99
    record.logprobs[0] -= 0.25 if record.arm == "floor" else 0.0


def elsewhere(**changes: dict[str, Any]) -> dict[str, Any]:
    """Surroundings with other values, of the sections by name."""
    found: dict[str, Any] = copy.deepcopy(SURROUNDINGS)
    for name, values in changes.items():
        found[name] = {**found[name], **values}
    return {"surroundings": found}


def damage(name: str, text: str | None) -> dict[str, Any]:
    """A file with this text, or without it where it is None."""
    return {"damage": (name, text)}


OF_ANOTHER_VERSION = elsewhere(versions={"vllm": "0.33"})
OF_ANOTHER_ENGINE = elsewhere(profile={"engine": {"kind": "vllm"}})
ELSEWHERE = elsewhere(
    machine={"cpu_count": 4, "load_average": 9.0, "time_unix_s": 2.0},
    versions={"vllm": "0.32"},
    profile={"tiers": {"host": {"capacity": "1GiB\x1b[31m"}}},
)
WRONG = changing(other_token(5), arm="kvbm", index=7)
NO_KVBM = {"times": {"kvbm": None, "baseline": 900.0}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "equal directories of two pairs": ({}, {}),
    "the measured arm is slower": ({}, {"times": {"kvbm": 80.0, "floor": 300.0}}),
    "the measured arm is faster": ({}, {"times": {"kvbm": 20.0, "floor": 300.0}}),
    "the surroundings differ": ({}, {"times": {"kvbm": 80.0}, **ELSEWHERE}),
    "answers that changed change no exit code": (
        {},
        {"change": other_answers, "summary": {"verdict": "faster"}},
    ),
    "answers of another version may differ": ({}, {**changing(other_token(4)), **OF_ANOTHER_VERSION}),
    "answers of another engine may differ": ({}, {**changing(other_token(4)), **OF_ANOTHER_ENGINE}),
    "wrong outputs on the first side": (WRONG, {}),
    "wrong outputs on the second side": ({}, WRONG),
    "invalid and incomplete experiments are named": (
        changing(failing, arm="baseline", index=7),
        {"summary": {"complete": False}},
    ),
    "the worst of several cells decides": (
        {"workloads": TWO},
        {"workloads": TWO, **changing(slower, cell="two", turn=2, arm="kvbm")},
    ),
    "only arms in common are compared": ({}, {"times": {"floor": None}}),
    "without a measured arm in common all others decide": ({}, NO_KVBM),
    "more pairs on one side are left out": (
        {"workloads": [in_turn(SIX, pairs=2)]},
        {"workloads": [in_turn(SIX, pairs=3)], **changing(other_token(0), pair=3)},
    ),
    "one session has no interval": ({"workloads": ONE_USER}, {"workloads": ONE_USER}),
    "an arm without an answer in both is invalid": ({}, changing(failing, arm="kvbm")),
    "different requests": ({}, {"seed": 1}),
    "different requests of a later pair": ({"second_digest": "1"}, {"second_digest": "2"}),
    "a cell of the first side only": ({"workloads": TWO}, {"workloads": TWO, "last_run": "one.1.floor"}),
    "a cell of the second side only": ({"workloads": TWO, "last_run": "one.1.floor"}, {"workloads": TWO}),
    "a cell without its plan": (damage("cells/small/plan.json", None), {}),
    "no arm in common": ({"times": {"floor": None, "baseline": None}}, {"times": {"kvbm": None, "baseline": None}}),
    "nothing that has ended": (damage("runs.jsonl", ""), damage("runs.jsonl", "")),
    "a missing summary": (damage("summary.json", None), {}),
    "a damaged summary": (damage("summary.json", '{"complete"'), {}),
}


def directory(
    path: Path,
    *,
    summary: dict[str, Any] | None = None,
    second_digest: str = "",
    damage: tuple[str, str | None] | None = None,
    **changes: Any,
) -> Path:
    made(path, **changes)
    if summary is not None:
        (path / "summary.json").write_text(json.dumps({**summary_in(path), **summary}))
    if second_digest:
        plan = json.loads((path / "cells/small/plan.json").read_text())
        (path / "cells/small/plan-2.json").write_text(json.dumps({**plan, "digest": second_digest}))
    if damage is not None:
        name, text = damage
        (path / name).unlink()
        if text is not None:
            (path / name).write_text(text)
    return path


@pytest.mark.parametrize("name", CASES)
def test_diff(name, tmp_path, capsys):
    one, other = (directory(tmp_path / side, **changes) for side, changes in zip("ab", CASES[name], strict=True))
    try:
        text = f"exit code: {diff(one, other, as_json=False)}\n{capsys.readouterr().out}"
    except UsageError as error:
        text = f"exit code: {error.exit_code}\nerror: {error.message}\nhint: {error.hint}\n"
    assert_entry("bench/diff", name, filtered(text), names=CASES)


def test_json_has_the_numbers(tmp_path, capsys):
    changes = {"times": {"kvbm": 80.0, "floor": 300.0}, "change": other_answers, "summary": {"verdict": "faster"}}
    assert diff(made(tmp_path / "a"), directory(tmp_path / "b", **changes), as_json=True) == 10
    result = json.loads(capsys.readouterr().out)
    assert (result["verdict"], result["judged_arms"]) == ("slower", ["kvbm"])
    (kvbm,) = [one for one in result["changes"] if one["arm"] == "kvbm"]
    paired = kvbm["ttft_speedup_paired"]
    assert (paired["geometric_mean"], paired["runs"], paired["pairs"]) == (pytest.approx(0.5, abs=1e-3), 2, 12)
    assert kvbm["second_ttft_p50_ms"] == pytest.approx(80.0, rel=0.05)
    answers = {one["arm"]: one["answers"] for one in result["changes"]}
    assert answers["kvbm"] == {"compared": 24, "different": 2, "largest_logprob_difference": 0.0}
    assert answers["floor"] == {"compared": 12, "different": 0, "largest_logprob_difference": 0.25}


def test_a_path_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"^cannot read "):
        diff(tmp_path / ("a" * 300), tmp_path, as_json=False)
