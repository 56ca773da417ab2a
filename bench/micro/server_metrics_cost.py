"""CPU time of one sample of server metrics: `python bench/micro/server_metrics_cost.py [PID]`.

Serves the saved page of vLLM with kvbm, filled up with buckets to the length of a real page, and a page of 10,000
lines. With PID, each sample also reads /proc of that process and its descendants.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/bench")]

from metrics_server import MetricsServerForTests  # noqa: E402

from kvbm_cli.bench.metrics.sampler import Sampler  # noqa: E402

PAGE = (ROOT / "tests/bench/data/vllm-kvbm-end.txt").read_text()
BUCKET = 'vllm:e2e_request_latency_seconds_bucket{{engine="0",le="{}",model_name="m"}} 1.0\n'
DURATION_S = 10.0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(line_count: int, pid: int | None) -> float:
    """Returns milliseconds per sample."""
    page = PAGE + "".join(BUCKET.format(n) for n in range(line_count - len(PAGE.splitlines())))
    with tempfile.TemporaryDirectory() as directory, MetricsServerForTests(page) as server:
        path = Path(directory, "samples")
        with Sampler.start(path, base_url=server.url, pid=pid, interval_s=0.05) as sampler:
            before, samples = cpu_s(sampler.pid), len(server.requests)
            time.sleep(DURATION_S)
            return 1e3 * (cpu_s(sampler.pid) - before) / (len(server.requests) - samples)


if __name__ == "__main__":
    root = int(sys.argv[1]) if len(sys.argv) > 1 else None
    for count in (763, 10_000):
        print(f"{count} lines: {measure(count, root):.2f} ms of CPU time per sample")
