"""DiskTier: blocks between host slots and the slots of an arena on disk, verified, and there again after a restart.

One thread owns it; only `open`, `clear` and `close` wait. A ticket ends in `poll`, once, when none of its I/O is
running any more; its host slots belong to the disk until then. Every block of it is good, which means that its bytes
and its hash fit the checksum (read) or that it will be found after a restart (write), or it is not, and a counter says
so. Nothing that the disk does comes out as an exception.
"""

from __future__ import annotations

import logging
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbm.disk.directory import ARENA
from kvbm.disk.health import DiskCounters as DiskCounters
from kvbm.disk.health import Health
from kvbm.disk.health import Limits as Limits
from kvbm.disk.index_thread import Clear, Forget, IndexThread
from kvbm.disk.instance import Instance
from kvbm.disk.io.threads import BlockIO, ThreadsIO
from kvbm.disk.settings import DiskSettings as DiskSettings
from kvbm.disk.settings import Namespace as Namespace
from kvbm.disk.settings import Progress
from kvbm.disk.transfers import Geometry, Transfer, TransferThreads
from kvbm.disk.wear import Wear, WearMeter
from kvbm.errors import EnvironmentProblem, InvariantError

BLOCKS_FOUND_TOGETHER = 16_384
SLOT_BYTES = 8
NOTHING = np.empty(0, np.int64), np.empty(0, np.void)  # slots and hashes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskResult:
    """The end of one ticket. `error` tells the first of what went wrong besides checksums."""

    ticket: int
    kind: str  # "read" | "write"
    is_good: tuple[bool, ...]
    error: str | None


class FoundBlocks(NamedTuple):
    """Blocks that were there at opening: `slots` are int64, and `hashes` all hashes, one after the other. Behind the
    last ones there are no more."""

    slots: bytes
    hashes: bytes
    is_last: bool

    def parts(self, block_count: int) -> Iterator[FoundBlocks]:
        """The same, at most so many at a time."""
        count = len(self.slots) // SLOT_BYTES
        width = len(self.hashes) // max(1, count)
        for start in range(0, max(1, count), block_count):
            end = start + block_count
            yield FoundBlocks(
                self.slots[start * SLOT_BYTES : end * SLOT_BYTES],
                self.hashes[start * width : end * width],
                self.is_last and end >= count,
            )

    def lists(self) -> tuple[list[int], list[bytes]]:
        """(slots, hashes)."""
        slots = array("q", self.slots).tolist()
        if not slots:
            return [], []
        return slots, [name for (name,) in struct.iter_unpack(f"{len(self.hashes) // len(slots)}s", self.hashes)]


