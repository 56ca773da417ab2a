"""A trace of the requests that a benchmark sent, with their times and whole bodies, for aiperf and for `kind: trace`.

docs/reference/trace.md describes the fields. A request in an open loop has a `timestamp` and is a session of its own.
In a closed loop, `delay` counts from the end of the previous turn; of several requests that one waits for, that is the
last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvbm.errors import UsageError
from kvbm_cli.bench.workload.plan import RESPONSES, Plan


def replay_lines(plan: Plan) -> Iterator[str]:
    """Yield one line per request, in the order of the launches. UsageError for bodies that a trace cannot have."""
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
