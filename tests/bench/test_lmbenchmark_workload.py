"""From a workload of kind `lmbenchmark` to what runs, and its files."""

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from terminal import assert_said, given_in

from kvbm.errors import UsageError
from kvbm_cli.bench.lmbenchmark.agentic import read_agent_trace
from kvbm_cli.bench.lmbenchmark.of_workload import PRESETS, strict_workload
from kvbm_cli.bench.lmbenchmark.sharegpt import read_transcripts
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


def test_a_transcript_continues_the_longest_one_that_it_begins_with(tmp_path):
    file = tmp_path / "run.json"
    texts = ["a", "b", "a and", "b or", "a", "a and so"]
    file.write_text(json.dumps([{"input": text, "output_length": 3} for text in texts]))
    turns = [(one.session, one.turn) for one in read_transcripts(file)]
    assert turns == [(0, 1), (1, 1), (0, 2), (1, 2), (2, 1), (0, 3)]


def test_the_page_lists_the_presets():
    page = Path(__file__).parents[2] / "docs" / "reference" / "lmbenchmark.md"
    rows = re.findall(r"^\| `(\S+)` \| ([0-9][0-9.| ]*) \|$", page.read_text(), re.MULTILINE)
    listed = {scenario: tuple(map(float, cells.split(" | "))) for scenario, cells in rows}
    assert listed == {name: tuple(preset.values()) for name, preset in PRESETS.items()}


READERS = {"bench/transcripts": read_transcripts, "bench/agentic_traces": read_agent_trace}


@pytest.mark.parametrize(("file", "name"), [(file, name) for file in READERS for name in given_in(file)])
def test_unreadable_files_are_refused(tmp_path, monkeypatch, file, name):
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(given_in(file)[name])
    with pytest.raises(UsageError) as caught:
        READERS[file](Path("run.json"))
    assert_said(file, name, caught.value.message)
