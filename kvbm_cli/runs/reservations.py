"""Reservations: ports and host memory that other engines on this machine use or will use.

An engine that is still starting has not taken them yet, so the kernel does not know them. Its run directory does, and a
claim of the machine for an engine of another user or with another state directory (memory_claims.py).
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from kvbm.config.sizes import format_size
from kvbm.engines.launch_plan import reachable
from kvbm.errors import EnvironmentProblem
from kvbm.host.machine_memory import THIS_MACHINE, HostMemory
from kvbm_cli.runs import memory_claims
from kvbm_cli.runs.memory_claims import MemoryClaim
from kvbm_cli.runs.run_directory import EngineRun, Runs
from kvbm_cli.runs.run_facts import RunState
from kvbm_cli.system.process_identity import descendants


def living_runs() -> list[EngineRun]:
    return [run for run in Runs.of_user_if_known() if run.is_living]


def require_port(host: str, port: int, living: Sequence[EngineRun]) -> None:
    """Raise EnvironmentProblem if a living run uses the port at this address."""
    for run in living:
        if holds_port(run, host, port):
            stop = f"`kvbm stop {shlex.quote(run.name)}`"
            hint = f"choose a free port with `--port 0`, or stop the other engine with {stop}"
            raise EnvironmentProblem(f"port {port} is used by `{run.name}` ({run.state})", hint=hint)


def holds_port(run: EngineRun, host: str, port: int) -> bool:
    is_same_host = urlsplit(run.facts.url).netloc.startswith(f"{reachable(host)}:")
    return port != 0 and port in run.facts.ports and is_same_host


def taken_ports(living: Sequence[EngineRun]) -> set[int]:
    return {port for run in living for port in run.facts.ports}


def pending_bytes(run: EngineRun) -> int:
    """Return the host memory that a starting run will still allocate. A healthy run has allocated all of it."""
    if run.state is not RunState.STARTING:
        return 0
    has_bytes = 0 if run.is_elsewhere else _shared_bytes_below(run.launcher.pid)
    return max(0, run.facts.memory_bytes - has_bytes)


def pending_memory(living: Sequence[EngineRun], *, memory: HostMemory = THIS_MACHINE) -> int:
    """Return the host memory for blocks that all starting engines of this machine will still allocate."""
    known = {run.launcher.pid for run in living}
    others = [claim for claim in memory_claims.claims() if claim.pid not in known]
    missing = (_possible(claim, claim.memory_bytes - _shared_bytes_below(claim.pid), memory) for claim in others)
    return sum(map(pending_bytes, living)) + sum(missing)


def pending_of_engines(memory: HostMemory = THIS_MACHINE) -> int:
    """Return the host memory that starting engines on a CPU may still allocate for weights and G1."""
    return sum(_possible(claim, claim.engine_bytes, memory) for claim in memory_claims.claims())


def _possible(claim: MemoryClaim, missing_bytes: int, memory: HostMemory) -> int:
    """Return how much of what a claim has not allocated yet its process may allocate."""
    return max(0, min(missing_bytes, memory.room(process=claim.pid).available_bytes))


def largest_run(living: Sequence[EngineRun]) -> EngineRun | None:
    """Return the run whose end frees the most host memory; None if none has any."""
    largest = max(living, key=lambda run: run.facts.memory_bytes, default=None)
    return largest if largest is not None and largest.facts.memory_bytes else None


def memory_lines(living: Sequence[EngineRun]) -> list[str]:
    """Return a line for each run with host memory for blocks."""
    return [
        f"  {run.name} ({run.state}, {_place_of(run)}) uses {format_size(run.facts.memory_bytes)}"
        for run in living
        if run.facts.memory_bytes
    ]


def _place_of(run: EngineRun) -> str:
    return f"pid {run.launcher.pid} on {run.launcher.host}" if run.is_elsewhere else f"pid {run.launcher.pid}"


def _shared_bytes_below(pid: int) -> int:
    return max(map(_shared_bytes_of, descendants(pid)), default=0)  # several processes map the same segment


def _shared_bytes_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        found = re.search(r"^RssShmem:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0
