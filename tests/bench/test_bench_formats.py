"""Files in the formats of other tools: compared key by key, and value by value, with what the tools wrote themselves.

The raw timings of a tool's own file become our records; the aggregates that our functions compute from them must be the
aggregates in that file. tests/bench/data/README.md says how the files were made.
"""

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from client_rig import planned

from kvbm_cli.bench import command
from kvbm_cli.bench.exports.aiperf import aiperf_records, aiperf_summary
from kvbm_cli.bench.exports.vllm_bench import vllm_bench_result
from kvbm_cli.bench.lmbenchmark.exchange import MULTI_ROUND_COLUMNS
from kvbm_cli.bench.result.arm_result import ArmResult, Slo
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
    cell = CellResult(CELL, plan(concurrency), "digest", (run,))
    return ArmResult("kvbm", cell, (run,), 1, Slo.parse("ttft:100"))


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
    theirs, ours = vllm_file(), vllm_bench_result(from_vllm(vllm_file()))
    metadata = {"workload", "pressure"}  # free keys that the command line named
    assert [key for key in theirs if key not in ours] == sorted(metadata, reverse=True)
    assert [key for key in ours if key not in theirs and not key.startswith("kvbm_")] == []
    different = {key for key in theirs.keys() - metadata if type(theirs[key]) is not type(ours[key])}
    assert different == {"label", "request_rate"}
    assert (theirs["label"], ours["burstiness"], ours["request_rate"]) == (None, 0.5, "inf")
    assert all(not isinstance(ours[key], dict) for key in ours)  # vLLM's plots make a table of the keys


def test_aggregates_are_those_that_vllm_computes_from_the_same_timings():
    theirs, ours = vllm_file(), vllm_bench_result(from_vllm(vllm_file()))
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


def test_percentiles_of_the_vllm_file_can_be_chosen():
    result = vllm_bench_result(from_vllm(vllm_file()), percentiles=(25.0, 99.9))
    assert {key for key in result if key.startswith("p") and key.endswith("_ttft_ms")} == {
        "p25_ttft_ms",
        "p99.9_ttft_ms",
    }


def aiperf_file() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = (DATA / "aiperf-0.13.0-records.jsonl").read_text().splitlines()
    return json.loads((DATA / "aiperf-0.13.0-summary.json").read_text()), [json.loads(line) for line in lines]


def from_aiperf() -> ArmResult:
    summary, lines = aiperf_file()
    start, end = (datetime.fromisoformat(summary[name]) for name in ("start_time", "end_time"))
    origin = min(line["metadata"]["credit_issued_ns"] for line in lines)
    records = []
    for index, line in enumerate(lines):
        metadata, metrics = line["metadata"], {name: one["value"] for name, one in line["metrics"].items()}
        launch, intended, ended = (
            (metadata[name] - origin) / 1e6 for name in ("request_start_ns", "credit_issued_ns", "request_end_ns")
        )
        error = line.get("error")
        times = {"launched_ms": launch, "intended_ms": intended}
        if not error:
            ttft, latency = metrics["time_to_first_token"], metrics["request_latency"]
            times = timings(launch, intended, ttft, latency, metrics.get("inter_chunk_latency", []))
        tokens = {
            "prompt_tokens": metrics.get("usage_prompt_tokens"),
            "output_tokens": metrics.get("usage_completion_tokens"),
            "cached_tokens": metrics.get("usage_prompt_cache_read_tokens"),
        }
        failure = {"error": error["message"], "http_status": error["code"]} if error else {"http_status": 200}
        place = {"index": index, "session": metadata["session_num"], "turn": metadata["turn_index"] + 1}
        records.append(record(**times, **tokens, **failure, **place, end_ms=ended))
    return measured(records, (end - start).total_seconds())


# What our records do not have: stamps of the connection, the requested length, the reason of a refusal; and estimates
# of load over time, for which aiperf spreads the tokens of a request evenly over its time.
NOT_WRITTEN = ("http_req_", "osl_mismatch_", "context_overflow_count", "effective_", "active_", "tokens_in_flight")


def is_written(name: str) -> bool:
    return name == "effective_latency" or not name.startswith(NOT_WRITTEN)


def test_every_key_of_aiperf_is_in_our_summary_in_the_same_type_and_unit():
    theirs, ours = aiperf_file()[0], aiperf_summary(from_aiperf())
    for key in filter(is_written, theirs):
        assert type(ours[key]) is type(theirs[key]), key
        if isinstance(theirs[key], dict) and "unit" in theirs[key]:
            assert ours[key]["unit"] == theirs[key]["unit"], key
            assert ours[key].keys() == theirs[key].keys(), key
    assert {key for key in ours if key not in theirs and not key.startswith("kvbm_")} == {"metadata"}
    assert ours["run_info"].keys() == theirs["run_info"].keys()
    assert ours["error_summary"][0].keys() == theirs["error_summary"][0].keys()
    assert ours["error_summary"][0]["error_details"]["type"] == "Service Unavailable"  # the mock's reason is "x"


