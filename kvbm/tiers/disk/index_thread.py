"""IndexThread: the only thread that uses the index, and so decides when a block is on disk.

A write passes through it twice:

    submit(write)       the rows of its slots are deleted; the slots' bytes change only after that commit
    written(write)      the host slots are checked, one flush of the arena covers all finished writes, and one commit
                        inserts their rows

Forget and clear are processed in order of submission with writes. Rows that cannot be deleted are deleted with the next
successful commit. A write whose rows cannot be deleted fails before it changes a byte.
"""

from __future__ import annotations

import itertools
import logging
import sqlite3
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvbm.errors import EnvironmentProblem
from kvbm.tiers.disk.health import Health
from kvbm.tiers.disk.index import IndexRow, is_damage
from kvbm.tiers.disk.instance import Instance, prove_arena
from kvbm.tiers.disk.io.threads import BlockIO
from kvbm.tiers.disk.known_rates import write_rates
from kvbm.tiers.disk.orders import Forget
from kvbm.tiers.disk.transfers import TransferThreads, WriteTransfer
from kvbm.tiers.rates import KnownRates

CHECK_INTERVAL_S = 1.0  # between checks that the arena still has its name
TOUCH_INTERVAL_S = 30.0  # between updates of the time of last use

logger = logging.getLogger(__name__)


class PendingClear:
    """A clear of all blocks, or of one tenant, submitted before it.

    `error` is the last failure. `is_durable`: it has succeeded; the index thread then calls `on_durable`.
    """

    def __init__(self, tenant: bytes | None, on_durable: Callable[[], None]) -> None:
        self.tenant = tenant
        self.on_durable = on_durable
        self.error: str | None = None
        self.is_durable = False


Command = WriteTransfer | Forget | PendingClear
SlotsCarry = Callable[[Sequence[int], Sequence[int]], bool]  # host slots, generations