class DiskStorage:
    """See the module's text."""

    def __init__(
        self,
        instance: Instance,
        io: BlockIO,
        shards: Sequence[NDArray[np.uint8]],
        *,
        threads: int = 4,
        limits: Limits | None = None,
    ) -> None:
        """*Consumes* the instance."""
        self.slot_count = instance.shape.slot_count
        self._host_slot_count = min(len(shard) for shard in shards)
        self._instance = instance
        self._io = io
        self._health = Health(limits or Limits())
        self._wear = WearMeter(instance.path)
        self._checksums = array("Q", bytes(8 * self.slot_count))
        self._writes: dict[int, Transfer] = {}  # that `poll` has not returned
        self._slots_being_written: set[int] = set()
        self._finished: deque[Transfer] = deque()  # filled by any thread, emptied by the owner
        self.on_result: Callable[[], None] | None = None  # called by any thread when `poll` has something
        self._found = NOTHING  # until it has been told
        last_generation = self._recover()
        self._index_thread = IndexThread(
            instance,
            io,
            self._health,
            self._checksums,
            first_generation=last_generation + 1,
            on_end=self._end,
        )
        geometry = Geometry(shards, instance.shape.slot_bytes)
        self._threads = TransferThreads(threads, io, geometry, self._health, self._transfer_ended)
        self._index_thread.start(self._threads)

    @classmethod
    def open(
        cls,
        settings: DiskSettings,
        namespace: Namespace,
        shards: Sequence[NDArray[np.uint8]],
        *,
        hash_bytes: int,
        progress: Progress | None = None,
        instance: Path | None = None,
    ) -> DiskStorage:
        """`shards[r][s]` is the payload of host slot s in rank r's segment, whole pages at the start of a page.
        `progress(done_bytes, total_bytes)` while space is taken; `instance`: this one, or a new one if it cannot be
        had. Raises EnvironmentProblem."""
        payload_bytes = sum(shard.shape[1] for shard in shards)
        opened = Instance.open(
            settings, namespace, payload_bytes=payload_bytes, hash_bytes=hash_bytes, progress=progress, only=instance
        )
        try:
            _require_aligned(opened, shards)
            return cls(opened, _open_io(settings, opened, shards), shards, threads=settings.threads)
        except BaseException:
            opened.close()
            raise

    @property
    def counters(self) -> DiskCounters:
        return self._health.counters

    @property
    def is_on(self) -> bool:
        """False after repeated errors or while I/O hangs; every ticket then ends as failed at once."""
        return self._health.is_on

    @property
    def off_because(self) -> str | None:
        return self._health.off_because

    @property
    def is_removed(self) -> bool:
        """Its files have lost their names: it stays off, and can be opened anew."""
        return self._health.is_removed

    @property
    def path(self) -> Path:
        """Where its files lie; without `persist`, the directory."""
        return self._instance.path

    @property
    def io_name(self) -> str:
        return self._io.name

    def wear(self) -> Wear:
        """What this has done to the drive."""
        return self._wear.measure(self.counters.bytes_written)

    def recovered(self) -> FoundBlocks:
        """The next of the blocks that were there at opening, the one written longest ago first. Each once only."""
        slots, hashes = self._found
        some, rest = slice(BLOCKS_FOUND_TOGETHER), slice(BLOCKS_FOUND_TOGETHER, None)
        is_last = len(slots) <= BLOCKS_FOUND_TOGETHER
        self._found = NOTHING if is_last else (slots[rest], hashes[rest])
        return FoundBlocks(slots[some].tobytes(), hashes[some].tobytes(), is_last)

    def write(
        self,
        ticket: int,
        hashes: Sequence[bytes],
        host_slots: Sequence[int],
        disk_slots: Sequence[int],
        tenants: Sequence[bytes],
        is_intact: Callable[[], bool] | None = None,
    ) -> None:
        """The disk slots are this ticket's until `poll` returns it; what they held is forgotten first.

        `is_intact` is asked by a thread of the disk when the payload has been read for the last time: False means that
        the host slots no longer hold what they held, and no block of the ticket is good.
        """
        self._check(hashes, host_slots, disk_slots)
        if len(tenants) != len(hashes):
            raise InvariantError(f"{len(hashes)} blocks of {len(tenants)} tenants")
        if not self._slots_being_written.isdisjoint(disk_slots) or len(set(disk_slots)) != len(disk_slots):
            raise InvariantError(f"ticket {ticket} writes disk slots that are being written")
        self._slots_being_written.update(disk_slots)
        transfer = self._writes[ticket] = Transfer(
            ticket, hashes, disk_slots, host_slots, tenants=tenants, is_intact=is_intact
        )
        self._begin(transfer)

    def read(self, ticket: int, hashes: Sequence[bytes], disk_slots: Sequence[int], host_slots: Sequence[int]) -> None:
        self._check(hashes, host_slots, disk_slots)
        transfer = Transfer(ticket, hashes, disk_slots, host_slots)
        for position, slot in enumerate(disk_slots):
            transfer.checksums[position] = self._checksums[slot]
        self._begin(transfer)

    def forget(self, disk_slots: Sequence[int]) -> None:
        """Durable soon, in the order of submission with writes; also while the disk is off, when it is on again."""
        self._check((), (), disk_slots)
        if disk_slots:
            self._index_thread.order(Forget(tuple(disk_slots)))

    def clear(self, tenant: bytes | None = None) -> None:
        """Forget all blocks, or one tenant's, and every write that `poll` has not returned. Durable when it returns.

        Raises EnvironmentProblem if it is not: the tier is off then until it is, and tries again as long as it is open.
        """
        clear = Clear(tenant)
        for transfer in self._writes.values():
            transfer.cleared |= clear.positions(transfer)
        self._index_thread.order(clear)
        is_done = clear.done.wait(self._health.limits.clear_timeout_s)
        if not is_done or clear.error is not None:
            why = clear.error or f"not within {self._health.limits.clear_timeout_s:g} s"
            self._health.turn_off(f"a clear is not on the disk yet: {why}")
            raise EnvironmentProblem(
                f"the disk cache {self._instance.path} is not cleared durably: {why}",
                hint=f"remove {self._instance.path} before the next start",
            )

    def withdraw(self, ticket: int) -> bool:
        """True: none of its I/O runs and none will, no result comes. False: it comes out of `poll`."""
        if self._threads.withdraw(ticket):
            return True
        transfer = self._index_thread.withdraw(ticket)
        if transfer is None:
            return False
        self._forget_write(transfer)
        return True

    def poll(self) -> list[DiskResult]:
        """The tickets that have ended since the last call."""
        self._threads.replace_dead_threads()
        self._notice_stall()
        results = []
        while self._finished:
            transfer = self._finished.popleft()
            if transfer.is_write:
                self._forget_write(transfer)
            results.append(_result_of(transfer))
        return results

    def close(self, timeout_s: float) -> None:
        """Fail what has not begun, wait at most `timeout_s` for what runs, and give the directory to others.

        Where I/O still hangs then, its files stay open, and the directory locked, until the process ends.
        """
        deadline_s = time.monotonic() + timeout_s
        self._threads.close()
        self._index_thread.close()
        has_ended = self._threads.join(deadline_s)
        has_ended &= self._index_thread.join(deadline_s)
        if not has_ended:
            logger.warning("the disk tier %s still waits for its disk: it stays locked", self._instance.path)
            return
        self._io.close()
        self._instance.close()

    def _forget_write(self, transfer: Transfer) -> None:
        del self._writes[transfer.ticket]
        self._slots_being_written.difference_update(transfer.disk_slots)

    def _begin(self, transfer: Transfer) -> None:
        why_not = self._health.off_because
        if why_not is not None:
            transfer.fail(f"off: {why_not}")
            self._end(transfer)
        elif transfer.is_write:
            self._index_thread.order(transfer)
        else:
            self._threads.submit(transfer)

    def _transfer_ended(self, transfer: Transfer) -> None:
        if transfer.is_write:
            self._index_thread.written(transfer)
        else:
            self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        self._finished.append(transfer)
        if self.on_result is not None:
            self.on_result()

    def _notice_stall(self) -> None:
        """I/O that hangs turns the disk off, and what waits behind it ends."""
        since = [at for at in (self._threads.busy_since(), self._index_thread.busy_since()) if at is not None]
        if not since or time.monotonic() - min(since) < self._health.limits.stall_s:
            return
        self._health.turn_off(f"I/O has been running for more than {self._health.limits.stall_s:g} s")
        self._threads.fail_waiting("the disk hangs")
        for transfer in self._index_thread.take_waiting():
            transfer.fail("the disk hangs")
            self._finished.append(transfer)

    def _recover(self) -> int:
        """Returns the last generation that was used."""
        losses, counters = self._instance.losses, self.counters
        counters.damaged_superblocks = losses.damaged_superblocks
        counters.damaged_indexes = losses.damaged_indexes
        counters.dropped_rows = losses.dropped_rows
        found, self._instance.recovered = self._instance.recovered, None
        if found is None or not len(found.slots):
            return 0
        np.frombuffer(self._checksums, np.uint64)[found.slots] = found.checksums
        order = np.argsort(found.generations, kind="stable")
        self._found = found.slots[order], found.hashes[order]
        return int(found.generations[order[-1]])

    def _check(self, hashes: Sequence[bytes], host_slots: Sequence[int], disk_slots: Sequence[int]) -> None:
        """A wrong number would silently mean another slot."""
        if hashes and not len(hashes) == len(host_slots) == len(disk_slots):
            raise InvariantError(f"{len(hashes)} blocks, {len(host_slots)} host slots, {len(disk_slots)} disk slots")
        for name, slots, count in (("host", host_slots, self._host_slot_count), ("disk", disk_slots, self.slot_count)):
            if slots and not 0 <= min(slots) <= max(slots) < count:
                raise InvariantError(f"{name} slots {min(slots)}..{max(slots)} of {count}")


