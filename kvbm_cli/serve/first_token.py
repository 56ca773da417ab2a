"""Waits for an engine's first token. A healthy engine may still compile its kernels, or have no memory for a request.

The request runs in a thread of its own, so that whoever waits can go on watching the engine and the signals.
"""

from __future__ import annotations

import http
import os
import re
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvbm.config.launch_plan import LaunchPlan
from kvbm_cli.engine.process import POLL_S
from kvbm_cli.system.http_client import HttpAnswer, request
from kvbm_cli.terminal.progress import Progress

if TYPE_CHECKING:
    from kvbm_cli.disaggregated.engines import DisaggregatedEngines
    from kvbm_cli.engine.process import EngineProcess

PROMPT = "Hello"
PHASE = "waiting for the first token"
NOT_NOW = (0, http.HTTPStatus.TOO_MANY_REQUESTS, http.HTTPStatus.SERVICE_UNAVAILABLE)


def wait_first_token(
    engine: EngineProcess | DisaggregatedEngines, timeout_s: float, on_progress: Callable[[Progress], None]
) -> str | None:
    """Returns when a healthy engine has answered, with its refusal where it takes no such request at all (a 4xx: it
    embeds, or wants another kind of prompt).

    EngineError as soon as it has ended or failed, or when `timeout_s` have passed since its start; then it is dead.
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
            hint = f"the whole log: `less {engine.log_path}`"
            raise engine.late_error(f"the engine is healthy, but its first answer was an error\n  {said}", hint=hint)
        if engine.elapsed_s > timeout_s:
            raise engine.late_error(f"the engine was not ready after {timeout_s:g} s\n  {token.waited_for()}")
        on_progress(Progress(engine.elapsed_s, PHASE))
        time.sleep(POLL_S)
    raise engine.ended_error("the engine ended before its first token")


class FirstToken:
    """A completion of one token, asked for at once."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._started = time.monotonic()
        self._answer = HttpAnswer()
        self._thread = self._ask_beside()

    def poll(self) -> HttpAnswer | None:
        """The answer when it is there. What is no more than a refusal for now is asked again."""
        if self._thread.is_alive():
            return None
        if self._answer.status in NOT_NOW:
            self._thread = self._ask_beside()
            return None
        return self._answer

    def waited_for(self) -> str:
        last = f"; it has answered {self._answer.status}: {self._answer.error()}" if self._answer.status else ""
        return f"it is healthy, but no token has come for {time.monotonic() - self._started:.0f} s{last}"

    def _ask_beside(self) -> threading.Thread:
        thread = threading.Thread(target=self._ask, name="first token", daemon=True)
        thread.start()
        return thread

    def _ask(self) -> None:
        content = {"model": self._plan.model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        url = f"{self._plan.base_url}/v1/completions"
        self._answer = request("POST", url, content=content, headers=_authorization(self._plan), timeout_s=None)


def _authorization(plan: LaunchPlan) -> dict[str, str]:
    """The key that the engine asks its clients for, where its command line or environment has one."""
    given = re.search(r"(?:^|\0)--api-key[\0=]([^\0]+)", "\0".join(plan.argv))
    key = given[1] if given else plan.environment.get("VLLM_API_KEY", os.environ.get("VLLM_API_KEY"))
    return {"Authorization": f"Bearer {key}"} if key else {}
