"""From a workload file to parameters, and from a ShareGPT data set to prepared transcripts."""

import json
import os
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvbm.errors import UsageError
from kvbm_cli.bench.lmbenchmark.of_workload import faithful_parameters
from kvbm_cli.bench.lmbenchmark.presets import AgenticParameters, ShareGptParameters, preset
from kvbm_cli.bench.lmbenchmark.sharegpt import main as program
from kvbm_cli.bench.lmbenchmark.sharegpt import prepare_sharegpt, read_transcripts
from kvbm_cli.bench.workload.files import load_workload
from kvbm_cli.bench.workload.schema import Lmbenchmark


def workload(scenario, **keys):
    return Lmbenchmark(name="one", kind="lmbenchmark", scenario=scenario, **keys)


def test_scenario_without_keys_is_its_preset():
    assert faithful_parameters(workload("long")) == preset("lmbenchmark-long")
    assert faithful_parameters(workload("short", sizes="as-shipped")) == preset("lmbenchmark-short", sizes="as-shipped")


def test_keys_of_a_workload_replace_those_of_the_preset():
    one = faithful_parameters(workload("long-long", qps=2.5, time_s=30, users=7, rounds=3, answer_tokens=9, chat=True))
    assert one == replace(
        preset("lmbenchmark-long-long"), qps=2.5, duration_s=30.0, users=7, rounds=3, answer_tokens=9, is_chat=True
    )
    assert faithful_parameters(workload("long", history_words=20)).sizes == "custom"
    assert faithful_parameters(workload("long", history_words=20000)).sizes == "documented"


def test_file_scenarios_take_their_file():
    assert faithful_parameters(workload("sharegpt", file="run.json", qps=2)) == ShareGptParameters("run.json", qps=2.0)
    assert faithful_parameters(workload("agentic", file="trace.jsonl")) == AgenticParameters(("trace.jsonl",))


def test_both_files_of_sharegpt_are_relative_to_the_workload(tmp_path):
    file = tmp_path / "one.yaml"
    lines = ("name: one", "kind: lmbenchmark", "scenario: sharegpt", "file: run.json", "warm_up_file: a/warmup.json")
    file.write_text("\n".join(lines))
    assert faithful_parameters(load_workload(str(file))) == ShareGptParameters(
        str(tmp_path / "run.json"), str(tmp_path / "a" / "warmup.json")
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"scenario": "sharegpt"}, "is required for the scenario `sharegpt`"),
        ({"scenario": "agentic", "file": "a", "qps": 1.0}, "does not exist in the scenario `agentic`"),
        ({"scenario": "sharegpt", "file": "a", "users": 1}, "does not exist in the scenario `sharegpt`"),
        ({"scenario": "long", "file": "a"}, "does not exist in the scenario `long`"),
        ({"scenario": "agentic", "file": "a", "sizes": "as-shipped"}, "does not exist in the scenario `agentic`"),
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


def test_prepared_files_have_one_round_before_and_all_rounds_after(tmp_path):
    repeated = {"conversations": [{"from": "human", "value": "a"}] * 20}
    unanswered = conversation("b", 5)
    unanswered["conversations"].pop()
    data_set = tmp_path / "data.json"
    data_set.write_text(json.dumps([conversation("a", 6), repeated, conversation("short", 4), unanswered]))
    warm_up, main = prepare_sharegpt(data_set, tmp_path, words)
    assert json.loads(warm_up.read_text()) == [
        {"input": "a asks 0 \nword \na asks 1", "output_length": 2},
        {"input": "b asks 0 \nword \nb asks 1", "output_length": 2},
    ]
    run = json.loads(main.read_text())
    assert [one["output_length"] for one in run] == [3, 3, 4, 4, 5, 20, 6]
    assert run[2]["input"] == "a asks 0 \nword \na asks 1 \nword word \na asks 2 \nword word word \na asks 3"
    transcripts = read_transcripts(str(warm_up), str(main))
    assert [(one.session, one.turn) for one in transcripts[1]] == [
        (0, 2),
        (1, 2),
        (0, 3),
        (1, 3),
        (0, 4),
        (1, 4),
        (0, 5),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "the data set cannot be read: No such file"),
        ("[{}]", "this is not a ShareGPT data set: KeyError: 'conversations'"),
        ("{", "this is not a ShareGPT data set: JSONDecodeError"),
        (json.dumps([conversation("a", 2)]), "no conversation has at least 5 rounds"),
    ],
)
def test_unusable_data_sets_are_refused(tmp_path, text, message):
    data_set = tmp_path / "data.json"
    if text is not None:
        data_set.write_text(text)
    with pytest.raises(UsageError, match=message):
        prepare_sharegpt(data_set, tmp_path, words)


def test_first_round_must_have_one_before_it(tmp_path):
    with pytest.raises(UsageError, match="start_round is 1; it must be at least 2"):
        prepare_sharegpt(tmp_path / "data.json", tmp_path, words, start_round=1)


@pytest.mark.soak
@pytest.mark.skipif("KVBM_LMBENCHMARK" not in os.environ, reason="KVBM_LMBENCHMARK is not set")
def test_prepared_files_equal_those_of_lmbenchmark(tmp_path):
    """LMBenchmark's three scripts read ShareGPT.json, which has the numbers of tokens."""
    dice = random.Random(1)
    data = [conversation(f"user {number}", dice.randint(1, 9)) for number in range(60)]
    for entry in data:
        del entry["conversations"][len(entry["conversations"]) - dice.randint(0, 1) :]
    data_set = tmp_path / "data.json"
    data_set.write_text(json.dumps(data))
    ours = [json.loads(path.read_text()) for path in prepare_sharegpt(data_set, tmp_path, words, limit=50)]
    for entry in data:
        for message in entry["conversations"]:
            if message["from"] == "gpt":
                message["num_tokens"] = words(message["value"])
    (tmp_path / "ShareGPT.json").write_text(json.dumps(data))
    scripts = Path(os.environ["KVBM_LMBENCHMARK"]) / "sharegpt"
    for script, *arguments in (
        ("concat_input.py", "--limit", "50"),
        ("prepare_run_dataset.py", "--min_rounds", "5", "--start_round", "3"),
        ("prepare_warmup_dataset.py", "--min_rounds", "5", "--round_number", "2"),
    ):
        command = [os.environ["KVBM_LMBENCHMARK_PYTHON"], str(scripts / script), *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert len(ours[1]) > 50
    assert ours == [json.loads((tmp_path / name).read_text()) for name in ("warmup.json", "run.json")]


def test_the_preparation_is_a_program(tmp_path, capsys):
    data_set = tmp_path / "data.json"
    data_set.write_text(json.dumps([conversation("a", 6)]))
    assert program([str(data_set), str(tmp_path / "made")]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "made" / name) for name in ("warmup.json", "run.json")]
    assert program([str(tmp_path / "missing.json"), str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert program([]) == 2
