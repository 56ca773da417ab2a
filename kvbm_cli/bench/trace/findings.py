"""What must be known of the trace of a workload before an engine starts. A wrong line ends the reading here."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from kvbm_cli.bench.trace.analysis import rate_doubt
from kvbm_cli.bench.trace.reader import TraceReader
from kvbm_cli.bench.trace.trace_request import TraceFormat


def findings_of(path: Path, form: TraceFormat, *, request_limit: int | None) -> list[str]:
    """Sentences about the first `request_limit` requests. ProfileError for a wrong line."""
    reader = TraceReader(path, form)
    times, count = [], 0
    for request in islice(reader, request_limit):
        count += 1
        if request.timestamp_ms is not None:
            times.append(request.timestamp_ms)
    doubt = rate_doubt(count, (max(times) - min(times)) / 1000 if times else None)
    found = [*reader.skips(), *([f"{doubt} `time_scale: 1000` in the workload is for seconds"] if doubt else [])]
    return [f"{path.name}: {one}" for one in found]
