"""DisaggregatedEngines: several engines and their proxy, handled like the one engine that they are to their clients.

It has the methods of EngineProcess that `kvbm serve` uses. The proxy starts when every engine is healthy, so that an
answer of the proxy means that all serve. None goes on without the others: the end of one ends the whole, and its name
and the end of its log are the report.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kvbm.config.launch_plan import LaunchPlan
from kvbm.errors import EngineError
from kvbm_cli.disaggregated.plan import DisaggregatedPlan
from kvbm_cli.engine.process import NO_TIME, POLL_S, STOP_TIMEOUT_S, EngineProcess

ENDED_EARLY = "the engine ended before it was healthy"


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    process: EngineProcess

    def ended_error(self, message: str) -> EngineError:
        return self.as_ours(self.process.ended_error(message))

    def as_ours(self, error: EngineError) -> EngineError:
        return EngineError(f"{self.name}: {error.message}", hint=error.hint, exit_code=error.exit_code)


class DisaggregatedEngines:
    """Started engines. As a context manager they are stopped at the end, whatever happened."""

    def __init__(self, plan: DisaggregatedPlan, log_path: Path) -> None:
        self._plan = plan
        self._members: list[_Member] = []
        self._first_ended: _Member | None = None
        self._is_told_to_end = False
        self._started = time.monotonic()
        self.log_path = log_path

    @classmethod
    def start(cls, plan: DisaggregatedPlan, *, log_path: Path) -> DisaggregatedEngines:
        """Starts the engines, returns at once. `log_path` is the proxy's; an engine's has its name in it."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """Which of them still run."""
        running = [member.name for member in self._members if member.process.poll() is None]
        return f"waiting for {', '.join(running)}" if running else ""

    def poll(self) -> int | None:
        """None while one runs and none has ended by itself. When one has, the others are killed, and the code is its
        own, or 1 where that says that all went well; otherwise it is the highest."""
        if self._first_ended is None and not self._is_told_to_end:
            self._first_ended = next((member for member in self._members if member.process.poll() is not None), None)
            if self._first_ended is not None:
                self.kill()
        if self._first_ended is not None:
            return self._first_ended.process.poll() or 1
        codes = [member.process.poll() for member in self._members]
        ended = [code for code in codes if code is not None]
        return max(ended, default=0) if len(ended) == len(codes) else None

    def wait_healthy(self, timeout_s: float, on_progress: Callable[[str], None] = lambda phase: None) -> None:
        """Returns when the proxy serves. EngineError as soon as one has ended, or after `timeout_s`; then all are dead.

        `on_progress` is called a few times per second and may stop the engines.
        """
        for member in list(self._members):
            self._wait_for(member, timeout_s, on_progress)
        self._wait_for(self._start("proxy", self._plan.proxy, self.log_path), timeout_s, on_progress)

    def ended_error(self, message: str) -> EngineError:
        """The report of the one that ended by itself."""
        assert self.poll() is not None, "the engines still run"
        return (self._first_ended or self._members[0]).ended_error(message)

    def late_error(self, message: str, *, hint: str = NO_TIME) -> EngineError:
        """Kills engines whose proxy does not become ready, and returns the report with the proxy's log."""
        error = self._members[-1].process.late_error(message, hint=hint)
        self.kill()
        return error

    def signal(self, signal_number: int) -> None:
        """To every one. From here on an end is no mishap."""
        self._is_told_to_end = True
        for member in self._members:
            member.process.signal(signal_number)

    def kill(self) -> int:
        """Ends all of them and all that they started, now. Returns the exit code."""
        return self.stop(timeout_s=0)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM to every one, up to `timeout_s` of patience with all, then SIGKILL. Returns the exit code."""
        deadline = time.monotonic() + timeout_s
        self._is_told_to_end = True
        if timeout_s > 0:
            self.signal(signal.SIGTERM)
        while self._is_one_running() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return max((member.process.kill() for member in self._members), default=0)

    def _is_one_running(self) -> bool:
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
            culprit = self._first_ended or member
            self.kill()
            if culprit is member:
                raise member.as_ours(error) from None
            raise culprit.ended_error(ENDED_EARLY) from None


def log_of(log_path: Path, name: str) -> Path:
    """`serve.log` and `prefill 0` make `serve-prefill-0.log`; what is no file, as `/dev/null`, is for all."""
    if log_path.exists() and not log_path.is_file():
        return log_path
    return log_path.with_name(f"{log_path.stem}-{name.replace(' ', '-')}{log_path.suffix}")
