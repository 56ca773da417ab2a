"""Metrics server: the kvbm_* series on a separate port, where the dashboards of NVIDIA's block manager scrape them.

It runs in the leader's process. The port is bound before the leader exists, so that a used port fails the start-up; the
collector is registered later. HTTP threads answer scrapes and only read.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from kvbm.errors import EnvironmentProblem

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

MAX_PORT = 65535
HOST = "127.0.0.1"

log = logging.getLogger(__name__)


class MetricsServer:
    """Serves `GET /metrics` at `host` and `port`; port 0 selects a free one.

    Raises EnvironmentProblem if it cannot listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        if port > MAX_PORT:
            raise EnvironmentProblem(f"port {port} for metrics is above {MAX_PORT}", hint=_HINT)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:  # includes a host name that does not resolve
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise EnvironmentProblem(
                f"cannot listen on {host} port {port} for metrics: {reason.lower()}", hint=_HINT
            ) from None
        self.port = int(self._server.server_port)
        log.info("kvbm: metrics at http://%s:%d/metrics", f"[{host}]" if ":" in host else host, self.port)

    def show(self, collector: Collector) -> None:
        self._registry.register(collector)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_HINT = (
    "set `metrics.port` (`DYN_KVBM_METRICS_PORT`) to a free port, "
    "or `metrics.serve: false` (`DYN_KVBM_METRICS=0`) to serve no metrics"
)
