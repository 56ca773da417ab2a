"""LMBenchmark's programs and our driver send the same bodies at the same times, and write the same CSV file.

The programs run against the same server; LMBenchmark's classes are driven with the same simulated clock.
Requires KVBM_LMBENCHMARK, a checkout of LMBenchmark, and KVBM_LMBENCHMARK_PYTHON, an interpreter in a `bin` directory
with `openai` and `pandas`.
"""

import asyncio
import csv
import json
import os
import random
import subprocess
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from lmbenchmark_clock import START_S, simulate
from openai_mock import Answer, OpenAIMock

from kvbm_cli.bench.lmbenchmark.exchange import SHAREGPT_COLUMNS, MeasuredAnswer, multi_round_csv
from kvbm_cli.bench.lmbenchmark.multi_round import MultiRoundSchedule
from kvbm_cli.bench.lmbenchmark.of_workload import run_faithful
from kvbm_cli.bench.lmbenchmark.presets import AgenticParameters, ShareGptParameters, preset
from kvbm_cli.bench.load.request import Target

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not {"KVBM_LMBENCHMARK", "KVBM_LMBENCHMARK_PYTHON"} <= os.environ.keys(),
        reason="KVBM_LMBENCHMARK and KVBM_LMBENCHMARK_PYTHON are not set",
    ),
]
TICK_S, SLACK_S = 0.1, 0.2
MEASURED = {"ttft", "generation_time", "launch_time", "finish_time"}


def checkout():
    return Path(os.environ["KVBM_LMBENCHMARK"])


def run_program(command, *, is_chat=False, **variables):
    python = Path(os.environ["KVBM_LMBENCHMARK_PYTHON"])
    environment = {**os.environ, "USE_CHAT_COMPLETIONS": str(is_chat), **variables}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def run_ours(parameters, server):
    target = Target("cell.1.kvbm", "kvbm", "cell", 1, server.url)
    return asyncio.run(run_faithful(parameters, target, model="m", on_record=lambda record: None))


def recorded(run, first_token_s=0.02):
    """(bodies and arrival times by user, what `run` returned); times count from the first request with a user."""
    with OpenAIMock(Answer(tokens=3, first_ms=1e3 * first_token_s)) as server:
        result = run(server)
    by_user = defaultdict(list)
    start_s = next((one.complete_s for one in server.arrivals if one.user), server.arrivals[0].complete_s)
    for one in server.arrivals:
        by_user[one.user].append((one.path, one.body, one.complete_s - start_s))
    return by_user, result


def assert_same_requests(theirs, ours, end_s):
    """Both send the same bodies at the same times; returns how many launches at the end of the time only one has."""
    assert sorted(body for _, body, _ in ours.pop(None)) == sorted(body for _, body, _ in theirs.pop(None))
    extra = []
    for user in theirs.keys() | ours.keys():
        both = list(zip(theirs[user], ours[user], strict=False))
        extra += theirs[user][len(both) :] + ours[user][len(both) :]
        for (path, body, at_s), (our_path, our_body, our_at_s) in both:
            assert (our_path, our_body) == (path, body)
            assert abs(our_at_s - at_s) < TICK_S + SLACK_S, (user, at_s, our_at_s)
    assert all(at_s > end_s - TICK_S - SLACK_S for _, _, at_s in extra), extra
    return len(extra)


def assert_same_table(theirs, ours, *, extra=0):
    """All cells are the same text except those of measured columns, which are floats in both."""
    their_rows, our_rows = (list(csv.DictReader(text.splitlines())) for text in (theirs, ours))
    assert ours.splitlines()[0] == theirs.splitlines()[0]
    if extra:
        kept = set(map(key_of, their_rows)) & set(map(key_of, our_rows))
        assert len(their_rows) + len(our_rows) - 2 * len(kept) <= extra
        their_rows, our_rows = ([row for row in rows if key_of(row) in kept] for rows in (their_rows, our_rows))
    assert len(our_rows) == len(their_rows) > 5
    for their_row, our_row in zip(their_rows, our_rows, strict=True):
        for column, cell in their_row.items():
            if column in MEASURED:
                assert repr(float(cell)) == cell
                assert repr(float(our_row[column])) == our_row[column]
            else:
                assert our_row[column] == cell


def key_of(row):
    return row["user_id"], row["question_id"]


def small(**changes):
    sizes = {"users": 4, "rounds": 3, "system_words": 20, "history_words": 300, "answer_tokens": 5, "qps": 4 / 0.95}
    sizes |= {"warm_up_users": 0, "duration_s": 7.0}
    return replace(preset("lmbenchmark-long"), **{**sizes, **changes})


