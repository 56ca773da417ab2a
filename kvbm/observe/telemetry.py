"""What one engine tells of its cache: series on a port of their own, lines of the log, a recording.

The integration that makes a leader owns it, in the leader's process. What can fail at the start fails in its
constructor, before any memory is taken; nothing here fails, waits or decides once the engine serves.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.leader.leader import Leader
from kvbm.metrics import KvbmCollector
from kvbm.observe.decision_trace import Recorder, RecordingLeader
from kvbm.observe.hit_rate_log import HitRateLog
from kvbm.observe.metrics_server import HOST, MetricsServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvbm.config.schema import MetricsSection


class Observation:
    """Of the engine number `engine` of its server. EnvironmentProblem where a port or a file is not to be had."""

    def __init__(self, wanted: MetricsSection, *, engine: int = 0) -> None:
        self._log_interval_s = wanted.log_interval_s
        self._recorder = Recorder(Path(wanted.record_directory)) if wanted.record else None
        self._log: HitRateLog | None = None
        self._server: MetricsServer | None = None
        if wanted.serve:
            port = wanted.port + engine if wanted.port else 0
            self._server = MetricsServer(wanted.host or HOST, port)

    @property
    def leader_class(self) -> Callable[..., Leader]:
        return Leader if self._recorder is None else partial(RecordingLeader, self._recorder)

    def watch(self, leader: Leader) -> None:
        """From here on."""
        if self._server is not None:
            self._server.show(KvbmCollector(leader.counters, leader.blocks, leader.wear))
        if self._log_interval_s:
            self._log = HitRateLog(leader.counters, self._log_interval_s)

    def close(self) -> None:
        for part in (self._log, self._server, self._recorder):
            if part is not None:
                part.close()
