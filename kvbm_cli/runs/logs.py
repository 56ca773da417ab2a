"""`kvbm logs`: prints the log of a run's engine, and with `--follow` new lines until the run ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence

from kvbm.errors import EnvironmentProblem
from kvbm_cli.runs.log_tail import LogTail, prefixes_of, shown_line
from kvbm_cli.runs.run_directory import Runs

POLL_S = 0.2


def show_logs(reference: str | None, *, follow: bool, line_count: int | None) -> None:
    """Print logs, of several engines with their names as prefixes. Raises UsageError for an ambiguous reference."""
    run = Runs.of_user().one(reference)
    paths = run.facts.log_paths
    tails = [
        LogTail(path, prefix=prefix, line_count=line_count, follows=follow)
        for prefix, path in zip(prefixes_of(list(paths)), paths.values(), strict=True)
    ]
    if not any(tail.is_there for tail in tails) and not run.is_living:
        raise EnvironmentProblem(f"the log of `{run.name}` was removed: `{tails[-1].path}`")
    _print(tails)
    while follow and run.is_living:
        time.sleep(POLL_S)
        run = run.again()  # before the files are read for the last time
        _print(tails)
    for tail in tails:
        _write(tail.prefix, tail.finish())


def _print(tails: Iterable[LogTail]) -> None:
    for tail in tails:
        while lines := tail.read():
            _write(tail.prefix, lines)


def _write(prefix: str, lines: Sequence[bytes]) -> None:
    """Escapes lines on a terminal. Writes them unchanged elsewhere: an engine's output may not be valid text."""
    if sys.stdout.isatty():
        print("".join(f"{prefix}{shown_line(line)}\n" for line in lines), end="", flush=True)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(b"".join(b"%s%s\n" % (prefix.encode(), line) for line in lines))
    sys.stdout.buffer.flush()