def program_command(parameters, url, output):
    flags = {
        "num-users": parameters.users,
        "num-rounds": parameters.rounds,
        "qps": parameters.qps,
        "shared-system-prompt": parameters.system_words,
        "user-history-prompt": parameters.history_words,
        "answer-len": parameters.answer_tokens,
        "model": "m",
        "base-url": url,
        "output": output,
        "init-user-id": parameters.first_user_id,
        "time": int(parameters.duration_s),
    }
    flags_of_command = [part for flag, value in flags.items() for part in (f"--{flag}", value)]
    strict = ["--enforce-strict-concurrent-users"] if parameters.strict_concurrent_users else []
    return ["python3", checkout() / "synthetic-multi-round-qa" / "multi-round-qa.py", *flags_of_command, *strict]


@pytest.mark.parametrize(
    ("changes", "first_token_s"),
    [
        ({}, 0.02),
        ({"is_chat": True}, 0.02),
        ({"strict_concurrent_users": True}, 0.02),
        ({}, 1.25),  # each answer is later than the user's next launch
    ],
    ids=["completions", "chat", "strict concurrent users", "late answers"],
)
def test_multi_round_program(tmp_path, changes, first_token_s):
    parameters = small(**changes)
    output = tmp_path / "theirs.csv"
    theirs, _ = recorded(
        lambda server: run_program(program_command(parameters, server.url, output), is_chat=parameters.is_chat),
        first_token_s,
    )
    ours, result = recorded(lambda server: run_ours(parameters, server), first_token_s)
    extra = assert_same_requests(theirs, ours, parameters.duration_s)
    assert_same_table(output.read_text(), result.csv, extra=extra)
    assert any("launched late" in note for note in result.notes) == (first_token_s > 1)


def test_long_script_with_its_warm_up_and_two_rates(tmp_path):
    script = checkout() / "synthetic-multi-round-qa" / "long_input_short_output_run.sh"
    variables = {"NUM_USERS_WARMUP": "5", "NUM_USERS": "3", "NUM_ROUNDS": "3", "TEST_DURATION": "3", "ANSWER_LEN": "7"}
    theirs, _ = recorded(
        lambda server: run_program(["bash", script, "m", server.url, tmp_path / "key", "2.25", "4.07"], **variables),
    )
    parameters = replace(
        *(preset("lmbenchmark-long"),), users=3, rounds=3, answer_tokens=7, duration_s=3.0, warm_up_users=5
    )
    runs = [replace(parameters, qps=2.25), replace(parameters, qps=4.07, first_user_id=parameters.first_user_id + 5)]
    ours, results = recorded(lambda server: [run_ours(one, server) for one in runs])
    for one, result in zip(runs, results, strict=True):
        assert_same_table(Path(one.output_file(str(tmp_path / "key"))).read_text(), result.csv)
    # The script starts a process per run, so only bodies are compared.
    assert {user: sorted(body for _, body, _ in sent) for user, sent in ours.items()} == {
        user: sorted(body for _, body, _ in sent) for user, sent in theirs.items()
    }


def test_process_summary_reads_our_file(tmp_path):
    with OpenAIMock(Answer(tokens=3, first_ms=20.0)) as server:
        result = run_ours(small(duration_s=3.0), server)
    ours = tmp_path / "ours.csv"
    ours.write_text(result.csv)
    program = checkout() / "synthetic-multi-round-qa" / "multi-round-qa.py"
    shown = run_program(["python3", program, "--process-summary", ours])
    rows = list(csv.DictReader(result.csv.splitlines()))
    mean_ttft_s = sum(float(row["ttft"]) for row in rows) / len(rows)
    assert f"Average TTFT: \x1b[32m{mean_ttft_s:.4f}s" in shown
    assert "Processing speed" in shown


@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
def test_sharegpt_program(tmp_path, is_chat):
    transcripts = [{"input": f"Question {n}é\nanswer\nnext", "output_length": n + 1} for n in range(20)]
    run_file, output = tmp_path / "run.json", tmp_path / "theirs.csv"
    run_file.write_text(json.dumps([*transcripts, {"input": "without a length"}]))
    command = [
        *("python3", checkout() / "sharegpt" / "sharegpt-qa.py", "--qps", "6.5", "--model", "m"),
        *("--sharegpt-file", run_file, "--output", output, "--base-url"),
    ]
    theirs, _ = recorded(lambda server: run_program([*command, server.url], is_chat=is_chat), 0.4)
    parameters = ShareGptParameters(str(run_file), qps=6.5, is_chat=is_chat)
    ours, result = recorded(lambda server: run_ours(parameters, server), 0.4)
    assert len(theirs[None]) == 21
    times_s = {(path, body): at_s for path, body, at_s in ours[None]}
    assert times_s.keys() == {(path, body) for path, body, _ in theirs[None]}
    assert all(abs(times_s[path, body] - at_s) < SLACK_S for path, body, at_s in theirs[None])
    assert tuple(result.csv.splitlines()[0].split(",")) == SHAREGPT_COLUMNS
    assert_same_table(output.read_text(), result.csv)


