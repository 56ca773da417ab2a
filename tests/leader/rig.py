"""A block manager around a toy engine: real leader, real workers and segments, real bytes, copies stepped by hand.

The toy engine has a block pool with reference counts. A block's bytes are a pattern of its sequence hash and the rank;
a block without references is overwritten with garbage at once, so that a copy from or to memory that was released too
early is detected.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial

import numpy as np
import torch
from bookkeeping import check_leader, tier_of
from fake_store import FakeStore
from faults import FaultyCopier
from manual_pool import ManualPool

from kvbm.device.copier import DeviceCopier
from kvbm.device.worker import CopyThreads, Worker
from kvbm.host.layout import BlockLayout, Piece
from kvbm.host.region import Region
from kvbm.host.segment import Segment
from kvbm.leader.leader import Leader
from kvbm.leader.request import LoadResult
from kvbm.plan import StepPlan
from kvbm.tiers.disk.health import DiskStorageCounters
from kvbm.tiers.disk.orders import DiskResult, FoundBlocks, Read, Write
from kvbm.tiers.disk.tier import DiskTier
from kvbm.tiers.rates import KnownRates
from kvbm.tiers.settings import EngineTraits, LeaderCallbacks, LeaderSettings, TierPolicy
from kvbm.tiers.shared.tier import SharedTier
from kvbm.types import SegmentInfo, Tier

PIECE_BYTES = 512
GARBAGE = 0xEE
OPEN: list[Rig] = []  # conftest.py closes them after each test


def chain(name: str, length: int) -> list[bytes]:
    """`length` sequence hashes of one conversation: the same name gives the same prefix."""
    return [hashlib.blake2b(f"{name}/{i}".encode(), digest_size=16).digest() for i in range(length)]


def pattern(block_hash: bytes, rank: int, piece: int) -> np.ndarray:
    seed = hashlib.blake2b(block_hash + bytes([rank, piece]), digest_size=64).digest()
    return np.frombuffer(seed * (PIECE_BYTES // 64), dtype=np.uint8)


class G1:
    """The toy engine's blocks: reference counts, and for each rank two storages like two layers. `replicas` consecutive
    ranks have equal bytes. `evictions`: the order in which the engine evicts blocks, if it says so."""

    evictions = None

    def __init__(self, block_count: int, rank_count: int, replicas: int = 1) -> None:
        self.block_count = block_count
        self.replicas = replicas
        self.references: Counter[int] = Counter()
        self.layout = BlockLayout(
            pieces=(Piece(0, 0, PIECE_BYTES, PIECE_BYTES), Piece(1, 0, PIECE_BYTES, PIECE_BYTES)),
            block_count=block_count,
        )
        self.storages = [
            [torch.full((block_count * PIECE_BYTES,), GARBAGE, dtype=torch.uint8) for _ in range(2)]
            for _ in range(rank_count)
        ]

    def allocate(self, count: int) -> list[int] | None:
        free = [block for block in range(self.block_count) if not self.references[block]]
        if len(free) < count:
            return None
        self.hold(free[:count])
        return free[:count]

    def hold(self, block_ids: Sequence[int]) -> None:
        self.references.update(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            assert self.references[block] > 0, f"block {block} was released more often than held"
            self.references[block] -= 1
            if not self.references[block]:
                self._fill(block, lambda rank, piece: np.full(PIECE_BYTES, GARBAGE, dtype=np.uint8))

    def compute(self, block: int, block_hash: bytes) -> None:
        """What a forward pass does: the KV of these tokens is now in this block."""
        assert self.references[block] > 0
        self._fill(block, lambda rank, piece: pattern(block_hash, rank // self.replicas, piece))

    def holds(self, block: int, block_hash: bytes) -> bool:
        return all(
            np.array_equal(self._view(rank, piece, block), pattern(block_hash, rank // self.replicas, piece))
            for rank in range(len(self.storages))
            for piece in range(2)
        )

    def _fill(self, block: int, content) -> None:
        for rank in range(len(self.storages)):
            for piece in range(2):
                self._view(rank, piece, block)[:] = content(rank, piece)

    def _view(self, rank: int, piece: int, block: int) -> np.ndarray:
        return self.storages[rank][piece].numpy()[block * PIECE_BYTES : (block + 1) * PIECE_BYTES]


AGE_S = 1000  # of what a disk in memory finds at a start


class FakeDisk:
    """A disk in memory: transfers wait until a test runs them, and can fail, hang, or bring other bytes.

    What it `keeps` stays when another leader is made on it.
    """

    def __init__(self, slot_count: int) -> None:
        self.process = self
        self.slot_count = slot_count
        self.is_on = True
        self.is_unnamed = self.is_silent = False
        self.counters = DiskStorageCounters()
        self.losses = 0
        self.restarts = 0
        self.is_lost = False
        self.is_hanging = False  # `run_all` runs nothing
        self.found: list[FoundBlocks] = []
        self.blocks_at_a_time = 1024
        self.kept: dict[int, tuple[bytes, list[np.ndarray]]] = {}
        self.waiting: list[Read | Write] = []
        self.cleared = 0
        self.has_ended_persistence = False
        self.slots_carry: Callable[[Sequence[int], Sequence[int]], bool] = lambda slots, generations: True
        self.tenants: dict[int, bytes] = {}
        self.shards: list[np.ndarray] = []
        self.is_clearing = self.is_closed = False
        self.confirms_clears = True
        self.earlier_rates: KnownRates | None = None
        self.kept_rates: list[KnownRates] = []
        self._ended: list[DiskResult] = []

    def recovered(self, *, waits):
        if self.is_lost:
            return None
        if not self.found:
            kept, some = list(self.kept.items()), self.blocks_at_a_time
            self.found = [self._found(kept[at : at + some], at + some) for at in range(0, len(kept) or 1, some)]
        return self.found.pop(0)

    def _found(self, kept, end):
        slots, hashes = [slot for slot, _ in kept], [sequence_hash for _, (sequence_hash, _) in kept]
        tenants = tuple(self.tenants.get(slot, b"") for slot in slots)
        return FoundBlocks(slots, hashes, end >= len(self.kept), (), [int(time.time()) - AGE_S] * len(slots), tenants)

    def submit(self, order):
        if isinstance(order, Write):
            assert len(order.hashes) == len(order.tenants)
            for slot in order.disk_slots:
                self.kept.pop(slot, None)
            self.tenants.update(zip(order.disk_slots, order.tenants, strict=True))
        assert len(order.hashes) == len(order.host_slots) == len(order.disk_slots)
        self.waiting.append(order)

    def forget(self, disk_slots):
        if self.is_lost:
            return
        for slot in disk_slots:
            self.kept.pop(slot, None)

    def keep_rates(self, known):
        self.kept_rates.append(known)

    def clear(self, *, ends_persistence=False):
        self.cleared += 1
        self.has_ended_persistence |= ends_persistence
        self.kept.clear()
        self.found.clear()

    def begin_clear(self, tenant=None):
        """Nothing else is read or written until `poll` has returned."""
        self.is_clearing, self.is_on = True, False
        cleared = [slot for slot in self.kept if tenant in (None, self.tenants.get(slot))]
        for slot in cleared:
            del self.kept[slot]
        self.found.clear()

    @property
    def off_because(self):
        return None if self.is_on else "it does not answer"

    def poll(self):
        if self.is_clearing and self.confirms_clears:
            self.is_clearing, self.is_on = False, True
        ended, self._ended = self._ended, []
        return ended

    def wear(self):
        return {}

    def close(self, timeout_s):
        self.is_closed = True

    def end(self, *, has_committed: bool = False) -> None:
        """Its process ends, and what waits has failed; the writes among it may be on disk nevertheless."""
        if has_committed:
            for order in self.waiting:
                if isinstance(order, Write):
                    for name, disk_slot, host_slot in _blocks(order):
                        self.kept[disk_slot] = (name, [shard[host_slot].copy() for shard in self.shards])
        self._ended += [DiskResult.failed(order, "ended") for order in self.waiting]
        self.waiting.clear()
        self.is_lost, self.is_on = True, False
        self.losses += 1

    def begin_again(self) -> None:
        """Another process finds what is kept."""
        self.is_lost, self.is_on = False, True
        self.found.clear()
        self.restarts += 1

    def run(self, kind: str, fault: str | None = None) -> bool:
        """Run the oldest waiting transfer of this kind, if there is one. A fault of `fail` fails its last block and
        leaves its bytes half written, `damage` all its blocks; `fail-all` fails it and proves nothing about a block."""
        wanted = Write if kind == "write" else Read
        order = next((order for order in self.waiting if isinstance(order, wanted)), None)
        if order is None:
            return False
        self.waiting.remove(order)
        if isinstance(order, Write) and not self.slots_carry(order.host_slots, order.generations):
            fault = "fail-all"
        count = len(order.hashes)
        good = [fault is None or (fault == "fail" and index + 1 < count) for index in range(count)]
        for (sequence_hash, disk_slot, host_slot), is_good in zip(_blocks(order), good, strict=True):
            if kind == "write" and is_good:
                self.kept[disk_slot] = (sequence_hash, [shard[host_slot].copy() for shard in self.shards])
            elif kind == "read":
                kept_hash, shards = self.kept.get(disk_slot, (b"", []))
                is_same = kept_hash == sequence_hash
                for shard, kept in zip(self.shards, shards, strict=False):
                    shard[host_slot] = kept if is_good and is_same else GARBAGE
        if kind == "read":
            present = [self.kept.get(disk_slot, (b"",))[0] == name for name, disk_slot, _ in _blocks(order)]
            good = [is_good and is_there for is_good, is_there in zip(good, present, strict=True)]
        damaged = () if fault == "fail-all" else tuple(index for index, is_good in enumerate(good) if not is_good)
        self._ended.append(DiskResult(order.ticket, tuple(good), None if all(good) else "fault", damaged))
        return True

    def run_all(self) -> None:
        while not self.is_hanging and (self.run("read") or self.run("write")):
            pass


def _blocks(order: Read | Write) -> list[tuple[bytes, int, int]]:
    """(hash, disk slot, host slot)."""
    return list(zip(order.hashes, order.disk_slots, order.host_slots, strict=True))


class Rank:
    """One worker with pools that the test steps, and a copier that fails on request. `owner` has allocated the segment
    of a rank with equal KV."""

    def __init__(
        self, rank: int, g1: G1, slot_count: int, onboard_parts: int = 1, owner: SegmentInfo | None = None
    ) -> None:
        if owner is None:
            self.segment = Segment.create(rank=rank, layout=g1.layout, slot_count=slot_count, replica_count=g1.replicas)
        else:
            self.segment = Segment.attach(owner, rank=rank, replica=rank % g1.replicas, layout=g1.layout)
        self.copier = FaultyCopier(DeviceCopier(g1.layout, g1.storages[rank], self.segment))
        self.onboard_pool = ManualPool()
        self.offload_pool = ManualPool()
        threads = CopyThreads(self.onboard_pool, self.offload_pool, onboard_parts, min_part_bytes=1)
        self.worker = Worker(self.segment, self.copier, threads)

    def run(self, kind: str) -> bool:
        """Run the oldest waiting copy of this kind, if there is one."""
        pool = self.onboard_pool if kind == "onboard" else self.offload_pool
        if not pool.waiting():
            return False
        pool.run_next()
        return True

    def run_all(self) -> None:
        while self.run("onboard") or self.run("offload"):
            pass


def disk_policy(writes: str = "frequency", **options) -> dict[str, object]:
    """Settings of a leader for its disk tier."""
    policy = {field.name: options.pop(field.name) for field in fields(TierPolicy) if field.name in options}
    return {"disk": TierPolicy(writes, **policy), **options}


class Rig:
    """Leader, ranks and G1 together; `step` is one engine step."""

    def __init__(
        self,
        *,
        slots: int = 8,
        blocks: int = 16,
        ranks: int = 1,
        replicas: int = 1,
        onboard_parts: int = 1,
        fake_disk=None,
        store: FakeStore | None = None,
        trace=None,
        spans=None,
        ended=None,
        groups=(),
        gives_up_blocks=False,
        accepts_failed_loads=True,
        more_tiers=(),
        has_manual_clock=True,
        hints=None,
        g1: type[G1] = G1,
        **settings,
    ) -> None:
        self.g1 = g1(blocks, ranks, replicas)
        self.ranks: list[Rank] = []
        for rank in range(ranks):
            owner = self.ranks[rank - rank % replicas].segment.info if rank % replicas else None
            self.ranks.append(Rank(rank, self.g1, slots, onboard_parts, owner))
        self.departed: list[LoadResult] = []
        self.region = Region.map([rank.worker.info for rank in self.ranks])
        self.disk: FakeDisk | None = FakeDisk(fake_disk) if isinstance(fake_disk, int) else fake_disk
        if self.disk is not None:
            self.disk.shards = self.region.shards
            self.disk.slots_carry = self.region.slots_carry
        self.store = store
        if store is not None:
            store.shards, store.slots_carry = self.region.shards, self.region.slots_carry
            store.now_s = lambda: self.now_s
        self.now_s = 0.0
        traits = EngineTraits(
            block_tokens=16,
            groups=groups,
            gives_up_blocks=gives_up_blocks,
            accepts_failed_loads=accepts_failed_loads,
            publishes_events=True,
        )
        defaults = {"block_bytes": 1024 * ranks // replicas, "max_in_flight_blocks": blocks}
        self.leader = Leader(
            self.region,
            LeaderSettings(traits, **(defaults | settings)),
            LeaderCallbacks(
                self.g1.hold,
                self.g1.release,
                tenant_of=lambda request_id: request_id.partition("@")[2].encode(),
                hint_of=lambda request_id: ((hints or {}).get(request_id), None),
                chain_of=lambda token_ids, salt: chain(f"{salt or ''}", len(token_ids)),
                trace=trace,
                spans=spans,
                ended=ended,
                evictions=self.g1.evictions,
                **({"clock": lambda: self.now_s} if has_manual_clock else {}),
            ),
            [
                *([] if self.disk is None else [partial(DiskTier, self.disk)]),
                *([] if self.store is None else [partial(SharedTier, self.store)]),
                *more_tiers,
            ],
        )
        if store is not None:
            self.shared_tier._random.seed(0)  # jitter, which no option takes away
        OPEN.append(self)

    @property
    def disk_tier(self):
        return tier_of(self.leader, Tier.DISK)

    @property
    def shared_tier(self):
        return tier_of(self.leader, Tier.SHARED)

    def close(self) -> None:
        if self in OPEN:
            OPEN.remove(self)
        self.region.close()
        for rank in self.ranks:
            rank.worker.close(0.1)

    def order(self) -> StepPlan:
        """First half of a step: the plan reaches every rank, as bytes."""
        message = pickle.dumps(self.leader.step())
        plan = pickle.loads(message)
        for rank in self.ranks:
            rank.worker.start(pickle.loads(message))
            rank.worker.finish(pickle.loads(message))
        return plan

    def settle(self) -> list[LoadResult]:
        """Second half: words are written, the leader reads them, and everything must still be consistent.

        Returns the results of live requests; `departed` keeps the others.
        """
        for rank in self.ranks:
            rank.worker.poll()
        results = self.leader.settle()
        check_leader(self.leader)
        self.departed += [result for result in results if not result.is_live]
        return [result for result in results if result.is_live]

    def step(self) -> list[LoadResult]:
        """A whole step in which every copy that is waiting runs."""
        self.order()
        self.run_tiers()
        return self.end_copies()

    def steps(self, count: int) -> list[LoadResult]:
        return [result for _ in range(count) for result in self.step()]

    def end_copies(self) -> list[LoadResult]:
        """Every copy that is waiting runs, and the leader hears of it."""
        for rank in self.ranks:
            rank.run_all()
        return self.settle()

    def run_tiers(self) -> None:
        """Run what waits on disk and in the shared store."""
        if self.disk is not None:
            self.disk.run_all()
        if self.store is not None:
            self.store.run_all()

    def settle_store(self) -> None:
        """Let time pass until everything that is due has been written."""
        for _ in range(20):
            self.now_s += 0.1
            self.step()

    def hold(self, hashes: list[bytes]) -> list[int]:
        """Compute `hashes` without the leader. Returns their G1 blocks, still referenced."""
        blocks = self.g1.allocate(len(hashes))
        assert blocks is not None
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.g1.compute(block, block_hash)
        return blocks

    def compute(self, request_id: str, hashes: list[bytes], *, prompt_blocks: int | None = None) -> list[int]:
        """A request that computes `hashes` in one forward pass. Returns its G1 blocks, still referenced."""
        blocks = self.hold(hashes)
        prompt = len(hashes) if prompt_blocks is None else prompt_blocks
        self.leader.offload(request_id, hashes, blocks, computed_blocks=len(hashes), prompt_blocks=prompt)
        return blocks

    def finish(self, request_id: str, hashes: list[bytes], blocks: list[int]) -> None:
        self.leader.finish(request_id, hashes)
        self.g1.release(blocks)

    def fill(self, name: str, length: int) -> list[bytes]:
        """Compute, offload and finish one conversation; its blocks are in G2 afterwards."""
        hashes = chain(name, length)
        blocks = self.compute(f"fill-{name}", hashes)
        self.step()
        self.finish(f"fill-{name}", hashes, blocks)
        return hashes

    def load(self, request_id: str, hashes: list[bytes], start: int = 0) -> list[int]:
        """Match and onboard as much as there is. Returns the G1 blocks of the loaded part."""
        matched = self.leader.match(request_id, hashes, start)
        assert matched
        blocks = self.g1.allocate(matched)
        assert blocks is not None
        self.leader.onboard(request_id, hashes, start, blocks)
        return blocks
