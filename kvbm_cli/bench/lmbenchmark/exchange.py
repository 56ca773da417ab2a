"""One request to an OpenAI-compatible server, sent once, with the times that LMBenchmark takes; records, CSV files.

Times come from the monotonic clock and one reading of the wall clock at the start of a run, so a correction of the wall
clock during the run does not change them. A request is never repeated, whatever its outcome.

A faithful run has one record per request of the main run, failed requests included. The intended launch is the tick
that launches the request: LMBenchmark fixes no launch times before the run.

The CSV files of LMBenchmark's programs are written byte for byte as pandas writes them. A table is the concatenation of
one table per session. Therefore a column of integers becomes floats as soon as one session has no rows or has a float
in it: its numbers then end with `.0`. Floats have the shortest digits that give the same number again. Lines end with a
line feed.
"""

from __future__ import annotations

import csv
import io
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbm.errors import EnvironmentProblem
from kvbm_cli.bench.load.control import error_text
from kvbm_cli.bench.load.request import UNREADABLE, StreamedAnswer, Target, open_session
from kvbm_cli.bench.result.arm_result import ArmResult, launch_ms, output_tokens
from kvbm_cli.bench.result.results import Measurement, RequestRecord
from kvbm_cli.bench.workload.script import Phase

if TYPE_CHECKING:
    import aiohttp

READ_TIMEOUT_S = 600.0  # as the `openai` client; there is no limit for a whole answer
OnRecord = Callable[[RequestRecord], None]
MULTI_ROUND_COLUMNS = (
    *("prompt_tokens", "generation_tokens", "ttft", "generation_time"),
    *("user_id", "question_id", "launch_time", "finish_time"),
)
TIER_COLUMNS = ("cached_tokens", "g1_tokens", "g2_tokens", "g3_tokens", "g4_tokens", "computed_tokens")
OUR_COLUMNS = ("request_id", "status", "turn", "phase", "intended_launch", *TIER_COLUMNS, "itl_p50", "tpot")
SHAREGPT_COLUMNS = ("prompt_tokens", "generation_tokens", "ttft", "generation_time", "launch_time", "finish_time")
AGENTIC_COLUMNS = (
    *("prompt_tokens", "generation_tokens", "ttft", "generation_time"),
    *("user_id", "round_id", "launch_time", "finish_time", "agentID", "input", "output"),
)
Cell = int | float | str


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
        except UNREADABLE as error:
            failure = error_text(f"unreadable answer: {type(error).__name__}: {error}")
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


@dataclass(frozen=True, slots=True)
class FaithfulResult:
    """`csv` has the answers of the main run, `records` its requests in the order in which they ended.

    `started_unix_s` is the first tick of the main run; `duration_s` includes the wait for the last answers. `notes` are
    sentences about what the CSV file does not show.
    """

    records: tuple[RequestRecord, ...]
    csv: str
    notes: tuple[str, ...]
    started_unix_s: float
    duration_s: float
    warm_up_requests: int


def require_an_answer(warm_up: Sequence[RequestRecord]) -> None:
    """Raise EnvironmentProblem if every request of a warm-up failed."""
    if warm_up and not any(record.is_ok for record in warm_up):
        raise EnvironmentProblem(
            f"the server answered none of the {len(warm_up)} requests of the warm-up: {warm_up[0].error}",
            hint="check the address, the name of the model, and the length that the model supports",
        )


def notes_on(
    records: Sequence[RequestRecord], warm_up: Sequence[RequestRecord], *, delayed: int = 0
) -> tuple[str, ...]:
    failed = sum(not record.is_ok for record in records)
    uncounted = sum(record.is_ok and not (record.prompt_tokens and record.output_tokens) for record in records)
    empty = sum(record.is_ok and record.first_text_ms is None for record in records)
    failed_warm_up = sum(not record.is_ok for record in warm_up)
    counts = (
        (failed, f"{failed} of {len(records)} requests failed; the CSV file has no rows for them"),
        (uncounted, f"{uncounted} answers had no token counts; the CSV file has 0 there"),
        (empty, f"{empty} answers had no text; the CSV file has a time to first token of 0 for them"),
        (delayed, f"{delayed} requests were launched late because the answer before them was late"),
        (failed_warm_up, f"{failed_warm_up} of {len(warm_up)} requests of the warm-up failed"),
    )
    return tuple(note for count, note in counts if count)


class RecordWriter:
    """Numbers the requests of one run, determines their phase, and hands their records over when they end.

    A request is `cold` if its session has sent nothing before. It is `steady` once `session_count` sessions have sent
    something, and `fill` before that. Requests of the warm-up count for the phase, but have no index.
    """

    def __init__(self, target: Target, session_count: int, on_record: OnRecord) -> None:
        self.main: list[RequestRecord] = []
        self.warm_up: list[RequestRecord] = []
        self._target = target
        self._session_count = session_count
        self._on_record = on_record
        self._sessions: set[int] = set()
        self._next_index = 0

    def launched(self, session: int, turn: int, *, is_warm_up: bool = False, has_history: bool = True) -> RequestRecord:
        """Return the record of a request that is sent next. Without history, nothing of its prompt can be reused."""
        phase = Phase.COLD
        if session in self._sessions and has_history:
            phase = Phase.STEADY if len(self._sessions) >= self._session_count else Phase.FILL
        self._sessions.add(session)
        index = -1
        if not is_warm_up:
            index, self._next_index = self._next_index, self._next_index + 1
        target = self._target
        return RequestRecord(target.run, target.arm, target.cell, target.pair, index, session, turn, phase.value)

    def ended(self, request: ProgramRequest) -> None:
        if request.record.index < 0:
            self.warm_up.append(request.record)
            return
        self.main.append(request.record)
        self._on_record(request.record)


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """One complete answer. Times are wall-clock seconds; `ttft_s` and `generation_s` are the integer 0 without text."""

    prompt_tokens: int
    generation_tokens: int
    ttft_s: float
    generation_s: float
    launched_s: float
    finished_s: float


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """One complete answer of an agent. `messages` is the request as Python prints it."""

    answer: MeasuredAnswer
    round: int
    agent: int
    messages: str
    text: str


