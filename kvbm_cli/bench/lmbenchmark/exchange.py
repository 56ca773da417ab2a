"""One request to an OpenAI-compatible server, sent once, with the times that LMBenchmark takes.

Times come from the monotonic clock and one reading of the wall clock at the start of a run, so a correction of the wall
clock during the run does not change them. A request is never repeated, whatever its outcome.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbm_cli.bench.lmbenchmark.result_csv import MeasuredAnswer
from kvbm_cli.bench.load.control import error_text
from kvbm_cli.bench.load.events import StreamedAnswer
from kvbm_cli.bench.load.request import UNREADABLE, Target, open_session
from kvbm_cli.bench.records.request_record import RequestRecord

if TYPE_CHECKING:
    import aiohttp

READ_TIMEOUT_S = 600.0  # as the `openai` client; there is no limit for a whole answer


class RunClock:
    """The time of one run of a program: wall clock for the CSV file, milliseconds for the records."""

    def __init__(self) -> None:
        self.start_unix_s = time.time()
        self.start_ns = time.perf_counter_ns()

    def now_ms(self) -> float:
        return (time.perf_counter_ns() - self.start_ns) / 1e6

    def now_s(self) -> float:
        return self.wall_s(self.now_ms())

    def wall_s(self, time_ms: float) -> float:
        return self.start_unix_s + time_ms / 1e3


@dataclass(slots=True)
class ProgramRequest:
    """A request and its record. `created_ms` is LMBenchmark's launch time, before the body is encoded."""

    record: RequestRecord
    clock: RunClock
    created_ms: float

    @property
    def is_ok(self) -> bool:
        return self.record.is_ok

    def measured(self) -> MeasuredAnswer:
        """Return the numbers of the CSV file; a missing token count is 0."""
        record, created_ms = self.record, self.created_ms
        assert record.end_ms is not None, "the request has not ended"
        first_ms = record.first_text_ms
        return MeasuredAnswer(
            prompt_tokens=record.prompt_tokens or 0,
            generation_tokens=record.output_tokens or 0,
            ttft_s=0 if first_ms is None else (first_ms - created_ms) / 1e3,
            generation_s=0 if first_ms is None else (record.end_ms - first_ms) / 1e3,
            launched_s=self.clock.wall_s(created_ms),
            finished_s=self.clock.wall_s(record.end_ms),
        )


@dataclass(frozen=True, slots=True)
class ProgramServer:
    """The engine under test, with the open connections of the run."""

    session: aiohttp.ClientSession
    target: Target
    url: str
    model: str

    async def post(self, request: ProgramRequest, path: str, body: bytes, *, user: int | None = None) -> None:
        """Send the body and fill the record. A failure sets its `error`."""
        import aiohttp

        record = request.record
        answer = StreamedAnswer(record, request.clock.start_ns)
        failure = None
        record.launched_ms = request.clock.now_ms()
        try:
            await self._exchange(record, answer, path, body, user)
        except (aiohttp.ClientError, OSError) as error:
            failure = error_text(f"{type(error).__name__}: {error}")
        ended_ms = request.clock.now_ms()
        record.error = record.error or _error_of(record, answer, failure)
        if record.end_ms is None:
            record.end_ms = ended_ms

    async def _exchange(
        self, record: RequestRecord, answer: StreamedAnswer, path: str, body: bytes, user: int | None
    ) -> None:
        import aiohttp

        key = {"Authorization": "Bearer EMPTY"}  # as LMBenchmark, unless there is one
        headers = {"Accept": "application/json", **key, **self.target.all_headers()}
        if user is not None:
            headers["x-user-id"] = str(user)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=READ_TIMEOUT_S)
        async with self.session.post(self.url + path, data=body, headers=headers, timeout=timeout) as response:
            record.http_status = response.status
            if response.status != 200:
                text = (await response.text(errors="replace")).strip()
                record.error = error_text(f"HTTP {response.status}: {text}")
                return
            while data := await response.content.readany():
                answer.take(time.perf_counter_ns(), data)


def _error_of(record: RequestRecord, answer: StreamedAnswer, failure: str | None) -> str | None:
    """Return what is wrong with the answer. A failure after its end mark does not count."""
    try:
        answer.finish()
    except UNREADABLE as error:
        return failure or error_text(f"unreadable answer: {type(error).__name__}: {error}")
    if record.error is not None:
        return record.error  # streamed by the engine
    if not answer.is_done:
        return failure or f"the answer ended after {answer.token_count} chunks, without [DONE]"
    if record.token_ids:
        return "the server sent token ids that were not requested; the text of the answer is then unknown"
    return None


@asynccontextmanager
async def connect(target: Target, model: str) -> AsyncIterator[ProgramServer]:
    """Open connections as LMBenchmark does: /v1 is appended if the address does not end with it."""
    base_url = target.base_url
    url = base_url if base_url.endswith("/v1") else base_url.rstrip("/") + "/v1"
    async with open_session() as session:
        yield ProgramServer(session, target, url, model)
