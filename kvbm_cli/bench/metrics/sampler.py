"""Sampler: the process that scrapes an engine during a run, as its starter sees it.

Scraping is a process of its own, because reading a page of metrics in the client's process would delay its requests.
The kernel kills it when the thread that started it ends, so start it from the main thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

from kvbm.errors import EnvironmentProblem, UsageError, reason_of
from kvbm_cli.bench.metrics.scraper import EXTRA_S, READY, ScrapeTask
from kvbm_cli.bench.metrics.summary import ServerSummary, summarise
from kvbm_cli.system import die_with_parent

ROOT = Path(__file__).resolve().parents[3]
MODULE = "kvbm_cli.bench.metrics.scraper"
METRICS = "/metrics"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 2.5
SHORTEST_INTERVAL_S = 0.05


class Sampler:
    """A started scraper. As a context manager, it takes a last sample at the end and ends the process."""

    def __init__(self, child: subprocess.Popen[bytes], path: Path, *, has_pages: bool) -> None:
        self._child = child
        self._has_pages = has_pages
        self.path = path
        self.failure: str | None = None  # why it ended before `stop`; the file then lacks the rest of the run

    @classmethod
    def start(
        cls,
        path: Path,
        *,
        base_url: str | None,
        kvbm_metrics_url: str | None = None,
        pid: int | None = None,
        start_ns: int | None = None,
        interval_s: float = 1.0,
        headers: Mapping[str, str] | None = None,
        ca_file: str = "",
    ) -> Sampler:
        """Return when the first sample is in the file, also if the server does not answer.

        `base_url` is `None` for an engine without metrics. `kvbm_metrics_url` is the full address of the kvbm_* series
        if the engine's /metrics lacks them, such as `LaunchPlan.metrics_url`. `pid` is the engine's first process.
        `start_ns` is the start of the run by time.perf_counter_ns, by default now. Raises EnvironmentProblem if the
        process cannot write the file.
        """
        if interval_s < SHORTEST_INTERVAL_S:
            raise UsageError(f"`interval_s` is {interval_s:g}, but must be at least {SHORTEST_INTERVAL_S:g}")
        pages = {} if base_url is None else {"engine": base_url.rstrip("/") + METRICS}
        if kvbm_metrics_url:
            pages["kvbm"] = kvbm_metrics_url
        began_ns = time.perf_counter_ns() if start_ns is None else start_ns
        task = ScrapeTask(str(path), pages, began_ns, interval_s, pid, dict(headers or {}), ca_file)
        _check_writable(path)
        try:
            child = subprocess.Popen(
                die_with_parent.command_line([sys.executable, "-P", "-m", MODULE]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                process_group=0,  # Ctrl-C in a terminal ends it through this process
            )
        except OSError as error:
            raise EnvironmentProblem(f"cannot start the sampler of server metrics: {reason_of(error)}") from None
        sampler = cls(child, path, has_pages=bool(pages))
        try:
            sampler._send(task)
            sampler._wait_ready(START_TIMEOUT_S + interval_s + EXTRA_S)
        except BaseException:
            sampler._kill()
            raise
        return sampler

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *ended: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._child.pid

    def stop(self) -> None:
        """Take a last sample and end the process within STOP_TIMEOUT_S. May be called twice."""
        stdin, stdout, stderr = self._pipes()
        if stderr.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        try:
            if code := self._child.wait(STOP_TIMEOUT_S):
                reason = _last_line(stderr)
                self.failure = f"the sampler ended with exit code {code}" + (f": {reason}" if reason else "")
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            self.failure = f"the sampler did not end within {STOP_TIMEOUT_S:g} s"
        stdout.close()
        stderr.close()

    def summary(self) -> ServerSummary:
        """Of the samples in the file, after `stop`. It has a caveat if the process ended early."""
        found = summarise(self.path, has_pages=self._has_pages)
        if self.failure is None:
            return found
        caveat = f"the server metrics cover only a part of the run: {self.failure}"
        return replace(found, caveats=(*found.caveats, caveat))

    def _send(self, task: ScrapeTask) -> None:
        stdin, _, _ = self._pipes()
        with contextlib.suppress(BrokenPipeError):  # it has ended; _wait_ready reports why
            stdin.write(task.to_json().encode() + b"\n")
            stdin.flush()

    def _wait_ready(self, timeout_s: float) -> None:
        _, stdout, stderr = self._pipes()
        ready = select.poll()
        ready.register(stdout, select.POLLIN)
        if ready.poll(1000 * timeout_s) and os.read(stdout.fileno(), len(READY)) == READY.encode():
            return
        self._child.kill()
        reason = _last_line(stderr) or f"no sample within {timeout_s:.0f} s"
        raise EnvironmentProblem(f"the sampler of server metrics did not start: {reason}")

    def _kill(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in self._pipes():
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        return child.stdin, child.stdout, child.stderr


def _last_line(stderr: IO[bytes]) -> str:
    lines = stderr.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _check_writable(path: Path) -> None:
    try:
        with open(path, "w", encoding="utf-8"):
            pass
    except OSError as error:
        raise EnvironmentProblem(f"cannot write `{path}`: {reason_of(error)}") from None
