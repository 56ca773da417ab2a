"""Files in the formats of other tools: compared key by key, and value by value, with what the tools wrote themselves.

The raw timings of a tool's own file become our records; the aggregates that our functions compute from them must be the
aggregates in that file. tests/bench/data/README.md says how the files were made.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from client_rig import planned

from kvbm_cli.bench import command
from kvbm_cli.bench.exports.bench_serve import bench_serve_result
from kvbm_cli.bench.exports.lmbenchmark import MULTI_ROUND_COLUMNS
from kvbm_cli.bench.result.arm_result import ArmResult
from kvbm_cli.bench.result.directory import BenchDirectory
from kvbm_cli.bench.result.results import CellResult, Measurement, RequestRecord, Results
from kvbm_cli.bench.workload.plan import Launches, Plan

DATA = Path(__file__).parent / "data"
RUN = "chat-x1.2.1.kvbm"


CELL = {"name": "chat-x1.2", "pressure": 1.2, "g1_tokens": 1024, "workload": {"name": "chat", "slo": "ttft:500,tpot:5"}}


def plan(concurrency: int | None = None, model: str = "mock") -> Plan:
    return Plan(
        (planned(fields={"model": model}),),
        Launches(concurrency=concurrency, burstiness=0.5),
        60.0,
        100,
        100,
        planned(),
    )


def record(**changes: Any) -> RequestRecord:
    """Of the run RUN, unless `changes` say otherwise."""
    place = {"run": RUN, "arm": "kvbm", "cell": "chat-x1.2", "pair": 1, "turn": 1, "phase": "steady"}
    return RequestRecord(**(place | changes))


def measured(records: list[RequestRecord], duration_s: float, concurrency: int | None = None) -> ArmResult:
    facts = {"started_unix_s": 1795397950.0, "duration_s": duration_s}
    run = Measurement(RUN, "kvbm", 1, facts, tuple(records))
    cell = CellResult(CELL | {"workload": {"name": "chat", "slo": "ttft:100"}}, plan(concurrency), "digest", (run,))
    return ArmResult("kvbm", cell, (run,))


def timings(launch: float, intended: float, ttft: float, latency: float, gaps: list[float]) -> dict[str, Any]:
    stamps = {"first_token_ms": launch + ttft, "first_text_ms": launch + ttft, "last_token_ms": launch + latency}
    return {"launched_ms": launch, "intended_ms": intended, "token_gaps_ms": gaps, "first_chunk_tokens": 1, **stamps}


def vllm_file() -> dict[str, Any]:
    result: dict[str, Any] = json.loads((DATA / "vllm-bench-0.32.json").read_text())
    return result


def from_vllm(file: dict[str, Any]) -> ArmResult:
    records = []
    for index in range(file["num_prompts"]):
        launch = (file["start_times"][index] - file["start_times"][0]) * 1e3
        gaps = [gap * 1e3 for gap in file["itls"][index]]
        queue, ttft, latency = (file[name][index] * 1e3 for name in ("queue_times", "ttfts", "latencies"))
        tokens = {"prompt_tokens": file["input_lens"][index], "output_tokens": file["output_lens"][index]}
        times = timings(launch, launch - queue, ttft, latency, gaps)
        records.append(record(**times, **tokens, index=index, session=index, error=file["errors"][index] or None))
    return measured(records, file["duration"], file["max_concurrency"])


# The configuration of vLLM's client, not a result.
VLLM_CONFIGURATION = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id"),
    *("request_rate", "burstiness", "workload", "pressure"),
}


def test_every_key_of_vllm_is_in_our_file_in_the_same_type():
    theirs, ours = vllm_file(), bench_serve_result(from_vllm(vllm_file()))
    metadata = {"workload", "pressure"}  # free keys that the command line named
    assert [key for key in theirs if key not in ours] == sorted(metadata, reverse=True)
    assert [key for key in ours if key not in theirs and not key.startswith("kvbm_")] == []
    different = {key for key in theirs.keys() - metadata if type(theirs[key]) is not type(ours[key])}
    assert different == {"label", "request_rate"}
    assert (theirs["label"], ours["burstiness"], ours["request_rate"]) == (None, 0.5, "inf")
    assert all(not isinstance(ours[key], dict) for key in ours)  # vLLM's plots make a table of the keys


def test_aggregates_are_those_that_vllm_computes_from_the_same_timings():
    theirs, ours = vllm_file(), bench_serve_result(from_vllm(vllm_file()))
    compared = theirs.keys() - VLLM_CONFIGURATION - {"generated_texts", "start_times"}
    assert len(compared) > 60
    for key in sorted(compared):
        if isinstance(theirs[key], list) and theirs[key] and isinstance(theirs[key][0], list):
            flat = [[value for part in one[key] for value in part] for one in (theirs, ours)]
            assert flat[1] == pytest.approx(flat[0]), key
        else:
            assert ours[key] == (theirs[key] if isinstance(theirs[key], str) else pytest.approx(theirs[key])), key
    starts = [start - theirs["start_times"][0] for start in theirs["start_times"]]
    assert ours["start_times"] == pytest.approx(starts, abs=1e-6)


def our_record(run: str, index: int, **changes: Any) -> RequestRecord:
    launch = 1000.0 * index + 2
    times = timings(launch, launch - 2, 50.0, 60.0, [6.0, 4.0])
    place = {"run": run, "arm": run.rsplit(".", 1)[1], "index": index, "session": index % 2, "turn": index // 2 + 1}
    tokens = {"prompt_tokens": 100, "output_tokens": 3, "cached_tokens": 64, "token_ids": [1, 2, 3]}
    tiers = {"g1_tokens": 16, "g2_tokens": 48, "g3_tokens": 0}
    return record(**(times | place | tokens | tiers | {"end_ms": launch + 61, "http_status": 200} | changes))


NO_TIMES = {"first_token_ms": None, "first_text_ms": None, "last_token_ms": None, "first_chunk_tokens": 0}
FAILED = {"error": "HTTP 503", "http_status": 503, "token_gaps_ms": [], "output_tokens": None, **NO_TIMES}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_requests(directory: Path, records: list[RequestRecord]) -> None:
    write_lines(directory / "requests.jsonl", [record.to_json() for record in records])


def run_directory(path: Path) -> Path:
    """Two pairs of two arms, and a third pair that did not end."""
    runs = [
        {"run": f"chat-x1.2.{pair}.{arm}", "arm": arm, "cell": "chat-x1.2", "pair": pair, "duration_s": 4.0}
        | {"started_unix_s": 1795397950.0 + 100 * pair, "client": {}, "server": {}}
        for pair in (2, 1)
        for arm in ("baseline", "kvbm")
    ]
    records = [our_record(str(run["run"]), index) for run in runs for index in range(4)]
    records += [our_record("chat-x1.2.1.kvbm", 4, **FAILED), our_record("chat-x1.2.3.kvbm", 0)]
    write_lines(path / "runs.jsonl", runs)
    write_requests(path, records)
    (path / "plan.json").write_text(json.dumps({"format": 2, "arms": {}, "cells": [CELL], "seed": 7}))
    folder = path / "cells/chat-x1.2"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plan(model="/data/models/small").to_json()))
    return path


def write_exports(directory: Path) -> list[Path]:
    return command.write_exports(directory, Results.read(BenchDirectory.open(directory)))


FOLDER = "exports/kvbm/chat-x1.2"


def exported(path: Path, *records: RequestRecord) -> dict[str, Any]:
    """The file of vLLM, of the run directory or of these requests in it."""
    directory = run_directory(path)
    if records:
        write_requests(directory, list(records))
    write_exports(directory)
    found: dict[str, Any] = json.loads((directory / FOLDER / "vllm-bench.json").read_text())
    return found


def test_exports_are_written_per_arm_and_cell(tmp_path):
    directory = run_directory(tmp_path)
    files = write_exports(directory)
    assert sorted(str(file.relative_to(directory)) for file in files) == sorted(
        str(file.relative_to(directory)) for file in directory.rglob("exports/**/*") if file.is_file()
    )
    folder = directory / FOLDER
    assert sorted(file.name for file in folder.iterdir()) == [
        *("chat-x1.2.1.kvbm_output_1.csv", "chat-x1.2.2.kvbm_output_1.csv", "vllm-bench.json"),
    ]
    assert "/data/models" not in "".join(file.read_text() for file in files)


def test_csv_begins_with_the_columns_of_lmbenchmark(tmp_path):
    write_exports(run_directory(tmp_path))
    file = tmp_path / FOLDER / "chat-x1.2.1.kvbm_output_1.csv"
    head, *rows = (line.split(",") for line in file.read_text().splitlines())
    assert tuple(head[:8]) == MULTI_ROUND_COLUMNS
    assert len(rows) == 4  # the failed request has no row
    first = dict(zip(head, rows[0], strict=True))
    assert [first[name] for name in ("prompt_tokens", "generation_tokens", "user_id", "question_id")] == [
        *("100", "3", "0", "1")
    ]
    assert float(first["ttft"]) == pytest.approx(0.050)
    assert float(first["generation_time"]) == pytest.approx(0.011)
    assert float(first["launch_time"]) == pytest.approx(1795398050.002, abs=1e-6)
    assert float(first["finish_time"]) - float(first["launch_time"]) == pytest.approx(0.061, abs=1e-6)
    assert (first["g2_tokens"], first["itl_p50"], first["tpot"]) == ("48", "0.005", "0.005")
    assert [row[5] for row in rows] == ["1", "2", "1", "2"]


@pytest.mark.soak
@pytest.mark.skipif("KVBM_LMBENCHMARK" not in os.environ, reason="KVBM_LMBENCHMARK is not set")
def test_the_program_of_lmbenchmark_reads_the_csv(tmp_path):
    """With KVBM_LMBENCHMARK_PYTHON, an interpreter with `openai` and `pandas`."""
    write_exports(run_directory(tmp_path))
    program = Path(os.environ["KVBM_LMBENCHMARK"]) / "synthetic-multi-round-qa/multi-round-qa.py"
    file = tmp_path / FOLDER / "chat-x1.2.1.kvbm_output_1.csv"
    command = [os.environ["KVBM_LMBENCHMARK_PYTHON"], program, "--process-summary", file]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "Average TTFT: \x1b[32m0.0500s" in done.stdout


ONE, ANOTHER = our_record(RUN, 0), our_record(RUN, 2)
ONE_TOKEN = our_record(RUN, 0, token_gaps_ms=[], output_tokens=1, last_token_ms=52.0)
UNKNOWN = our_record(RUN, 0, prompt_tokens=None, output_tokens=None, cached_tokens=None, g1_tokens=None)
# The engine ended before the requests that it waited for.
NEVER_DUE = our_record(RUN, 1, **FAILED, launched_ms=None, intended_ms=None, end_ms=900.0)
COUNTED = {"total_input_tokens": None, "total_token_throughput": None, "total_output_tokens": 3}  # by the chunks
POOLED = {
    "completed": 8,
    "failed": 1,
    "duration": 8.0,
    "request_throughput": 1.0,
    "request_goodput": 1.0,
    "total_input_tokens": 8 * 100,
    "mean_client_queue_time_ms": 2.0,
    "max_concurrent_requests": 1,
    "model_id": "small",
    "kvbm_pressure": 1.2,
    "kvbm_arm": "kvbm",
    "request_rate": 1.0,
    "kvbm_prompt_tokens_g2": 8 * 48,
    "kvbm_g1_capacity_tokens": 1024,
}
CASES: dict[str, tuple[list[RequestRecord], dict[str, Any]]] = {
    "the pairs of the run directory are pooled": ([], POOLED),
    "a run without failures": ([ONE, ANOTHER], {"failed": 0}),
    "an arm without a successful request has a file": (
        [our_record(RUN, 0, **FAILED)],
        {"completed": 0, "failed": 1, "mean_ttft_ms": 0.0},
    ),
    "a request that was never due is a failed one": ([ONE, NEVER_DUE], {"completed": 1, "failed": 1}),
    "an answer of one token meets a limit of TPOT": ([ONE_TOKEN], {"request_goodput": 1 / 8.0}),
    "unknown token counts stay unknown": ([UNKNOWN], {**COUNTED, "kvbm_prompt_tokens_g1": None}),
    "the first token of reasoning counts": ([our_record(RUN, 0, first_text_ms=56.0)], {"mean_ttft_ms": 50.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_files(tmp_path, name):
    """Values of the file. A key that is missing has None, and no records are those of the run directory."""
    records, expected = CASES[name]
    found = exported(tmp_path, *records)
    if not records:
        runs = Results.read(BenchDirectory.open(tmp_path)).cells[0].of_arm("kvbm")
        records = sorted((one for run in runs for one in run.records), key=lambda one: (one.run, one.index))
        assert found["start_times"][5] == pytest.approx(100.002)
    assert {key: found.get(key) for key in expected} == pytest.approx(expected)
    assert found["errors"] == [record.error or "" for record in records]


def test_every_key_of_ours_is_documented(tmp_path):
    page = (Path(__file__).parents[2] / "docs/reference/bench-files.md").read_text()
    ours = [key for key in exported(tmp_path) if key.startswith("kvbm_")]
    head = (tmp_path / FOLDER / "chat-x1.2.1.kvbm_output_1.csv").read_text().splitlines()[0].split(",")
    assert sorted(name for name in {*ours, *head} if f"`{name}" not in page) == []
