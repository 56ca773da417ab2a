"""The load client: launches requests at fixed times, reads the streamed answers and records their times.

A launch never waits for another request, and no request is retried: a failed request is recorded with its error. Times
come from the monotonic clock. The launch time is taken before the first byte is written, the arrival time right after a
read and before parsing. Request bodies are encoded beforehand. Each record has the intended and the actual launch time;
the difference is the client's own lateness. Time to first token counts from the intended launch, as a user would count.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbm_cli.bench.request_record import RequestRecord
from kvbm_cli.bench.schedule import Plan, PlannedRequest
from kvbm_cli.profile.workload import Workload

if TYPE_CHECKING:
    import aiohttp

NANOSECONDS = 1e9
LEAD_S = 0.25
WATCH_INTERVAL_S = 0.25
ERROR_TEXT_CHARACTERS = 300


class EventSplitter:
    """Splits a byte stream into the payloads of its server-sent events; a read may end anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        payloads = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                payloads.append(b"\n".join(self._data))
                self._data = []
        return payloads


@dataclass(frozen=True, slots=True)
class Target:
    """An arm's engine. Its schedule starts `offset_s` after the schedule of the first arm of the drive."""

    arm: str
    base_url: str
    offset_s: float
    has_ended: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class DriveResult:
    """Records by arm, in the order of the plan. `client_cpu_share` is the share of one core over the whole drive."""

    records: dict[str, tuple[RequestRecord, ...]]
    client_cpu_share: float
    started_unix_s: float
    duration_s: float


@asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    """A session without proxy, retries or connection limit. Only each request has a timeout."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
        yield session


async def drive(plan: Plan, targets: Sequence[Target], *, on_record: Callable[[RequestRecord], None]) -> DriveResult:
    """Send the whole plan to every target. When an engine ends, its open requests fail at once."""
    records: dict[str, list[RequestRecord]] = {target.arm: [] for target in targets}

    def take(record: RequestRecord) -> None:
        records[record.arm].append(record)
        on_record(record)

    async with open_session() as session:
        with _garbage_collector_off():
            started_unix_s, cpu_start_s, start_ns = time.time(), time.process_time(), time.perf_counter_ns()
            await _all([_drive_one(session, plan, target, start_ns, take) for target in targets])
            duration_s = (time.perf_counter_ns() - start_ns) / NANOSECONDS
            cpu_share = (time.process_time() - cpu_start_s) / duration_s
    ordered = {arm: tuple(sorted(of_arm, key=lambda record: record.index)) for arm, of_arm in records.items()}
    return DriveResult(ordered, cpu_share, started_unix_s, duration_s)


@contextmanager
def _garbage_collector_off() -> Iterator[None]:
    """Disable garbage collection: it would stop every stream for milliseconds, and requests allocate little."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


async def _all(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait for all calls. If one fails, end the others before its exception is raised."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drive_one(
    session: aiohttp.ClientSession,
    plan: Plan,
    target: Target,
    drive_start_ns: int,
    take: Callable[[RequestRecord], None],
) -> None:
    """Send the whole schedule to one target."""
    start_ns = drive_start_ns + int((LEAD_S + target.offset_s) * NANOSECONDS)

    async def one(request: PlannedRequest) -> None:
        record = RequestRecord(target.arm, request.index, request.user, request.turn, request.intended_s * 1e3)
        try:
            await asyncio.sleep((start_ns - time.perf_counter_ns()) / NANOSECONDS + request.intended_s)
            await _send(session, target.base_url, request, record, start_ns=start_ns, workload=plan.workload)
        except asyncio.CancelledError:
            if not target.has_ended():
                raise
            record.error = "the engine ended"
        take(record)

    pending = {asyncio.create_task(one(request)) for request in plan.requests}
    try:
        while pending and not target.has_ended():
            done, pending = await asyncio.wait(pending, timeout=WATCH_INTERVAL_S)
            _raise_first(task.exception() for task in done)
    finally:
        for task in pending:
            task.cancel()
        _raise_first(await asyncio.gather(*pending, return_exceptions=True))