class IndexThread:
    """The thread and its queue. `checksums` is written here; the owner reads a slot only after the end of its write."""

    def __init__(
        self,
        instance: Instance,
        io: BlockIO,
        health: Health,
        checksums: array[int],
        *,
        first_generation: int,
        slots_carry: SlotsCarry | None,
        on_end: Callable[[WriteTransfer], None],
    ) -> None:
        self._instance = instance
        self._io = io
        self._health = health
        self._checksums = checksums
        self._slots_carry = slots_carry
        self._on_end = on_end
        # Shared by all threads under the lock of `_changed`.
        self._changed = threading.Condition()
        self._commands: deque[Command] = deque()
        self._written: list[WriteTransfer] = []
        self._is_closing = False
        self._busy_since: float | None = None
        self._inserts_rows = True
        self._rates: KnownRates | None = None  # to be written
        # Owned by this thread.
        self._generations = itertools.count(first_generation)
        self._in_flight: set[WriteTransfer] = set()
        self._slots_to_delete: set[int] = set()
        self._deferred_clears: list[PendingClear] = []
        self._has_retried_at_close = False
        self._next_check_s = 0.0
        self._next_probe_s = 0.0
        self._next_touch_s = 0.0
        self._moved_blocks = 0  # at the last update of the time of last use

    def start(self, threads: TransferThreads) -> None:
        """Start the thread. `threads` run the I/O of writes; `written` must be called at its end."""
        self._threads = threads
        self._thread = threading.Thread(target=self._work, name="kvbm-disk-index", daemon=True)
        self._thread.start()

    def submit(self, command: Command) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def keep_rates(self, known: KnownRates) -> None:
        """Write them soon, in place of those that are not written yet."""
        with self._changed:
            self._rates = known
            self._changed.notify()

    def end_persistence(self) -> None:
        """Insert no more rows. Those of earlier writes are deleted by the clear that the caller submits next."""
        self._inserts_rows = False

    def written(self, transfer: WriteTransfer) -> None:
        """Accept a write whose I/O has ended."""
        with self._changed:
            self._written.append(transfer)
            self._changed.notify()

    def take_waiting(self) -> list[WriteTransfer]:
        """Remove and return all writes that have not started."""
        with self._changed:
            waiting = [command for command in self._commands if isinstance(command, WriteTransfer)]
            others = [command for command in self._commands if not isinstance(command, WriteTransfer)]
            self._commands = deque(others)
        return waiting

    def busy_since(self) -> float | None:
        """Return when the current batch started, None if idle."""
        with self._changed:
            return self._busy_since

    def close(self) -> None:
        """Fail writes that have not started, process the other commands, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def join(self, deadline_s: float) -> bool:
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (work := self._take()) is not None:
            commands, written = work
            try:
                self._advance(commands, written)
            except BaseException as error:  # every ticket and every clear must end
                logger.exception("the index thread of the disk tier failed")
                self._health.count_error("index", error)
                self._give_up(commands, written, str(error) or type(error).__name__)
            with self._changed:
                self._busy_since = None

    def _take(self) -> tuple[list[Command], list[WriteTransfer]] | None:
        with self._changed:
            while not (self._commands or self._written or self._rates):
                if self._is_closing and not self._in_flight:
                    if self._has_retried_at_close or not (self._slots_to_delete or self._deferred_clears):
                        return None
                    self._has_retried_at_close = True
                    break
                if not self._changed.wait(self._health.limits.probe_interval_s):
                    break
            commands, written = list(self._commands), self._written
            self._commands.clear()
            self._written = []
            self._busy_since = time.monotonic()
            return commands, written

    def _give_up(self, commands: Sequence[Command], written: Sequence[WriteTransfer], why: str) -> None:
        for command in (*written, *commands):
            if isinstance(command, PendingClear):
                self._defer_clear(command, why)
            elif isinstance(command, Forget):
                self._slots_to_delete.update(command.disk_slots)
            elif not command.has_ended and (command in written or command not in self._in_flight):
                self._finish(command, why)

    def _advance(self, commands: Sequence[Command], written: Sequence[WriteTransfer]) -> None:
        self._check_state(has_clears=any(isinstance(command, PendingClear) for command in commands))
        self._touch()
        for transfer in written:
            order = transfer.order
            if not (self._slots_carry is None or self._slots_carry(order.host_slots, order.generations)):
                transfer.fail("the host slots were reused or lost during the write")
        self._flush(written)
        started, forgotten, clears = self._sort(commands, written)
        overwritten = [transfer.order.disk_slots for transfer in started]
        slots = self._slots_to_delete.union(*overwritten, *(command.disk_slots for command in forgotten))
        rows = [row for transfer in written for row in self._rows(transfer)] if self._inserts_rows else []
        error = self._commit(rows, slots)
        self._slots_to_delete = slots if error else set()
        for transfer in written:
            self._finish(transfer, error)
        for transfer in started:
            if error is None:
                self._in_flight.add(transfer)
                self._threads.submit(transfer)
            else:
                self._finish(transfer, error)
        self._clear([*self._deferred_clears, *clears])
        self._write_rates()  # last: should it hang, no block waits for it

    def _check_state(self, *, has_clears: bool) -> None:
        """Turn off if the arena was deleted; turn on if no clear is pending, no I/O hangs and a probe succeeds."""
        now = time.monotonic()
        if now >= self._next_check_s and self._instance.index is not None:
            self._next_check_s = now + CHECK_INTERVAL_S
            if not (has_its_name := self._instance.arena.has_its_name()):
                self._health.turn_off(f"{self._instance.arena.path} was deleted")
                self._health.is_removed |= has_its_name is False
        if not self._health.is_on and now >= self._next_probe_s:
            if not (has_clears or self._deferred_clears or self._is_any_overdue(now)) and self._probe():
                self._health.turn_on()
            self._next_probe_s = time.monotonic() + self._health.limits.probe_interval_s

    def _touch(self) -> None:
        """Update the time of last use, by which the next engine and `reclaim` choose a cache."""
        now, moved = time.monotonic(), self._health.counters.blocks_read + self._health.counters.blocks_written
        if now >= self._next_touch_s and moved != self._moved_blocks and self._health.is_on:
            self._next_touch_s, self._moved_blocks = now + TOUCH_INTERVAL_S, moved
            self._instance.touch()

    def _write_rates(self) -> None:
        with self._changed:
            known, self._rates = self._rates, None
        path = self._instance.rates_path
        if known is not None and path is not None:
            write_rates(path, known)

    def _is_any_overdue(self, now: float) -> bool:
        since = self._threads.busy_since()
        return since is not None and now - since >= self._health.limits.stall_s

    def _flush(self, written: Sequence[WriteTransfer]) -> None:
        """Make the bytes durable before their rows. Without an index nothing needs to survive."""
        if self._instance.index is None or not any(any(transfer.is_good) for transfer in written):
            return
        try:
            self._instance.arena.sync()
        except OSError as error:
            self._health.count_error("flush", error)
            for transfer in written:
                transfer.fail(f"flush: {error}")
        else:
            self._health.count("flush", flushes=1)

    def _sort(
        self, commands: Sequence[Command], written: Sequence[WriteTransfer]
    ) -> tuple[list[WriteTransfer], list[Forget], list[PendingClear]]:
        """Split into writes to start, forgets and clears. A forget or clear applies to every earlier write."""
        started: list[WriteTransfer] = []
        forgotten: list[Forget] = []
        clears: list[PendingClear] = []
        for command in commands:
            if isinstance(command, WriteTransfer):
                started.append(command)
                continue
            for transfer in (*self._in_flight, *written, *started):
                transfer.dropped |= _dropped_positions(command, transfer)
            if isinstance(command, Forget):
                forgotten.append(command)
            else:
                clears.append(command)
        with self._changed:
            refusal = "closed" if self._is_closing else self._health.off_because
        for transfer in started:
            if refusal is not None:
                self._finish(transfer, refusal)
        return [] if refusal is not None else started, forgotten, clears

    def _rows(self, transfer: WriteTransfer) -> Iterator[IndexRow]:
        """Yield the row of each block that is on disk."""
        now, length = time.time(), self._instance.superblock.payload_bytes
        order = transfer.order
        notes = order.notes or [b""] * len(order.hashes)
        columns = zip(order.disk_slots, order.hashes, transfer.checksums, order.tenants, notes, strict=True)
        for position, (slot, sequence_hash, checksum, tenant, note) in enumerate(columns):
            if transfer.is_good[position] and position not in transfer.dropped:
                yield IndexRow(slot, sequence_hash, next(self._generations), length, checksum, tenant, now, note)

    def _commit(self, rows: Sequence[IndexRow], slots: set[int]) -> str | None:
        """Commit; return an error, after which nothing has changed. A damaged index is replaced first."""
        for _ in range(2):
            index = self._instance.index
            if index is None or not (rows or slots):
                return None
            try:
                if index.change(rows, sorted(slots)):
                    self._health.count("index")
                return None
            except sqlite3.Error as error:
                why = f"index: {error}"
                if not self._index_failed(error):
                    break
        return why

    def _index_failed(self, error: sqlite3.Error) -> bool:
        """Return whether the index was replaced by an empty one."""
        self._health.count_error("index", error)
        if not is_damage(error):
            return False
        logger.warning("the index of %s is damaged (%s): starting with an empty one", self._instance.path, error)
        with self._health.lock:
            self._health.counters.damaged_indexes += 1
        try:
            self._instance.renew_index()
        except (sqlite3.Error, OSError, EnvironmentProblem) as again:
            self._health.count_error("index", again)
            self._health.turn_off(f"cannot create a new index: {again}")
            return False
        return True

    def _finish(self, transfer: WriteTransfer, error: str | None) -> None:
        self._in_flight.discard(transfer)
        transfer.has_ended = True
        if error is not None:
            transfer.fail(error)
        for position in transfer.dropped:
            transfer.is_good[position] = 0
            transfer.error = transfer.error or "deleted during the write"
        for position, is_good in enumerate(transfer.is_good):
            if is_good:
                self._checksums[transfer.order.disk_slots[position]] = transfer.checksums[position]
        self._on_end(transfer)

    def _clear(self, clears: Sequence[PendingClear]) -> None:
        for clear in clears:
            try:
                if self._instance.index is not None:
                    self._instance.index.clear(clear.tenant)
            except sqlite3.Error as error:
                if not self._index_failed(error):
                    self._defer_clear(clear, str(error))
                    continue
            if clear in self._deferred_clears:
                self._deferred_clears.remove(clear)
            clear.is_durable = True
            clear.on_durable()

    def _defer_clear(self, clear: PendingClear, why: str) -> None:
        """Keep a failed clear for later. Until it succeeds, nothing may be read or written."""
        clear.error = why
        self._health.turn_off(f"a clear is not durable yet: {why}")
        if clear not in self._deferred_clears:
            self._deferred_clears.append(clear)

    def _probe(self) -> bool:
        """Return whether the arena stores a page and the index accepts a commit."""
        instance = self._instance
        try:
            prove_arena(instance.arena, instance.superblock, self._io)
            if instance.index is not None:
                instance.index.prove()
                return bool(instance.arena.has_its_name())
        except Exception as error:
            logger.info("the disk tier stays off: %s", error)
            if isinstance(error, sqlite3.Error) and is_damage(error):
                self._index_failed(error)
            return False
        return True


def _dropped_positions(command: Forget | PendingClear, write: WriteTransfer) -> set[int]:
    """Return the positions of a write that a later command forgets."""
    if isinstance(command, PendingClear):
        return {position for position, owner in enumerate(write.order.tenants) if command.tenant in (None, owner)}
    slots = set(command.disk_slots)
    return {position for position, slot in enumerate(write.order.disk_slots) if slot in slots}
