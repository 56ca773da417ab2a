"""Kills what is left of an engine's process group when the process that started the engine dies, however it dies.

The kernel kills the engine itself (die_with_parent.py), but not the processes that the engine has started. This one
waits for the end of its standard input, a pipe whose other end only the parent holds: end of file means that the parent
is gone, and a byte means that the parent has seen to everything. Run by path, as
`python -I -S group_guard.py PROCESS_GROUP`, in a session of its own, so that no terminal signals it.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    parent_is_gone = not os.read(sys.stdin.fileno(), 1)
    if parent_is_gone:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(sys.argv[1]), signal.SIGKILL)


if __name__ == "__main__":
    main()
