"""Checks of the addresses and ports that the engine's server needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvbm.errors import EnvironmentProblem
from kvbm_cli.doctor.check import Check, DoctorContext, failure, ok, skipped
from kvbm_cli.engine.process import choose_port
from kvbm_cli.profile.machine_problems import require_metrics_ports
from kvbm_cli.runs.reservations import living_runs, require_port

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile


def checks(context: DoctorContext) -> Iterator[Check]:
    """Yield the checks of ports. The block manager itself needs no port: results travel through shared memory."""
    if context.resolved is None:
        yield skipped("server", "the address is unknown without a profile", "add `--profile PROFILE`")
        return
    server = context.resolved.profile.server
    try:
        require_port(server.host, server.port, living_runs())
        choose_port(server.host, server.port)
    except EnvironmentProblem as error:
        yield failure("server", error.message, f"set `server.port: 0`, or {error.hint}")
    else:
        port = f"port {server.port} is free" if server.port else "a free port is chosen at start-up"
        yield ok("server", f"{server.host}, {port}", host=server.host, port=server.port)
    yield from _metrics(context.resolved)


def _metrics(resolved: ResolvedProfile) -> Iterator[Check]:
    metrics = resolved.profile.metrics
    if not metrics.serve:
        return
    try:
        require_metrics_ports(resolved)
    except EnvironmentProblem as error:
        yield failure("metrics", error.message.splitlines()[0], error.hint or "set `metrics.port: 0`")
    else:
        yield ok("metrics", f"port {metrics.port} is free" if metrics.port else "a free port is chosen at start-up")
