"""Metrics server: the kvbm_* series on a separate port, where the dashboards of NVIDIA's block manager scrape them.

It runs in the leader's process. The port is bound before the leader exists, so that a used port fails the start-up; the
collector is registered later. HTTP threads answer scrapes and only read. There are at most MAX_CLIENTS of them, and
none waits long for its client: the process is the engine's. Pages are made one at a time, in a fifth of the time.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from kvbm.errors import EnvironmentProblem
from kvbm.metrics import PagePace

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

MAX_PORT = 65535
HOST = "127.0.0.1"
MAX_CLIENTS = 16
CLIENT_TIMEOUT_S = 2.0
PAUSE_S = 0.5  # after a client could not be accepted

log = logging.getLogger(__name__)


class MetricsServer:
    """Serves `GET /metrics` at `host` and `port`; port 0 selects a free one.

    Raises EnvironmentProblem if it cannot listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        self._registry = CollectorRegistry()
        if port > MAX_PORT:
            raise EnvironmentProblem(f"port {port} for metrics is above {MAX_PORT}", hint=_HINT)
        try:
            kind = _server_of(host)
            app = _Paced(make_wsgi_app(self._registry))
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


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._places = threading.BoundedSemaphore(MAX_CLIENTS)
        super().__init__(*arguments, **options)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # no descriptors; the client stays in the queue, and the selector would return it at once
            time.sleep(PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._places.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("kvbm: a request for metrics failed", exc_info=True)


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
