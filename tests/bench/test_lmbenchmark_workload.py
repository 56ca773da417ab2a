"""From a workload file to what runs, and from a ShareGPT data set to transcripts."""

import json
import os
import random
import re
import subprocess
from dataclasses import astuple
from pathlib import Path

import pytest
from pydantic import ValidationError
from terminal import assert_said, given_in

from kvbm.errors import UsageError
from kvbm_cli.bench.lmbenchmark.agentic import read_agent_trace
from kvbm_cli.bench.lmbenchmark.of_workload import strict_workload
from kvbm_cli.bench.lmbenchmark.presets import PRESETS
from kvbm_cli.bench.lmbenchmark.sharegpt import main as program
from kvbm_cli.bench.lmbenchmark.sharegpt import prepare_sharegpt, read_transcripts
from kvbm_cli.bench.workload.files import load_workload
from kvbm_cli.bench.workload.schema import Lmbenchmark


def workload(scenario, **keys):
    return Lmbenchmark(name="one", kind="lmbenchmark", scenario=scenario, **keys)


def test_a_scenario_without_keys_has_the_sizes_of_its_preset():
    one = strict_workload(workload("long-long"))
    assert (one.users, one.turns, one.system_tokens, one.history_tokens) == (320, 20, 0, 2000)
    assert (one.answer_tokens, one.schedule.interval_s, one.history) == (1000, 1 / 0.7, "canned")


def test_keys_of_a_workload_replace_those_of_the_preset():
    one = strict_workload(workload("long-long", qps=2.5, time_s=30, users=7, rounds=3, system_words=5, answer_tokens=9))
    assert (one.users, one.turns, one.system_tokens, one.history_tokens) == (7, 3, 5, 2000)
    assert (one.answer_tokens, one.schedule.interval_s, one.schedule.duration_s) == (9, 0.4, 30.0)


def test_the_time_is_long_enough_for_two_turns_of_a_user():
    assert strict_workload(workload("long")).schedule.duration_s == 300.0
    assert strict_workload(workload("long", qps=1.0)).schedule.duration_s == 100.0


def test_only_sharegpt_of_the_scenarios_with_a_file_has_a_rate():
    sharegpt = strict_workload(workload("sharegpt", file="run.json")).schedule
    assert (sharegpt.interval_s, sharegpt.duration_s) == (1 / 1.34, None)
    assert strict_workload(workload("sharegpt", file="run.json", qps=2, time_s=9)).schedule.interval_s == 0.5
    assert strict_workload(workload("agentic", file="trace.jsonl")).schedule.interval_s is None


def test_the_file_of_a_scenario_is_relative_to_the_workload(tmp_path):
    file = tmp_path / "one.yaml"
    file.write_text("{name: one, kind: lmbenchmark, scenario: sharegpt, file: a/run.json}")
    assert load_workload(str(file)).file == str(tmp_path / "a" / "run.json")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"scenario": "sharegpt"}, "is required for the scenario `sharegpt`"),
        ({"scenario": "agentic", "file": "a", "qps": 1.0}, "does not exist in the scenario `agentic`"),
        ({"scenario": "sharegpt", "file": "a", "users": 1}, "does not exist in the scenario `sharegpt`"),
        ({"scenario": "long", "file": "a"}, "does not exist in the scenario `long`"),
        ({"scenario": "agentic", "file": "a", "sizes": "documented"}, "does not exist in the scenario `agentic`"),
    ],
)
def test_keys_that_a_scenario_does_not_have_are_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        workload(**keys)


def conversation(name, rounds):
    messages = []
    for number in range(rounds):
        messages += [
            {"from": "human", "value": f"{name} asks {number} "},
            {"from": "gpt", "value": "word " * (number + 1)},
        ]
    return {"conversations": messages}


def words(text):
    return len(text.split())


