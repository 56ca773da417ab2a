"""The command as a user sees it: the real program, its exit code and both streams, compared with a stored text.

`KVBM_UPDATE_SNAPSHOTS=1 pytest tests/cli` writes the stored texts anew; the difference is then reviewed as code.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOTS = Path(__file__).parent / "snapshots"
PROGRAM = (sys.executable, "-c", "from kvbm_cli.app import main; main()")
FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"

# What differs between machines and runs, in the order in which it is replaced.
FILTERS = (
    (re.escape(sys.executable), "[PYTHON]"),  # before ROOT, below which it may lie
    (re.escape(str(ROOT)), "[ROOT]"),
    (re.escape(version("kvbm-cli")), "[VERSION]"),
    (r"( has )[\d.]+ \w+( left for a new cache)", r"\1[FREE]\2"),
    (r"(127\.0\.0\.1[: ](?:port )?)\d{5}\b", r"\1[PORT]"),
    (r"\b\d+\.\d s\b", "[TIME] s"),
    (r"\bfor \d+ s\b", "for [TIME] s"),
    (r"/tmp/\S*?pytest-\d+/[^/\s]+", "[TMP]"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    exit_code: int
    stdout: str
    stderr: str

    def text(self, command: str) -> str:
        shown = f"$ {command}\nexit code: {self.exit_code}\n----- stdout -----\n{self.stdout}"
        return filtered(f"{shown}----- stderr -----\n{self.stderr}")


def filtered(text: str) -> str:
    for pattern, placeholder in FILTERS:
        text = re.sub(pattern, placeholder, text)
    return text


def environment(home: Path, **extra: str) -> dict[str, str]:
    """A small environment of its own: no variable of the developer's shell reaches the program."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH", "VIRTUAL_ENV") if name in os.environ}
    return {**kept, "HOME": str(home), "COLUMNS": "80", "OMP_NUM_THREADS": "1", **extra}


def kvbm(*arguments: str, home: Path, timeout_s: float = 60, **extra: str) -> Outcome:
    done = subprocess.run(
        [*PROGRAM, *arguments],
        cwd=home,
        env=environment(home, **extra),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def on_a_terminal(*command: str, home: Path, columns: int, **extra: str) -> list[str]:
    """The lines that are shown on a terminal of that width."""
    leader, follower = pty.openpty()
    env = {**environment(home, **extra), "COLUMNS": str(columns), "TERM": "dumb"}
    with subprocess.Popen([*PROGRAM, *command], cwd=home, env=env, stdout=follower, stderr=follower) as program:
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while part := os.read(leader, 4096):
                shown += part
        os.close(leader)
    assert program.returncode == 0, shown
    return shown.decode().splitlines()


def assert_snapshot(name: str, text: str) -> None:
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("KVBM_UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, f"{path.name} differs; KVBM_UPDATE_SNAPSHOTS=1 accepts it"
