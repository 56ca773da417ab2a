"""The one place from which commands speak to a run: to its servers, and to the sockets of its live control.

Ports and process ids outlive a run, and other programs get them. So nothing is sent unless the launcher of the run is
alive, by its process id with its start time, and the process that listens was started by it.
"""

from __future__ import annotations

import shlex
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

from kvbm.errors import EnvironmentProblem
from kvbm_cli.runs.run_directory import EngineRun
from kvbm_cli.system.http_client import MAX_METRICS_BYTES, HttpAnswer, request
from kvbm_cli.system.open_files import is_served_by
from kvbm_cli.system.process_identity import descendants

FOREIGN = "another program listens there"
_CREDENTIALS = struct.Struct("3i")  # process, user and group of the peer


def living(run: EngineRun) -> EngineRun:
    """Return the run as it is now. Raises EnvironmentProblem if it has ended, or runs elsewhere."""
    now, name = run.again(), run.name
    if not now.is_living:
        raise EnvironmentProblem(f"`{name}` is not running: it has ended")
    if now.is_elsewhere:
        hint = f"run this command there; `kvbm status {shlex.quote(name)}` names the machine"
        raise EnvironmentProblem(f"`{name}` runs in another container", hint=hint)
    return now


def request_run(run: EngineRun, method: str, path: str, **options: Any) -> HttpAnswer:
    """Send a request to the engine of a run, as `request` does. Without an answer, `failure` says why."""
    return _request(run, method, f"{run.facts.url}{path}", **options)


def metrics_of(run: EngineRun, *, timeout_s: float) -> HttpAnswer:
    """Return the page with the kvbm_* series."""
    url = run.facts.metrics_url or f"{run.facts.url}/metrics"
    return _request(run, "GET", url, timeout_s=timeout_s, max_bytes=MAX_METRICS_BYTES)


def engine_metrics_of(run: EngineRun, *, timeout_s: float) -> HttpAnswer:
    """Return the page with the engine's own series."""
    return request_run(run, "GET", "/metrics", timeout_s=timeout_s, max_bytes=MAX_METRICS_BYTES)


def _request(run: EngineRun, method: str, url: str, **options: Any) -> HttpAnswer:
    try:
        launcher = living(run).facts.launcher
    except EnvironmentProblem as problem:
        return HttpAnswer(failure=problem.message)

    def refusal(address: str) -> str:
        port = urlsplit(url).port or 0
        return "" if is_served_by(descendants(launcher.pid), address=address, port=port) else FOREIGN

    return request(method, url, refusal=refusal, **options)


def require_own(run: EngineRun, connection: socket.socket) -> None:
    """Raise OSError if another program listens at the Unix socket of this connection."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(credentials)[0] not in descendants(run.facts.launcher.pid):
        raise OSError(FOREIGN)