def _raise_first(outcomes: Iterable[BaseException | None]) -> None:
    """Look at every outcome: asyncio logs the exceptions of tasks that are never retrieved."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if errors:
        raise errors[0]


async def send(
    session: aiohttp.ClientSession, base_url: str, request: PlannedRequest, *, workload: Workload, arm: str
) -> RequestRecord:
    """Send one request now, outside a schedule; its times count from this call."""
    record = RequestRecord(arm, request.index, request.user, request.turn, 0.0)
    await _send(session, base_url, request, record, start_ns=time.perf_counter_ns(), workload=workload)
    return record


async def _send(
    session: aiohttp.ClientSession,
    base_url: str,
    request: PlannedRequest,
    record: RequestRecord,
    *,
    start_ns: int,
    workload: Workload,
) -> None:
    """Send the request and fill `record`; a failure sets `record.error`."""
    import aiohttp

    def since_start_ms() -> float:
        return (time.perf_counter_ns() - start_ns) / 1e6

    record.launched_ms = since_start_ms()
    try:
        async with asyncio.timeout(workload.request_timeout_s):
            await _read_answer(session, f"{base_url}/v1/completions", request.body, record, since_start_ms)
        record.error = record.error or _defect(record, request.prompt_tokens, workload.answer_tokens)
    except TimeoutError:
        record.error = f"no complete answer within {workload.request_timeout_s:g} s"
    except (aiohttp.ClientError, OSError) as error:
        record.error = f"{type(error).__name__}: {error}"[:ERROR_TEXT_CHARACTERS]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        record.error = f"unreadable answer: {type(error).__name__}: {error}"[:ERROR_TEXT_CHARACTERS]
    if record.end_ms is None:
        record.end_ms = since_start_ms()


async def _read_answer(
    session: aiohttp.ClientSession, url: str, body: bytes, record: RequestRecord, since_start_ms: Callable[[], float]
) -> None:
    headers = {"Content-Type": "application/json", "X-Request-Id": f"{record.arm}-{record.index}"}
    async with session.post(url, data=body, headers=headers) as response:
        record.http_status = response.status
        if response.status != 200:
            text = (await response.text(errors="replace")).strip()
            record.error = f"HTTP {response.status}: {text}"[:ERROR_TEXT_CHARACTERS]
            return
        splitter = EventSplitter()
        async for data in response.content.iter_any():
            arrived_ms = since_start_ms()
            for payload in splitter.feed(data):
                if payload == b"[DONE]":
                    record.end_ms = arrived_ms
                    return
                _take_event(record, json.loads(payload), arrived_ms)
    record.error = record.error or f"the answer ended after {len(record.token_ids)} tokens"


def _take_event(record: RequestRecord, event: dict[str, Any], arrived_ms: float) -> None:
    if "error" in event:
        record.error = f"error in the stream: {event['error']}"[:ERROR_TEXT_CHARACTERS]
        return
    for choice in event.get("choices") or ():
        _take_tokens(record, choice.get("token_ids") or [], arrived_ms)
        record.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
    if usage := event.get("usage"):
        record.prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = details.get("cached_tokens")
        if (tiers := details.get("cached_tokens_by_tier")) is not None:
            record.g1_tokens = tiers.get("device", 0)
            record.g2_tokens = tiers.get("host", 0) + tiers.get("disk", 0)  # blocks from disk pass through host memory


def _take_tokens(record: RequestRecord, token_ids: list[int], arrived_ms: float) -> None:
    """Split the gap since the previous event evenly over the tokens of this one; the first event has no gap."""
    if not token_ids:
        return
    if record.last_token_ms is None:
        record.first_token_ms = arrived_ms
    else:
        gap_ms = (arrived_ms - record.last_token_ms) / len(token_ids)
        record.token_gaps_ms += [round(gap_ms, 4)] * len(token_ids)
    record.last_token_ms = arrived_ms
    record.token_ids += token_ids


def _defect(record: RequestRecord, prompt_tokens: int, answer_tokens: int) -> str | None:
    """Why a complete answer cannot be compared; `None` if it can."""
    if not record.token_ids:
        return "the engine sent no token ids (it must support `return_token_ids`)"
    if len(record.token_ids) != answer_tokens:
        return f"the answer has {len(record.token_ids)} tokens instead of {answer_tokens}"
    if record.prompt_tokens is not None and record.prompt_tokens != prompt_tokens:
        return f"the engine counted {record.prompt_tokens} prompt tokens instead of {prompt_tokens}"
    return None
