"""Becomes another program that the kernel kills when the process that started this one dies, however it dies.

Run by path, as `python -I -S die_with_parent.py PARENT_PID PROGRAM [ARGUMENT...]`, because it must start fast and
import nothing of ours. PR_SET_PDEATHSIG survives the exec. The parent may be gone before the request is made, which the
kernel does not report; the comparison with PARENT_PID catches that.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CANNOT_RUN = 127


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
