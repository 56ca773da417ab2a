"""Claims: host memory that engines of all users of this machine will allocate while they start.

A claim is a file in /dev/shm, which its launcher keeps locked from the choice of the sizes until the engine is
healthy, or the start has failed. The kernel ends the lock with the launcher, so a claim without one counts for nothing.
Every user can write and lock files there. So a claim counts only while its process lives, and if the file belongs to
the user of this process; and for no more than the control groups of the process let it allocate (reservations.py).
Sizes are chosen, and claims made, under a lock of the directory, so that two starts at once do not take the same
memory. Where /dev/shm cannot be used, there are no claims, and only the run directories of this user count.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvbm.config.sizes import MAX_BYTES
from kvbm_cli.runs.locks import is_locked, locked, open_regular

DIRECTORY = Path("/dev/shm")
PREFIX = "kvbm-claim-"
LOCK_LIMIT_S = 10.0  # a process of another user may hold the lock for as long as it likes
MOST_BYTES = 100


@dataclass(frozen=True, slots=True)
class MemoryClaim:
    """Host memory for blocks (G2), and of the engine itself on a CPU, below the process `pid`."""

    pid: int
    memory_bytes: int
    engine_bytes: int


@contextlib.contextmanager
def claiming() -> Iterator[None]:
    """Keep other starts on this machine from choosing sizes in the meantime. Waits for them for `LOCK_LIMIT_S`."""
    with contextlib.ExitStack() as lock:
        with contextlib.suppress(OSError):
            lock.enter_context(locked(DIRECTORY, limit_s=LOCK_LIMIT_S))
        yield


def make(claim: MemoryClaim) -> BinaryIO | None:
    """Publish a claim and return its locked file, to be given to `release`; None if that is not possible here."""
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix="kvbm-new-", dir=DIRECTORY)
        file = os.fdopen(descriptor, "wb", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(f"{claim.pid} {claim.memory_bytes} {claim.engine_bytes}".encode())
        os.fchmod(descriptor, 0o644)  # every user counts it
        os.rename(name, DIRECTORY / f"{PREFIX}{claim.pid}-{os.path.basename(name)}")
        return file
    return None


def release(file: BinaryIO) -> None:
    """End a claim."""
    with contextlib.suppress(OSError):
        os.unlink(os.readlink(f"/proc/self/fd/{file.fileno()}"))
    file.close()


def claims() -> list[MemoryClaim]:
    """Return the claims of all starting engines, and remove those of this user that a killed launcher left."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(DIRECTORY.glob(f"{PREFIX}*")):
            if is_locked(path):
                found += [claim] if (claim := _read(path)) is not None else []
                continue
            with contextlib.suppress(OSError):
                path.unlink()
    return found


def _read(path: Path) -> MemoryClaim | None:
    """Return None for a file that was just removed, or that the user of its process did not write."""
    with contextlib.suppress(OSError, ValueError):
        with open(open_regular(path), "rb") as file:
            numbers = [int(word) for word in file.read(MOST_BYTES).split()]
            owner = os.fstat(file.fileno()).st_uid
        if len(numbers) == 3 and all(0 <= number <= MAX_BYTES for number in numbers):
            return MemoryClaim(*numbers) if os.stat(f"/proc/{numbers[0]}").st_uid == owner else None
    return None
