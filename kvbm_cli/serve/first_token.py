"""Waits for an engine's first token. A healthy engine may still compile kernels, or lack memory for a request.

The request runs in its own thread, so that the launcher continues to watch the engine and the signals.
"""

from __future__ import annotations

import http
import os
import re
import shlex
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvbm.engines.launch_plan import KEY_VARIABLE, LaunchPlan
from kvbm_cli.engine.process import POLL_S
from kvbm_cli.system.http_client import HttpAnswer, request

if TYPE_CHECKING:
    from kvbm_cli.disaggregated.engines import DisaggregatedEngines
    from kvbm_cli.engine.process import EngineProcess

PROMPT = "Hello"
PHASE = "waiting for the first token"
NOT_NOW = (0, http.HTTPStatus.TOO_MANY_REQUESTS, http.HTTPStatus.SERVICE_UNAVAILABLE)


def wait_first_token(
    engine: EngineProcess | DisaggregatedEngines, timeout_s: float, on_progress: Callable[[str], None]
) -> str | None:
    """Return when a healthy engine has answered: None for a token, the error text for a 4xx status. An engine that
    serves embeddings or requires another kind of prompt answers 4xx.

    Raises EngineError as soon as the engine has ended or failed, or `timeout_s` after its start; then it is killed.
    """
    token = FirstToken(engine.plan)
    while engine.poll() is None:
        answer = token.poll()
        if answer is not None and answer.status < 400:
            return None
        if answer is not None and answer.status < 500:
            return f"{answer.status}: {answer.error()}"
        if answer is not None:
            said = f"{answer.status}: {answer.error()}"
            hint = f"see the whole log with `less {shlex.quote(str(engine.log_path))}`"
            raise engine.late_error(f"the engine is healthy, but its first answer is an error\n  {said}", hint=hint)
        if engine.elapsed_s > timeout_s:
            raise engine.late_error(f"the engine was not ready after {timeout_s:g} s\n  {token.waited_for()}")
        on_progress(PHASE)
        time.sleep(POLL_S)
    raise engine.ended_error("the engine exited before its first token")


class FirstToken:
    """Requests a completion of one token, immediately."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._started = time.monotonic()
        self._answer = HttpAnswer()
        self._thread = self._start()

    def poll(self) -> HttpAnswer | None:
        """Return the answer, None while there is none. Repeats a request that the engine refused temporarily."""
        if self._thread.is_alive():
            return None
        if self._answer.status in NOT_NOW:
            self._thread = self._start()
            return None
        return self._answer

    def waited_for(self) -> str:
        last = f"; its last answer: {self._answer.status}: {self._answer.error()}" if self._answer.status else ""
        return f"it is healthy, but has generated no token for {time.monotonic() - self._started:.0f} s{last}"

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._send, name="first token", daemon=True)
        thread.start()
        return thread

    def _send(self) -> None:
        content = {"model": self._plan.model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        url = f"{self._plan.base_url}/v1/completions"
        self._answer = request("POST", url, content=content, headers=_authorization(self._plan), timeout_s=None)


def _authorization(plan: LaunchPlan) -> dict[str, str]:
    """Return the API key header if the engine's command line or environment sets a key."""
    given = re.search(r"(?:^|\0)--api-key[\0=]([^\0]+)", "\0".join(plan.argv))
    key = given[1] if given else plan.environment.get(KEY_VARIABLE, os.environ.get(KEY_VARIABLE))
    return {"Authorization": f"Bearer {key}"} if key else {}
