"""Verify a cache: read every block and compare its checksum. Also finds the process that uses a cache.

A cache in use can be verified too: the engine deletes a block's row before the block's bytes change. A mismatch whose
row still exists after the read is damage; a mismatch whose row is gone was only replaced.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvbm.host.layout import consecutive
from kvbm.host.processes import stat_of
from kvbm.tiers.disk.directory import ARENA, INDEX, LOCK
from kvbm.tiers.disk.files import open_private
from kvbm.tiers.disk.index import BlockIndex, Recovered, checksum
from kvbm.tiers.disk.io.threads import Buffer, IoRun, ThreadsIO
from kvbm.tiers.disk.superblock import Superblock
from kvbm_cli.store.caches import index_to_read

READ_BYTES = 8 << 20
LOCKS = Path("/proc/locks")
DISK_PROCESS = b"kvbm.tiers.disk.service.server"


@dataclass(frozen=True, slots=True)
class Verified:
    """`bad` are damaged slots; `replaced_count` blocks were replaced while they were read."""

    good_count: int
    bad: tuple[int, ...]
    replaced_count: int


def verify(instance: Path, superblock: Superblock, *, progress: Callable[[int, int], None]) -> Verified:
    """Verify all blocks. `progress(bytes done, bytes total)`.

    Raises OSError, EnvironmentProblem or sqlite3.Error if the cache as a whole cannot be read.
    """
    found, namespace = _load(instance, superblock), bytes.fromhex(superblock.namespace)
    order = np.argsort(found.slots)
    suspects = []
    with _SlotReader(instance / ARENA, superblock.slot_bytes) as reader:
        done = 0
        for group in _adjacent(found.slots, order, most=reader.slots_at_once):
            payloads = reader.read(int(found.slots[group[0]]), len(group))
            suspects += [
                at for at, payload in zip(group, payloads, strict=True) if not _fits(namespace, found, at, payload)
            ]
            done += len(group)
            progress(done * superblock.payload_bytes, len(order) * superblock.payload_bytes)
    count = len(suspects) + len(found.misfits)
    bad = _still_there(found, suspects, _load(instance, superblock)) if count else []
    return Verified(len(order) - len(suspects), tuple(bad), count - len(bad))


def drop(instance: Path, slots: tuple[int, ...]) -> None:
    """Delete the rows of these slots. The caller holds the lock.

    Raises OSError, EnvironmentProblem or sqlite3.Error.
    """
    with closing(BlockIndex.open(instance / INDEX)) as index:
        index.delete(slots)


def holder(instance: Path) -> int | None:
    """Return the pid of the engine that uses a cache, or None if it is not visible from here."""
    with suppress(OSError):
        found = os.lstat(instance / LOCK)
        name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        for line in LOCKS.read_text().splitlines():
            fields = line.split()
            if fields[1:2] == ["FLOCK"] and name in fields and int(fields[4]) > 0:
                return _engine_of(int(fields[4]))
    return None


def _engine_of(pid: int) -> int:
    """Return the parent of a disk process, which holds the lock on behalf of its engine."""
    with suppress(OSError):
        if DISK_PROCESS in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            process = stat_of(pid)
            return pid if process is None else process.parent
    return pid


def _load(instance: Path, superblock: Superblock) -> Recovered:
    with closing(index_to_read(instance / INDEX)) as index:
        return index.load(superblock.hash_bytes)


def _fits(namespace: bytes, found: Recovered, at: int, payload: Buffer | None) -> bool:
    length = int(found.lengths[at])
    if payload is None or not 0 <= length <= len(payload):
        return False
    return checksum(namespace, found.hashes[at].tobytes(), [payload[:length]]) == int(found.checksums[at])


def _still_there(before: Recovered, suspects: list[int], now: Recovered) -> list[int]:
    """Return the slots of suspects whose rows have not changed."""
    generations = dict(zip(now.slots.tolist(), now.generations.tolist(), strict=True))
    slots = [int(before.slots[at]) for at in suspects]
    unchanged = [
        slot for at, slot in zip(suspects, slots, strict=True) if generations.get(slot) == int(before.generations[at])
    ]
    return sorted([*unchanged, *set(before.misfits).intersection(now.misfits)])


def _adjacent(slots: np.ndarray, order: np.ndarray, *, most: int) -> Iterator[list[int]]:
    """Group positions in `slots` by adjacent slots, in ascending order of slots, at most `most` per group."""
    for begin, end in consecutive(slots[order]):
        for start in range(begin, end, most):
            yield order[start : min(start + most, end)].tolist()


class _SlotReader:
    """Reads slots of an arena that may be written concurrently, bypassing the page cache, which may be stale."""

    def __init__(self, arena: Path, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self.slots_at_once = max(1, READ_BYTES // slot_bytes)
        memory = mmap.mmap(-1, self.slots_at_once * slot_bytes)
        self._rows = np.frombuffer(memory, np.uint8).reshape(self.slots_at_once, slot_bytes)
        self._fd = open_private(arena, os.O_RDONLY)
        is_direct = True
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError:
            is_direct = False
        self._io = ThreadsIO(self._fd, is_direct=is_direct)

    def __enter__(self) -> _SlotReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._io.close()
        os.close(self._fd)

    def read(self, slot: int, count: int, *, row: int = 0) -> list[Buffer | None]:
        """Read adjacent slots in one call, or one by one if that fails: only unreadable slots are None."""
        rows = self._rows[row : row + count]
        try:
            self._io.read([IoRun(slot * self._slot_bytes, [rows.reshape(-1)])])
        except OSError:
            return [None] if count == 1 else [self.read(slot + at, 1, row=at)[0] for at in range(count)]
        return list(rows)
