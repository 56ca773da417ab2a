"""A shared store in memory: it holds bytes, runs orders when a test says so, and fails on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvbm.tiers.shared.orders import NOT_WANTED, Get, Listing, ObjectResult, Order, Outcome, Probe, ProbeResult, Put
from kvbm.tiers.shared.presence import DIGEST, digest_of
from kvbm.tiers.shared.storage import SharedStorageCounters

GARBAGE = 0xEE


class FakeStore:
    """The interface of SharedClient: orders wait until a test runs them, and can fail or
    bring other bytes. What it `keeps` stays when another leader is made on it, and others may write and delete it."""

    def __init__(self, extent_blocks: int) -> None:
        self.extent_blocks = extent_blocks
        self.is_on = True
        self.is_unnamed = self.is_silent = False
        self.now_s: Callable[[], float] = lambda: 0.0  # the clock of the leader
        self.counters = SharedStorageCounters()
        self.restarts = 0
        self.kept: dict[bytes, list[list[np.ndarray]]] = {}  # name of a run -> for each block its shards
        self.waiting: list[Order] = []
        self.shards: list[np.ndarray] = []
        self.slots_carry: Callable[[Sequence[int], Sequence[int]], bool] = lambda slots, generations: True
        self.writes = 0
        self._ended: list[ObjectResult | ProbeResult] = []
        self._listings: list[Listing] = []

    def submit(self, order: Order) -> None:
        self.waiting.append(order)

    def poll(self):
        ended, self._ended = self._ended, []
        return ended

    def list_all(self) -> None:
        digests = np.sort(np.array([digest_of(name) for name in self.kept], DIGEST))
        self._listings.append(Listing(digests.tobytes(), self.now_s(), is_first=True, is_last=True))

    def take_listing(self) -> Listing | None:
        return self._listings.pop(0) if self._listings else None

    def close(self, timeout_s: float) -> None:
        self.run_all()

    def run(self, fault: str | None = None, *, index: int = 0) -> bool:
        """Run a waiting order, if there is one. `bad` and `fail` leave other bytes behind a read."""
        if not self.waiting:
            return False
        match order := self.waiting.pop(index % len(self.waiting)):
            case Probe():
                present = next((i for i, name in enumerate(order.names) if name not in self.kept), len(order.names))
                self._ended.append(ProbeResult(order.ticket, None if fault else present))
            case Put():
                self._ended.append(self._put(order, fault))
            case Get():
                self._ended.append(self._get(order, fault))
        return True

    def run_all(self) -> None:
        while self.run():
            pass

    def fail_all(self) -> None:
        """The process ends: what waits has failed."""
        while self.run("fail"):
            pass

    def _put(self, order: Put, fault: str | None) -> ObjectResult:
        if fault or not self.slots_carry(order.host_slots, order.generations):
            return ObjectResult.failed(order, "fault")
        assert len(order.hashes) == self.extent_blocks
        if order.hashes[-1] in self.kept and not order.replaces:
            return ObjectResult(order.ticket, Outcome.EXISTS)
        self.kept[order.hashes[-1]] = [[shard[slot].copy() for shard in self.shards] for slot in order.host_slots]
        self.writes += 1
        return ObjectResult(order.ticket, Outcome.GOOD)

    def _get(self, order: Get, fault: str | None) -> ObjectResult:
        blocks = self.kept.get(order.hashes[-1])
        if blocks is None and fault is None:
            return ObjectResult(order.ticket, Outcome.ABSENT)
        for slot, shards in zip(order.host_slots, blocks or [[]] * len(order.hashes), strict=True):
            if slot != NOT_WANTED:
                for rank, shard in enumerate(self.shards):
                    size = None if fault else len(shards[rank])
                    shard[slot, :size] = GARBAGE if fault else shards[rank]
        if fault:
            outcome = Outcome.BAD if fault == "bad" else Outcome.FAILED
            return ObjectResult(order.ticket, outcome, "fault")
        return ObjectResult(order.ticket, Outcome.GOOD)
