"""Process of the shared tier: maps the segments of the ranks and runs the orders of one leader on an object store.

    python -m kvbm.tiers.shared.service.server FD        FD is one end of a socket pair

A library for object stores has threads of its own, and some of its calls last half a minute when a peer hangs. Here it
can disturb no engine. The process exits with its leader.
"""

from __future__ import annotations

import os
import sys

from kvbm.child.channel import Channel
from kvbm.child.child import LogRelay, Send, StorageServer, serve_leader
from kvbm.errors import EnvironmentProblem
from kvbm.host.region import Region
from kvbm.tiers.shared.extent_format import ExtentFormat
from kvbm.tiers.shared.geometry import ExtentGeometry
from kvbm.tiers.shared.keys import KeySpace, extent_blocks
from kvbm.tiers.shared.orders import Get, Listing, ListingTaken, OpenStore, Probe, Put, StoreOpened
from kvbm.tiers.shared.presence import DIGEST
from kvbm.tiers.shared.protection import protection_of
from kvbm.tiers.shared.storage import SharedStorage
from kvbm.tiers.shared.stores.open import open_store, with_copies

FIRST_LISTING_S = 2.0  # a start waits so long for it, so that the first request finds what the store has
LISTED_AT_ONCE = 8192  # names in one message, so that an engine's step takes it in a fraction of a millisecond


class SharedServer(StorageServer[SharedStorage]):
    """Also sends the listings of the namespace, one at a time."""

    def __init__(self, channel: Channel, storage: SharedStorage, log: LogRelay) -> None:
        super().__init__(channel, storage, log)
        self._is_listing_on_its_way = False

    def serve(self) -> None:
        self._report()  # the first listing may be there already
        super().serve()
        self._report()  # what has ended while the storage was closed

    def _handle(self, message: object) -> None:
        match message:
            case ListingTaken():
                self._is_listing_on_its_way = False
            case Get() | Put() | Probe():
                self._submit(message)

    def _report_more(self) -> None:
        if self._is_listing_on_its_way or (listing := self._storage.take_listing()) is None:
            return
        self._is_listing_on_its_way = True
        began_s, digests = listing
        step = LISTED_AT_ONCE * DIGEST.itemsize
        starts = range(0, max(1, len(digests)), step)
        for start in starts:
            part = digests[start : start + step]
            self._channel.send(Listing(part, began_s, is_first=start == 0, is_last=start + step >= len(digests)))


def _open(order: OpenStore, _send: Send, _log: LogRelay) -> tuple[SharedStorage, StoreOpened]:
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
    count = extent_blocks(block_bytes, order.block_tokens) if order.has_extents else 1
    form = ExtentFormat(order.namespace, count, block_bytes, order.hash_bytes)
    geometry = ExtentGeometry(region.shards, shard_bytes, form, protection)
    storage = SharedStorage(store, keys, geometry, region.slots_carry, settings)
    storage.wait_for_listing(FIRST_LISTING_S)
    return storage, StoreOpened(store.name, count, form.object_bytes)


def main() -> int:
    code = serve_leader(OpenStore, _open, SharedServer)
    if code == 0:
        os._exit(0)  # a thread may be in a call that does not return
    return code


if __name__ == "__main__":
    sys.exit(main())
