"""Launches the requests of one target at the times that the plan fixes. All of it runs in one event loop.

A request passes these states:

    waiting     for requests that must end before it (`after`)
    due         its launch time is known; it waits for that time, or for a slot of the closed loop
    in flight   its task encodes the body, sleeps until the launch time, sends, and reads the answer
    ended       its record was handed over, or it was dropped because the duration was over

Launches have absolute times, so that a slow engine delays no launch of an open loop. Bodies are encoded one at a time,
early enough for the launch, and never all at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbm_cli.bench.load.request import Exchange, Target
from kvbm_cli.bench.result.results import RequestRecord
from kvbm_cli.bench.workload.plan import Launches, PlannedRequest, slot_groups

LEAD_S = 0.25
LEAD_S_PER_REQUEST = 2e-5
ENCODE_S_PER_TOKEN = 3e-7  # three times the usual time

if TYPE_CHECKING:
    import aiohttp

WATCH_INTERVAL_S = 0.25
ENCODE_AHEAD_S = 0.05
EARLY_ENCODE_DELAY_S = 0.005
ENGINE_ENDED = "the engine ended"


OnRecord = Callable[[RequestRecord], None]


@dataclass(slots=True)
class _Group:
    """Requests that share a slot of the closed loop. `due` are those that wait for it."""

    open_requests: int
    is_admitted: bool = False
    due: list[tuple[PlannedRequest, float]] = field(default_factory=list)


class Launcher:
    """The requests of one target, from the first launch to the last answer."""

    def __init__(
        self, part: Part, target: Target, session: aiohttp.ClientSession, start_ns: int, on_record: OnRecord
    ) -> None:
        self._part = part
        self._target = target
        self._on_record = on_record
        self._start_s = start_ns / 1e9 + target.offset_s
        self._exchange = Exchange(
            session,
            target,
            start_ns=start_ns + round(target.offset_s * 1e9),
            timeout_s=part.request_timeout_s,
        )
        self._requests = {request.index: request for request in part.requests}
        self._awaited = {request.index: len(request.after) for request in part.requests}
        self._earliest_s = {request.index: request.intended_s or 0.0 for request in part.requests}
        self._dependents: dict[int, list[PlannedRequest]] = {request.index: [] for request in part.requests}
        for request in part.requests:
            for index in request.after:
                self._dependents[index].append(request)
        self._groups = self._make_groups()
        self._queue: deque[_Group] = deque()
        self._free_slots = part.concurrency or 0
        self._is_filling = False
        self._is_closed = False
        self._not_ended = set(self._requests)
        self._bodies: dict[int, bytes] = {}
        self._encoding = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._finished = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        roots = [request for request in self._part.requests if not request.after]
        starts = encoding_starts(roots)
        for request in roots:
            self._schedule(request, self._earliest_s[request.index], starts.get(request.index))
        if not self._not_ended:
            return
        try:
            while not self._finished.done() and not self._target.has_ended():
                await asyncio.wait([self._finished], timeout=WATCH_INTERVAL_S)
        finally:
            await self._close()
        if self._finished.done():
            self._finished.result()
        self._fail_rest()

    # ---- from waiting to due

    def _schedule(self, request: PlannedRequest, due_s: float, encoding_start_s: float | None) -> None:
        """Start the request shortly before its body must be encoded, or now."""
        if encoding_start_s is None or encoding_start_s - ENCODE_AHEAD_S <= self._now_s():
            self._admit(request, due_s)
        else:
            at_s = self._start_s + encoding_start_s - ENCODE_AHEAD_S  # the loop's clock is that of perf_counter
            self._timers[request.index] = asyncio.get_running_loop().call_at(at_s, self._admit, request, due_s)

    def _admit(self, request: PlannedRequest, due_s: float) -> None:
        """Start the request if its group has a slot or gets one; otherwise it waits for the slot."""
        self._timers.pop(request.index, None)
        group = self._groups.get(request.index)
        if group is None or group.is_admitted:
            self._start(request, due_s)
            return
        if not group.due:
            self._queue.append(group)
        group.due.append((request, due_s))
        self._fill_slots(0.0)

    def _fill_slots(self, since_s: float) -> None:
        """Give free slots to the groups that have waited longest; a slot is free since `since_s`."""
        if self._is_filling:
            return  # a group was dropped as a whole, which freed its slot: the loop below continues
        self._is_filling = True
        while self._free_slots and self._queue:
            self._free_slots -= 1
            group = self._queue.popleft()
            group.is_admitted = True
            for request, due_s in group.due:
                self._start(request, max(due_s, since_s))
        self._is_filling = False

    def _start(self, request: PlannedRequest, due_s: float) -> None:
        duration_s = self._part.launches.duration_s
        if request.intended_s is None and duration_s is not None and due_s >= duration_s:
            self._drop(request, due_s)
            return
        task = asyncio.create_task(self._send(request, due_s))
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    # ---- in flight

    async def _send(self, request: PlannedRequest, due_s: float) -> None:
        record = self._target.record_of(request)
        record.intended_ms = round(due_s * 1e3, 6)
        try:
            body = await self._body_of(request)
            if (delay_s := due_s - self._now_s()) > 0:
                await asyncio.sleep(delay_s)
            self._encode_next(request)
            await self._exchange.send(request, body, record)
        except asyncio.CancelledError:
            if not self._target.has_ended():
                raise
            record.error = ENGINE_ENDED
            record.end_ms = self._exchange.now_ms()
        self._not_ended.discard(request.index)
        self._on_record(record)
        assert record.end_ms is not None
        self._ended(request, record.end_ms / 1e3)

    async def _body_of(self, request: PlannedRequest) -> bytes:
        """One body per pass of the event loop: encoding must not delay the stamps of other requests more than once."""
        if (body := self._bodies.pop(request.index, None)) is not None:
            return body
        async with self._encoding:
            return request.encode()

    def _encode_next(self, request: PlannedRequest) -> None:
        """Encode what follows at once on this request while the engine works on it."""
        following = [one for one in self._dependents[request.index] if one.delay_s < ENCODE_AHEAD_S]
        if following:
            asyncio.get_running_loop().call_later(EARLY_ENCODE_DELAY_S, self._encode_early, following)

    def _encode_early(self, requests: list[PlannedRequest]) -> None:
        for request in requests:
            if self._awaited[request.index] and request.index not in self._bodies and not self._finished.done():
                self._bodies[request.index] = request.encode()

    # ---- ended

    def _ended(self, request: PlannedRequest, end_s: float) -> None:
        for one in self._dependents[request.index]:
            self._awaited[one.index] -= 1
            due_s = self._earliest_s[one.index] = max(self._earliest_s[one.index], end_s + one.delay_s)
            if not self._awaited[one.index] and one.index in self._not_ended and not self._is_closed:
                self._schedule(one, due_s, due_s)
        self._release(request, end_s)

    def _drop(self, request: PlannedRequest, end_s: float) -> None:
        """Drop a request. The duration is over: neither this request nor any that awaits it is launched."""
        dropped = [request]
        while dropped:
            one = dropped.pop()
            if one.index in self._not_ended:
                self._not_ended.discard(one.index)
                self._bodies.pop(one.index, None)
                dropped += self._dependents[one.index]
                self._release(one, end_s)

    def _release(self, request: PlannedRequest, end_s: float) -> None:
        group = self._groups.get(request.index)
        if group is not None:
            group.open_requests -= 1
            if not group.open_requests and group.is_admitted:
                self._free_slots += 1
                self._fill_slots(end_s)
        if not self._not_ended and not self._finished.done():
            self._finished.set_result(None)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._finished.done():
            self._finished.set_exception(error)

    # ---- the end

    async def _close(self) -> None:
        """End what is open: nothing, unless the engine ended or the run was cancelled."""
        self._is_closed = True
        for timer in self._timers.values():
            timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fail_rest(self) -> None:
        """Record the requests that the engine was not sent before it ended. With a duration, they are unknown."""
        if self._part.launches.duration_s is not None and self._part.launches.interval_s is None:
            return
        for index in sorted(self._not_ended):
            record = self._target.record_of(self._requests[index])
            intended_s = self._requests[index].intended_s
            record.intended_ms = None if intended_s is None else intended_s * 1e3
            record.error = ENGINE_ENDED
            self._on_record(record)

    def _make_groups(self) -> dict[int, _Group]:
        if self._part.concurrency is None:
            return {}
        groups = [(requests, _Group(len(requests))) for requests in slot_groups(self._part.requests)]
        return {request.index: group for requests, group in groups for request in requests}

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s


@dataclass(frozen=True, slots=True)
class Part:
    """What one process sends: all or some requests of a plan."""

    requests: tuple[PlannedRequest, ...]
    launches: Launches
    request_timeout_s: float
    concurrency: int | None

    def lead_s(self) -> float:
        """Time to prepare the first launches."""
        starts = encoding_starts([request for request in self.requests if not request.after])
        return LEAD_S + LEAD_S_PER_REQUEST * len(self.requests) - min([*starts.values(), 0.0])


def encoding_starts(requests: Iterable[PlannedRequest]) -> dict[int, float]:
    """Seconds at which the encoding of each timed request must start, also where many are due at once."""
    starts: dict[int, float] = {}
    timed = [(request.intended_s, request) for request in requests if request.intended_s is not None]
    next_s = float("inf")
    for intended_s, request in sorted(timed, key=lambda one: (one[0], one[1].index), reverse=True):
        next_s = min(intended_s, next_s) - ENCODE_S_PER_TOKEN * (request.prompt_tokens or 1)
        starts[request.index] = next_s
    return starts
