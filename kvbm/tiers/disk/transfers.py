"""Transfers between host slots and disk slots, split into pieces, and the threads that run the pieces.

A piece is the work of one thread in one call: blocks of one transfer, ordered by disk slot. Pieces of reads run before
pieces of writes, otherwise in order of submission. The thread that runs the last piece of a transfer calls `on_end`
with it; nothing accesses its host slots afterwards. A failed piece of a read is repeated block by block, so that a bad
sector costs only the blocks in it.

A block is damaged if a second read, into other memory, does not match its checksum either, or if the arena ends before
it, or if it cannot be read twice while other blocks can. No other failure of a read says anything about the block.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvbm.host.threads import allowed_cores, start
from kvbm.tiers.disk.health import Health
from kvbm.tiers.disk.index import checksum
from kvbm.tiers.disk.io.threads import BlockIO, EndOfArena, IoNotEnded, IoRun
from kvbm.tiers.disk.orders import Read, Write


class Transfer:
    """The state of one order. `is_good` and `is_damaged` are per block; `checksums` are expected by a read, computed by
    a write.

    Between submission and end only the disk's threads write to it, each to the blocks of its own piece.
    """

    __slots__ = ("checksums", "error", "is_damaged", "is_good", "order", "pieces_left")

    def __init__(self, order: Read | Write, checksums: Sequence[int]) -> None:
        self.order = order
        self.checksums = array("Q", checksums)
        self.is_good = bytearray(len(order.hashes))
        self.is_damaged = bytearray(len(order.hashes))
        self.error: str | None = None
        self.pieces_left = 0

    def fail(self, why: str) -> None:
        """Mark every block as failed. The first error is kept."""
        self.is_good = bytearray(len(self.order.hashes))
        self.error = self.error or why


class WriteTransfer(Transfer):
    """A write. `dropped` are positions of blocks that were forgotten after its submission. The index thread owns them
    and `has_ended`."""

    __slots__ = ("dropped", "has_ended")

    order: Write

    def __init__(self, order: Write) -> None:
        super().__init__(order, [0] * len(order.hashes))
        self.dropped: set[int] = set()
        self.has_ended = False


class Geometry:
    """Where a block's bytes are: `shards[r][slot]` in host memory, all shards concatenated in a slot of the arena."""

    def __init__(self, shards: Sequence[NDArray[np.uint8]], slot_bytes: int, namespace: bytes) -> None:
        self.shards = shards
        self.payload_bytes = sum(shard.shape[1] for shard in shards)
        self.slot_bytes = slot_bytes
        self._namespace = namespace

    def checksum(self, sequence_hash: bytes, host_slot: int) -> int:
        """Return the checksum of the bytes in a host slot, as those of the block with this hash."""
        return checksum(self._namespace, sequence_hash, self.buffers(host_slot))

    def checksum_of(self, sequence_hash: bytes, payload: NDArray[np.uint8]) -> int:
        return checksum(self._namespace, sequence_hash, [payload])

    def buffers(self, host_slot: int) -> list[NDArray[np.uint8]]:
        return [shard[host_slot] for shard in self.shards]

    def runs(self, transfer: Transfer, positions: Sequence[int]) -> list[IoRun]:
        """Merge blocks that are adjacent on disk into one run, unless slots are padded."""
        disk_slots, host_slots = transfer.order.disk_slots, transfer.order.host_slots
        runs: list[IoRun] = []
        buffers: list[NDArray[np.uint8]] = []
        previous = -2
        for position in positions:
            slot = disk_slots[position]
            if slot != previous + 1 or self.payload_bytes != self.slot_bytes:
                buffers = []
                runs.append(IoRun(slot * self.slot_bytes, buffers))
            buffers += self.buffers(host_slots[position])
            previous = slot
        return runs


Piece = tuple[Transfer, list[int]]


