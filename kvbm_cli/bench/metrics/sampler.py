"""Sampler: the process that scrapes an engine during a run and writes server-metrics.jsonl.

Scraping is a process of its own, because reading a page of metrics in the client's process would delay its requests.
The kernel kills it when the thread that started it ends, so start it from the main thread.

`Sampler` starts this module as a program and sends its task as a message, because an argument would show the engine's
secret to all users. The program (`Scraper`) answers when the first sample is in the file. When the channel is closed,
it takes a last sample and ends. Every page is fetched in a thread of its own, so a server that hangs delays neither
the other page nor the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from kvbm.child.channel import Channel, ChannelClosed
from kvbm.child.child import end_of_channel
from kvbm.child.parent import end, start_child
from kvbm.child.run import Output, last_line
from kvbm.errors import EnvironmentProblem, reason_of
from kvbm_cli.bench.metrics.engine_metrics import (
    NAMES,
    SampleLine,
    read_counters,
    read_facts,
    read_gauges,
    started_s,
)
from kvbm_cli.bench.metrics.summary import summarise
from kvbm_cli.system.http_client import get_metrics, load_library
from kvbm_cli.system.metrics_page import MetricsPage
from kvbm_cli.system.usage import Gpus, ProcessTree

MODULE = "kvbm_cli.bench.metrics.sampler"
METRICS = "/metrics"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 2.5
EXTRA_S = 1.0  # a sample waits for its pages for its interval and this time
LAST_S = 1.0
READY = "ready"
NO_METRICS = "the answer has no metrics"
Result = TypeVar("Result")
Fetched = tuple[MetricsPage | None, str]  # a page, or why there is none


class Sampler:
    """A started scraper. As a context manager, it takes a last sample at the end and ends the process."""

    def __init__(self, path: Path, *, has_pages: bool) -> None:
        self._output = Output()
        self._child, self._channel = start_child(
            MODULE, "the sampler of server metrics", stderr=self._output.fileno(), dies_with_parent=True
        )
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
        pages = {} if base_url is None else {"engine": base_url.rstrip("/") + METRICS}
        if kvbm_metrics_url:
            pages["kvbm"] = kvbm_metrics_url
        began_ns = time.perf_counter_ns() if start_ns is None else start_ns
        task = ScrapeTask(str(path), pages, began_ns, interval_s, pid, dict(headers or {}), ca_file)
        _check_writable(path)
        sampler = cls(path, has_pages=bool(pages))
        try:
            sampler._begin(task, START_TIMEOUT_S + interval_s + EXTRA_S)
        except BaseException:
            sampler._child.kill()
            sampler.stop()
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
        if self._child.returncode is not None:
            return
        self._channel.close()
        if not end(self._child, STOP_TIMEOUT_S):
            self.failure = f"the sampler did not end within {STOP_TIMEOUT_S:g} s"
        elif code := self._child.returncode:
            reason = last_line(self._output.text())
            self.failure = f"the sampler ended with exit code {code}" + (f": {reason}" if reason else "")
        self._output.close()

    def summary(self) -> dict[str, Any]:
        """Of the samples in the file, after `stop`. It has a caveat if the process ended early."""
        found = summarise(self.path, has_pages=self._has_pages)
        if self.failure is None:
            return found
        caveat = f"the server metrics cover only a part of the run: {self.failure}"
        return {**found, "caveats": [*found["caveats"], caveat]}

    def _begin(self, task: ScrapeTask, timeout_s: float) -> None:
        try:
            self._channel.send(asdict(task))
            self._channel.receive_one(str, timeout_s)
        except (ChannelClosed, TimeoutError):
            reason = last_line(self._output.text(), f"no sample within {timeout_s:.0f} s")
            raise EnvironmentProblem(f"the sampler of server metrics did not start: {reason}") from None


def _check_writable(path: Path) -> None:
    try:
        with open(path, "w", encoding="utf-8"):
            pass
    except OSError as error:
        raise EnvironmentProblem(f"cannot write `{path}`: {reason_of(error)}") from None


@dataclass(frozen=True, slots=True)
class ScrapeTask:
    """`pages` are the addresses of metrics by name; a later page overrides the series of an earlier one. `pid` is the
    first process of the engine. Sample times count from `start_ns` of time.perf_counter_ns."""

    path: str
    pages: dict[str, str]
    start_ns: int
    interval_s: float
    pid: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    ca_file: str = ""


class Scraper:
    """Owns the file and the threads of the process."""

    def __init__(self, task: ScrapeTask, channel: Channel, output: TextIO) -> None:
        """Borrows `channel` and `output`."""
        self._task = task
        self._channel = channel
        self._output = output
        self._tree = None if task.pid is None else ProcessTree(task.pid)
        self._gpus = Gpus.open()

    def run(self) -> None:
        """Sample until the channel is closed."""
        load_library()  # not in the time of the first sample
        interval_s = self._task.interval_s
        self._sample(interval_s + EXTRA_S, Future())
        self._channel.send(READY)
        stop = _in_thread(self._wait_for_stop)
        next_s = time.monotonic()
        while True:
            missed = max(0.0, time.monotonic() - next_s) // interval_s
            next_s += (1 + missed) * interval_s
            if wait([stop], max(0.0, next_s - time.monotonic())).done:
                break
            self._sample(interval_s + EXTRA_S, stop)
        self._sample(LAST_S, Future())

    def _wait_for_stop(self) -> None:
        with contextlib.suppress(ChannelClosed):
            self._channel.receive_one(str)

    def _sample(self, timeout_s: float, stop: Future[None]) -> None:
        """Write one line. Writes nothing if `stop` comes before the pages have arrived: a last sample follows."""
        began_s, began_ns = time.monotonic(), time.perf_counter_ns()
        fetches = {name: _in_thread(self._fetch, url, timeout_s) for name, url in self._task.pages.items()}
        usage = None if self._tree is None else self._tree.usage()
        gpu = self._gpus.sample(() if self._tree is None else self._tree.pids)
        missing: set[Future[Any]] = set(fetches.values())
        while missing and (left_s := began_s + timeout_s + EXTRA_S / 10 - time.monotonic()) > 0:
            missing -= wait([*missing, stop], left_s, return_when=FIRST_COMPLETED).done
            if stop.done():
                return
        found = {name: one.result() if one.done() else (None, "no answer") for name, one in fetches.items()}
        pages = [page for page, _ in found.values() if page is not None]
        page = MetricsPage({name: series for one in pages for name, series in one.series.items()})
        line = SampleLine(
            t_ms=(began_ns - self._task.start_ns) / 1e6,
            took_ms=(time.monotonic() - began_s) * 1e3,
            error="; ".join(f"{name}: {error}" for name, (_, error) in found.items() if error) or None,
            started_s=started_s(page),
            counters=read_counters(page),
            gauges=read_gauges(page),
            facts=read_facts(page),
            process={} if usage is None else asdict(usage),
            gpu=gpu,
        )
        self._output.write(json.dumps(line.to_json(), allow_nan=False) + "\n")
        self._output.flush()

    def _fetch(self, url: str, timeout_s: float) -> Fetched:
        answer = get_metrics(url, headers=self._task.headers, timeout_s=timeout_s, ca_file=self._task.ca_file)
        if answer.failure:
            return None, answer.failure
        if not answer.is_ok:
            return None, f"HTTP {answer.status}: {answer.error()}"
        page = MetricsPage.parse(answer.text(), NAMES)
        return page, "" if page.is_readable else NO_METRICS


def _in_thread(call: Callable[..., Result], *arguments: object) -> Future[Result]:
    """Start a call in a thread of its own, which does not keep the process running."""
    future: Future[Result] = Future()
    threading.Thread(target=lambda: future.set_result(call(*arguments)), daemon=True).start()
    return future


def main() -> None:
    channel = end_of_channel()
    task = ScrapeTask(**channel.receive_one(dict))
    with open(task.path, "w", encoding="utf-8") as output:
        Scraper(task, channel, output).run()
    os._exit(0)  # a thread may still wait for a server that hangs


if __name__ == "__main__":
    main()
