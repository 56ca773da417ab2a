"""Readiness: whether a starting engine answers at its health address, and why it is not ready yet."""

from __future__ import annotations

import http
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from kvbm.engines.launch_plan import LaunchPlan
from kvbm_cli.engine.engine_log import EngineLog
from kvbm_cli.system.http_client import HttpAnswer, get

HEALTH_TIMEOUT_S = 2.0
SILENCE_S = 20.0


class Readiness:
    """Probes the health address of a starting engine. `is_own(address)` is true if the engine listens there."""

    def __init__(self, plan: LaunchPlan, log: EngineLog, is_own: Callable[[str], bool]) -> None:
        self._url = plan.health_url
        self._log = log
        self._is_own = is_own
        self._state = ""
        self._since = time.monotonic()
        self._reported_phase: str | None = None

    def probe(self) -> bool:
        """Return True if the engine answers 200. Ignores the answer of another program that took the port."""
        answer = get(self._url, timeout_s=HEALTH_TIMEOUT_S)
        if answer.status == http.HTTPStatus.OK and self._is_own(answer.address):
            return True
        phase = answer.fields().get("phase")
        self._reported_phase = phase if isinstance(phase, str) else self._reported_phase
        self._enter(self._state_of(answer))
        return False

    def phase(self) -> str:
        """Return the phase of the start, from the health address or from the log."""
        return self._reported_phase or self._log.phase() or "starting"

    def delay(self) -> str:
        """Return why the engine is not healthy, for how long, and when its log last grew."""
        phase = f"; its last phase was `{self._reported_phase}`" if self._reported_phase else ""
        return f"{self._state} for {time.monotonic() - self._since:.0f} s{phase}{silence(self._log)}"

    def _enter(self, state: str) -> None:
        if state != self._state:
            self._state, self._since = state, time.monotonic()

    def _state_of(self, answer: HttpAnswer) -> str:
        where = f"{urlsplit(self._url).hostname} port {urlsplit(self._url).port}"
        if answer.status == 0:
            return f"no answer on {where}"
        if answer.status == http.HTTPStatus.OK:
            return f"another program answers on {where}"
        return f"{urlsplit(self._url).path} answers {answer.status}"


def silence(log: EngineLog) -> str:
    """Return how long the log has not grown, empty for a short time."""
    silent_s = log.silent_s()
    return f"; no new log line for {silent_s:.0f} s" if silent_s >= SILENCE_S else ""
