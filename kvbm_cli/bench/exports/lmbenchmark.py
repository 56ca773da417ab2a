"""CSV files that LMBenchmark's scripts read, from the records of a run."""

from __future__ import annotations

import csv
import io
from collections import Counter
from typing import Any

from kvbm_cli.bench.result.arm_result import ArmResult, launch_ms
from kvbm_cli.bench.result.results import Measurement, RequestRecord, percentile

MULTI_ROUND_COLUMNS = (
    *("prompt_tokens", "generation_tokens", "ttft", "generation_time"),
    *("user_id", "question_id", "launch_time", "finish_time"),
)
TIER_COLUMNS = ("cached_tokens", "g1_tokens", "g2_tokens", "g3_tokens", "g4_tokens", "computed_tokens")
OUR_COLUMNS = ("request_id", "status", "turn", "phase", "intended_launch", *TIER_COLUMNS, "itl_p50", "tpot")


def csv_files_of(result: ArmResult) -> dict[str, str]:
    """Return name and text of a CSV file per run of our own schedule: LMBenchmark's eight columns first, then ours.

    `multi-round-qa.py --process-summary FILE` reads it. A row is a request that succeeded: LMBenchmark has no column
    for failures, and its means would count them. `ttft` runs from the launch to the first text, `generation_time` from
    there to the end of the stream. `launch_time` and `finish_time` are Unix seconds. LMBenchmark's `question_id` counts
    the recorded rows of a user, not the questions; so does this file, and `turn` has the number of the question. A
    number that the server did not report is empty.

    A file has one run, because times of several on one axis would make LMBenchmark's throughput wrong. Its name is
    KEY_output_Q.csv: the key is the name of the run, Q the offered requests per second.
    """
    return {f"{run.run}_output_{result.offered_rate or 0:.4g}.csv": _of_run(result, run) for run in result.runs}


def _of_run(result: ArmResult, run: Measurement) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*MULTI_ROUND_COLUMNS, *OUR_COLUMNS))
    seen: Counter[int] = Counter()
    for record in sorted(run.records, key=lambda record: (record.session, record.end_ms or 0.0)):
        if record.is_ok:
            seen[record.session] += 1
            writer.writerow(_row(result, record, seen[record.session]))
    return text.getvalue()


def _row(result: ArmResult, record: RequestRecord, question: int) -> tuple[Any, ...]:
    launch, text, end = launch_ms(record), record.first_text_ms, record.end_ms
    assert end is not None, "a request that succeeded has ended"
    return (
        record.prompt_tokens,
        record.answer_token_count,
        0.0 if text is None else (text - launch) / 1e3,
        0.0 if text is None else (end - text) / 1e3,
        record.session,
        question,
        result.unix_s(record, launch),
        result.unix_s(record, end),
        record.index,
        "ok",
        record.turn,
        record.phase,
        None if record.intended_ms is None else result.unix_s(record, record.intended_ms),
        *(getattr(record, name) for name in TIER_COLUMNS),
        _seconds(percentile(record.token_gaps_ms, 50) if record.token_gaps_ms else None),
        _seconds(record.tpot_ms),
    )


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1e3
