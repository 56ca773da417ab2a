"""Removes the directories that a doctor made, when the doctor has ended in whatever way.

Run by path, as `python -I -S guard.py DIRECTORY...`, in a session of its own, so that no terminal signals it; hence the
standard library alone. It waits for the end of its standard input, a pipe whose other end only the doctor holds. The
first directory goes with everything in it, as soon as that is possible: FUSE keeps files that a dying process still has
open, under other names. The others go only where they are empty by then: somebody else may have begun
to use them.
"""

import contextlib
import os
import shutil
import signal
import sys
import time

PATIENCE_S = 30.0
INTERVAL_S = 0.02


def main() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    print(flush=True)  # from here on, whatever ends the doctor
    sys.stdin.buffer.read()
    whole, *parents = sys.argv[1:]
    deadline = time.monotonic() + PATIENCE_S
    while os.path.lexists(whole) and time.monotonic() < deadline:
        shutil.rmtree(whole, ignore_errors=True)
        time.sleep(INTERVAL_S)
    for directory in parents:
        with contextlib.suppress(OSError):
            os.rmdir(directory)


if __name__ == "__main__":
    main()
