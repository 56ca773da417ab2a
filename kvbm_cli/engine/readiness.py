"""Readiness: whether a starting engine answers at its health address, and in words what is being waited for."""

from __future__ import annotations

import http
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from kvbm.config.launch_plan import LaunchPlan
from kvbm_cli.engine.engine_log import EngineLog
from kvbm_cli.system.http_client import HttpAnswer, get

HEALTH_TIMEOUT_S = 2.0
SILENCE_S = 20.0


class Readiness:
    """Asks a starting engine whether it is healthy. `is_own` says of an address whether the engine listens there."""

    def __init__(self, plan: LaunchPlan, log: EngineLog, is_own: Callable[[str], bool]) -> None:
        self._url = plan.health_url
        self._log = log
        self._is_own = is_own
        self._state = ""
        self._since = time.monotonic()
        self._reported_phase: str | None = None

    def ask(self) -> bool:
        """True when the engine answers 200. The answer of a stranger, who took the port before it could, is none."""
        answer = get(self._url, timeout_s=HEALTH_TIMEOUT_S)
        if answer.status == http.HTTPStatus.OK and self._is_own(answer.address):
            return True
        phase = answer.fields().get("phase")
        self._reported_phase = phase if isinstance(phase, str) else self._reported_phase
        self._enter(self._state_of(answer))
        return False

    def phase(self) -> str:
        """What the engine says that it is at, at its health address or in its log."""
        return self._reported_phase or self._log.phase() or "starting"

    def waited_for(self) -> str:
        """What keeps the engine from being healthy, for how long, and when its log last grew."""
        said = f"; it was at `{self._reported_phase}`" if self._reported_phase else ""
        return f"{self._state} for {time.monotonic() - self._since:.0f} s{said}{silence(self._log)}"

    def _enter(self, state: str) -> None:
        if state != self._state:
            self._state, self._since = state, time.monotonic()

    def _state_of(self, answer: HttpAnswer) -> str:
        where = f"{urlsplit(self._url).hostname} port {urlsplit(self._url).port}"
        if answer.status == 0:
            return f"nobody has answered on {where}"
        if answer.status == http.HTTPStatus.OK:
            return f"another program has answered on {where}"
        return f"{urlsplit(self._url).path} has answered {answer.status}"


def silence(log: EngineLog) -> str:
    """That the log has not grown, where that is worth a word."""
    silent_s = log.silent_s()
    return f"; nothing in its log for {silent_s:.0f} s" if silent_s >= SILENCE_S else ""