def test_the_prepared_file_has_all_rounds_from_the_first_one(tmp_path):
    repeated = {"conversations": [{"from": "human", "value": "a"}] * 20}
    unanswered = conversation("b", 5)
    unanswered["conversations"].pop()
    data_set = tmp_path / "data.json"
    data_set.write_text(json.dumps([conversation("a", 6), repeated, conversation("short", 4), unanswered]))
    file = prepare_sharegpt(data_set, tmp_path, words)
    run = json.loads(file.read_text())
    assert [one["output_length"] for one in run] == [3, 3, 4, 4, 5, 20, 6]
    assert run[2]["input"] == "a asks 0 \nword \na asks 1 \nword word \na asks 2 \nword word word \na asks 3"
    assert [(one.session, one.turn) for one in read_transcripts(file)] == [
        *((0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3), (0, 4))
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "the data set `.*data.json` does not exist"),
        ("[{}]", "this is not a ShareGPT data set: KeyError: 'conversations'"),
        ("{", "data.json:1: not JSON"),
        (json.dumps([conversation("a", 2)]), "no conversation has at least 5 rounds"),
    ],
)
def test_unusable_data_sets_are_refused(tmp_path, text, message):
    data_set = tmp_path / "data.json"
    if text is not None:
        data_set.write_text(text)
    with pytest.raises(UsageError, match=message):
        prepare_sharegpt(data_set, tmp_path, words)


@pytest.mark.soak
@pytest.mark.skipif("KVBM_LMBENCHMARK" not in os.environ, reason="KVBM_LMBENCHMARK is not set")
def test_the_prepared_file_equals_that_of_lmbenchmark(tmp_path):
    """LMBenchmark's scripts read ShareGPT.json, which has the numbers of tokens."""
    dice = random.Random(1)
    data = [conversation(f"user {number}", dice.randint(1, 9)) for number in range(60)]
    for entry in data:
        del entry["conversations"][len(entry["conversations"]) - dice.randint(0, 1) :]
    data_set = tmp_path / "data.json"
    data_set.write_text(json.dumps(data))
    ours = json.loads(prepare_sharegpt(data_set, tmp_path, words, limit=50).read_text())
    for entry in data:
        for message in entry["conversations"]:
            if message["from"] == "gpt":
                message["num_tokens"] = words(message["value"])
    (tmp_path / "ShareGPT.json").write_text(json.dumps(data))
    scripts = Path(os.environ["KVBM_LMBENCHMARK"]) / "sharegpt"
    for script, *arguments in (
        ("concat_input.py", "--limit", "50"),
        ("prepare_run_dataset.py", "--min_rounds", "5", "--start_round", "3"),
    ):
        command = [os.environ["KVBM_LMBENCHMARK_PYTHON"], str(scripts / script), *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert len(ours) > 50
    assert ours == json.loads((tmp_path / "run.json").read_text())


def test_the_preparation_is_a_program(tmp_path, capsys):
    data_set = tmp_path / "data.json"
    data_set.write_text(json.dumps([conversation("a", 6)]))
    assert program([str(data_set), str(tmp_path / "made")]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "made" / "run.json")]
    assert program([str(tmp_path / "missing.json"), str(tmp_path)]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert program([]) == 2


def test_the_page_lists_the_presets():
    page = Path(__file__).parents[2] / "docs" / "reference" / "lmbenchmark.md"
    rows = re.findall(r"^\| `(\S+)` \| ([0-9][0-9.| ]*) \|$", page.read_text(), re.MULTILINE)
    listed = {scenario: tuple(map(float, cells.split(" | "))) for scenario, cells in rows}
    assert listed == {name: astuple(preset) for name, preset in PRESETS.items()}


READERS = {"bench/transcripts": read_transcripts, "bench/agentic_traces": read_agent_trace}


@pytest.mark.parametrize(("file", "name"), [(file, name) for file in READERS for name in given_in(file)])
def test_unreadable_files_are_refused(tmp_path, monkeypatch, file, name):
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(given_in(file)[name])
    with pytest.raises(UsageError) as caught:
        READERS[file](Path("run.json"))
    assert_said(file, name, caught.value.message)
