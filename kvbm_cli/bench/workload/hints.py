"""Adds hints for kvbm to the requests of a script (docs/reference/hints.md), as an agent would send them.

An agent knows whether its context continues. A request whose prompt a later one of its session continues retains its
blocks for about twice the time until then, and LEAST_S more. The last request of a context demotes them. Each context
has a session of its own, so that the end of a subagent does not end its agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvbm_cli.bench.workload.script import Script, ScriptedRequest

LEAST_S = 30.0
FIELD = "kv_transfer_params"


def with_hints(script: Script) -> Script:
    """Return the same script with hints. A request that has the field already keeps it."""
    requests = script.requests
    successor = _successors(requests)
    root = list(range(len(requests)))
    for index, later in sorted(successor.items()):
        root[later] = root[index]
    hinted = (
        _hinted(one, f"context-{root[index]}", None if index not in successor else requests[successor[index]])
        for index, one in enumerate(requests)
    )
    return replace(script, requests=tuple(hinted))


def _successors(requests: Sequence[ScriptedRequest]) -> dict[int, int]:
    """Return for each request the next one of its session that begins with its prompt, if there is one."""
    sessions: dict[int, list[int]] = {}
    for index, one in enumerate(requests):
        sessions.setdefault(one.session, []).append(index)
    found: dict[int, int] = {}
    for indices in sessions.values():
        for at, index in enumerate(indices):
            parts = requests[index].parts
            later = (other for other in indices[at + 1 :] if requests[other].parts[: len(parts)] == parts)
            if (other := next(later, None)) is not None:
                found[index] = other
    return found


def _hinted(request: ScriptedRequest, session: str, later: ScriptedRequest | None) -> ScriptedRequest:
    if any(name == FIELD for name, _ in request.extra):
        return request
    hint: dict[str, object] = {"session": session}
    if later is None:
        hint["demote"] = True
    else:
        at_s, later_s = request.at_s, later.at_s
        pause_s = later.delay_s if at_s is None or later_s is None else later_s - at_s
        hint["retain_s"] = round(LEAST_S + 2 * pause_s, 1)
    return replace(request, extra=(*request.extra, (FIELD, {"kvbm": hint})))
