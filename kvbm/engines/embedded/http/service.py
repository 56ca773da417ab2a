"""Service: the state that the HTTP endpoints share and the server changes.

Only the event loop accesses it, except that the thread that loads the engine sets `phase`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from kvbm.engines.embedded.http.completion import Completion, Served
from kvbm.engines.embedded.http.openai_responses import Json
from kvbm.engines.embedded.http.request_fields import RequestError


@dataclass(slots=True)
class Service:
    """Current state of the server. `phase` describes the start-up step; `failure` is set when the engine is dead.

    Without `admin_token`, endpoints that change the engine are off.
    """

    served: Served | None = None
    phase: str = "starting"
    failure: str | None = None
    is_stopping: bool = False
    running: set[Completion] = field(default_factory=set)
    admin_token: str | None = None
    started_unix_s: int = field(default_factory=lambda: int(time.time()))

    def status(self) -> tuple[int, Json]:
        """Return HTTP status and body of /health. The pid lets the parent verify that it reached this process."""
        if self.failure is not None:
            return 503, {"status": "dead", "error": self.failure}
        if self.is_stopping:
            return 503, {"status": "stopping"}
        if self.served is None:
            return 503, {"status": "loading", "phase": self.phase}
        return 200, {"status": "ok", "pid": os.getpid()}

    def ready(self) -> Served:
        """Return the started engine. Raises RequestError 503 if there is none."""
        status, state = self.status()
        if status == 200 and self.served is not None:
            return self.served
        detail = state.get("phase") or state.get("error")
        message = f"the engine is {state['status']}" + (f": {detail}" if detail else "")
        raise RequestError(message, status=status, code=state["status"])

    def fail_running(self, message: str) -> None:
        for completion in self.running:
            completion.fail(message)
