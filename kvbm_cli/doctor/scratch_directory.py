"""A private directory of the doctor below the examined one. It is removed afterwards, also if the doctor is killed.

A guard process starts before anything is made and removes everything: after a normal end, an interrupt, or a kill.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

from kvbm.host.directories import make_private_directories
from kvbm_cli.system.guard_process import GuardProcess
from kvbm_cli.system.leftovers import Leftovers

PREFIX = ".kvbm-doctor-"
REMOVAL_TIMEOUT_S = 5.0


@contextlib.contextmanager
def scratch_directory(directory: Path) -> Iterator[Path]:
    """Yield an empty private directory in `directory`, which is created too if it is missing. Raises OSError."""
    directory = directory.absolute()
    place = directory / f"{PREFIX}{secrets.token_hex(8)}"
    missing = [str(path) for path in (directory, *directory.parents) if not path.exists()]
    guard = GuardProcess(Leftovers(str(place), parents=missing), log=subprocess.DEVNULL)
    try:
        guard.scan()  # once it answers, it survives every signal to the doctor
        make_private_directories(directory)
        os.mkdir(place, 0o700)
        yield place
    finally:
        guard.remove(REMOVAL_TIMEOUT_S)  # the doctor does not wait longer for a disk that hangs
