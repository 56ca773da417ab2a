"""Starts processes: children of ours and short programs. Only engines start elsewhere (kvbm_cli/engine/process.py).

Run by path as `python -I -S start.py PARENT_PID PROGRAM [ARGUMENT...]`, it replaces itself by a program that the kernel
kills when the thread that started it ends (`command_line` builds the command). That must start fast, so this module
imports nothing of kvbm. PR_SET_PDEATHSIG survives the exec. The parent may die before the call of prctl, which the
kernel does not report; the comparison with PARENT_PID detects that.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

TYPE_CHECKING = False  # it takes time to import `typing`
if TYPE_CHECKING:
    import subprocess
    from typing import IO

PR_SET_PDEATHSIG = 1
CANNOT_RUN = 127
HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # where the packages are


def start(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    stdin: int | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    directory: str | None = None,
    dies_with_parent: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a program in its own session, so that signals of a terminal reach only this process. May raise OSError.

    Without `stdin` and `stdout` it has none; it shares `stderr` with this process. With `dies_with_parent`, the kernel
    kills it when the thread that called this ends.
    """
    import subprocess

    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        command_line(command) if dies_with_parent else command,
        env=environment,
        stdin=nothing if stdin is None else stdin,
        stdout=nothing if stdout is None else stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        cwd=directory,
        start_new_session=True,
    )


def our_environment() -> dict[str, str]:
    """Return the variables of a child that imports our packages from where this process has them."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [HOME, os.environ.get("PYTHONPATH", "")]))}


def command_line(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` and ends it when this process dies."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def die_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent dies. Exit if the parent is gone already."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(CANNOT_RUN)


def main() -> None:
    parent_pid, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        die_with_parent(parent_pid)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"cannot run {program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
