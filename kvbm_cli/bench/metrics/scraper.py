"""The sampler's process: scrapes an engine at a fixed interval and writes server-metrics.jsonl.

`Sampler` starts it as `python -P -m kvbm_cli.bench.metrics.scraper` and sends its task as one line of JSON to
standard input, because an argument would show the engine's secret to all users. It answers with one line when the first
sample is in the file. At the end of its input it takes a last sample and ends.

Every page is fetched in a thread of its own, so a server that hangs delays neither the other page nor the end.

`SampleLine` is one line of the file. Its top-level keys are for readers of the file. `counters` has every total that a
page had; only the totals are exact enough for differences, so the summary is computed from them.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from kvbm_cli.bench.metrics.engine_metrics import (
    NAMES,
    prompt_tokens_by_tier,
    read_counters,
    read_facts,
    read_gauges,
    started_s,
)
from kvbm_cli.system.http_client import get_metrics, load_library
from kvbm_cli.system.metrics_page import MetricsPage
from kvbm_cli.system.usage import Gpus, ProcessTree

EXTRA_S = 1.0  # a sample waits for its pages for its interval and this time
LAST_S = 1.0
READY = "ready\n"
STOP = "stop"
NO_METRICS = "the answer has no metrics"
MOVES = {"onboard": "g2_to_g1", "offload": "g1_to_g2"}
QUANTITIES = ("bytes", "blocks", "seconds")


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

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class FetchedPage:
    """`round` is the sample for which it was fetched: an answer that is too late is ignored."""

    round: int
    name: str
    page: MetricsPage | None
    error: str


class Scraper:
    """Owns the file and the threads of the process."""

    def __init__(self, task: ScrapeTask, output: TextIO) -> None:
        """Borrows `output`."""
        self._task = task
        self._output = output
        self._events: queue.SimpleQueue[FetchedPage | str] = queue.SimpleQueue()
        self._tree = None if task.pid is None else ProcessTree(task.pid)
        self._gpus = Gpus.open()
        self._round = 0
        self._is_stopping = False

    def run(self) -> None:
        """Sample until the input ends."""
        load_library()  # not in the time of the first sample
        self._sample(self._task.interval_s + EXTRA_S)
        sys.stdout.write(READY)
        sys.stdout.flush()
        threading.Thread(target=self._wait_for_stop, daemon=True).start()
        next_s = time.monotonic()
        while not self._is_stopping:
            missed = max(0.0, time.monotonic() - next_s) // self._task.interval_s
            next_s += (1 + missed) * self._task.interval_s
            self._wait_until(next_s)
            if not self._is_stopping:
                self._sample(self._task.interval_s + EXTRA_S)
        self._sample(LAST_S)

    def _wait_for_stop(self) -> None:
        sys.stdin.read()
        self._events.put(STOP)

    def _wait_until(self, moment_s: float) -> None:
        while not self._is_stopping and self._next_event(moment_s) is not None:
            pass

    def _sample(self, timeout_s: float) -> None:
        """Write one line. Writes nothing if the run ends before the pages have arrived: a last sample follows."""
        self._round += 1
        began_s, began_ns = time.monotonic(), time.perf_counter_ns()
        was_stopping = self._is_stopping
        for name, url in self._task.pages.items():
            threading.Thread(target=self._fetch, args=(self._round, name, url, timeout_s), daemon=True).start()
        usage = None if self._tree is None else self._tree.usage()
        gpu = self._gpus.sample(() if self._tree is None else self._tree.pids)
        pages = self._arrived_pages(began_s + timeout_s + EXTRA_S / 10)
        if self._is_stopping and not was_stopping:
            return
        line = self._line(pages, (began_ns - self._task.start_ns) / 1e6)
        process = {} if usage is None else asdict(usage)
        took_ms = (time.monotonic() - began_s) * 1e3
        self._write({**SampleLine(**line, took_ms=took_ms, process=process, gpu=gpu).to_json()})

    def _arrived_pages(self, deadline_s: float) -> dict[str, FetchedPage]:
        arrived: dict[str, FetchedPage] = {}
        was_stopping = self._is_stopping
        while len(arrived) < len(self._task.pages) and self._is_stopping == was_stopping:
            event = self._next_event(deadline_s)
            if event is None:
                break
            if isinstance(event, FetchedPage) and event.round == self._round:
                arrived[event.name] = event
        return arrived

    def _next_event(self, deadline_s: float) -> FetchedPage | str | None:
        try:
            event = self._events.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            return None
        self._is_stopping = self._is_stopping or event == STOP
        return event

    def _fetch(self, number: int, name: str, url: str, timeout_s: float) -> None:
        answer = get_metrics(url, headers=self._task.headers, timeout_s=timeout_s, ca_file=self._task.ca_file)
        page, error = None, answer.failure
        if not answer.failure and not answer.is_ok:
            error = f"HTTP {answer.status}: {answer.error()}"
        elif not answer.failure:
            page = MetricsPage.parse(answer.text(), NAMES)
            error = "" if page.is_readable else NO_METRICS
        self._events.put(FetchedPage(number, name, page, error))

    def _line(self, arrived: dict[str, FetchedPage], t_ms: float) -> dict[str, Any]:
        late = [FetchedPage(self._round, name, None, "no answer") for name in self._task.pages if name not in arrived]
        pages = [arrived[name] for name in self._task.pages if name in arrived]
        errors = [f"{found.name}: {found.error}" for found in (*pages, *late) if found.error]
        series = {name: found for one in pages if one.page is not None for name, found in one.page.series.items()}
        page = MetricsPage(series)
        return {
            "t_ms": t_ms,
            "error": "; ".join(errors) or None,
            "started_s": started_s(page),
            "counters": read_counters(page),
            "gauges": read_gauges(page),
            "facts": read_facts(page),
        }

    def _write(self, line: dict[str, Any]) -> None:
        self._output.write(json.dumps(line, allow_nan=False) + "\n")
        self._output.flush()


def main() -> None:
    task = ScrapeTask(**json.loads(sys.stdin.readline()))
    with open(task.path, "w", encoding="utf-8") as output:
        Scraper(task, output).run()
    sys.stdout.flush()
    os._exit(0)  # a thread may still wait for a server that hangs


@dataclass(frozen=True, slots=True)
class SampleLine:
    """`error` says which page is missing, and why. The readers return `counters`, `gauges` and `facts`."""

    t_ms: float
    took_ms: float
    error: str | None = None
    started_s: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, int] = field(default_factory=dict)
    process: Mapping[str, float | None] = field(default_factory=dict)
    gpu: Sequence[Mapping[str, float | int | None]] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "t_ms": round(self.t_ms, 3),
            "took_ms": round(self.took_ms, 3),
            **({} if self.error is None else {"error": self.error}),
            "prompt_tokens": prompt_tokens_by_tier(self.counters),
            **{name: self._move(pair) for name, pair in MOVES.items()},
            "disk": {name: self.process.get(name) for name in ("read_bytes", "written_bytes")},
            "evictions": self.counters.get("evictions"),
            **{name: self.gauges.get(name) for name in ("running", "waiting", "kv_usage")},
            **{name: self.process.get(name) for name in ("rss_bytes", "shared_bytes", "cpu_s")},
            "gpu": list(self.gpu),
            "started_s": self.started_s,
            "counters": dict(self.counters),
            "states": {name: value for name, value in self.gauges.items() if name.startswith("kvbm_")},
            "facts": dict(self.facts),
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> SampleLine:
        """Raise KeyError, TypeError or AttributeError if the line is not one of a sampler."""
        gauges = {name: line[name] for name in ("running", "waiting", "kv_usage") if line[name] is not None}
        return cls(
            t_ms=float(line["t_ms"]),
            took_ms=float(line["took_ms"]),
            error=line.get("error"),
            started_s=line["started_s"],
            counters=dict(line["counters"]),
            gauges={**gauges, **line["states"]},
            facts=dict(line["facts"]),
            process={**line["disk"], **{name: line[name] for name in ("rss_bytes", "shared_bytes", "cpu_s")}},
            gpu=tuple(line["gpu"]),
        )

    def _move(self, pair: str) -> dict[str, float | None]:
        return {quantity: self.counters.get(f"{pair}_{quantity}") for quantity in QUANTITIES}


if __name__ == "__main__":
    main()
