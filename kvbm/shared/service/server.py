"""Process of the shared tier: maps the segments of the ranks and runs the orders of one leader on an object store.

    python -m kvbm.shared.service.server FD        FD is one end of a socket pair

A library for object stores has threads of its own, and some of its calls last half a minute when a peer hangs. Here it
can disturb no engine. The process exits with its leader.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress
from functools import partial

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
from kvbm.shared.extent_format import ExtentFormat
from kvbm.shared.geometry import ExtentGeometry
from kvbm.shared.keys import KeySpace, extent_blocks
from kvbm.shared.orders import Get, Listing, Probe, Put
from kvbm.shared.presence import DIGEST
from kvbm.shared.protection import protection_of
from kvbm.shared.service import messages
from kvbm.shared.storage import SharedStorage
from kvbm.shared.stores.open import open_store, with_copies

BUSY_INTERVAL_S = 0.1  # between looks for calls that last too long
FIRST_LISTING_S = 2.0  # a start waits so long for it, so that the first request finds what the store has
LISTED_AT_ONCE = 8192  # names in one message, so that an engine's step takes it in a fraction of a millisecond


class _SharedChild:
    """Serves one leader."""

    def __init__(self, channel: Channel, storage: SharedStorage, log: LogRelay) -> None:
        self._channel = channel
        self._storage = storage
        self._log = log
        self._in_flight_count = 0
        self._next_beat_s = 0.0
        self._is_listing_on_its_way = False
        self._reported_off_because = storage.off_because
        self._result_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        storage.on_result = partial(os.eventfd_write, self._result_event, 1)

    def serve(self) -> None:
        """Run until the leader sends Close. Raises ChannelClosed if the leader exits without."""
        self._report()  # the first listing may be there already
        while True:
            self._channel.wait(
                BUSY_INTERVAL_S if self._in_flight_count else IDLE_INTERVAL_S, or_readable=(self._result_event,)
            )
            with suppress(BlockingIOError):
                os.eventfd_read(self._result_event)
            for message in self._channel.receive():
                match message:
                    case Close():
                        self._storage.close(message.timeout_s)
                        self._report()
                        return
                    case messages.ListingTaken():
                        self._is_listing_on_its_way = False
                    case Get() | Put() | Probe():
                        self._in_flight_count += 1
                        self._storage.submit(message)
            self._report()

    def _report(self) -> None:
        results, now = self._storage.poll(), time.monotonic()
        self._in_flight_count -= len(results)
        off_because = self._storage.off_because
        is_beat_due = self._in_flight_count and now >= self._next_beat_s
        if results or is_beat_due or off_because != self._reported_off_because:
            self._next_beat_s = now + BEAT_S
            self._reported_off_because = off_because
            self._channel.send(Status(results, off_because, self._storage.counters, moved_s=0.0))
        if not self._is_listing_on_its_way and (listing := self._storage.take_listing()) is not None:
            self._is_listing_on_its_way = True
            self._send_listing(*listing)
        self._log.send(self._channel.send)

    def _send_listing(self, began_s: float, digests: bytes) -> None:
        step = LISTED_AT_ONCE * DIGEST.itemsize
        starts = range(0, max(1, len(digests)), step)
        for start in starts:
            part = digests[start : start + step]
            self._channel.send(Listing(part, began_s, is_first=start == 0, is_last=start + step >= len(digests)))


def main() -> int:
    """Return 0 after Close, 1 if the store cannot be used. If the leader exits, the process exits at once."""
    log = begin()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        order = receive_first(channel, messages.OpenStore)
        os.sched_setaffinity(0, order.cores)
        try:
            with beating(channel):
                storage, opened = _open(order)
                storage.wait_for_listing(FIRST_LISTING_S)
        except EnvironmentProblem as error:
            channel.send(Problem(error.message, error.hint))
            send_all(channel)
            return 1
        channel.send(opened)
        _SharedChild(channel, storage, log).serve()
        send_all(channel)
    except ChannelClosed:
        os._exit(0)
    os._exit(0)  # a thread may be in a call that does not return


def _open(order: messages.OpenStore) -> tuple[SharedStorage, messages.StoreOpened]:
    """May raise EnvironmentProblem."""
    settings, region = order.settings, Region.map(order.segments)
    shard_bytes = [info.block_bytes for info in order.segments if info.replica == 0]
    protection = protection_of(settings.protection, settings.key_file)
    if protection.namespace(order.digest) != order.namespace:
        raise EnvironmentProblem(
            "the secret of `tiers.shared.protection` has changed since the engine started", hint="restart the engine"
        )
    keys = KeySpace(order.namespace)
    store = open_store(settings.url, settings.requests, keys, order.facts, writes=settings.writes)
    store = with_copies(store, settings.url, settings.node_directory)
    block_bytes = sum(shard_bytes)
    count = extent_blocks(block_bytes, order.block_tokens, min_bytes=store.min_extent_bytes) if order.has_runs else 1
    form = ExtentFormat(order.namespace, count, block_bytes, order.hash_bytes)
    storage = SharedStorage(
        store,
        keys,
        ExtentGeometry(region.shards, shard_bytes, form, protection),
        region.slots_carry,
        expire_s=settings.expire_s,
        list_interval_s=settings.list_interval_s,
    )
    return storage, messages.StoreOpened(store.name, count, form.object_bytes)


if __name__ == "__main__":
    sys.exit(main())
