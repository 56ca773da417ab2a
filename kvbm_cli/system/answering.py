"""Whether the file system below a directory answers: a hung mount would keep a command, and its process, for ever.

A child process reads a file of the directory. If the file system hangs, the child is left behind: nothing ends a
process in a call of such a file system, and a thread in this process would keep it from exiting.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

from kvbm.errors import EnvironmentProblem

ANSWER_LIMIT_S = 3.0
REMEMBERED_S = 10.0  # a command asks several times
LOOK = """
import os, sys
os.statvfs(sys.argv[1])
for home, _, files in os.walk(sys.argv[1]):
    for name in files:  # one is enough
        os.read(os.open(os.path.join(home, name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), 1)
        sys.exit()
"""

_silent: dict[Path, float] = {}  # directories that did not answer, and when they were asked


def answers(directory: Path) -> bool:
    """Return whether the file system answers, also with an error."""
    if time.monotonic() - _silent.get(directory, float("-inf")) < REMEMBERED_S:
        return False
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", LOOK, str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError):
        return True  # the caller finds the problem
    try:
        child.wait(ANSWER_LIMIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.returncode = 0  # left behind: it ends when the file system answers
        _silent[directory] = time.monotonic()
        return False
    return True


def require_answering(directory: Path) -> None:
    """Raise EnvironmentProblem for a directory whose file system hangs."""
    if not answers(directory):
        raise EnvironmentProblem(
            f"{directory} does not answer within {ANSWER_LIMIT_S:g} s: its file system hangs",
            hint=f"check it with `timeout 5 ls {shlex.quote(str(directory))}` and mount it again",
        )
