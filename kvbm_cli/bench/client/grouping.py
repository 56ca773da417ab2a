"""Groups of sessions: those that share a slot of a closed loop, and those that one process must send."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbm_cli.bench.workload.plan import PlannedRequest

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
