"""Spans of a real vLLM: kvbm's and vLLM's own hang below the client's span, explain the TTFT, and sum up to counters.

A receiver on the loopback gets the spans of both, over OTLP/HTTP. vLLM makes one span for a request, `llm_request`. It
begins at the arrival, and the times in the queue and in the prefill are attributes of it. A request that loads waits in
the queue meanwhile:

    arrival                                                scheduled         first token
    |<-- until the first lookup -->|<-- lookup, wait, load -->|<-- prefill (vLLM's) -->|
    |                              |<------ kvbm's spans ---->|
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from traffic import tokens
from vllm_server import BLOCK_TOKENS, CONNECTOR, VllmServer
from waiting import eventually

from kvbm.engines.make_model import materialise

G1_BLOCKS, HOST_BLOCKS, DISK_BLOCKS = 40, 48, 400
PREFIXES, PREFIX_BLOCKS, REST_TOKENS = 10, 12, 2000
LATENCY = "gen_ai.latency."
TOLERANCE = 0.05


class Receiver:
    """Collects spans as (name, trace id, parent id, begin and end in seconds, attributes)."""

    def __init__(self) -> None:
        self.spans: list[Mapping[str, Any]] = []

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
                    self.spans.append(
                        {
                            "name": span.name,
                            "trace": span.trace_id.hex(),
                            "parent": span.parent_span_id.hex(),
                            "began_s": span.start_time_unix_nano / 1e9,
                            "ended_s": span.end_time_unix_nano / 1e9,
                            **attributes,
                        }
                    )

    def named(self, name: str, trace: str | None = None) -> list[Mapping[str, Any]]:
        return [span for span in self.spans if span["name"] == name and trace in (None, span["trace"])]


@contextmanager
def received() -> Iterator[tuple[Receiver, str]]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield receiver, f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()
        server.server_close()


def profile(endpoint: str, disk: Path) -> dict[str, object]:
    return {
        "tiers": {
            "host": {"blocks": HOST_BLOCKS},
            "disk": {"blocks": DISK_BLOCKS, "directory": str(disk)},
        },
        "offload": {"to_disk": "always"},
        "onboard": {"policy": "always"},
        "metrics": {"spans_endpoint": endpoint, "capacities": True},
    }


def total(spans: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(span.get(f"kvbm.{name}", 0) for span in spans)


def share_explained(receiver: Receiver, trace: str) -> float:
    """Return the sum of the spans of a request that loaded, as a share of its TTFT."""
    (theirs,) = receiver.named("llm_request", trace)
    (load,) = receiver.named("kvbm.load", trace)
    first = min(receiver.named("kvbm.lookup", trace), key=lambda span: span["began_s"])
    ours_s = load["ended_s"] - first["began_s"]
    queued_s = first["began_s"] - theirs["began_s"]
    assert ours_s <= theirs[f"{LATENCY}time_in_queue"]
    summed_s = queued_s + ours_s + theirs[f"{LATENCY}time_in_model_prefill"]
    return summed_s / theirs[f"{LATENCY}time_to_first_token"]


@pytest.mark.timeout(1500)  # tens of thousands of tokens take minutes to compute on a busy machine
def test_spans_of_kvbm_and_vllm_explain_the_first_token_and_sum_up_to_the_counters(tmp_path):
    random_ = Random(3)
    prefixes = [tokens(random_, PREFIX_BLOCKS * BLOCK_TOKENS) for _ in range(PREFIXES)]
    with received() as (receiver, endpoint):
        connector = CONNECTOR | {"kv_connector_extra_config": {"kvbm": profile(endpoint, tmp_path)}}
        environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200"}
        arguments = ("--otlp-traces-endpoint", endpoint)
        with VllmServer(
            materialise("vllm-25m"), *arguments, blocks=G1_BLOCKS, connector=connector, environment=environment
        ) as server:
            for prefix in prefixes:
                server.ask(prefix)
            traces = [f"{number + 1:032x}" for number in range(PREFIXES)]
            for trace, prefix in zip(traces, prefixes, strict=True):
                server.http.headers["traceparent"] = f"00-{trace}-00000000000000aa-01"
                server.ask(prefix + tokens(random_, REST_TOKENS), max_tokens=2)
            eventually(lambda: len(receiver.named("llm_request")) == 2 * PREFIXES)
            eventually(lambda: len(receiver.named("kvbm.request")) == 2 * PREFIXES)
            metrics = server.metrics()
        loaded = [trace for trace in traces if receiver.named("kvbm.load", trace)]
    assert len(loaded) > PREFIXES / 2, "too few requests loaded blocks"
    for trace in traces:
        for name in ("kvbm.request", "llm_request"):
            (span,) = receiver.named(name, trace)
            assert span["parent"] == "00000000000000aa"
    loads, copies, reads = (receiver.named(f"kvbm.{name}") for name in ("load", "copy", "read"))
    assert metrics["kvbm_hit_rate_at"] > 0, "no shadow cache has found a prefix that came back"
    assert total(loads, "tokens") == metrics["kvbm_matched_tokens"]
    assert total(loads, "bytes") == total(copies, "bytes") == metrics["kvbm_onboard_bytes_h2d"]
    assert total(loads, "disk_blocks") == metrics["kvbm_onboard_blocks_d2d"] > 0
    assert total(reads, "blocks") >= total(loads, "disk_blocks")
    shares = [share_explained(receiver, trace) for trace in loaded]
    assert abs(statistics.median(shares) - 1) <= TOLERANCE, shares
