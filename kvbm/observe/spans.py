"""Spans: OpenTelemetry spans of what the cache does for a request, for `metrics.spans_endpoint`. Off by default.

    kvbm.request     from the first lookup to the end of the request; its parent is the trace context of the request
      kvbm.lookup    one call of the match
      kvbm.wait      from the first lookup to the load: the engine's queue, other loads, a match in several steps
      kvbm.load      from the load to the step in which the engine may read it
        kvbm.read    one batch from a lower tier into host memory
        kvbm.copy    one copy from host memory to the device

The leader notes what has ended: an entry in a queue. A thread looks into the queue every POLL_S, because waking it for
each entry would take the leader longer than the entry. It makes the spans of a request when the request has ended, and
sends them. Of an answer it reads the status alone: a body may never end. What does not fit or cannot be sent is dropped
and counted, and the engine's stop waits CLOSE_LIMIT_S at most.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvbm.errors import EnvironmentProblem
from kvbm.host import threads
from kvbm.metrics import Counters
from kvbm.text.outside import without_secrets
from kvbm.tiers.settings import SpanNote

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

MOST_REQUESTS = 4096  # that have not ended
MOST_NOTES = 256  # of a request
MOST_QUEUED = 100_000
MOST_SENT = 512  # at once
POLL_S = 0.2
SEND_S = 1.0
CLOSE_LIMIT_S = 1.0
END, LOOKUP, LOAD, INSIDE_LOAD = "finish", "lookup", "load", ("read", "copy")
NS = 1_000_000_000
MISSING = "`metrics.spans_endpoint` requires the OpenTelemetry SDK and its OTLP exporter"
HINT = "`pip install 'kvbm-cli[spans]'`, or remove `metrics.spans_endpoint`"

Headers = Mapping[str, str] | None

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    headers: Headers
    notes: list[SpanNote] = field(default_factory=list)
    dropped: int = 0


class SpanRecorder:
    """`headers_of(request_id)` returns the trace context of a live request; the leader's thread calls it once for each.
    `clock` is the leader's. `counters` may be replaced by those of a leader, `lost_spans` is written here. Raises
    EnvironmentProblem without the libraries."""

    def __init__(
        self,
        endpoint: str,
        *,
        exporter: SpanExporter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider

            self._exporter = _exporter(endpoint) if exporter is None else exporter
        except ImportError:
            raise EnvironmentProblem(MISSING, hint=HINT) from None
        self.headers_of: Callable[[str], Headers] = lambda request_id: None
        self.counters = Counters()
        self._endpoint = endpoint
        provider = TracerProvider(resource=Resource.create({"service.name": "kvbm"}), shutdown_on_exit=False)
        self._tracer = provider.get_tracer("kvbm")
        self._epoch_ns = time.time_ns() - int(clock() * NS)
        self._known: set[str] = set()  # of the leader's thread: requests whose trace context is noted
        self._queue: deque[tuple[SpanNote, Headers]] = deque()
        self._is_ending = threading.Event()
        self._dropped = 0  # of the leader's thread: notes that did not fit
        self._failed = 0  # of our thread, as what follows: spans and notes
        self._spans: list[Any] = []  # made, and not sent
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._thread = threading.Thread(target=self._run, name="kvbm-spans", daemon=True)
        threads.start(self._thread)

    def note(self, note: SpanNote) -> None:
        """Note what has ended. The leader calls it in its thread."""
        headers: Headers = None
        if note.name == END:
            self._known.discard(note.request_id)
        elif note.request_id not in self._known and len(self._known) < MOST_REQUESTS:
            self._known.add(note.request_id)
            headers = self.headers_of(note.request_id)
        if len(self._queue) < MOST_QUEUED:
            self._queue.append((note, headers))
        else:
            self._dropped += 1
            self._count()

    def close(self) -> None:
        """Send what has ended, as far as it is possible within CLOSE_LIMIT_S, and count the rest."""
        self._is_ending.set()
        self._thread.join(CLOSE_LIMIT_S)
        counters, self.counters = self.counters, Counters()  # a thread that still sends counts no more
        if lost := self._dropped + self._failed + len(self._spans) + len(self._queue):
            counters.lost_spans = lost
            log.warning("kvbm: %d spans were not sent to %s", lost, without_secrets(self._endpoint))
        self._exporter.shutdown()

    def _run(self) -> None:
        sent_s = time.monotonic()
        while not self._is_ending.wait(POLL_S):
            self._empty_queue()
            if len(self._spans) >= MOST_SENT or time.monotonic() - sent_s >= SEND_S:
                self._send()
                sent_s = time.monotonic()
        self._empty_queue()
        self._send()

    def _count(self) -> None:
        self.counters.lost_spans = self._dropped + self._failed

    def _send(self) -> None:
        """Send all spans. They stay in the list meanwhile, so that `close` can count them."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        while self._spans:
            spans = self._spans[:MOST_SENT]
            try:
                is_sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
            except OSError:  # what `requests` raises, and old exporters let pass
                is_sent = False
            self._failed += 0 if is_sent else len(spans)
            del self._spans[: len(spans)]
            self._count()

    def _empty_queue(self) -> None:
        while self._queue:
            note, headers = self._queue.popleft()
            if note.name == END:
                if (request := self._requests.pop(note.request_id, None)) is not None:
                    self._make(note, request)
                continue
            request = self._requests.setdefault(note.request_id, _Request(headers))
            if len(request.notes) < MOST_NOTES:
                request.notes.append(note)
            else:
                request.dropped += 1
                self._failed += 1
            if len(self._requests) > MOST_REQUESTS:
                self._failed += len(self._requests.popitem(last=False)[1].notes)

    def _make(self, end: SpanNote, request: _Request) -> None:
        """Make the spans of a request that has ended."""
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        notes = sorted(request.notes, key=lambda note: note.began_s)
        context = TraceContextTextMapPropagator().extract(dict(request.headers or {}))
        attributes = {"kvbm.request_id": end.request_id, "kvbm.dropped_spans": request.dropped}
        root = self._begin("request", notes[0].began_s, context, attributes)
        inside_root = set_span_in_context(root)
        loads = [note for note in notes if note.name == LOAD]
        lookups = [note for note in notes if note.name == LOOKUP]
        if loads and lookups and loads[0].began_s > lookups[0].ended_s:
            self._whole(SpanNote(end.request_id, "wait", lookups[0].ended_s, loads[0].began_s, {}), inside_root)
        for load in loads:
            inside_load = set_span_in_context(self._whole(load, inside_root))
            for note in notes:
                if note.name in INSIDE_LOAD and load.began_s <= note.began_s and note.ended_s <= load.ended_s:
                    self._whole(note, inside_load)
        for note in lookups:
            self._whole(note, inside_root)
        root.end(self._ns(end.ended_s))

    def _whole(self, note: SpanNote, context: Any) -> Any:
        span = self._begin(note.name, note.began_s, context, {f"kvbm.{name}": one for name, one in note.facts.items()})
        span.end(self._ns(note.ended_s))
        return span

    def _begin(self, name: str, began_s: float, context: Any, attributes: Mapping[str, Any]) -> Any:
        span = self._tracer.start_span(
            f"kvbm.{name}", context=context, start_time=self._ns(began_s), attributes=dict(attributes)
        )
        if span.is_recording():  # not if the client has decided that its trace is not sampled
            self._spans.append(span)
        return span

    def _ns(self, moment_s: float) -> int:
        return self._epoch_ns + int(moment_s * NS)


def _exporter(endpoint: str) -> SpanExporter:
    """Return an exporter that reads no body of an answer. Raises ImportError."""
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    def drop_body(response: requests.Response, **_: Any) -> None:
        response._content = b""  # what the exporter would wait for
        response.close()

    session = requests.Session()
    session.hooks["response"].append(drop_body)
    return OTLPSpanExporter(endpoint=endpoint, session=session)
