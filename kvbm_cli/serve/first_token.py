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
from queue import SimpleQueue
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
    answers: SimpleQueue[HttpAnswer] = SimpleQueue()
    started, answer = time.monotonic(), HttpAnswer()
    _ask(engine.plan, answers)
    while engine.poll() is None:
        if not answers.empty():
            answer = answers.get()
            said = f"{answer.status}: {answer.error()}"
            if answer.status in NOT_NOW:
                _ask(engine.plan, answers)
            elif answer.status < 500:
                return None if answer.status < 400 else said
            else:
                hint = f"see the whole log with `less {shlex.quote(str(engine.log_path))}`"
                message = f"the engine is healthy, but its first answer is an error\n  {said}"
                raise engine.late_error(message, hint=hint)
        if engine.elapsed_s > timeout_s:
            last = f"; its last answer: {answer.status}: {answer.error()}" if answer.status else ""
            waited = f"it is healthy, but has generated no token for {time.monotonic() - started:.0f} s{last}"
            raise engine.late_error(f"the engine was not ready after {timeout_s:g} s\n  {waited}")
        on_progress(PHASE)
        time.sleep(POLL_S)
    raise engine.ended_error("the engine exited before its first token")


def _ask(plan: LaunchPlan, answers: SimpleQueue[HttpAnswer]) -> None:
    """Request a completion of one token, from a thread."""
    content = {"model": plan.model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    url, headers = f"{plan.base_url}/v1/completions", _authorization(plan)

    def send() -> None:
        answers.put(request("POST", url, content=content, headers=headers, timeout_s=None))

    threading.Thread(target=send, name="first token", daemon=True).start()


def _authorization(plan: LaunchPlan) -> dict[str, str]:
    """Return the API key header if the engine's command line or environment sets a key."""
    given = re.search(r"(?:^|\0)--api-key[\0=]([^\0]+)", "\0".join(plan.argv))
    key = given[1] if given else plan.environment.get(KEY_VARIABLE, os.environ.get(KEY_VARIABLE))
    return {"Authorization": f"Bearer {key}"} if key else {}
