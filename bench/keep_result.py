"""Copies the result of `kvbm bench` to bench/results/: summary.json with date, machine and command, and report.html.

    python bench/keep_result.py kvbm-runs/peers bench-peers --packages .nox/lmcache \\
        --command "python bench/peers/compare.py --output kvbm-runs/peers"

This writes bench/results/<machine>-bench-peers.json and .html. Run it on the machine that measured. It refuses a result
that is not complete, a report above 3 MB, and files that name directories, the host or the user of this machine.
"""

from __future__ import annotations

import argparse
import datetime
import getpass
import importlib.metadata
import json
import re
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
sys.path.insert(0, str(ROOT / "bench" / "vllm"))

from facts import commit, machine  # noqa: E402

MAX_REPORT_BYTES = 3_000_000


DIRECTORY = r"(?<![\w.])/(?:root|home|work|tmp|mnt|Users)/"


def private_names(directory: Path) -> list[str]:
    """Patterns of this machine's directories."""
    return [re.escape(str(path)) for path in (ROOT, directory.resolve(), Path.home())]


def require_no_names(text: str, file: str, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        found = re.search(pattern, text)
        if found is not None:
            around = text[max(0, found.start() - 40) : found.end() + 40]
            raise SystemExit(f"{file} has a name of this machine: {around!r}")


def versions_in(packages: Path | None) -> dict[str, str]:
    """Version of LMCache in a directory, which an arm of bench/peers/compare.py uses."""
    if packages is None:
        return {}
    found = importlib.metadata.distributions(name="lmcache", path=[str(packages)])
    return {one.metadata["Name"]: one.version for one in found}


def keep(
    directory: Path, name: str, command: str, *, packages: Path | None = None, results: Path = RESULTS
) -> list[Path]:
    """Write both files; returns their paths. SystemExit for a result that must not be published."""
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    if not summary["complete"]:
        raise SystemExit(f"{directory} has no complete result: {summary['explanation']}")
    report = (directory / "report.html").read_text(encoding="utf-8")
    if len(report.encode()) > MAX_REPORT_BYTES:
        raise SystemExit(f"{directory / 'report.html'} has {len(report.encode())} bytes, at most {MAX_REPORT_BYTES}")
    measured = datetime.datetime.fromtimestamp(summary["machine"]["time_unix_s"], datetime.UTC)
    head = {
        "benchmark": "kvbm_bench",
        "date": measured.isoformat(timespec="seconds"),
        "machine_name": machine(),
        "commit": commit(),
        "command": command,
    }
    summary["versions"] |= versions_in(packages)
    content = json.dumps({**head, **summary}, indent=1) + "\n"
    names = (rf"\b{re.escape(name)}\b" for name in (socket.gethostname(), getpass.getuser()))
    require_no_names(content, "summary.json", [DIRECTORY, *private_names(directory), *names])
    require_no_names(report, "report.html", private_names(directory))
    written = []
    for suffix, text in ((".json", content), (".html", report)):
        path = results / f"{machine()}-{name}{suffix}"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="run directory of `kvbm bench`")
    parser.add_argument("name", help="last part of the names of the files, such as `bench-peers`")
    parser.add_argument("--command", required=True, help="the command that measured")
    parser.add_argument("--packages", type=Path, help="directory of LMCache, whose version is added")
    options = parser.parse_args()
    for path in keep(options.directory, options.name, options.command, packages=options.packages):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
