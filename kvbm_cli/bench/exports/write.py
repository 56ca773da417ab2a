"""Writes the files of all formats below exports/ of a run directory."""

from __future__ import annotations

import json
from pathlib import Path

from kvbm_cli.bench.exports.aiperf import aiperf_records, aiperf_summary
from kvbm_cli.bench.exports.lmbenchmark_csv import file_name, lmbenchmark_csv
from kvbm_cli.bench.exports.vllm_bench import vllm_bench_result
from kvbm_cli.bench.result.directory import cannot_write
from kvbm_cli.bench.result.measured import Measured, measured_in
from kvbm_cli.bench.result.results import Results
from kvbm_cli.system.filesystem import write_atomically


def write_exports(directory: Path, results: Results) -> list[Path]:
    """Write exports/<arm>/<cell>/ for all arms and cells with a run that has ended; return the files.

    `directory` is the directory of the experiment that `results` were read from. EnvironmentProblem if a file cannot be
    written.
    """
    return [path for measured in measured_in(results) for path in _write(directory / "exports", measured)]


def _write(exports: Path, measured: Measured) -> list[Path]:
    folder = exports / measured.arm / measured.cell.name
    texts = {
        "vllm-bench.json": json.dumps(vllm_bench_result(measured), allow_nan=False) + "\n",
        "profile_export_aiperf.json": json.dumps(aiperf_summary(measured), indent=2, allow_nan=False) + "\n",
        "profile_export.jsonl": "".join(
            json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in aiperf_records(measured)
        ),
        **_csv_files(measured),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_atomically(folder / name, text)
    except OSError as error:
        raise cannot_write(folder, error) from None
    return [folder / name for name in texts]


def _csv_files(measured: Measured) -> dict[str, str]:
    """Return the CSV files. A faithful run of LMBenchmark has a CSV of its own, equal to LMBenchmark's to the byte."""
    workload = measured.cell.definition["workload"]
    if workload.get("kind") == "lmbenchmark" and workload.get("mode") == "faithful":
        return {}
    return {file_name(measured, run): lmbenchmark_csv(measured, run) for run in measured.runs}
