"""Removes the directories that a doctor made, when the doctor has ended in whatever way.

Run by path, as `python -I -S guard.py DIRECTORY...`, in a session of its own, so that no terminal signals it; hence the
standard library alone. It waits for the end of its standard input, a pipe whose other end only the doctor holds. The
first directory goes with everything in it, the others only where they are empty by then: somebody else may have begun
to use them.
"""

import contextlib
import os
import shutil
import signal
import sys


def main() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    print(flush=True)  # from here on, whatever ends the doctor
    sys.stdin.buffer.read()
    whole, *parents = sys.argv[1:]
    shutil.rmtree(whole, ignore_errors=True)
    for directory in parents:
        with contextlib.suppress(OSError):
            os.rmdir(directory)


if __name__ == "__main__":
    main()
