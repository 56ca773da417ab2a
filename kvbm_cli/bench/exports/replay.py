"""A trace of the requests of a benchmark, which aiperf and `kind: trace` replay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvbm.errors import UsageError
from kvbm_cli.bench.workload.plan import RESPONSES, Plan


def replay_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of a trace with the times and whole bodies of the requests, in the order of the launches
    (docs/reference/trace.md).

    A request in an open loop has a `timestamp` and is a session of its own. In a closed loop, `delay` counts from the
    end of the previous turn; of several requests that one waits for, that is the last. UsageError for bodies that a
    trace cannot have.
    """
    joined = {request.session for request in plan.requests if request.after}
    for request in plan.requests:
        if request.path == RESPONSES:
            raise UsageError(f"a trace has no bodies for `{RESPONSES}`")
        line: dict[str, Any] = {}
        if request.intended_s is not None:
            line["timestamp"] = round(request.intended_s * 1e3, 3)
        if request.session in joined:
            line["session_id"] = str(request.session)
        if request.after and request.turn > 1:
            line["delay"] = round(request.delay_s * 1e3, 3)
        if request.answer_tokens is not None:
            line["output_length"] = request.answer_tokens
        yield json.dumps({**line, "payload": json.loads(request.encode())}, separators=(",", ":")) + "\n"
