"""Spans of requests: their sums are the counters, they hang together, and a receiver gets them."""

from __future__ import annotations

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from fake_server import FakeServer
from rig import Rig, disk_policy
from waiting import slept_s

from kvbm.config.schema import MetricsSection
from kvbm.observe.telemetry import Telemetry
from kvbm.tiers.settings import SpanNote

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvbm.observe import spans
from kvbm.observe.spans import MOST_NOTES, SpanRecorder

BLOCK_BYTES = 1024
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class SpanRig:
    """A rig whose leader notes spans in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.recorder = SpanRecorder("", exporter=self.exporter, clock=lambda: 0.0)
        self.rig = Rig(slots=16, blocks=32, fake_disk=32, spans=self.recorder.note, **disk_policy("always"))

    def request(self, name: str, hashes: list[bytes]) -> None:
        """Load what there is, as an engine does, and end."""
        blocks = self.rig.load(name, hashes)
        for _ in range(12):
            self.rig.now_s += 0.01
            self.rig.step()
        self.rig.finish(name, hashes, blocks)

    def spans(self) -> dict[str, list]:
        self.recorder.close()
        found: dict[str, list] = {}
        for span in self.exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        return found


@pytest.fixture
def traced():
    made = SpanRig()
    yield made
    made.rig.close()


def total(spans: list, name: str) -> float:
    return sum(span.attributes[f"kvbm.{name}"] for span in spans)


def test_sums_over_spans_are_the_counters(traced):
    rig = traced.rig
    first, second = rig.fill("a", 4), rig.fill("b", 3)
    rig.step()
    traced.request("host", first)
    rig.leader.host.store.forget(second)
    traced.request("disk", second)
    counters, spans = rig.leader.counters, traced.spans()
    loads, copies = spans["kvbm.load"], spans["kvbm.copy"]
    assert total(loads, "tokens") == counters.matched_tokens == 7 * 16
    assert total(loads, "bytes") == total(copies, "bytes") == counters.onboard_bytes == 7 * BLOCK_BYTES
    assert total(spans["kvbm.read"], "blocks") == counters.disk.fetched_blocks == 3
    assert total([span for span in loads if "kvbm.disk_blocks" in span.attributes], "disk_blocks") == 3
    assert total(loads, "saved_prefill_s") == pytest.approx(counters.saved_prefill_s)
    assert {span.attributes["kvbm.tier"] for span in spans["kvbm.read"]} == {"disk"}
    assert total(loads, "failed_blocks") == counters.onboard_failed_blocks == 0
    assert len(spans["kvbm.lookup"]) == sum(counters.durations["match"].counts)


def test_spans_of_a_request_hang_together_and_lie_inside_one_another(traced):
    hashes = traced.rig.fill("a", 4)
    traced.recorder.headers_of = {"r": {"traceparent": TRACEPARENT}}.get
    traced.rig.step()
    traced.rig.leader.host.store.forget(hashes)
    traced.request("r", hashes)
    spans = traced.spans()
    (root,) = [span for span in spans["kvbm.request"] if span.attributes["kvbm.request_id"] == "r"]
    assert f"{root.parent.span_id:016x}" == TRACEPARENT.split("-")[2]
    every = [span for kind in spans.values() for span in kind if span.context.trace_id == root.context.trace_id]
    assert {span.name for span in every} == {"kvbm.request", "kvbm.lookup", "kvbm.load", "kvbm.read", "kvbm.copy"}
    by_id = {span.context.span_id: span for span in every}
    for span in every:
        if span is not root:
            parent = by_id[span.parent.span_id]
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time
            assert parent.name == ("kvbm.load" if span.name in ("kvbm.read", "kvbm.copy") else "kvbm.request")


def test_a_failed_copy_is_a_load_without_tokens(traced):
    hashes = traced.rig.fill("a", 4)
    traced.rig.ranks[0].copier.next("fail")
    traced.request("r", hashes)
    spans = traced.spans()
    (load,) = spans["kvbm.load"]
    assert (load.attributes["kvbm.tokens"], load.attributes["kvbm.failed_blocks"]) == (0, 4)
    assert total(spans["kvbm.copy"], "bytes") == 0


def test_too_many_notes_are_dropped_and_counted():
    exporter = InMemorySpanExporter()
    recorder = SpanRecorder("", exporter=exporter)
    for number in range(MOST_NOTES + 10):
        recorder.note(SpanNote("r", "lookup", number, number, {}))
    recorder.note(SpanNote("r", "finish", 1000, 1000, {}))
    recorder.close()
    (root,) = [span for span in exporter.get_finished_spans() if span.name == "kvbm.request"]
    assert root.attributes["kvbm.dropped_spans"] == 10


def test_a_request_that_waited_shows_for_how_long(traced):
    hashes = traced.rig.fill("a", 2)
    assert traced.rig.leader.match("r", hashes, 0) == 2
    traced.rig.now_s += 1.5
    traced.request("r", hashes)
    (wait,) = traced.spans()["kvbm.wait"]
    assert wait.end_time - wait.start_time == pytest.approx(1.5e9)


def test_spans_are_off_by_default():
    before = set(threading.enumerate())
    telemetry = Telemetry(MetricsSection(log_interval_s=0))
    assert telemetry.spans(lambda request_id: None) is None
    assert set(threading.enumerate()) == before
    telemetry.close()


class Collector(FakeServer):
    """Answers with `begin`, and then with `piece` again and again."""

    def __init__(self, begin: bytes, piece: bytes, pause_s: float) -> None:
        super().__init__()
        self.begin, self.piece, self.pause_s = begin, piece, pause_s
        self.asked = threading.Event()

    async def answer(self, request, connection):
        self.asked.set()
        connection.write(self.begin)
        while True:
            connection.write(self.piece)
            await asyncio.sleep(self.pause_s)


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("begin", "piece", "pause_s", "lost"),
    [
        pytest.param(b"", b"", 1, 2, id="hangs"),
        pytest.param(OK, b"X", 1, 2, id="drips_a_header"),
        pytest.param(OK, b"X: y\r\n", 0.1, 2, id="drips_headers"),
        pytest.param(OK + b"Content-Length: 9999\r\n\r\n", b"x", 1, 0, id="drips_its_body"),
        pytest.param(OK + b"\r\n", b"x" * 65536, 0.001, 0, id="never_ends"),
        pytest.param(b"HTTP/1.1 503 no\r\nContent-Length: 0\r\n\r\n", b"", 1, 2, id="asks_to_wait"),
        pytest.param(b"HTTP/1.1 404 no\r\nContent-Length: 0\r\n\r\n", b"", 1, 2, id="refuses"),
    ],
)
@pytest.mark.parametrize("while_sending", [True, False])
def test_a_collector_that_does_not_answer_delays_no_stop_and_what_is_lost_is_counted(
    begin, piece, pause_s, lost, while_sending, caplog
):
    rig = Rig()
    with Collector(begin, piece, pause_s) as collector:
        telemetry = Telemetry(MetricsSection(log_interval_s=0, spans_endpoint=f"{collector.url}/v1/traces"))
        note = telemetry.spans(lambda request_id: None)
        telemetry.watch(rig.leader)
        assert note is not None
        note(SpanNote("r", "lookup", 1.0, 2.0, {}))
        note(SpanNote("r", "finish", 3.0, 3.0, {}))
        if while_sending:
            assert collector.asked.wait(60)
        began_s = slept_s()
        telemetry.close()
        assert slept_s() - began_s < 2
    assert rig.leader.counters.lost_spans == lost
    assert ("2 spans were not sent" in caplog.text) == bool(lost)
    rig.close()


def test_spans_beyond_the_queue_are_counted_while_a_collector_hangs(monkeypatch):
    monkeypatch.setattr(spans, "MOST_QUEUED", 4)
    monkeypatch.setattr(spans, "POLL_S", 3600)
    recorder = SpanRecorder("", exporter=InMemorySpanExporter())
    for number in range(10):
        recorder.note(SpanNote("r", "lookup", number, number, {}))
    assert recorder.counters.lost_spans == 6
    recorder.close()


def test_a_receiver_on_the_loopback_gets_them():
    received = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            """Log nothing."""

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = MetricsSection(log_interval_s=0, spans_endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces")
    telemetry = Telemetry(settings)
    note = telemetry.spans(lambda request_id: None)
    assert note is not None
    note(SpanNote("request-7", "lookup", 1.0, 2.0, {"found": 3}))
    note(SpanNote("request-7", "finish", 3.0, 3.0, {}))
    telemetry.close()
    server.shutdown()
    server.server_close()
    ((path, body),) = received
    assert path == "/v1/traces"
    assert b"kvbm.lookup" in body
    assert b"request-7" in body
