"""Replaces this process by another program that the kernel kills when the parent process dies.

Run by path as `python -I -S die_with_parent.py PARENT_PID PROGRAM [ARGUMENT...]` (`command_line` builds the command).
It must start fast, so it imports nothing of kvbm. PR_SET_PDEATHSIG survives the exec. The parent may die before the
call of prctl, which the kernel does not report; the comparison with PARENT_PID detects that.
"""

import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
CANNOT_RUN = 127


def command_line(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` and ends it when this process dies."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    parent_pid, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(CANNOT_RUN)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"cannot run {program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
