"""How a plan is divided: groups of sessions, the part of each process, and how many processes a plan needs.

Sessions that await each other stay together, and the concurrency is divided.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvbm.errors import UsageError
from kvbm_cli.bench.workload.plan import Launches, Plan, PlannedRequest

# Load of one core, measured by bench/client/overhead.py.
REQUEST_S = 0.00035
CHUNK_S = 0.00008
PROMPT_TOKEN_S = 1.5e-7
LARGEST_LOAD = 0.5
ASSUMED_TOKENS_PER_S = 50.0  # per session of a closed loop
ASSUMED_TOKENS = 128  # of an answer without a limit
WINDOW_S = 10.0
WorkerCount = int | Literal["auto"]

LEAD_S = 0.25
LEAD_S_PER_REQUEST = 2e-5
ENCODE_S_PER_TOKEN = 3e-7  # three times the usual time

Group = list[PlannedRequest]


def slot_groups(requests: Sequence[PlannedRequest]) -> list[Group]:
    """Each session, together with sessions that it awaits after its first request, as an agent awaits its helpers.

    Such a session would otherwise keep its slot while it waits for a session that gets none.
    """
    session_of = {request.index: request.session for request in requests}
    started: set[int] = set()
    links = []
    for request in requests:
        if request.session in started:
            links += [(request.session, session_of[index]) for index in request.after]
        started.add(request.session)
    return _groups(requests, links)


def linked_groups(requests: Sequence[PlannedRequest]) -> list[Group]:
    """Sessions of which no request awaits one of another group."""
    session_of = {request.index: request.session for request in requests}
    return _groups(requests, [(request.session, session_of[index]) for request in requests for index in request.after])


def _groups(requests: Sequence[PlannedRequest], links: Iterable[tuple[int, int]]) -> list[Group]:
    """In the order of their first requests."""
    parents = {request.session: request.session for request in requests}

    def root(session: int) -> int:
        while parents[session] != session:
            parents[session] = session = parents[parents[session]]
        return session

    for one, other in links:
        parents[root(one)] = root(other)
    groups: dict[int, Group] = {}
    for request in requests:
        groups.setdefault(root(request.session), []).append(request)
    return list(groups.values())


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


def worker_count(plan: Plan, target_count: int, wanted: WorkerCount) -> int:
    """How many processes send the plan; 1 is this process. There is at most one per group of sessions."""
    if wanted != "auto" and wanted < 1:
        raise UsageError(f"{wanted} worker processes: at least 1 is required")
    count = wanted if wanted != "auto" else _useful_count(estimated_load(plan, target_count))
    concurrency = plan.launches.concurrency or count
    return max(1, min(count, concurrency, len(linked_groups(plan.requests)) if count > 1 else 1))


def estimated_load(plan: Plan, target_count: int) -> float:
    """Return the share of one core that the plan takes in its busiest 10 s, if the engines keep up."""
    costs_s = [
        REQUEST_S + CHUNK_S * (request.answer_tokens or ASSUMED_TOKENS) + PROMPT_TOKEN_S * (request.prompt_tokens or 0)
        for request in plan.requests
    ]
    timed = sorted((request.intended_s, costs_s[i]) for i, request in enumerate(plan.requests) if request.intended_s)
    return target_count * max(_busiest(timed), _closed_loop_load(plan, costs_s))


def _busiest(timed: Sequence[tuple[float, float]]) -> float:
    """Return the largest load of any window of the timed requests."""
    largest = inside = 0.0
    first = 0
    for at_s, cost_s in timed:
        inside += cost_s
        while timed[first][0] <= at_s - WINDOW_S:
            inside -= timed[first][1]
            first += 1
        largest = max(largest, inside)
    return largest / min(WINDOW_S, max(1.0, timed[-1][0])) if timed else 0.0


def _closed_loop_load(plan: Plan, costs_s: Sequence[float]) -> float:
    """Sessions in flight, each with the assumed speed of answers."""
    closed = [i for i, request in enumerate(plan.requests) if request.intended_s is None]
    if not closed:
        return 0.0
    tokens = sum(plan.requests[i].answer_tokens or ASSUMED_TOKENS for i in closed)
    sessions = len({plan.requests[i].session for i in closed})
    in_flight = min(sessions, plan.launches.concurrency or sessions)
    return in_flight * ASSUMED_TOKENS_PER_S / tokens * sum(costs_s[i] for i in closed)


def parts_of(plan: Plan, count: int) -> list[Part]:
    """Divides the plan into parts of about equal work."""
    sent: list[list[PlannedRequest]] = [[] for _ in range(count)]
    work = [0] * count
    for group in linked_groups(plan.requests):
        lightest = work.index(min(work))
        sent[lightest] += group
        work[lightest] += sum(8 + (request.answer_tokens or ASSUMED_TOKENS) for request in group)
    parts = []
    for number, requests in enumerate(sent):
        whole = plan.launches.concurrency
        concurrency = None if whole is None else whole // count + (number < whole % count)
        requests.sort(key=lambda request: request.index)
        parts.append(Part(tuple(requests), plan.launches, plan.request_timeout_s, concurrency))
    return parts


def _useful_count(load: float) -> int:
    """One core is left for the engine, which usually runs on the same machine."""
    return min(math.ceil(load / LARGEST_LOAD), _cores() - 1)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
