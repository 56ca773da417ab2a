"""Disk process: maps the segments of the ranks, owns a DiskStorage, and executes the orders of one leader.

    python -m kvbm.tiers.disk.service.server FD        FD is one end of a socket pair

It has its own interpreter, so that its threads and the engine never wait for each other's GIL. It exits with its
leader: when the channel closes, or when its parent process changes. The disk format is crash-safe without cleanup.
"""

from __future__ import annotations

import os
import sys
from functools import partial

from kvbm.child.channel import Channel
from kvbm.child.child import LogRelay, Send, StorageServer, send_all, serve_leader
from kvbm.errors import EnvironmentProblem
from kvbm.host.region import Region
from kvbm.tiers.disk.directory import await_predecessor, device_of
from kvbm.tiers.disk.index_thread import PendingClear
from kvbm.tiers.disk.orders import (
    LOST_IO,
    REMOVED,
    Clear,
    Cleared,
    Forget,
    Open,
    Opened,
    Read,
    Recover,
    SpaceTaken,
    Write,
)
from kvbm.tiers.disk.storage import DiskStorage
from kvbm.tiers.rates import KnownRates

BATCHES_AT_ONCE = 4  # of found blocks: about as many as a step of an engine registers


class DiskServer(StorageServer[DiskStorage]):
    """`_clears` are not durable yet."""

    def __init__(self, channel: Channel, storage: DiskStorage, log: LogRelay) -> None:
        super().__init__(channel, storage, log)
        self._clears: list[PendingClear] = []

    def _handle(self, message: object) -> None:
        match message:
            case Read() | Write():
                self._submit(message)
            case Recover():
                for _ in range(BATCHES_AT_ONCE):
                    self._channel.send(found := self._storage.recovered())
                    if found.is_last:
                        break
            case Forget():
                self._storage.forget(message.disk_slots)
            case KnownRates():
                self._storage.keep_rates(message)
            case Clear():
                clear = self._storage.begin_clear(message.tenant, ends_persistence=message.ends_persistence)
                self._clears.append(clear)

    def _is_busy(self) -> bool:
        return super()._is_busy() or bool(self._clears)

    def _moved_s(self, now_s: float) -> float:
        return self._storage.reads_stuck_since() or now_s

    def _report(self) -> None:
        super()._report()
        if self._storage.health.is_removed:
            self._exit(REMOVED)
        if self._storage.health.has_lost_io:
            self._exit(LOST_IO)

    def _report_more(self) -> None:
        if self._clears and all(clear.is_durable for clear in self._clears):
            self._channel.send(Cleared(len(self._clears)))
            self._clears.clear()

    def _exit(self, code: int) -> None:
        send_all(self._channel)
        os._exit(code)


def _open(order: Open, send: Send, log: LogRelay) -> tuple[DiskStorage, Opened]:
    """May raise EnvironmentProblem."""
    device = device_of(order.settings.directory)
    if order.device and device != order.device:
        raise EnvironmentProblem(f"{order.settings.directory} is on a different file system than at start-up")
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
        progress=lambda done, total: send(SpaceTaken(done, total)),
    )
    facts = storage.path, storage.slot_count, storage.io_name, storage.counters
    return storage, Opened(*facts, device_of(order.settings.directory), storage.earlier_rates())


if __name__ == "__main__":
    sys.exit(serve_leader(Open, _open, DiskServer))