def multi_round_csv(sessions: Sequence[tuple[int, Sequence[MeasuredAnswer]]]) -> str:
    """`sessions` are (user, rows in the order of completion), retired users first."""
    rows: list[list[Cell]] = [
        [*_measured(row), user, position, row.launched_s, row.finished_s]
        for user, answers in sessions
        for position, row in enumerate(answers, start=1)
    ]
    if any(not answers for _, answers in sessions):
        rows = [[*map(float, row[:4]), *row[4:]] for row in rows]
    return _text(MULTI_ROUND_COLUMNS, rows)


def sharegpt_csv(answers: Iterable[MeasuredAnswer]) -> str:
    ordered = sorted(answers, key=lambda row: row.launched_s)
    return _text(SHAREGPT_COLUMNS, [[*_measured(row), row.launched_s, row.finished_s] for row in ordered])


def agentic_csv(sessions: Sequence[tuple[int, Sequence[AgentAnswer]]]) -> str:
    rows: list[list[Cell]] = [
        [
            *(*_measured(row.answer), user, row.round, row.answer.launched_s, row.answer.finished_s),
            *(row.agent, row.messages, row.text),
        ]
        for user, answers in sessions
        for row in answers
    ]
    if any(not answers for _, answers in sessions):
        rows = [[*map(float, row[:4]), row[4], float(row[5]), *row[6:8], float(row[8]), *row[9:]] for row in rows]
    return _text(AGENTIC_COLUMNS, rows)


def _measured(row: MeasuredAnswer) -> list[Cell]:
    return [row.prompt_tokens, row.generation_tokens, row.ttft_s, row.generation_s]


def _text(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    columns_of_cells = [_as_one_type(column) for column in zip(*rows, strict=True)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns_of_cells, strict=True))
    return out.getvalue()


def _as_one_type(column: Sequence[Cell]) -> Sequence[Cell]:
    """Return a column of one type: one with a float has only floats."""
    if any(isinstance(cell, float) for cell in column):
        return [float(cell) for cell in column]
    return column


def csv_files_of(result: ArmResult) -> dict[str, str]:
    """Return name and text of a CSV file per run of our own schedule: LMBenchmark's eight columns first, then ours.

    `multi-round-qa.py --process-summary FILE` reads it. A row is a request that succeeded: LMBenchmark has no column
    for failures, and its means would count them. `ttft` runs from the launch to the first text, `generation_time` from
    there to the end of the stream. `launch_time` and `finish_time` are Unix seconds. LMBenchmark's `question_id` counts
    the recorded rows of a user, not the questions; so does this file, and `turn` has the number of the question. A
    number that the server did not report is empty.

    A file has one run, because times of several on one axis would make LMBenchmark's throughput wrong. Its name is
    KEY_output_Q.csv: the key is the name of the run, Q the offered requests per second. A faithful run has a CSV of its
    own, equal to LMBenchmark's to the byte, and none here.
    """
    workload = result.cell.definition["workload"]
    if workload.get("kind") == "lmbenchmark" and workload.get("mode") == "faithful":
        return {}
    return {f"{run.run}_output_{result.offered_rate or 0:.4g}.csv": _of_run(result, run) for run in result.runs}


def _of_run(result: ArmResult, run: Measurement) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*MULTI_ROUND_COLUMNS, *OUR_COLUMNS))
    seen: Counter[int] = Counter()
    for record in sorted(run.records, key=lambda record: (record.session, record.end_ms or 0.0)):
        if record.is_ok:
            seen[record.session] += 1
            writer.writerow(_row(result, record, seen[record.session]))
    return text.getvalue()


def _row(result: ArmResult, record: RequestRecord, question: int) -> tuple[Any, ...]:
    launch, text, end = launch_ms(record), record.first_text_ms, record.end_ms
    assert end is not None, "a request that succeeded has ended"
    return (
        record.prompt_tokens,
        output_tokens(record),
        0.0 if text is None else (text - launch) / 1e3,
        0.0 if text is None else (end - text) / 1e3,
        record.session,
        question,
        result.unix_s(record, launch),
        result.unix_s(record, end),
        record.index,
        "ok",
        record.turn,
        record.phase,
        None if record.intended_ms is None else result.unix_s(record, record.intended_ms),
        *(getattr(record, name) for name in TIER_COLUMNS),
        _seconds(_median(record.token_gaps_ms)),
        _seconds(record.tpot_ms),
    )


def _median(values: list[float]) -> float | None:
    import numpy as np

    return float(np.median(values)) if values else None


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1e3
