"""Launches the requests of one target at the times that the plan fixes. All of it runs in one event loop.

Each request has a task, which waits

    for the requests that must end before it (`after`)
    until shortly before its launch time
    for a slot of the closed loop, which its group shares
    for its launch time, with the encoded body

and then sends the request, and reads and hands over the answer. A request that is due after the end of the duration is
dropped, with all that await it.

Launches have absolute times, so that a slow engine delays no launch of an open loop. Bodies are encoded one at a time,
early enough for the launch, and never all at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbm_cli.bench.load.request import Exchange, Target
from kvbm_cli.bench.result.results import RequestRecord
from kvbm_cli.bench.workload.plan import Launches, PlannedRequest, slot_groups

LEAD_S = 0.25
LEAD_S_PER_REQUEST = 5e-5  # their tasks begin at once, for up to three targets
ENCODE_S_PER_TOKEN = 3e-7  # three times the usual time

if TYPE_CHECKING:
    import aiohttp

WATCH_INTERVAL_S = 0.25
ENCODE_AHEAD_S = 0.05
EARLY_ENCODE_DELAY_S = 0.005
ENGINE_ENDED = "the engine ended"
AT_ONCE = float("-inf")


OnRecord = Callable[[RequestRecord], None]


@dataclass(slots=True)
class _Group:
    """Requests that share a slot of the closed loop. `slot_s` is the moment since which the slot was free."""

    open_requests: int
    slot_s: asyncio.Future[float]
    is_queued: bool = False


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
        new_future = asyncio.get_running_loop().create_future
        self._not_ended = {request.index: request for request in part.requests}
        self._ends_s: dict[int, asyncio.Future[float | None]] = {index: new_future() for index in self._not_ended}
        self._dependents: dict[int, list[PlannedRequest]] = {index: [] for index in self._not_ended}
        for request in part.requests:
            for index in request.after:
                self._dependents[index].append(request)
        self._groups: dict[int, _Group] = {}
        for requests in slot_groups(part.requests) if part.concurrency is not None else ():
            self._groups |= dict.fromkeys((one.index for one in requests), _Group(len(requests), new_future()))
        self._queue: deque[_Group] = deque()
        self._free_slots = part.concurrency or 0
        self._is_closed = False
        self._bodies: dict[int, bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: asyncio.Future[None] = new_future()

    async def run(self) -> None:
        if not self._part.requests:
            return
        starts_s = encoding_starts([request for request in self._part.requests if not request.after])
        for request in self._part.requests:
            task = asyncio.create_task(self._follow(request, starts_s.get(request.index, AT_ONCE)))
            self._tasks.add(task)
            task.add_done_callback(self._task_ended)
        try:
            while not self._finished.done() and not self._target.has_ended():
                await asyncio.wait([self._finished], timeout=WATCH_INTERVAL_S)
        finally:
            await self._close()
        if self._finished.done():
            self._finished.result()
        self._fail_rest()

    async def _follow(self, request: PlannedRequest, encoding_start_s: float) -> None:
        """Take one request from its awaited requests to its end."""
        group = self._groups.get(request.index)
        due_s = await self._due_s(request, group, encoding_start_s)
        end_s = None if due_s is None else await self._send(request, due_s)
        del self._not_ended[request.index]
        if self._is_closed:
            return
        self._bodies.pop(request.index, None)
        self._ends_s[request.index].set_result(end_s)
        if group is not None:
            group.open_requests -= 1
            if not group.open_requests and group.slot_s.done():
                self._free_slots += 1
                duration_s = self._part.launches.duration_s or 0.0
                self._fill_slots(max(duration_s, self._now_s()) if end_s is None else end_s)

    async def _due_s(self, request: PlannedRequest, group: _Group | None, encoding_start_s: float) -> float | None:
        """Wait until the request may be encoded. Return its launch time, None if it is dropped."""
        due_s = request.intended_s or 0.0
        for index in request.after:
            end_s = await self._ends_s[index]
            if end_s is None:
                return None
            encoding_start_s = due_s = max(due_s, end_s + request.delay_s)
        await self._sleep_until(encoding_start_s - ENCODE_AHEAD_S)
        if group is not None:
            due_s = max(due_s, await self._slot_s(group))
        duration_s = self._part.launches.duration_s
        return None if request.intended_s is None and duration_s is not None and due_s >= duration_s else due_s

    async def _slot_s(self, group: _Group) -> float:
        """Wait for the slot of a group. Return since when it was free."""
        if not group.is_queued:
            group.is_queued = True
            self._queue.append(group)
            self._fill_slots(0.0)
        return await group.slot_s

    def _fill_slots(self, since_s: float) -> None:
        """Give free slots to the groups that have waited longest; a slot is free since `since_s`."""
        while self._free_slots and self._queue:
            self._free_slots -= 1
            self._queue.popleft().slot_s.set_result(since_s)

    async def _send(self, request: PlannedRequest, due_s: float) -> float:
        """Return when the request ended."""
        record = self._target.record_of(request)
        record.intended_ms = round(due_s * 1e3, 6)
        try:
            body = self._bodies.pop(request.index, None) or request.encode()
            await self._sleep_until(due_s)
            if self._dependents[request.index]:
                asyncio.get_running_loop().call_later(EARLY_ENCODE_DELAY_S, self._encode_dependents, request)
            await self._exchange.send(request, body, record)
        except asyncio.CancelledError:
            if not self._target.has_ended():
                raise
            record.error = ENGINE_ENDED
            record.end_ms = self._exchange.now_ms()
        self._on_record(record)
        assert record.end_ms is not None
        return record.end_ms / 1e3

    def _encode_dependents(self, request: PlannedRequest) -> None:
        """Encode what follows at once on this request while the engine works on it."""
        if not self._ends_s[request.index].done():
            for one in self._dependents[request.index]:
                if one.delay_s < ENCODE_AHEAD_S and one.index not in self._bodies:
                    self._bodies[one.index] = one.encode()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()  # of each task, or asyncio would print it
        if self._finished.done():
            return
        if error is not None:
            self._finished.set_exception(error)
        elif not self._tasks:
            self._finished.set_result(None)

    async def _close(self) -> None:
        """End what is open: nothing, unless the engine ended or the run was cancelled."""
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fail_rest(self) -> None:
        """Record the requests that the engine was not sent before it ended. With a duration, they are unknown."""
        if self._part.launches.duration_s is not None and self._part.launches.interval_s is None:
            return
        for request in self._not_ended.values():
            record = self._target.record_of(request)
            record.intended_ms = None if request.intended_s is None else request.intended_s * 1e3
            record.error = ENGINE_ENDED
            self._on_record(record)

    async def _sleep_until(self, at_s: float) -> None:
        if (delay_s := at_s - self._now_s()) > 0:
            await asyncio.sleep(delay_s)

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