def test_metrics_are_those_that_aiperf_computes_from_the_same_timings():
    theirs, ours = aiperf_file()[0], aiperf_summary(from_aiperf())
    metrics = [key for key in filter(is_written, theirs) if isinstance(theirs[key], dict) and "unit" in theirs[key]]
    assert len(metrics) > 40
    for key in metrics:
        for statistic, value in theirs[key].items():
            # For these two, aiperf keeps Unix time in ns as float64, whose resolution is 256 ns.
            unsure_ms = 12 * 256e-6 if key in ("credit_to_start_latency", "effective_latency") else 0.0
            expected = value if statistic == "unit" else pytest.approx(value, rel=1e-6, abs=unsure_ms)
            assert ours[key][statistic] == expected, (key, statistic)


def test_lines_have_the_fields_of_aiperf():
    theirs, ours = aiperf_file()[1], [json.loads(json.dumps(line)) for line in aiperf_records(from_aiperf())]
    for their, our in zip(theirs, ours, strict=True):
        metadata = their["metadata"].keys() - {"request_ack_ns"}  # the time of the response's head is not recorded
        assert metadata <= our["metadata"].keys()
        assert all(type(our["metadata"][name]) is type(their["metadata"][name]) for name in metadata)
        assert our.keys() == their.keys()
        metrics = set(filter(is_written, their["metrics"]))
        assert {name for name in our["metrics"] if not name.startswith("kvbm_")} == metrics
        for name in metrics:
            assert our["metrics"][name]["unit"] == their["metrics"][name]["unit"]
            assert our["metrics"][name]["value"] == pytest.approx(their["metrics"][name]["value"], rel=1e-6), name
        if "error" in their:
            assert our["error"].keys() == their["error"].keys()


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


def exported(path: Path, *records: RequestRecord) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """The file of vLLM, and summary and lines of aiperf, of the run directory or of these requests in it."""
    directory = run_directory(path)
    if records:
        write_requests(directory, list(records))
    write_exports(directory)
    vllm, summary, lines = (
        (directory / FOLDER / name).read_text()
        for name in ("vllm-bench.json", "profile_export_aiperf.json", "profile_export.jsonl")
    )
    return json.loads(vllm), json.loads(summary), [json.loads(line) for line in lines.splitlines()]


def test_exports_are_written_per_arm_and_cell(tmp_path):
    directory = run_directory(tmp_path)
    files = write_exports(directory)
    assert sorted(str(file.relative_to(directory)) for file in files) == sorted(
        str(file.relative_to(directory)) for file in directory.rglob("exports/**/*") if file.is_file()
    )
    folder = directory / FOLDER
    assert sorted(file.name for file in folder.iterdir()) == [
        *("chat-x1.2.1.kvbm_output_1.csv", "chat-x1.2.2.kvbm_output_1.csv", "profile_export.jsonl"),
        *("profile_export_aiperf.json", "vllm-bench.json"),
    ]
    assert "/data/models" not in "".join(file.read_text() for file in files)


def test_runs_of_a_cell_are_pooled_in_the_vllm_file(tmp_path):
    result, _, _ = exported(tmp_path)
    assert (result["completed"], result["failed"], result["duration"]) == (8, 1, 8.0)
    assert result["request_throughput"] == 1.0
    assert result["total_input_tokens"] == 8 * 100
    assert result["errors"] == ["", "", "", "", "HTTP 503", "", "", "", ""]
    assert result["request_goodput"] == 1.0
    assert result["mean_client_queue_time_ms"] == pytest.approx(2.0)
    assert result["start_times"][5] == pytest.approx(100.002)
    assert result["max_concurrent_requests"] == 1
    assert (result["model_id"], result["kvbm_pressure"], result["kvbm_arm"]) == ("small", 1.2, "kvbm")
    assert (result["kvbm_prompt_tokens_g2"], result["kvbm_g1_capacity_tokens"]) == (8 * 48, 1024)
    assert result["kvbm_phases"] == ["steady"] * 9
    assert result["request_rate"] == pytest.approx(1.0)


