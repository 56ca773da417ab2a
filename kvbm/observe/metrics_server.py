"""Metrics server: the kvbm_* series on a separate port, where the dashboards of NVIDIA's block manager scrape them.

It runs in the leader's process. The port is bound before the leader exists, so that a used port fails the start-up; the
collector is registered later. HTTP threads answer scrapes and only read. Their number is bounded, and none
waits long for its client: the process is the engine's. Pages are made one at a time, in a fifth of the time.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from kvbm.errors import EnvironmentProblem
from kvbm.metrics import PagePace
from kvbm.observe.bounded_server import CLIENT_TIMEOUT_S, BoundedServer
from kvbm.observe.control_route import ControlRoute

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from kvbm.observe.control_desk import ControlDesk

MAX_PORT = 65535
HOST = "127.0.0.1"

log = logging.getLogger(__name__)


class MetricsServer:
    """Serves `GET /metrics` at `host` and `port`, and with a token `POST /control`; port 0 selects a free one.

    Raises EnvironmentProblem if it cannot listen there.
    """

    def __init__(self, host: str, port: int, control_token: str | None = None) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        self._registry = CollectorRegistry()
        self._control: ControlRoute | None = None
        if port > MAX_PORT:
            raise EnvironmentProblem(f"port {port} for metrics is above {MAX_PORT}", hint=_HINT)
        try:
            kind = _server_of(host)
            app: Any = _Paced(make_wsgi_app(self._registry))
            if control_token is not None:
                app = self._control = ControlRoute(control_token, app)
            self._server = make_server(host, port, app, kind, handler_class=_Handler)
        except OSError as error:  # includes a host name that does not resolve
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise EnvironmentProblem(
                f"cannot listen on {host} port {port} for metrics: {reason.lower()}", hint=_HINT
            ) from None
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvbm-metrics", daemon=True)
        self._thread.start()
        log.info("kvbm: metrics at http://%s:%d/metrics", f"[{host}]" if ":" in host else host, self.port)

    def show(self, collector: Collector) -> None:
        self._registry.register(collector)

    def control(self, desk: ControlDesk) -> None:
        """Pass messages to `desk`, if they are served here."""
        if self._control is not None:
            self._control.desk = desk

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _server_of(host: str) -> type[_Server]:
    """Return the server for the family of an address. Raises OSError."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return type("_ServerOfFamily", (_Server,), {"address_family": family})


class _Paced:
    """An application that answers one request at a time, and rests after it."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app
        self._turn = threading.Lock()
        self._pace = PagePace()

    def __call__(self, *request: Any) -> Any:
        with self._turn:
            time.sleep(self._pace.wait_s())
            return self._pace.make(lambda: self._app(*request))


class _Server(BoundedServer, WSGIServer):
    """The server of the standard library, within bounds."""


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def get_stderr(self) -> Any:
        return _Nowhere()


class _Nowhere:
    """For what wsgiref writes about a client that leaves: a traceback each."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


_HINT = (
    "set `metrics.port` (`DYN_KVBM_METRICS_PORT`) to a free port, "
    "or `metrics.serve: false` (`DYN_KVBM_METRICS=0`) to serve no metrics"
)
