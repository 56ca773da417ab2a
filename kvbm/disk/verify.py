"""Reads every block of a cache back and compares it with its checksum; and finds out who holds a cache.

Also while an engine uses the cache: the engine deletes a block's row before the block's bytes change, so a block that
does not fit and whose row is still there afterwards was damaged, and one whose row is gone was only replaced.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvbm.disk.directory import ARENA, INDEX, LOCK
from kvbm.disk.files import open_private
from kvbm.disk.index import BlockIndex, Recovered, checksum
from kvbm.disk.io.threads import Buffer, IoRun, ThreadsIO
from kvbm.disk.superblock import Superblock

READ_BYTES = 8 << 20
LOCKS = Path("/proc/locks")
DISK_PROCESS = b"kvbm.disk.service.server"


@dataclass(frozen=True, slots=True)
class Verified:
    """`bad` are slots whose bytes are not their block's; `replaced_count` blocks went away while they were read."""

    good_count: int
    bad: tuple[int, ...]
    replaced_count: int


def verify(instance: Path, superblock: Superblock, *, progress: Callable[[int, int], None]) -> Verified:
    """`progress(bytes done, bytes in all)`. OSError, EnvironmentProblem and sqlite3.Error are about the whole cache."""
    found = _load(instance, superblock)
    order = np.argsort(found.slots)
    suspects = []
    with _SlotReader(instance / ARENA, superblock.slot_bytes) as reader:
        done = 0
        for group in _neighbours(found.slots, order, most=reader.slots_at_once):
            payloads = reader.read(int(found.slots[group[0]]), len(group))
            suspects += [at for at, payload in zip(group, payloads, strict=True) if not _fits(found, at, payload)]
            done += len(group)
            progress(done * superblock.payload_bytes, len(order) * superblock.payload_bytes)
    count = len(suspects) + len(found.misfits)
    bad = _still_there(found, suspects, _load(instance, superblock)) if count else []
    return Verified(len(order) - len(suspects), tuple(bad), count - len(bad))


def drop(instance: Path, slots: tuple[int, ...]) -> None:
    """The holder of the lock forgets blocks. Raises sqlite3.Error."""
    index = BlockIndex.open(instance / INDEX)
    try:
        index.delete(slots)
    finally:
        index.close()


def holder(instance: Path) -> int | None:
    """The engine's process that uses a cache, where this one can see it."""
    with suppress(OSError):
        found = os.lstat(instance / LOCK)
        name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        for line in LOCKS.read_text().splitlines():
            fields = line.split()
            if fields[1:2] == ["FLOCK"] and name in fields and int(fields[4]) > 0:
                return _engine_of(int(fields[4]))
    return None


def _engine_of(pid: int) -> int:
    """A lock is held by the process that an engine's leader has for its disk."""
    with suppress(OSError):
        if DISK_PROCESS in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def _load(instance: Path, superblock: Superblock) -> Recovered:
    index = BlockIndex.open_to_read(instance / INDEX)
    try:
        return index.load(superblock.hash_bytes)
    finally:
        index.close()


def _fits(found: Recovered, at: int, payload: Buffer | None) -> bool:
    length = int(found.lengths[at])
    if payload is None or not 0 <= length <= len(payload):
        return False
    return checksum(found.hashes[at].tobytes(), [payload[:length]]) == int(found.checksums[at])


def _still_there(before: Recovered, suspects: list[int], now: Recovered) -> list[int]:
    """Slots of those whose rows are what they were."""
    generations = dict(zip(now.slots.tolist(), now.generations.tolist(), strict=True))
    slots = [int(before.slots[at]) for at in suspects]
    unchanged = [
        slot for at, slot in zip(suspects, slots, strict=True) if generations.get(slot) == int(before.generations[at])
    ]
    return sorted([*unchanged, *set(before.misfits).intersection(now.misfits)])


def _neighbours(slots: np.ndarray, order: np.ndarray, *, most: int) -> Iterator[list[int]]:
    """Positions in `slots`, in the order of slots, those of neighbouring slots together."""
    group: list[int] = []
    for at in order.tolist():
        if group and (slots[at] != slots[group[-1]] + 1 or len(group) == most):
            yield group
            group = []
        group.append(at)
    if group:
        yield group


class _SlotReader:
    """Slots of an arena to which somebody may be writing: past the page cache, which would show what was there once."""

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

    def read(self, slot: int, count: int) -> list[Buffer | None]:
        """Neighbours in one call; one after the other if that fails, so that only what cannot be read is None."""
        try:
            self._io.read([IoRun(slot * self._slot_bytes, [self._rows[:count].reshape(-1)])])
        except OSError:
            return [None] if count == 1 else self._read_each(slot, count)
        return list(self._rows[:count])

    def _read_each(self, slot: int, count: int) -> list[Buffer | None]:
        payloads: list[Buffer | None] = []
        for position in range(count):
            try:
                self._io.read([IoRun((slot + position) * self._slot_bytes, [self._rows[position]])])
            except OSError:
                payloads.append(None)
            else:
                payloads.append(self._rows[position])
        return payloads
