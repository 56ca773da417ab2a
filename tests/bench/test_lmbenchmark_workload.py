"""From a workload file or a preset to parameters, from a ShareGPT data set to transcripts, and CSV files byte by byte.

The presets equal the arguments of LMBenchmark's scripts (commit 26d02bd); pandas 3.1.1 wrote the expected CSV files.
"""

import json
import os
import random
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvbm.errors import UsageError
from kvbm_cli.bench.lmbenchmark.exchange import AgentAnswer, MeasuredAnswer, agentic_csv, multi_round_csv, sharegpt_csv
from kvbm_cli.bench.lmbenchmark.of_workload import faithful_parameters
from kvbm_cli.bench.lmbenchmark.presets import PRESETS, AgenticParameters, ShareGptParameters, preset
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
    assert "does not exist" in capsys.readouterr().err
    assert program([]) == 2


def test_times_of_the_example_of_the_long_script():
    one = replace(preset("lmbenchmark-long"), qps=1.0)
    assert (one.gap_s, one.session_s, one.gap_between_users_s, one.ramp_up_s) == (15.0, 285.0, 19.0, 285.0)


def test_warm_up_has_one_user_and_two_rounds_of_the_same_size():
    warm_up = preset("lmbenchmark-long-long", sizes="as-shipped").warm_up()
    assert (warm_up.users, warm_up.rounds, warm_up.qps, warm_up.duration_s) == (1, 2, 2.0, 375.0)
    assert (warm_up.system_words, warm_up.history_words, warm_up.answer_tokens) == (1, 1, 1000)
    assert warm_up.first_user_id == 1
    assert warm_up.gap_between_users_s == 0.5
    assert warm_up.warm_up() is None


def test_odd_number_of_warm_up_users_is_halved_as_the_shell_does():
    assert replace(preset("lmbenchmark-long"), warm_up_users=21).warm_up().duration_s == 10.0


def test_each_rate_has_its_own_file():
    runs = [replace(preset("lmbenchmark-short"), qps=qps) for qps in (15, 20.0, 0.25)]
    assert [run.output_file("key") for run in runs] == ["key_qps15.csv", "key_qps20.csv", "key_qps0.25.csv"]
    assert preset("lmbenchmark-long").output_file("a/key") == "a/key_output_0.1.csv"
    assert ShareGptParameters("run.json").output_file("key") == "key_output_1.34.csv"


def test_scaled_words_are_labelled():
    one = preset("lmbenchmark-long").scaled(0.01)
    assert (one.sizes, one.system_words, one.history_words, one.answer_tokens) == ("custom", 10, 200, 100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: preset("lmbenchmark-medium"), "no preset lmbenchmark-medium"),
        (lambda: preset("lmbenchmark-long", sizes="big"), "lmbenchmark-short \\(as-shipped\\)"),
        (lambda: replace(preset("lmbenchmark-long"), users=0), "users is 0; it must be at least 1"),
        (lambda: replace(preset("lmbenchmark-long"), history_words=-1), "history_words is -1; it must be 0 or more"),
        (lambda: replace(preset("lmbenchmark-long"), qps=0), "qps is 0; it must be a finite number above 0"),
        (lambda: replace(preset("lmbenchmark-long"), duration_s=float("inf")), "duration_s is inf"),
        (lambda: preset("lmbenchmark-long").scaled(0), "factor of words is 0"),
        (lambda: ShareGptParameters("run.json", qps=-1), "qps is -1"),
        (lambda: AgenticParameters(()), "at least one trace file"),
        (lambda: AgenticParameters(("a",), new_user_interval_s=-1), "new_user_interval_s is -1"),
    ],
)
def test_impossible_parameters_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_the_page_lists_the_presets_with_the_arguments_of_their_scripts():
    page = Path(__file__).parents[2] / "docs" / "reference" / "lmbenchmark.md"
    rows = re.findall(r"^\| `(\S+)` \| ((?:documented|as-shipped).*) \|$", page.read_text(), re.MULTILINE)
    listed = {}
    for scenario, cells in rows:
        sizes, *numbers, file = cells.split(" | ")
        for one in sizes.split(", "):
            listed[f"lmbenchmark-{scenario}", one] = (*map(float, numbers), file)
    assert listed == {
        (one.name, one.sizes): (
            *(one.users, one.rounds, one.system_words, one.history_words, one.answer_tokens),
            *(one.qps, one.duration_s, one.warm_up_users),
            f"`{one.output_name.format(key='KEY', qps='QPS')}`",
        )
        for one in (preset(name, sizes=sizes) for name, sizes in PRESETS)
    }
    assert {one.first_user_id for one in PRESETS.values()} == {1}


HEADER = "prompt_tokens,generation_tokens,ttft,generation_time,user_id,question_id,launch_time,finish_time\n"
FIRST = MeasuredAnswer(21028, 100, 0.25, 1.5, 1700000000.25, 1700000002.0)
TINY = MeasuredAnswer(21145, 7, 1e-05, 2.3e-07, 1700000100.125, 1700000100.5)
NO_TEXT = MeasuredAnswer(3, 0, 0, 0, 1700000003.0, 1700000004.0)


@pytest.mark.parametrize(
    ("sessions", "lines"),
    [
        ([(2, []), (3, [])], ""),
        (
            [(9, [FIRST, TINY]), (3, [NO_TEXT])],
            "21028,100,0.25,1.5,9,1,1700000000.25,1700000002.0\n"
            "21145,7,1e-05,2.3e-07,9,2,1700000100.125,1700000100.5\n"
            "3,0,0.0,0.0,3,1,1700000003.0,1700000004.0\n",
        ),
        ([(2, []), (3, [FIRST])], "21028.0,100.0,0.25,1.5,3,1,1700000000.25,1700000002.0\n"),
        ([(3, [NO_TEXT])], "3,0,0,0,3,1,1700000003.0,1700000004.0\n"),
        ([(2, []), (3, [NO_TEXT])], "3.0,0.0,0.0,0.0,3,1,1700000003.0,1700000004.0\n"),
    ],
    ids=["no rows", "integers", "a session without rows", "only integers", "integers and a session without rows"],
)
def test_multi_round_file(sessions, lines):
    assert multi_round_csv(sessions) == HEADER + lines


def test_sharegpt_file_is_sorted_by_launch():
    assert sharegpt_csv([TINY, FIRST]) == (
        "prompt_tokens,generation_tokens,ttft,generation_time,launch_time,finish_time\n"
        "21028,100,0.25,1.5,1700000000.25,1700000002.0\n"
        "21145,7,1e-05,2.3e-07,1700000100.125,1700000100.5\n"
    )


def test_agentic_file_quotes_texts():
    messages = "[{'role': 'user', 'name': 'agent0-0', 'content': 'hihihihihi'}, {'role': 'user'}]"
    answer = AgentAnswer(FIRST, 0, 2, messages, 'a "b"\nc')
    header = (
        "prompt_tokens,generation_tokens,ttft,generation_time,user_id,round_id,launch_time,finish_time,"
        "agentID,input,output\n"
    )
    texts = f'"{messages}","a ""b""\nc"\n'
    assert agentic_csv([(1, [answer])]) == (f"{header}21028,100,0.25,1.5,1,0,1700000000.25,1700000002.0,2,{texts}")
    assert agentic_csv([(1, [answer]), (2, [])]) == (
        f"{header}21028.0,100.0,0.25,1.5,1,0.0,1700000000.25,1700000002.0,2.0,{texts}"
    )
