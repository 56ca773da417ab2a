"""Telemetry of one engine's cache: a metrics server, hit rates in the log, a recording of decisions.

The integration that creates the leader owns it, in the leader's process. Whatever can fail at start-up fails in the
constructor, before any memory is allocated. While the engine serves, nothing here fails, waits or decides.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvbm.metrics import KvbmCollector
from kvbm.observe.decision_trace import DecisionTrace
from kvbm.observe.hit_rate_log import HitRateLog
from kvbm.observe.metrics_server import HOST, MetricsServer
from kvbm.observe.series import EngineReport, Reporting, SeriesCollector

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvbm.config.schema import MetricsSection


class Watched(Reporting, Protocol):
    """What telemetry reads of a leader, from any thread."""

    def wear(self) -> dict[str, float]: ...


class Telemetry:
    """Telemetry of engine number `engine` of a server.

    Raises EnvironmentProblem if a port is not available or a file cannot be created.
    """

    def __init__(self, settings: MetricsSection, *, engine: int = 0) -> None:
        self._engine = engine
        self._log_interval_s = settings.log_interval_s
        self._trace = DecisionTrace(Path(settings.record_directory)) if settings.record else None
        self._log: HitRateLog | None = None
        self._server: MetricsServer | None = None
        if settings.serve:
            port = settings.port + engine if settings.port else 0
            self._server = MetricsServer(settings.host or HOST, port)

    @property
    def trace(self) -> Callable[..., None] | None:
        """What the leader calls with each decision; None unless decisions are recorded."""
        return None if self._trace is None else self._trace.record

    def watch(self, leader: Watched) -> None:
        """Start to report on `leader`."""
        if self._trace is not None:
            self._trace.counters = leader.counters
        if self._server is not None:
            self._server.show(KvbmCollector(leader.counters, leader.blocks, leader.wear))
            self._server.show(SeriesCollector(lambda: {self._engine: EngineReport.of(leader)}))
        if self._log_interval_s:
            self._log = HitRateLog(leader.counters, self._log_interval_s)

    def close(self) -> None:
        for part in (self._log, self._server, self._trace):
            if part is not None:
                part.close()
