"""A directory of the doctor's own below the one that is examined, gone afterwards also if the doctor is killed.

A guard process (guard.py) runs before anything is made, and it alone removes things: one way for an ordinary end, an
interrupt and a kill.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

GUARD = Path(__file__).with_name("scratch_guard.py")
PREFIX = ".kvbm-doctor-"
REMOVAL_TIMEOUT_S = 5.0


@contextlib.contextmanager
def scratch_directory(directory: Path) -> Iterator[Path]:
    """An empty private directory in `directory`, which is made too where it is missing. Raises OSError."""
    place = directory / f"{PREFIX}{secrets.token_hex(8)}"
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", str(GUARD), str(place), *map(str, missing)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert guard.stdin is not None
    assert guard.stdout is not None
    try:
        guard.stdout.readline()
        with contextlib.suppress(FileExistsError):  # a file, too; the next call finds out
            directory.mkdir(mode=0o700, parents=True)
        os.mkdir(place, 0o700)
        yield place
    finally:
        guard.stdout.close()
        guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a disk that hangs does not hang the doctor
            guard.wait(REMOVAL_TIMEOUT_S)