class TransferThreads:
    """A pool of threads that run transfers. One thread owns it; any thread may call `submit`."""

    def __init__(
        self, thread_count: int, io: BlockIO, geometry: Geometry, health: Health, on_end: Callable[[Transfer], None]
    ) -> None:
        self._io = io
        self._geometry = geometry
        self._health = health
        self._on_end = on_end
        self._thread_count = thread_count
        self._cores = allowed_cores()
        # Shared by all threads under the lock of `_changed`. `_running` has the start time of each piece; `_moved_s` is
        # when a piece of a read last ended, or when the first of the open ones was submitted.
        self._changed = threading.Condition()
        self._reads: deque[Piece] = deque()
        self._writes: deque[Piece] = deque()
        self._running: dict[int, float] = {}
        self._open_reads = 0
        self._moved_s = 0.0
        self._read_count = 0  # pieces that were read without an error
        self._unreadable: dict[int, int] = {}  # disk slot that failed alone -> `_read_count` at that time
        self._is_closed = False
        self._threads = [self._start_thread() for _ in range(thread_count)]

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer; it fails at once if the pool is closed."""
        pieces = self._cut(transfer)
        with self._changed:
            transfer.pieces_left = len(pieces)
            if not self._is_closed and pieces:
                if isinstance(transfer, WriteTransfer):
                    self._writes.extend(pieces)
                else:
                    if not self._open_reads:
                        self._moved_s = time.monotonic()
                    self._open_reads += len(pieces)
                    self._reads.extend(pieces)
                self._changed.notify(len(pieces))
                return
        if pieces:
            transfer.fail("closed")
        self._on_end(transfer)

    def fail_waiting(self, why: str) -> None:
        with self._changed:
            pieces = [*self._reads, *self._writes]
            self._reads.clear()
            self._writes.clear()
        for piece in pieces:
            self._end(piece, why, has_run=False)

    def busy_since(self) -> float | None:
        """Return the start time of the oldest running piece."""
        with self._changed:
            return min(self._running.values(), default=None)

    def reads_stuck_since(self) -> float | None:
        """Return since when no piece of a read has ended; None if there is none to wait for."""
        with self._changed:
            return self._moved_s if self._open_reads else None

    def close(self) -> None:
        """Fail what has not started; each thread ends after its current piece."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.fail_waiting("closed")

    def join(self, deadline_s: float) -> bool:
        """Return whether all threads have ended by `deadline_s` of `time.monotonic`."""
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _cut(self, transfer: Transfer) -> list[Piece]:
        """Split in order of disk slots: at most `piece_bytes` each, and a piece for every thread if possible."""
        count = len(transfer.order.hashes)
        order = sorted(range(count), key=transfer.order.disk_slots.__getitem__)
        most = max(1, self._io.piece_bytes // self._geometry.slot_bytes)
        size = max(1, min(most, -(-count // self._thread_count)))
        return [(transfer, order[start : start + size]) for start in range(0, count, size)]

    def _start_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._live, name="kvbm-disk", daemon=True)
        start(thread)
        return thread

    def _live(self) -> None:
        try:
            os.sched_setaffinity(0, self._cores)  # applies to this thread only
            self._work()
        except BaseException as error:  # its piece never ends
            self._health.lose_io(f"a thread died: {error!r}")

    def _work(self) -> None:
        me = threading.get_ident()
        while (piece := self._take(me)) is not None:
            why = None
            is_write = isinstance(piece[0], WriteTransfer)
            try:
                (self._write if is_write else self._read)(*piece)
            except IoNotEnded as error:  # its host slots stay reserved until the process has ended
                self._health.lose_io(str(error))
                with self._changed:
                    del self._running[me]
                continue
            except BaseException as error:  # the ticket must end in any case
                self._health.count_error("write" if is_write else "read", error)
                why = str(error) or type(error).__name__
                if not is_write:
                    self._note_unreadable(piece, error)
            with self._changed:
                del self._running[me]
                if why is not None and self._requeue_read(piece):
                    continue
            self._end(piece, why)

    def _requeue_read(self, piece: Piece) -> bool:
        """Requeue the blocks of a failed read one by one, unless the disk is off. Call under the lock."""
        transfer, positions = piece
        if isinstance(transfer, WriteTransfer) or len(positions) == 1 or self._is_closed or not self._health.is_on:
            return False
        transfer.pieces_left += len(positions) - 1
        self._open_reads += len(positions) - 1
        self._moved_s = time.monotonic()
        self._reads.extendleft((transfer, [position]) for position in reversed(positions))
        self._changed.notify(len(positions))
        return True

    def _take(self, me: int) -> Piece | None:
        with self._changed:
            while not (self._reads or self._writes or self._is_closed):
                self._changed.wait()
            if not (self._reads or self._writes):
                return None
            piece = (self._reads or self._writes).popleft()
            self._running[me] = time.monotonic()
            return piece

    def _end(self, piece: Piece, why: str | None, *, has_run: bool = True) -> None:
        transfer, positions = piece
        with self._changed:
            if not isinstance(transfer, WriteTransfer):
                self._open_reads -= 1
                self._moved_s = time.monotonic() if has_run else self._moved_s
            if why is not None:
                transfer.error = transfer.error or why
                for position in positions:
                    transfer.is_good[position] = 0
            transfer.pieces_left -= 1
            is_last = transfer.pieces_left == 0
        if is_last:
            self._on_end(transfer)

    def _read(self, transfer: Transfer, positions: Sequence[int]) -> None:
        self._io.read(self._geometry.runs(transfer, positions))
        hashes, host_slots = transfer.order.hashes, transfer.order.host_slots
        misses = 0
        for position in positions:
            found = self._geometry.checksum(hashes[position], host_slots[position])
            is_good = found == transfer.checksums[position]
            transfer.is_good[position] = is_good
            if not is_good and not self._is_intact(transfer, position):
                transfer.is_damaged[position] = 1
                misses += 1
        with self._changed:
            self._read_count += 1
            if self._unreadable:
                for position in positions:
                    self._unreadable.pop(transfer.order.disk_slots[position], None)
        self._health.count("read", blocks_read=len(positions) - misses, checksum_misses=misses)

    def _is_intact(self, transfer: Transfer, position: int) -> bool:
        """Read a block again, into other memory: its host slot may be lost, because its rank has ended."""
        slot, geometry = transfer.order.disk_slots[position], self._geometry
        memory = np.frombuffer(mmap.mmap(-1, geometry.slot_bytes), np.uint8)
        self._io.read([IoRun(slot * geometry.slot_bytes, [memory])])
        found = geometry.checksum_of(transfer.order.hashes[position], memory[: geometry.payload_bytes])
        is_intact = found == transfer.checksums[position]
        if is_intact:
            transfer.error = transfer.error or "the host memory was lost during the read"
        return is_intact

    def _note_unreadable(self, piece: Piece, error: BaseException) -> None:
        """Note an error of a read of one block, and whether the block is damaged, see the module docstring."""
        transfer, positions = piece
        if len(positions) > 1:
            return
        slot = transfer.order.disk_slots[positions[0]]
        with self._changed:
            do_others_work = self._unreadable.setdefault(slot, self._read_count) < self._read_count
            if isinstance(error, EndOfArena) or (isinstance(error, OSError) and do_others_work):
                del self._unreadable[slot]
                transfer.is_damaged[positions[0]] = 1

    def _write(self, transfer: Transfer, positions: Sequence[int]) -> None:
        hashes, host_slots = transfer.order.hashes, transfer.order.host_slots
        for position in positions:
            transfer.checksums[position] = self._geometry.checksum(hashes[position], host_slots[position])
        self._io.write(self._geometry.runs(transfer, positions))
        for position in positions:
            transfer.is_good[position] = 1
        count = len(positions)
        self._health.count("write", blocks_written=count, bytes_written=count * self._geometry.payload_bytes)
