"""Writes the files of all formats below exports/ of a run directory."""

from __future__ import annotations

import json
from pathlib import Path

from kvbm.errors import EnvironmentProblem, reason_of
from kvbm_cli.bench.formats.aiperf import aiperf_records, aiperf_summary
from kvbm_cli.bench.formats.lmbenchmark_csv import file_name, lmbenchmark_csv
from kvbm_cli.bench.formats.measured import Measured, read
from kvbm_cli.bench.formats.vllm_bench import vllm_bench_result
from kvbm_cli.system.filesystem import write_atomically


def write_exports(directory: Path) -> list[Path]:
    """Write exports/<arm>/<cell>/ for all arms and cells with a completed run; return the files.

    Reads runs.jsonl and requests.jsonl, and if they exist plan.json (`model`, `seed`) and summary.json (pressure and
    workload of the cells). UsageError if a line is malformed, EnvironmentProblem if a file cannot be read or written.
    """
    return [path for measured in read(directory) for path in _write(directory / "exports", measured)]


def _write(exports: Path, measured: Measured) -> list[Path]:
    folder = exports / measured.arm / measured.cell
    texts = {
        "vllm-bench.json": json.dumps(vllm_bench_result(measured), allow_nan=False) + "\n",
        "profile_export_aiperf.json": json.dumps(aiperf_summary(measured), indent=2, allow_nan=False) + "\n",
        "profile_export.jsonl": "".join(
            json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in aiperf_records(measured)
        ),
        **{file_name(measured, run): lmbenchmark_csv(measured, run) for run in measured.runs},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomically(folder / name, text)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write to {folder}: {reason_of(error)}") from None
    return [folder / name for name in texts]
