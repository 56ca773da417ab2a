"""Whether the file system of a path answers: a hung mount would keep a command, and its process, for ever.

A child process reads the file, or one of the directory. If the file system hangs, the child is left behind: nothing
ends a process in a call of such a file system, and a thread in this process would keep it from exiting.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from kvbm.child.start import start
from kvbm.errors import EnvironmentProblem
from kvbm.host.mounts import may_hang

ANSWER_LIMIT_S = 3.0
REMEMBERED_S = 10.0  # a command asks several times
LOOK = """
import os, stat, sys
path = sys.argv[1]
while sys.argv[2:] and not os.path.lexists(path):  # it will be made in this one
    path = os.path.dirname(path)
os.statvfs(path)
if stat.S_ISREG(os.stat(path).st_mode):  # not a pipe, whose content would be gone
    os.read(os.open(path, os.O_RDONLY), 1)
if sys.argv[2:]:
    name = os.path.join(path, f".kvbm-{os.getpid()}")
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(file, b"x")
        os.fsync(file)
        os.close(file)
        file = os.open(name, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # not from the page cache
        os.read(file, 1)
    finally:
        os.unlink(name)
for home, _, files in os.walk(path):
    for name in files:  # one is enough
        os.read(os.open(os.path.join(home, name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), 1)
        sys.exit()
"""

_silent: dict[Path, float] = {}  # directories that did not answer, and when they were asked


def answers(path: Path, *, changes: bool = False) -> bool:
    """Return whether the file system answers, also with an error. `changes`: also to a write into this directory, or
    into the one in which it will be made."""
    return not silent_among([path], changes=changes)


def silent_among(paths: Collection[Path], *, changes: bool = False) -> set[Path]:
    """Return the paths whose file system does not answer, as `answers`. They are asked in parallel: several that hang
    take no longer than one."""
    known = {path for path in paths if time.monotonic() - _silent.get(path, float("-inf")) < REMEMBERED_S}
    asked = {path: _ask(path, changes=changes) for path in paths if path not in known}
    deadline_s = time.monotonic() + ANSWER_LIMIT_S
    silent = {path for path, child in asked.items() if child is not None and not _ends(child, deadline_s)}
    _silent.update(dict.fromkeys(silent, time.monotonic()))
    return known | silent


def _ask(path: Path, *, changes: bool) -> subprocess.Popen[bytes] | None:
    """Start to look; None if that is not possible, and the caller finds the problem."""
    try:
        command = [sys.executable, "-I", "-S", "-c", LOOK, str(path), *(["changes"] if changes else [])]
        return start(command, stderr=subprocess.DEVNULL)
    except (OSError, ValueError):
        return None


def _ends(child: subprocess.Popen[bytes], deadline_s: float) -> bool:
    try:
        child.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        child.returncode = 0  # left behind: it ends when the file system answers
        return False
    return True


def require_answering(path: Path, *, changes: bool = False) -> None:
    """Raise EnvironmentProblem for a path whose file system hangs, as `answers`."""
    if not answers(path, changes=changes):
        raise problem_of_silent(path)


def problem_of_silent(path: Path) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"{path} does not answer within {ANSWER_LIMIT_S:g} s: its file system hangs",
        hint=f"check it with `timeout 5 ls {shlex.quote(str(path))}` and mount it again",
    )


def require_all_answer(paths: Iterable[str]) -> None:
    """Raise EnvironmentProblem for the first of some paths whose file system hangs. Those on drives of this machine
    are not asked: that takes no process."""
    asked = []
    for expanded in map(os.path.expanduser, paths):
        with contextlib.suppress(FileNotFoundError):  # the current directory is gone
            if "\0" not in expanded and may_hang(expanded):
                asked.append(Path(expanded))
    silent = silent_among(asked)
    for path in asked:
        if path in silent:
            raise problem_of_silent(path)
