"""Disk process: maps the segments of the ranks, owns a DiskStorage, and executes the orders of one leader.

    python -m kvbm.disk.service.server FD        FD is one end of a socket pair

It has its own interpreter, so that its threads and the engine never wait for each other's GIL. It exits with its
leader: when the channel closes, or when its parent process changes. The disk format is crash-safe without cleanup.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from kvbm.disk.directory import await_predecessor, device_of
from kvbm.disk.index_thread import PendingClear
from kvbm.disk.orders import DiskResult, Forget, Read, Write
from kvbm.disk.service import messages
from kvbm.disk.storage import DiskStorage
from kvbm.errors import EnvironmentProblem
from kvbm.host.region import Region
from kvbm.process.channel import Channel, ChannelClosed
from kvbm.process.child import (
    BEAT_S,
    IDLE_INTERVAL_S,
    Close,
    LogRelay,
    Problem,
    Status,
    beating,
    begin,
    receive_first,
    send_all,
)

BUSY_INTERVAL_S = 0.1  # between checks for I/O that hangs


class _Child:
    """Serves one leader. `_in_flight_count` orders have no result yet, and `_clears` are not durable yet."""

    def __init__(self, channel: Channel, storage: DiskStorage, log: LogRelay) -> None:
        self._channel = channel
        self._storage = storage
        self._log = log
        self._in_flight_count = 0
        self._clears: list[PendingClear] = []
        self._next_beat_s = 0.0
        self._reported_off_because = storage.off_because
        self._result_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        storage.on_result = partial(os.eventfd_write, self._result_event, 1)

    def serve(self) -> None:
        """Run until the leader sends Close. Raises ChannelClosed if the leader exits without."""
        while True:
            self._channel.wait(
                BUSY_INTERVAL_S if self._is_busy() else IDLE_INTERVAL_S, or_readable=(self._result_event,)
            )
            with suppress(BlockingIOError):
                os.eventfd_read(self._result_event)
            for message in self._channel.receive():
                if isinstance(message, Close):
                    self._storage.close(message.timeout_s)
                    return
                self._handle(message)
            self._report(self._storage.poll())
            if self._storage.is_removed:
                self._exit(messages.REMOVED)
            if self._storage.has_lost_io:
                self._exit(messages.LOST_IO)

    def _exit(self, code: int) -> None:
        send_all(self._channel)
        os._exit(code)

    def _handle(self, message: object) -> None:
        match message:
            case Read() | Write():
                self._in_flight_count += 1
                self._storage.submit(message)
            case messages.Recover():
                self._channel.send(self._storage.recovered())
            case Forget():
                self._storage.forget(message.disk_slots)
            case messages.Clear():
                clear = self._storage.begin_clear(message.tenant, ends_persistence=message.ends_persistence)
                self._clears.append(clear)

    def _is_busy(self) -> bool:
        return bool(self._in_flight_count or self._clears)

    def _report(self, results: list[DiskResult]) -> None:
        now = time.monotonic()
        is_beat_due = self._is_busy() and now >= self._next_beat_s
        self._in_flight_count -= len(results)
        off_because = self._storage.off_because
        if results or is_beat_due or off_because != self._reported_off_because:
            self._next_beat_s = now + BEAT_S
            self._reported_off_because = off_because
            moved_s = self._storage.reads_stuck_since() or now
            self._channel.send(Status(results, off_because, self._storage.counters, moved_s))
        if self._clears and all(clear.is_durable for clear in self._clears):
            self._clears.clear()
            self._channel.send(messages.Cleared())
        self._log.send(self._channel.send)


def main() -> int:
    """Return 0 after Close, 1 if the disk could not be opened. If the leader exits, the process exits at once."""
    log = begin()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        order = receive_first(channel, messages.Open)
        os.sched_setaffinity(0, order.cores)
        try:
            with beating(channel) as send:
                storage, opened = _open(order, send, log)
        except EnvironmentProblem as error:
            channel.send(Problem(error.message, error.hint))
            send_all(channel)
            return 1
        channel.send(opened)
        _Child(channel, storage, log).serve()
        send_all(channel)
    except ChannelClosed:
        os._exit(0)
    return 0


def _open(order: messages.Open, send: Callable[[object], None], log: LogRelay) -> tuple[DiskStorage, messages.Opened]:
    """May raise EnvironmentProblem."""
    region = Region.map(order.segments)
    if order.settings.persist and order.instance is None:
        name = order.namespace.digest.hex()
        await_predecessor(order.settings.directory, name, on_wait=partial(log.send, send))
    storage = DiskStorage.open(
        order.settings,
        order.namespace,
        region.shards,
        hash_bytes=order.hash_bytes,
        slots_carry=region.slots_carry,
        instance=order.instance,
        progress=lambda done, total: send(messages.SpaceTaken(done, total)),
    )
    device = device_of(order.settings.directory)
    return storage, messages.Opened(storage.path, storage.slot_count, storage.io_name, storage.counters, device)


if __name__ == "__main__":
    sys.exit(main())
