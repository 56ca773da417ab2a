"""A server of metrics with a page that the test changes, and that hangs or is slow on request."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class MetricsPages:
    text: str | bytes = ""
    status: int = 200
    delay_s: float = 0.0
    hangs: bool = False
    requests: int = 0
    headers: dict[str, str] = field(default_factory=dict)


class MetricsServerForTests:
    """`pages` may be changed at any time. A context manager."""

    def __init__(self, text: str = "") -> None:
        self.pages = pages = MetricsPages(text)
        self._released = released = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                pages.requests += 1
                pages.headers = dict(self.headers)
                if pages.hangs:
                    released.wait(60)
                    return
                body = pages.text if isinstance(pages.text, bytes) else pages.text.encode()
                time.sleep(pages.delay_s)
                self.send_response(pages.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> MetricsServerForTests:
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()

    def close(self) -> None:
        """May be called twice."""
        self._released.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
