"""The kvbm_* series on a port of their own, as NVIDIA's block manager has them and its dashboards scrape them.

The leader's process owns it. The port is taken before the leader exists, so that one which is not free stops the start;
what is shown there comes later. Requests are answered by threads that only read.
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
    """`GET /metrics` at `host` and `port`, 0 for one that is free. EnvironmentProblem where it cannot be had."""

    def __init__(self, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        if port > MAX_PORT:
            raise EnvironmentProblem(f"there is no port {port} for metrics", hint=_HINT)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:  # also a host that has no address
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


_HINT = "`metrics.port` (`DYN_KVBM_METRICS_PORT`) chooses another, `metrics.serve: false` (`DYN_KVBM_METRICS=0`) none"
