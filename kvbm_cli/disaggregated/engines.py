"""DisaggregatedEngines: several engines and their proxy, with the interface of one engine.

It has the methods of EngineProcess that `kvbm serve` uses. The proxy starts when every engine is healthy, so an answer
of the proxy means that all are ready. If one process exits, all are stopped; the error has its name and the end of its
log.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvbm.engines.launch_plan import LaunchPlan
from kvbm.errors import EngineError
from kvbm_cli.disaggregated.plan import DisaggregatedPlan
from kvbm_cli.engine.process import NO_TIME, POLL_S, STOP_TIMEOUT_S, EngineProcess

ENDED_EARLY = "the engine exited before it was healthy"


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    process: EngineProcess

    def ended_error(self, message: str) -> EngineError:
        return self.with_name(self.process.ended_error(message))

    def with_name(self, error: EngineError) -> EngineError:
        return EngineError(f"{self.name}: {error.message}", hint=error.hint, exit_code=error.exit_code)


class DisaggregatedEngines:
    """Started engines. As a context manager, it stops them at the end."""

    def __init__(self, plan: DisaggregatedPlan, log_path: Path) -> None:
        self._plan = plan
        self._members: list[_Member] = []
        self._first_ended: _Member | None = None
        self._is_stopping = False
        self._started = time.monotonic()
        self.log_path = log_path

    @classmethod
    def start(cls, plan: DisaggregatedPlan, *, log_path: Path) -> DisaggregatedEngines:
        """Start the engines and return immediately. `log_path` is the proxy's log; engines append their names."""
        engines = cls(plan, log_path)
        try:
            for name, engine_plan in plan.engines:
                engines._start(name, engine_plan, log_of(log_path, name))
        except BaseException:
            engines.kill()
            raise
        return engines

    def __enter__(self) -> DisaggregatedEngines:
        return self

    def __exit__(self, *ended: object) -> None:
        self.stop()

    @property
    def plan(self) -> LaunchPlan:
        return self._plan.proxy

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def pids(self) -> dict[str, int]:
        return {
            f"{member.name}{'' if kind == 'engine' else f' {kind}'}": pid
            for member in self._members
            for kind, pid in member.process.pids().items()
        }

    def phase(self) -> str:
        """Return which processes are still running."""
        running = [member.name for member in self._members if member.process.poll() is None]
        return f"waiting for {', '.join(running)}" if running else ""

    def poll(self) -> int | None:
        """Return None while they run. If one exits unexpectedly, kills the others and returns its exit code, or 1 in
        place of 0. After a stop, returns the highest exit code."""
        if self._first_ended is None and not self._is_stopping:
            self._first_ended = next((member for member in self._members if member.process.poll() is not None), None)
            if self._first_ended is not None:
                self.kill()
        if self._first_ended is not None:
            return self._first_ended.process.poll() or 1
        codes = [member.process.poll() for member in self._members]
        ended = [code for code in codes if code is not None]
        return max(ended, default=0) if len(ended) == len(codes) else None

    def wait_healthy(self, timeout_s: float, on_progress: Callable[[str], None] = lambda phase: None) -> None:
        """Return when the proxy is healthy. Raises EngineError as soon as one has ended, or after `timeout_s`; then all
        are killed.

        Calls `on_progress` with the phase of the start a few times per second. It may stop the engines.
        """
        for member in list(self._members):
            self._wait_for(member, timeout_s, on_progress)
        self._wait_for(self._start("proxy", self._plan.proxy, self.log_path), timeout_s, on_progress)

    def ended_error(self, message: str) -> EngineError:
        """Return the error for the one that exited unexpectedly."""
        assert self.poll() is not None, "the engines are still running"
        return (self._first_ended or self._members[0]).ended_error(message)

    def late_error(self, message: str, *, hint: str = NO_TIME) -> EngineError:
        """Kills engines whose proxy does not become ready and returns the error with the proxy's log."""
        error = self._members[-1].process.late_error(message, hint=hint)
        self.kill()
        return error

    def signal(self, signal_number: int) -> None:
        """Send a signal to all. Afterwards an exit is expected."""
        self._is_stopping = True
        for member in self._members:
            member.process.signal(signal_number)

    def kill(self) -> int:
        """Kills all of them and all processes that they started. Returns the exit code."""
        return self.stop(timeout_s=0)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Send SIGTERM to all, wait up to `timeout_s` in total, then kill. Returns the exit code."""
        deadline = time.monotonic() + timeout_s
        self._is_stopping = True
        if timeout_s > 0:
            self.signal(signal.SIGTERM)
        while self._is_any_running() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return max((member.process.kill() for member in self._members), default=0)

    def _is_any_running(self) -> bool:
        return any(member.process.poll() is None for member in self._members)

    def _start(self, name: str, plan: LaunchPlan, log_path: Path) -> _Member:
        member = _Member(name, EngineProcess.start(plan, log_path=log_path))
        self._members.append(member)
        return member

    def _wait_for(self, member: _Member, timeout_s: float, on_progress: Callable[[str], None]) -> None:
        def watch(phase: str) -> None:
            on_progress(f"{member.name}: {phase}")
            self.poll()  # kills this one too, when another has ended

        try:
            member.process.wait_healthy(timeout_s, watch)
        except EngineError as error:
            failed = self._first_ended or member
            self.kill()
            if failed is member:
                raise member.with_name(error) from None
            raise failed.ended_error(ENDED_EARLY) from None


def log_of(log_path: Path, name: str) -> Path:
    """Return `serve-prefill-0.log` for `serve.log` and `prefill 0`. All use a path that is not a regular file."""
    if log_path.exists() and not log_path.is_file():
        return log_path
    return log_path.with_name(f"{log_path.stem}-{name.replace(' ', '-')}{log_path.suffix}")
