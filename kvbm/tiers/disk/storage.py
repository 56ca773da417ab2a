"""DiskStorage: moves blocks between host slots and the slots of an arena on disk, verifies them, and persists them.

One thread owns it; only `open` and `close` block. `poll` returns each ticket once, after all of its I/O has
ended; its host slots belong to the disk until then. Each block of a result is either good or counted as failed. Good
means: bytes and hash match the checksum (read), or the block survives a restart (write). Disk errors never raise.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbm.errors import InvariantError
from kvbm.tiers.disk.directory import ARENA
from kvbm.tiers.disk.health import Health, HealthLimits
from kvbm.tiers.disk.index_thread import IndexThread, PendingClear, SlotsCarry
from kvbm.tiers.disk.instance import Instance, WantedInstance
from kvbm.tiers.disk.io.threads import BlockIO, ThreadsIO
from kvbm.tiers.disk.known_rates import read_rates
from kvbm.tiers.disk.orders import DiskResult, Forget, FoundBlocks, Read, Write
from kvbm.tiers.disk.settings import DiskSettings, Namespace, Progress
from kvbm.tiers.disk.transfers import Geometry, Transfer, TransferThreads, WriteTransfer
from kvbm.tiers.rates import KnownRates

FOUND_BATCH_BLOCKS = 1024  # few enough for a step of an engine
NOTHING = np.empty(0, np.int64), np.empty(0, np.void), np.empty(0, np.int64)  # slots, hashes, times of writing

logger = logging.getLogger(__name__)


class DiskStorage:
    """The disk tier of one engine; see the module docstring."""

    def __init__(
        self,
        instance: Instance,
        io: BlockIO,
        shards: Sequence[NDArray[np.uint8]],
        *,
        threads: int = 4,
        slots_carry: SlotsCarry | None = None,
        limits: HealthLimits | None = None,
    ) -> None:
        """*Consumes* the instance. Without `slots_carry`, host slots are not checked after a write."""
        self.slot_count = instance.superblock.slot_count
        self.path = instance.path  # directory of the files; without `persist`, the configured directory
        self.io_name = io.name
        self._host_slot_count = min(len(shard) for shard in shards)
        self._instance = instance
        self._io = io
        self.health = Health(limits or HealthLimits(), instance.losses)
        self.counters = self.health.counters
        self._checksums = array("Q", bytes(8 * self.slot_count))
        self._writers: dict[int, WriteTransfer] = {}  # disk slot -> its write, until `poll` returns it
        self._finished: deque[Transfer] = deque()  # filled by any thread, emptied by the owner
        self.on_result: Callable[[], None] = lambda: None  # any thread calls it after a result or a durable clear
        self._found: tuple[NDArray[Any], ...] = NOTHING  # not yet returned by `recovered`
        self._tenants: dict[int, bytes] = {}  # of these blocks, by slot
        last_generation = self._recover()
        self._index_thread = IndexThread(
            instance,
            io,
            self.health,
            self._checksums,
            first_generation=last_generation + 1,
            slots_carry=slots_carry,
            on_end=self._end,
        )
        superblock = instance.superblock
        geometry = Geometry(shards, superblock.slot_bytes, bytes.fromhex(superblock.namespace))
        self._threads = TransferThreads(threads, io, geometry, self.health, self._transfer_ended)
        self._index_thread.start(self._threads)

    @classmethod
    def open(
        cls,
        settings: DiskSettings,
        namespace: Namespace,
        shards: Sequence[NDArray[np.uint8]],
        *,
        hash_bytes: int,
        slots_carry: SlotsCarry | None = None,
        progress: Progress | None = None,
        instance: Path | None = None,
    ) -> DiskStorage:
        """Open or create an instance. Raises EnvironmentProblem.

        `shards[r][s]` is the payload of host slot s in the segment of rank r: whole pages, page-aligned.
        `slots_carry(host_slots, generations)`: whether host slots still have these generations; any thread calls it.
        `progress(done_bytes, total_bytes)` is called while space is allocated. `instance`: this one, or a new one if it
        is not available.
        """
        payload_bytes = sum(shard.shape[1] for shard in shards)
        opened = Instance.open(WantedInstance(settings, namespace, payload_bytes, hash_bytes, progress), instance)
        try:
            io = _open_io(settings, opened, shards)
            return cls(opened, io, shards, threads=settings.threads, slots_carry=slots_carry)
        except BaseException:
            opened.close()
            raise

    @property
    def off_because(self) -> str | None:
        """Set after repeated errors or while I/O hangs; every ticket then fails at once."""
        return self.health.off_because

    def reads_stuck_since(self) -> float | None:
        """Return since when reads have made no progress, in `time.monotonic`; None if there is none to wait for."""
        return self._threads.reads_stuck_since()

    def recovered(self) -> FoundBlocks:
        """Return the next batch of blocks found at opening, oldest first, each block once."""
        slots, hashes, written = (column[:FOUND_BATCH_BLOCKS].tolist() for column in self._found)
        is_last = len(self._found[0]) <= FOUND_BATCH_BLOCKS
        self._found = NOTHING if is_last else tuple(column[FOUND_BATCH_BLOCKS:] for column in self._found)
        notes, tenants = (
            tuple(known.pop(slot, b"") for slot in slots) if known else ()
            for known in (self._instance.notes, self._tenants)
        )
        return FoundBlocks(slots, hashes, is_last, notes, written, tenants)

    def submit(self, order: Read | Write) -> None:
        """Start an order; if the disk is off, it fails at once. Raises InvariantError for invalid slots."""
        self._check_slots(order)
        if isinstance(order, Write):
            distinct = set(order.disk_slots)
            if len(distinct) < len(order.disk_slots) or not self._writers.keys().isdisjoint(distinct):
                raise InvariantError(f"ticket {order.ticket} writes disk slots that are being written")
            write = WriteTransfer(order)
            self._writers.update(dict.fromkeys(order.disk_slots, write))
            self._start(write)
        else:
            self._start(Transfer(order, [self._checksums[slot] for slot in order.disk_slots]))

    def forget(self, disk_slots: Sequence[int]) -> None:
        """Delete blocks soon, in order of submission with writes. While the disk is off, the request is kept."""
        _require_below(self.slot_count, "disk", disk_slots)
        self._index_thread.submit(Forget(tuple(disk_slots)))

    def earlier_rates(self) -> KnownRates | None:
        """Read the rates of an earlier engine. Blocks."""
        path = self._instance.rates_path
        return None if path is None else read_rates(path)

    def keep_rates(self, known: KnownRates) -> None:
        """Write the rates for the next engine soon, if the cache is persistent."""
        self._index_thread.keep_rates(known)

    def begin_clear(self, tenant: bytes | None = None, *, ends_persistence: bool = False) -> PendingClear:
        """Start to delete all blocks, or those of one tenant, also those of writes in flight. A write whose rows were
        inserted before may still end as good.

        If that fails, the tier is off, and retries until it succeeds. `ends_persistence`: blocks that are written later
        get no row in the index, so that no later start finds them.
        """
        if ends_persistence:
            self._index_thread.end_persistence()
        clear = PendingClear(tenant, lambda: self.on_result())
        self._index_thread.submit(clear)
        return clear

    def poll(self) -> list[DiskResult]:
        """Return the tickets that have ended since the last call."""
        self._check_for_stall()
        results = []
        while self._finished:
            transfer = self._finished.popleft()
            if isinstance(transfer, WriteTransfer):
                for slot in transfer.order.disk_slots:
                    del self._writers[slot]
            results.append(_result_of(transfer))
        return results

    def close(self, timeout_s: float) -> None:
        """Fail what has not started, wait at most `timeout_s` for running I/O, and release the instance.

        If I/O still hangs then, the files stay open and the instance locked until the process ends.
        """
        deadline_s = time.monotonic() + timeout_s
        self._threads.close()
        self._index_thread.close()
        has_ended = self._threads.join(deadline_s)
        has_ended &= self._index_thread.join(deadline_s)
        if not has_ended:
            logger.warning(
                "I/O of the disk cache %s still hangs: it stays locked until the process ends",
                self._instance.path,
            )
            return
        self._io.close()
        self._instance.close()

    def _start(self, transfer: Transfer) -> None:
        refusal = self.health.off_because
        if refusal is not None:
            transfer.fail(f"off: {refusal}")
            self._end(transfer)
        elif isinstance(transfer, WriteTransfer):
            self._index_thread.submit(transfer)
        else:
            self._threads.submit(transfer)

    def _transfer_ended(self, transfer: Transfer) -> None:
        if isinstance(transfer, WriteTransfer):
            self._index_thread.written(transfer)
        else:
            self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        self._finished.append(transfer)
        self.on_result()

    def _check_for_stall(self) -> None:
        """Turn the disk off if I/O hangs, and fail the orders that wait for it."""
        since = [at for at in (self._threads.busy_since(), self._index_thread.busy_since()) if at is not None]
        if not since or time.monotonic() - min(since) < self.health.limits.stall_s:
            return
        self.health.turn_off(f"I/O has been running for more than {self.health.limits.stall_s:g} s")
        self._threads.fail_waiting("the disk hangs")
        for transfer in self._index_thread.take_waiting():
            transfer.fail("the disk hangs")
            self._finished.append(transfer)

    def _recover(self) -> int:
        """Take over what opening has found. Returns the last generation that was used."""
        found, self._instance.recovered = self._instance.recovered, None
        if found is None or not len(found.slots):
            return 0
        np.frombuffer(self._checksums, np.uint64)[found.slots] = found.checksums
        order = np.argsort(found.generations, kind="stable")
        self._found, self._tenants = (found.slots[order], found.hashes[order], found.written[order]), found.tenants
        return int(found.generations[order[-1]])

    def _check_slots(self, order: Read | Write) -> None:
        """Reject invalid slots: a wrong number would silently address another slot."""
        columns = [order.hashes, order.disk_slots, order.host_slots]
        if isinstance(order, Write):
            columns += [order.tenants, order.generations, order.notes or order.hashes]
        if len({len(column) for column in columns}) > 1:
            raise InvariantError(f"ticket {order.ticket} has columns of lengths {[len(column) for column in columns]}")
        _require_below(self._host_slot_count, "host", order.host_slots)
        _require_below(self.slot_count, "disk", order.disk_slots)


def _require_below(slot_count: int, kind: str, slots: Sequence[int]) -> None:
    if slots and not 0 <= min(slots) <= max(slots) < slot_count:
        raise InvariantError(f"{kind} slots {min(slots)}..{max(slots)} of {slot_count}")


def _result_of(transfer: Transfer) -> DiskResult:
    is_good = tuple(map(bool, transfer.is_good))
    damaged = tuple(position for position, bad in enumerate(transfer.is_damaged) if bad)
    return DiskResult(transfer.order.ticket, is_good, transfer.error, damaged)


def _open_io(settings: DiskSettings, instance: Instance, shards: Sequence[NDArray[np.uint8]]) -> BlockIO:
    arena = instance.arena
    if settings.io == "threads":
        return ThreadsIO(arena.fd, is_direct=arena.is_direct)
    from kvbm.tiers.disk.io.select import open_io

    return open_io(settings.io, arena.fd, path=instance.path / ARENA, shards=shards, is_direct=arena.is_direct)