def test_tokens_by_tier_are_metrics_in_the_aiperf_files(tmp_path):
    _, summary, lines = exported(tmp_path)
    assert summary["kvbm_g2_tokens"]["sum"] == 8 * 48
    assert summary["good_request_fraction"]["avg"] == pytest.approx(8 / 9)
    assert summary["metadata"]["variation_label"] == "chat-x1.2/kvbm"
    assert lines[0]["metrics"]["kvbm_g1_tokens"] == {"value": 16, "unit": "tokens"}
    assert lines[5]["metadata"]["request_start_ns"] - lines[0]["metadata"]["request_start_ns"] == 100_000_000_000


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


def test_unknown_token_counts_stay_unknown(tmp_path):
    unknown = {"prompt_tokens": None, "output_tokens": None, "cached_tokens": None, "g1_tokens": None}
    records = [our_record(RUN, index, **unknown) for index in range(2)]
    one = measured(records, 2.0)
    result = vllm_bench_result(one)
    assert (result["total_input_tokens"], result["total_token_throughput"]) == (None, None)
    assert result["total_output_tokens"] == 6  # counted by the chunks
    assert "kvbm_prompt_tokens_g1" not in result
    assert "total_isl" not in aiperf_summary(one)


def test_an_arm_without_a_successful_request_has_files(tmp_path):
    result, summary, _ = exported(tmp_path, our_record("chat-x1.2.1.kvbm", 0, **FAILED))
    assert (result["completed"], result["failed"], result["mean_ttft_ms"]) == (0, 1, 0.0)
    assert summary["request_error_rate"]["avg"] == 100.0
    assert all(math.isfinite(value) for value in summary["effective_latency"].values() if isinstance(value, float))


def test_a_request_that_was_never_due_is_a_failed_one(tmp_path):
    """The engine ended before the requests that it waited for."""
    lost = our_record("chat-x1.2.1.kvbm", 1, **FAILED, launched_ms=None, intended_ms=None, end_ms=900.0)
    result, summary, lines = exported(tmp_path, our_record("chat-x1.2.1.kvbm", 0), lost)
    assert (result["completed"], result["failed"], result["queue_times"]) == (1, 1, [0.002, 0.0])
    assert summary["effective_latency"]["count"] == 1
    assert "credit_issued_ns" not in lines[1]["metadata"]


def test_an_answer_of_one_token_meets_a_limit_of_tpot_in_vllms_file_only(tmp_path):
    one = {"token_gaps_ms": [], "output_tokens": 1, "last_token_ms": 52.0}
    result, summary, _ = exported(tmp_path, our_record("chat-x1.2.1.kvbm", 0, **one))
    assert result["request_goodput"] == 1 / 8.0
    assert summary["good_request_count"]["avg"] == 0.0


def test_answers_with_reasoning_have_no_output_token_count():
    one = measured([our_record(RUN, 0, first_text_ms=56.0)], 1.0)
    summary = aiperf_summary(one)
    assert "output_token_count" not in summary
    assert summary["time_to_first_output_token"]["avg"] - summary["time_to_first_token"]["avg"] == pytest.approx(4.0)


def test_a_run_without_failures_has_no_metrics_of_failures():
    summary = aiperf_summary(measured([our_record(RUN, 0)], 1.0))
    assert "error_request_count" not in summary
    assert [name for name in summary if name.startswith("adj_")] == []
    assert summary["request_error_rate"]["avg"] == 0.0
    assert summary["error_summary"] == []


def test_turns_count_from_zero_in_aiperfs_lines():
    lines = list(aiperf_records(measured([our_record(RUN, 0), our_record(RUN, 2)], 1.0)))
    assert [line["metadata"]["turn_index"] for line in lines] == [0, 1]


def test_a_faithful_run_of_lmbenchmark_keeps_its_own_csv(tmp_path):
    directory = run_directory(tmp_path)
    workload = {"name": "chat", "kind": "lmbenchmark", "mode": "faithful"}
    cell = CELL | {"workload": workload}
    (directory / "plan.json").write_text(json.dumps({"format": 2, "arms": {}, "cells": [cell]}))
    assert [file for file in write_exports(directory) if file.suffix == ".csv"] == []


def test_every_key_of_ours_and_every_omission_is_documented(tmp_path):
    page = (Path(__file__).parents[2] / "docs/reference/bench-files.md").read_text()
    result, summary, [line, *_] = exported(tmp_path)
    ours = [key for key in (*result, *summary, *summary["metadata"], *line["metadata"]) if key.startswith("kvbm_")]
    head = (tmp_path / FOLDER / "chat-x1.2.1.kvbm_output_1.csv").read_text().splitlines()[0].split(",")
    named = {*ours, *head, *NOT_WRITTEN, "request_ack_ns", "input_config"}
    assert sorted(name for name in named if f"`{name}" not in page) == []