def test_agentic_program(tmp_path):
    traces = [checkout() / "agentic" / "demo.jsonl", tmp_path / "second.jsonl"]
    rounds = [
        {"round_id": 0, "agent_id": [2], "output_tokens": [3], "input_from": [[]]},
        {
            "round_id": 1,
            "agent_id": [0, 2],
            "output_tokens": [4, 5],
            "input_from": [[[0, 2, "both"]], [[1, 0, "input"]]],
        },
    ]
    traces[1].write_text("\n".join(map(json.dumps, rounds)))
    output = tmp_path / "theirs.csv"
    command = [
        *("python3", checkout() / "agentic" / "agentic-qa.py", "--num-agents", 3, "--model", "m"),
        *("--user-request-interval", 0.65, "--new-user-interval", 0.45, "--trace-file", *traces),
        *("--output", output, "--base-url"),
    ]
    theirs, _ = recorded(lambda server: run_program([*command, server.url]))
    parameters = AgenticParameters(tuple(map(str, traces)), request_interval_s=0.65, new_user_interval_s=0.45)
    ours, result = recorded(lambda server: run_ours(parameters, server))
    assert {user: sorted(body for _, body, _ in sent) for user, sent in ours.items()} == {
        user: sorted(body for _, body, _ in sent) for user, sent in theirs.items()
    }
    for user, sent in theirs.items():
        times_s = {body: at_s for _, body, at_s in ours[user]}
        assert all(abs(times_s[body] - at_s) < TICK_S + SLACK_S for _, body, at_s in sent)
    kept = ("user_id", "round_id", "agentID", "prompt_tokens", "generation_tokens", "input", "output")
    their_rows, our_rows = (
        sorted([row[column] for column in kept] for row in csv.DictReader(text.splitlines()))
        for text in (output.read_text(), result.csv)
    )
    assert our_rows == their_rows
    assert result.csv.splitlines()[0] == output.read_text().splitlines()[0]


def cases():
    """All rates of two decimals of the long preset, and random parameters with late answers."""
    dice = random.Random(1)
    long = preset("lmbenchmark-long").scaled(0.0001)
    chosen = [(replace(long, qps=hundredths / 100), 100.0, 1.0) for hundredths in range(1, 400, 3)]
    chosen += [(replace(preset("lmbenchmark-short"), qps=qps), 40.0, 1.0) for qps in (0.7, 3.3, 15.0)]
    for _ in range(300):
        parameters = replace(
            long,
            users=dice.randint(1, 12),
            rounds=dice.randint(1, 6),
            system_words=dice.randint(0, 2),
            history_words=dice.randint(0, 3),
            qps=dice.choice([dice.uniform(0.05, 8.0), dice.randint(1, 800) / 100]),
            first_user_id=dice.randint(0, 50),
            strict_concurrent_users=dice.random() < 0.3,
        )
        chosen.append((parameters, dice.uniform(5.0, 60.0), dice.choice([0.0, 0.5, 3.0, 20.0])))
    return [
        {
            "parameters": asdict(parameters),
            "clock": {"duration_s": duration_s, "seed": position, "longest_answer_s": longest_s},
            "has_no_text": position % 7 == 0,
        }
        for position, (parameters, duration_s, longest_s) in enumerate(chosen)
    ]


def ours(case):
    schedule = MultiRoundSchedule(replace(preset("lmbenchmark-long"), **case["parameters"]))
    rows = {}

    def step(now):
        return [(launch.user, launch.messages[-1]["content"]) for launch in schedule.step(now)]

    def answered(user, now, text):
        of_user = rows.setdefault(user, [])
        times = (0, 0) if case["has_no_text"] else (now - START_S, 0.25)
        of_user.append(MeasuredAnswer(100 * user, len(of_user) + 1, *times, now - 1.0, now))
        schedule.answered(user, text)

    launches = simulate(step, answered, **case["clock"])
    return {
        "launches": [list(launch) for launch in launches],
        "csv": multi_round_csv([(user, rows.get(user, [])) for user in schedule.users]),
    }


def test_schedule_and_csv_equal_those_of_lmbenchmark():
    chosen = cases()
    oracle = Path(__file__).with_name("lmbenchmark_oracle.py")
    done = subprocess.run(
        [os.environ["KVBM_LMBENCHMARK_PYTHON"], str(oracle), os.environ["KVBM_LMBENCHMARK"]],
        input=json.dumps(chosen),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout)
    assert len(theirs) == len(chosen) == 436
    assert sum(len(one["launches"]) for one in theirs) > 10_000
    for case, expected in zip(chosen, theirs, strict=True):
        assert ours(case) == expected, case
