"""Pages of metrics as an engine serves them, from counts that a test chooses, and a server for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest

from kvbm.metrics import Counters, Facts, KvbmCollector
from kvbm.observe.series import EngineReport, SeriesCollector
from kvbm.types import Tier


class FakeLeader:
    """What a collector reads of a leader with host memory and disk. `engine_text`: series of its engine, on a page of
    their own."""

    engine_text = ""

    def __init__(self, **counts: float) -> None:
        self.counters = Counters()
        for name, count in counts.items():
            self.counters.set_total(name, count)
        self.facts = Facts(1000, has_shared=False, info={"engine_name": "embedded", "model": "tiny"})
        self.waiting: dict[str, tuple[int, float]] = {"offload": (0, 0.0), "disk_write": (0, 0.0)}

    def blocks(self):
        return {Tier.HOST: {"free": 25, "evictable": 75}, Tier.DISK: {"free": 10, "evictable": 0}}

    def queues(self):
        return self.waiting


def text_of(*leaders: FakeLeader) -> str:
    registry = CollectorRegistry()
    registry.register(KvbmCollector(leaders[0].counters, leaders[0].blocks))
    registry.register(SeriesCollector(lambda: {n: EngineReport.of(leader) for n, leader in enumerate(leaders)}))
    return generate_latest(registry).decode()


def sglang_text(prompt_tokens: int, running: int = 0, **cached: int) -> str:
    """Series of SGLang's own page; `cached` tokens by where they were."""
    labels = 'model_name="m",moe_ep_rank="0"'
    lines = [
        f'sglang:cached_tokens_total{{cache_source="{name}",{labels}}} {count}.0' for name, count in cached.items()
    ]
    lines += [f"sglang:prompt_tokens_total{{{labels}}} {prompt_tokens}.0"]
    lines += [f"sglang:num_running_reqs{{{labels}}} {running}.0", f"sglang:num_queue_reqs{{{labels}}} 0.0"]
    return "\n".join(["# TYPE sglang:prompt_tokens_total counter", *lines, ""])


@contextmanager
def serving(leader: FakeLeader, port: int = 0) -> Iterator[int]:
    """Serve the metrics of a leader; yields the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {"/metrics": text_of, "/engine/metrics": lambda one: one.engine_text}
            is_known = self.path in pages
            body = pages[self.path](leader).encode() if is_known else b""
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
