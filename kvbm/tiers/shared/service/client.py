"""SharedClient: the leader's end of the process of the shared tier, a ChildService.

The process holds no state that a leader needs. It sends heartbeats while the store answers slowly, and what its calls
do cannot be seen from outside: progress is a read that ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from kvbm.child.child import Status
from kvbm.child.service import ChildService, ServiceProcess
from kvbm.host.threads import allowed_cores
from kvbm.tiers.shared.orders import (
    Get,
    Listing,
    ListingTaken,
    OpenStore,
    Order,
    Result,
    StoreOpened,
    failed,
)
from kvbm.tiers.shared.protection import protection_of
from kvbm.tiers.shared.settings import SharedSettings
from kvbm.tiers.shared.storage import SharedStorageCounters
from kvbm.types import SegmentInfo

Named = tuple[bytes, Mapping[str, object]]  # digest of what names the blocks, and facts that describe it

log = logging.getLogger(__name__)


class BlockShape(NamedTuple):
    """`has_extents`: an object may hold several blocks of a chain."""

    hash_bytes: int
    block_tokens: int
    has_extents: bool


class SharedProcess(ServiceProcess[Order, Result, SharedStorageCounters]):
    """One process. It has *read* orders, whose host memory is not free before they end."""

    tier, module = "shared", "kvbm.tiers.shared.service.server"

    def __init__(self) -> None:
        super().__init__(SharedStorageCounters(), failed)
        self.opened = StoreOpened("", 0, 0)
        self._reads: set[int] = set()  # tickets in flight
        self._listings: list[Listing] = []

    def submit(self, order: Order) -> None:
        if isinstance(order, Get):
            if not self._reads:
                self._moved_s = time.monotonic()
            self._reads.add(order.ticket)
        super().submit(order)

    def poll(self) -> list[Result]:
        results = super().poll()
        if ended := self._reads.intersection(result.ticket for result in results):
            self._reads -= ended
            self._moved_s = time.monotonic()
        return results

    def take_listing(self) -> Listing | None:
        if not (self._listings and self.is_alive):
            return None
        part = self._listings.pop(0)
        if part.is_last:
            self._send(ListingTaken())
        return part

    def _progressed_s(self) -> float:
        return min(self._heard_s, self._moved_s) if self._reads else self._heard_s

    def _handle(self, message: object) -> None:
        match message:
            case StoreOpened():
                self.opened, self._is_open = message, True
            case Listing():
                self._listings.append(message)
            case Status(off_because=why) if (why is None) != (self.off_because is None):
                if why is None:
                    log.warning("kvbm: the shared tier is on again")
                else:
                    log.warning("kvbm: the shared tier is off until its store answers: %s", why)
        super()._handle(message)


class SharedClient(ChildService[Order, Result, SharedStorageCounters]):
    """See the module's text. Only the leader's thread uses it."""

    process: SharedProcess

    def __init__(
        self, named: Future[Named | None], settings: SharedSettings, segments: Sequence[SegmentInfo], shape: BlockShape
    ) -> None:
        """With None in `named`, the tier stays off. Raises EnvironmentProblem if the secret is missing."""
        protection_of(settings.protection, settings.key_file)
        self._settings, self._segments, self._shape = settings, segments, shape
        self._namespace = b""  # of the first process: with another secret, a further one would read no block
        super().__init__(SharedProcess(), named, settings.url)

    @property
    def extent_blocks(self) -> int:
        """The number of blocks in an object, 0 until the first process has started."""
        return self.process.opened.extent_blocks

    def take_listing(self) -> Listing | None:
        """Return the next part of a listing of the namespace, if one has arrived."""
        return self.process.take_listing()

    def _open_next(self) -> SharedProcess:
        name = self._named.result()
        assert name is not None, "a tier that stays off starts no process"
        (digest, facts), settings = name, self._settings
        self._namespace = self._namespace or protection_of(settings.protection, settings.key_file).namespace(digest)
        cores = frozenset(allowed_cores())
        order = OpenStore(settings, digest, self._namespace, facts, tuple(self._segments), *self._shape, cores)
        process = SharedProcess()
        process.start(order, f"`tiers.shared.url` {settings.url}", self._first, self._is_closing.is_set)
        return process