def _require_aligned(instance: Instance, shards: Sequence[NDArray[np.uint8]]) -> None:
    if not instance.arena.is_direct:
        return
    needed = instance.arena.alignment()
    for rank, shard in enumerate(shards):
        if shard.shape[1] % needed.offset or shard.ctypes.data % needed.memory or shard.strides[0] % needed.memory:
            raise EnvironmentProblem(
                f"{instance.arena.path} asks for I/O in units of {needed.offset} bytes, and a block of rank {rank} has "
                f"{shard.shape[1]}",
                hint="set `tiers.disk.o_direct: false`",
            )


def _result_of(transfer: Transfer) -> DiskResult:
    is_good = tuple(good == 1 and position not in transfer.cleared for position, good in enumerate(transfer.is_good))
    return DiskResult(transfer.ticket, "write" if transfer.is_write else "read", is_good, transfer.error)


def _open_io(settings: DiskSettings, instance: Instance, shards: Sequence[NDArray[np.uint8]]) -> BlockIO:
    arena = instance.arena
    if settings.io == "threads":
        return ThreadsIO(arena.fd, is_direct=arena.is_direct)
    from kvbm.disk.io.select import open_io

    return open_io(settings.io, arena.fd, path=instance.path / ARENA, shards=shards, is_direct=arena.is_direct)
