"""BenchDirectory: the files of an experiment. What has ended is written at once, so that a run can be resumed.

    plan.json                  arms, cells, order of runs, workloads, seed, and a digest of all that
    cells/<cell>/plan.json     every token and launch time of a cell; plan-2.json if the second pair has others
    requests.jsonl             one line per request of every run, errors included
    runs.jsonl                 one line per run that has ended
    runs/<run>/                engine.log, server-metrics.jsonl
    summary.json, report.html  the result; `"complete": false` marks an interrupted experiment
    limit.json, probes.jsonl   of `--find-limit`, in place of summary.json, report.html and runs.jsonl
    .lock                      locked by the command that measures

The name of a cell is its workload, with the pressure if there is one; the name of a run is <cell>.<pair>.<arm>.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kvbm.errors import EnvironmentProblem, UsageError, reason_of
from kvbm.text.outside import json_text
from kvbm.text.reading import parse_json
from kvbm_cli.system.filesystem import write_atomically

DEFAULT_PARENT = Path("kvbm-runs")
FORMAT = 2  # of plan.json and summary.json
RUN_FIELDS = {"run": str, "arm": str, "cell": str, "pair": int, "client": dict, "server": dict}
REQUESTS, RUNS, PLAN, SUMMARY = "requests.jsonl", "runs.jsonl", "plan.json", "summary.json"
LIMIT, PROBES = "limit.json", "probes.jsonl"
LEFT_OUT = "left-out.jsonl"  # one line per run that was not made, with the reason
SERVER_METRICS = "server-metrics.jsonl"  # of a run
LOCK = ".lock"
OWN = "`kvbm bench report` and `kvbm bench diff` read only directories that `kvbm bench` wrote"


def run_name(cell: str, pair: int, arm: str) -> str:
    return f"{cell}.{pair}.{arm}"


def cell_plan(cell: str, pair: int = 1) -> str:
    """Return the file with the plan of a cell. Servers that cannot be emptied get other prompts, so another plan, per
    pair."""
    return f"cells/{cell}/" + ("plan.json" if pair == 1 else f"plan-{pair}.json")


class BenchDirectory:
    """Owns the directory of an experiment and its open files; `close()` closes them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []  # what the reader of a report must know of the files
        self._files: dict[str, IO[str]] = {}

    @classmethod
    def create(cls, path: Path | None) -> BenchDirectory:
        """Create the directory; without `path` it is named after the time. UsageError if it is not empty."""
        path = path or _named_after_now(DEFAULT_PARENT)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                hint = f"`--resume {shlex.quote(str(path))}` continues it" if (path / PLAN).exists() else None
                raise UsageError(f"`--output {path}` is not empty: name a new or empty directory", hint=hint)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> BenchDirectory:
        """Open an existing one. UsageError if it is none."""
        try:
            is_run = (path / PLAN).is_file()
        except OSError as error:
            raise UsageError(f"cannot read {path}: {reason_of(error)}") from None
        if not is_run:
            is_file_of_a_run = path.is_file() and (path.parent / PLAN).is_file()
            hint = f"give the directory: `{shlex.quote(str(path.parent))}`" if is_file_of_a_run else OWN
            raise UsageError(f"{path} is not the directory of a run: it has no {PLAN}", hint=hint)
        return cls(path)

    def lock(self) -> None:
        """Keep other commands from measuring into this directory until `close()`. UsageError if one does."""
        import fcntl

        file = self._files[LOCK] = (self.path / LOCK).open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self.path} is used by another `kvbm bench` that is still running") from None

    def run(self, name: str) -> Path:
        return _made(self.path / "runs" / name)

    def has(self, name: str) -> bool:
        return (self.path / name).exists()

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Append one line of JSON; it is flushed at once."""
        if name not in self._files:
            self._files[name] = (self.path / name).open("a", encoding="utf-8", buffering=1)
        self._files[name].write(json_text(line, separators=(",", ":")) + "\n")

    def write_json(self, path: Path | str, content: dict[str, Any], *, indent: int | None = 2) -> None:
        """Write the file atomically, with its directory."""
        _made((self.path / path).parent)
        write_atomically(self.path / path, json_text(content, indent=indent) + "\n")

    def read_json(self, path: Path | str) -> dict[str, Any]:
        """UsageError if the file is missing, or is not a JSON object."""
        file = self.path / path
        try:
            content = parse_json(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read {file}: {reason_of(error)}") from None
        except ValueError as error:
            raise UsageError(f"{file} is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise UsageError(f"{file} must be a JSON object")
        return content

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Every line of a JSONL file. A last line that was cut off is left out; UsageError for any other damage."""
        return json_lines(self.path / name, self.note)

    def runs(self) -> list[dict[str, Any]]:
        """Return the lines of runs.jsonl. UsageError for a line without what every run has."""
        if not self.has(RUNS):
            self.note(f"{RUNS} is missing: the report has no data of it")
        runs = list(self.lines(RUNS))
        for number, run in enumerate(runs, start=1):
            for name, wanted in RUN_FIELDS.items():
                if not isinstance(run.get(name), wanted):
                    problem = f"`{name}` is {run[name]!r}" if name in run else f"`{name}` is missing"
                    raise UsageError(f"{self.path / RUNS}, line {number}: {problem}")
            if run["run"] in (".", "..") or "/" in run["run"] or "\0" in run["run"]:
                raise UsageError(f"{self.path / RUNS}, line {number}: {run['run']!r} is not the name of a run")
        return runs

    def note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def forget_unfinished(self, groups: Iterable[Collection[str]]) -> set[str]:
        """Drop runs that have not ended, with their records; returns the names of those that have.

        `groups` has the names of runs that are made together; if one of them has not ended, the others are dropped.
        """
        runs = self.runs()
        written = {run["run"] for run in runs}
        ended = {name for group in groups if written.issuperset(group) for name in group}
        self._rewrite(RUNS, (run for run in runs if run["run"] in ended))
        self._rewrite(REQUESTS, (line for line in self.lines(REQUESTS) if line.get("run") in ended))
        return ended

    def _rewrite(self, name: str, lines: Iterable[dict[str, Any]]) -> None:
        text = "".join(json_text(line, separators=(",", ":")) + "\n" for line in lines)
        write_atomically(self.path / name, text)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}


def json_lines(path: Path, note: Callable[[str], None] = lambda _: None) -> Iterator[dict[str, Any]]:
    """Yield every line of a JSONL file; none if there is no such file. A last line that was cut off is left out and
    given to `note`; UsageError for any other damage."""
    for number, line in enumerate(_text_lines(path), start=1):
        try:
            found = parse_json(line)
        except ValueError as error:
            if not line.endswith("\n"):
                note(f"the last line of {path.name} is incomplete and was ignored")
                return
            raise UsageError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(found, dict):
            raise UsageError(f"{path}, line {number}: must be a JSON object")
        yield found


def _text_lines(path: Path) -> Iterator[str]:
    """None if there is no such file. UsageError if it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from file
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason_of(error)}") from None


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise EnvironmentProblem for what the file system refuses while files below `path` are written."""
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(f"cannot write to {path}: {reason_of(error)}") from None


def _named_after_now(parent: Path) -> Path:
    stem = time.strftime("%Y-%m-%dT%H-%M-%S")
    candidates = (parent / (stem if number == 1 else f"{stem}-{number}") for number in range(1, 1000))
    return next(path for path in candidates if not path.exists())
