"""Sends one request of a plan and reads its answer. A failure of any kind is a record with an error text."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbm_cli.bench.load.control import error_text
from kvbm_cli.bench.load.events import StreamedAnswer
from kvbm_cli.bench.result.results import RequestRecord
from kvbm_cli.bench.workload.plan import PlannedRequest
from kvbm_cli.system.tls import is_https, tls_context

if TYPE_CHECKING:
    import aiohttp

CONNECT_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 4.0  # uvicorn closes idle connections after 5 s; a request on a closed one would fail
LARGEST_SINGLE_WRITE_BYTES = 1 << 20
LONGEST_REFUSAL_BYTES = 20_000
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError)


@dataclass(frozen=True, slots=True)
class Target:
    """The engine of one run. Its schedule starts `offset_s` after the schedule of the first target of the drive.

    `headers` and `api_key` are sent with each request, and never written to a file. `ca_file`: see `tls_context`.
    """

    run: str
    arm: str
    cell: str
    pair: int
    base_url: str
    offset_s: float = 0.0
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    api_key: str | None = field(default=None, repr=False)
    has_ended: Callable[[], bool] = lambda: False
    ca_file: str = ""

    def all_headers(self) -> dict[str, str]:
        """Return the headers. A compressed answer would arrive in blocks instead of tokens, hence no encoding is
        accepted."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Content-Type": "application/json", "Accept-Encoding": "identity", **self.headers, **key}

    def record_of(self, request: PlannedRequest) -> RequestRecord:
        return RequestRecord(
            run=self.run,
            arm=self.arm,
            cell=self.cell,
            pair=self.pair,
            index=request.index,
            session=request.session,
            turn=request.turn,
            phase=request.phase.value,
        )


@asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a session without proxy, retries, cookies or connection limit. Only each request has a timeout."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        yield session


async def send(
    session: aiohttp.ClientSession, target: Target, request: PlannedRequest, *, timeout_s: float
) -> RequestRecord:
    """Send one request now, outside a schedule; its times count from this call."""
    record = target.record_of(request)
    body, start_ns = request.encode(), time.perf_counter_ns()
    record.intended_ms = 0.0
    exchange = Exchange(session, target, start_ns=start_ns, timeout_s=timeout_s)
    await exchange.send(request, body, record)
    return record


class Exchange:
    """Sends requests to one target. Times of the records count from `start_ns`."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, *, start_ns: int, timeout_s: float) -> None:
        self._session = session
        self._run = target.run
        self._base_url = target.base_url.rstrip("/")
        self._headers = target.all_headers()
        self._tls = tls_context(target.ca_file) if is_https(target.base_url) else True  # True: what aiohttp does itself
        self._start_ns = start_ns
        self._timeout_s = timeout_s

    def now_ms(self) -> float:
        return (time.perf_counter_ns() - self._start_ns) / 1e6

    async def send(self, request: PlannedRequest, body: bytes, record: RequestRecord) -> None:
        """Fill `record`; a failure sets `record.error`. Does not raise, except when it is cancelled."""
        import aiohttp

        asks_tiers = "return_cached_tokens_details" in dict(request.fields)
        answer = StreamedAnswer(record, self._start_ns, asks_tiers=asks_tiers)
        failure = None
        record.launched_ms = self.now_ms()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._read_answer(request, body, record, answer)
        except TimeoutError:
            failure = f"no complete answer within {self._timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as caught:
            failure = error_text(f"{type(caught).__name__}: {caught}")
        except UNREADABLE as caught:
            failure = _unreadable(caught)
        ended_ms = self.now_ms()
        record.error = record.error or _error_of(request, record, answer, failure)
        if record.end_ms is None:
            record.end_ms = ended_ms

    async def _read_answer(
        self, request: PlannedRequest, body: bytes, record: RequestRecord, answer: StreamedAnswer
    ) -> None:
        headers = {**self._headers, "X-Request-Id": f"{self._run}-{request.index}"}
        data = body if len(body) <= LARGEST_SINGLE_WRITE_BYTES else io.BytesIO(body)
        url = self._base_url + request.path
        post = self._session.post(url, data=data, headers=headers, allow_redirects=False, ssl=self._tls)
        async with post as response:
            record.http_status = response.status
            if response.status != 200:
                text = (await response.content.read(LONGEST_REFUSAL_BYTES)).decode(errors="replace").strip()
                record.error = error_text(f"HTTP {response.status}: {text}")
                return
            readany, take, clock = response.content.readany, answer.take, time.perf_counter_ns
            while data_read := await readany():
                take(clock(), data_read)


def _error_of(
    request: PlannedRequest, record: RequestRecord, answer: StreamedAnswer, failure: str | None
) -> str | None:
    """Return what is wrong with the answer. A failure after its end mark does not count."""
    try:
        answer.finish()
    except UNREADABLE as caught:
        return failure if failure and not answer.is_done else _unreadable(caught)
    if record.error is not None:
        return record.error  # streamed by the engine
    if not answer.is_done:
        return failure or f"the answer ended after {answer.token_count} tokens"
    return _defect(request, record)


def _field_for_token_ids(asked: Mapping[str, object]) -> str | None:
    """Return the field that asks for token ids: of vLLM and its like, or of TensorRT-LLM."""
    if asked.get("return_token_ids"):
        return "return_token_ids"
    return "detokenize" if asked.get("detokenize") is False else None


def _unreadable(caught: Exception) -> str:
    return error_text(f"unreadable answer: {type(caught).__name__}: {caught}")


def _defect(request: PlannedRequest, record: RequestRecord) -> str | None:
    """Why a complete answer cannot be compared; `None` if it can."""
    asked = dict(request.fields)
    if record.first_token_ms is None:
        return "the answer is empty"
    name = _field_for_token_ids(asked)
    if name is not None and not record.token_ids:
        return f"the engine sent no token ids (it must support `{name}`)"
    count = record.output_tokens
    if "min_tokens" in asked and count is not None and count != request.answer_tokens:
        return f"the answer has {count} tokens instead of {request.answer_tokens}"
    if None not in (record.prompt_tokens, request.prompt_tokens) and record.prompt_tokens != request.prompt_tokens:
        return f"the engine counted {record.prompt_tokens} prompt tokens instead of {request.prompt_tokens}"
    return None
