"""The script of a workload of any kind."""

from __future__ import annotations

from pathlib import Path

from kvbm_cli.bench.lmbenchmark.of_workload import strict_script
from kvbm_cli.bench.trace.findings import findings_of
from kvbm_cli.bench.trace.to_script import trace_script
from kvbm_cli.bench.trace.trace_request import TraceFormat, Turns
from kvbm_cli.bench.workload.build import build_script
from kvbm_cli.bench.workload.content import Writer
from kvbm_cli.bench.workload.script import Script
from kvbm_cli.workload.schema import Lmbenchmark, Trace, Workload


def warnings_of(workload: Workload) -> list[str]:
    """Return what the files of the workload make doubtful, read before an engine starts. Errors as in `script_of`."""
    if not isinstance(workload, Trace):
        return []
    return findings_of(Path(workload.file), _form(workload), request_limit=workload.requests)


def script_of(workload: Workload, writer: Writer, *, seed: int) -> Script:
    """UsageError or ProfileError for a file of the workload that is missing or wrong."""
    if isinstance(workload, Trace):
        return trace_script(
            Path(workload.file),
            _form(workload),
            writer,
            seed=seed,
            length_scale=workload.length_scale,
            request_limit=workload.requests,
        )
    if isinstance(workload, Lmbenchmark):
        return strict_script(workload, writer, seed=seed)
    return build_script(workload, writer, seed=seed)


def _form(workload: Trace) -> TraceFormat:
    return TraceFormat(workload.block_tokens, workload.time_scale, workload.columns, Turns(workload.turns))
