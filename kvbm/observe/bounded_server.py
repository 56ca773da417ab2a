"""BoundedServer: a mixin for servers of the standard library that run inside an engine's process.

Each client has a thread. There are at most MAX_CLIENTS of them; further clients are refused at once. A handler limits
the time of its client. Nothing of a client is logged.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any

MAX_CLIENTS = 16
CLIENT_TIMEOUT_S = 2.0
PAUSE_S = 0.5  # after a client could not be accepted

log = logging.getLogger(__name__)


class BoundedServer(ThreadingMixIn):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._places = threading.BoundedSemaphore(MAX_CLIENTS)
        super().__init__(*arguments, **options)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            request: tuple[socket.socket, Any] = super().get_request()  # type: ignore[misc]  # of the server
        except OSError:  # no descriptors; the client stays in the queue, and the selector would return it at once
            time.sleep(PAUSE_S)
            raise
        return request

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)  # type: ignore[attr-defined]
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._places.release()
            self.shutdown_request(request)  # type: ignore[attr-defined]

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("kvbm: a request of a client failed", exc_info=True)
