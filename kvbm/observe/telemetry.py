"""Telemetry of one engine's cache: a metrics server, hit rates in the log, a recording of decisions, live control.

The integration that creates the leader owns it, in the leader's process. Whatever can fail at start-up fails in the
constructor, before any memory is allocated. While the engine serves, nothing here fails, waits or decides.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvbm.metrics import KvbmCollector
from kvbm.observe.alarm import Alarm
from kvbm.observe.capacity_curve import CapacityCurve
from kvbm.observe.control_desk import ControlDesk
from kvbm.observe.control_server import ControlServer, opened
from kvbm.observe.decision_trace import DecisionTrace
from kvbm.observe.metrics_server import HOST, MetricsServer, read_token
from kvbm.observe.series import EngineReport, Reporting, SeriesCollector
from kvbm.observe.spans import SpanRecorder
from kvbm.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvbm.config.schema import MetricsSection
    from kvbm.leader.control import CacheControl
    from kvbm.metrics import Counters
    from kvbm.tiers.settings import SpanNote

log = logging.getLogger(__name__)


class Watched(Reporting, Protocol):
    """What telemetry reads of a leader, from any thread."""

    @property
    def control(self) -> CacheControl: ...

    def wear(self) -> dict[str, float]: ...


class HitRateLog:
    """Logs every `interval_s` seconds and at the end, if a request has finished since the last line. Its thread reads
    the leader's counters; no engine step waits for it."""

    def __init__(self, counters: Counters, interval_s: float) -> None:
        self._counters = counters
        self._reported_requests = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(interval_s,), name="kvbm-hit-rates", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self, interval_s: float) -> None:
        while not self._stop.wait(interval_s):
            self._report()
        self._report()

    def _report(self) -> None:
        finished = self._counters.finished_requests
        if finished != self._reported_requests:
            self._reported_requests = finished
            log.info("%s", hit_rates(self._counters))


def hit_rates(counters: Counters) -> str:
    """`kvbm: cache hit rates of the last 12 requests: host 42.0% (21/50 blocks), disk 0.0% (0/50)`"""
    host, disk, shared, queried = counters.hits()
    count = len(counters.hit_window)
    percent = 100 / queried if queried else 0.0
    text = (
        f"kvbm: cache hit rates of the last {count} requests: "
        f"host {host * percent:.1f}% ({host}/{queried} blocks), disk {disk * percent:.1f}% ({disk}/{queried})"
    )
    return f"{text}, shared {shared * percent:.1f}% ({shared}/{queried})" if shared else text


class Telemetry:
    """Telemetry of engine number `engine` of a server. Its control socket is in `control_directory`.

    Raises EnvironmentProblem if a port is not available or a file cannot be created.
    """

    def __init__(self, settings: MetricsSection, *, engine: int = 0, control_directory: str | None = None) -> None:
        self._engine = engine
        self._control_directory = control_directory
        self._control: ControlServer | None = None
        self._alarm: Alarm | None = None
        self._log_interval_s = settings.log_interval_s
        self._trace = DecisionTrace(Path(settings.record_directory)) if settings.record else None
        self._spans = SpanRecorder(settings.spans_endpoint) if settings.spans_endpoint else None
        self._curve = CapacityCurve() if settings.capacities else None
        self._log: HitRateLog | None = None
        self.server: MetricsServer | None = None
        if settings.serve:
            port = settings.port + engine if settings.port else 0
            self.server = MetricsServer(settings.host or HOST, port, read_token(settings.control_token_file))

    @property
    def trace(self) -> Callable[..., None] | None:
        """What the leader calls with each decision; None unless decisions are recorded."""
        return None if self._trace is None else self._trace.record

    def spans(self, headers_of: Callable[[str], Mapping[str, str] | None]) -> Callable[[SpanNote], None] | None:
        """Return what the leader calls with what it did for a request; None unless spans are on. `headers_of` returns
        the trace context of a live request."""
        if self._spans is None:
            return None
        self._spans.headers_of = headers_of
        return self._spans.note

    @property
    def ended(self) -> Callable[[Sequence[bytes], int], None] | None:
        """What the leader calls with the chain of each request that has ended; None unless capacities are measured."""
        return None if self._curve is None else self._curve.note

    def watch(self, leader: Watched, wake: Callable[[], None] | None = None) -> None:
        """Start to report on `leader`, and to pass messages to it. `wake()` lets an idle engine take a step; None if
        nothing can."""
        desk = ControlDesk(leader.control, wake, engine=self._engine)
        if wake is not None:
            self._alarm = Alarm(wake)
            leader.control.wake_after = self._alarm.after
        self._control = opened(self._control_directory, desk, engine=self._engine)
        if self.server is not None:
            self.server.control(desk)
        for part in (self._trace, self._spans):
            if part is not None:
                part.counters = leader.counters
        if self._curve is not None and (host := leader.blocks().get(Tier.HOST)) is not None:
            self._curve.start(sum(host.values()), leader.counters)
        if self.server is not None:
            self.server.show(KvbmCollector(leader.counters, leader.blocks, leader.wear))
            self.server.show(SeriesCollector(lambda: {self._engine: EngineReport.of(leader)}))
        if self._log_interval_s:
            self._log = HitRateLog(leader.counters, self._log_interval_s)

    def close(self) -> None:
        for part in (self._control, self._alarm, self._log, self._spans, self.server, self._trace, self._curve):
            if part is not None:
                part.close()
