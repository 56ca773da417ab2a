"""The script of a workload of any kind."""

from __future__ import annotations

from kvbm_cli.bench.workload.build import build_script
from kvbm_cli.bench.workload.content import Writer
from kvbm_cli.bench.workload.script import Script
from kvbm_cli.workload.schema import Workload


def script_of(workload: Workload, writer: Writer, *, seed: int) -> Script:
    return build_script(workload, writer, seed=seed)
