"""Prefetches: reads blocks from disk and from the shared tier into host memory before they are promised to a request.

An engine that accepts no failed load is promised blocks in host memory only, because a read can fail. With such an
engine, a block in a lower tier is useful once it has been read ahead and verified:

    warm               at the start: the blocks that an earlier engine used last, from disk into free slots
    want, want_runs    a lookup found these blocks in a lower tier only; a repeated request, or another one with the
                       same prefix, finds them in host memory

A read that fails costs a hit only. The leader's thread owns it. Nothing here waits, except `warm`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbm.leader.disk_tier import DiskTier, Fetch
    from kvbm.leader.host_tier import HostTier
    from kvbm.leader.shared_tier import Run, RunFetch, SharedTier

READS_AT_A_TIME = 4
SHARES_OF_G2 = 4  # one read takes at most this share of host memory
WARM_S = 10.0  # the start of an engine waits no longer for its first reads
POLL_S = 0.001

log = logging.getLogger(__name__)


class Prefetches:
    """See the module's text. `batch_blocks` is the size of one read from disk."""

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None,
        shared: SharedTier | None,
        *,
        batch_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._disk = disk
        self._shared = shared
        self._runs: deque[tuple[Run, bytes]] = deque()
        self._clock = clock
        self._size = max(1, min(batch_blocks, host.capacity_blocks // SHARES_OF_G2))
        self._wanted: deque[tuple[tuple[bytes, ...], bytes | None]] = deque()  # batches of one tenant, oldest first
        self._queued: set[bytes] = set()
        self._open: set[Fetch | RunFetch] = set()

    def want(self, hashes: Sequence[bytes], tenant: bytes | None) -> None:
        """Queue blocks of a tenant, None if it is unknown. Beyond the capacity of host memory, blocks are dropped."""
        room = self._host.capacity_blocks - len(self._queued)
        fresh = [one for one in hashes if one not in self._queued][: max(0, room)]
        self._queued.update(fresh)
        self._wanted += ((tuple(fresh[at : at + self._size]), tenant) for at in range(0, len(fresh), self._size))

    def want_runs(self, runs: Sequence[Run], tenant: bytes) -> None:
        """Queue runs of the shared tier."""
        for run in runs:
            if len(self._queued) < self._host.capacity_blocks and run.name not in self._queued:
                self._queued.add(run.name)
                self._runs.append((run, tenant))

    def step(self) -> None:
        """Start the next reads. Blocks that have arrived meanwhile, or have left their tier, are not read."""
        while self._wanted and self._may_read(self._disk, self._wanted[0][0]):
            batch, tenant = self._wanted.popleft()
            self._queued.difference_update(batch)
            if self._disk is not None:
                due = [one for one in self._absent(batch) if self._disk.contains(one)]
                self._add(self._disk.fetch(due, tenant) if due else None)
        while self._runs and self._may_read(self._shared, self._runs[0][0].hashes):
            run, owner = self._runs.popleft()
            self._queued.discard(run.name)
            if self._shared is not None and (absent := self._absent(run.hashes)) and not self._shared.has_lost(run):
                self._add(self._shared.fetch(run, absent, owner))

    def _may_read(self, tier: DiskTier | SharedTier | None, hashes: Sequence[bytes]) -> bool:
        return len(self._open) < READS_AT_A_TIME and (tier is None or tier.reads.has_room(len(hashes)))

    def _absent(self, hashes: Sequence[bytes]) -> list[bytes]:
        return [hashes[index] for index in self._host.store.missing(hashes)]

    def _add(self, fetch: Fetch | RunFetch | None) -> None:
        if fetch is not None:
            self._open.add(fetch)

    def settle(self, fetches: Sequence[Fetch | RunFetch]) -> list[Fetch | RunFetch]:
        """Release what has been read: it stays in host memory. Return the fetches of others."""
        others = []
        for fetch in fetches:
            if fetch not in self._open:
                others.append(fetch)
                continue
            self._open.discard(fetch)
            if fetch.blocks is not None:
                fetch.blocks.release()
        return others

    def reset(self) -> None:
        """Forget what is queued."""
        self._wanted.clear()
        self._runs.clear()
        self._queued.clear()

    def warm(self) -> None:
        """Read the blocks on disk that were used last into the free slots, for at most WARM_S; later steps continue."""
        if self._disk is None:
            return
        counts = self._disk.store.counts()
        free = self._host.store.free
        newest = self._disk.store.oldest(counts.inactive)[::-1][:free]
        if not newest:
            return
        began_s = self._clock()
        self.want(newest[::-1], None)
        while (self._wanted or self._open) and self._disk.is_on and self._clock() - began_s < WARM_S:
            self.step()
            time.sleep(POLL_S)
            self.settle(self._disk.settle())
        held = len(newest) - len(self._host.store.missing(newest))
        log.info("kvbm: read %d of %d blocks from disk into host memory before the start", held, len(newest))
