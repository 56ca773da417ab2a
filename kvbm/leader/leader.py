"""The leader: the only orchestrator of one engine's block manager.

It runs in the engine's scheduler thread and owns all metadata: which blocks are in G2, which are moving, which G1
blocks a copy still reads or writes. It moves no bytes and never waits. An integration calls it in this order:

    new request      match -> (the engine allocates) -> onboard          0 or more times
    every step       offload (per scheduled request) -> step -> ... the workers act on the plan ... -> settle
    end of request   finish

A block's way out: `offload` allocates a G2 slot and orders the copy, a worker proves the bytes in its control word,
`settle` registers the block, and only then can `match` find it. Its way back: `onboard` pins the slot and orders the
copy, the worker reports in a lane word, `settle` tells the engine that it may read.

Whatever goes wrong on the way ends as a miss and a counter: the engine recomputes. G1 blocks under a copy are held in
the engine's pool, in both directions, until every rank has reported that its copier has stopped; so an abort, a
preemption or a reset needs no waiting, and a hung copy costs the blocks that it touches and nothing else.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbm.core.groups import Group, longest_hit
from kvbm.core.store import BlockStore
from kvbm.errors import EnvironmentProblem
from kvbm.host.region import Region
from kvbm.leader.disk_tier import Disk, DiskPolicy, DiskTier
from kvbm.leader.onboards import Load, Onboards
from kvbm.metrics import WINDOW_REQUESTS, Counters, TierBlocks
from kvbm.plan import Offload, StepPlan
from kvbm.types import SegmentInfo, SlotState, Tier

if TYPE_CHECKING:
    from kvbm.config.schema import ConnectorConfig
    from kvbm.core.blocks import MutableBlocks
    from kvbm.core.store import StoreCounts
    from kvbm.events import Event

CHECKED_SLOTS_PER_STEP = 4
FRESH_SHARE = 4  # a chain that was made recent is safe until this part of the slots has been evicted
HELD_SHARE_OF_G1 = 4  # offloads hold at most a quarter of the engine's blocks at a time
NO_BLOCK = -1  # in place of a block id: the engine keeps no such block

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaderSettings:
    """What the profile decides about the leader.

    `block_tokens` tokens per block; `block_bytes` payload of one block over all ranks. At most `max_in_flight_blocks`
    G1 blocks are held by offloads at a time. A transfer without a result is asked after every `overdue_steps` steps;
    while an onboard is older than that, no further hit is promised. `groups` are the engine's KV cache groups, those
    that look back over everything first; without any, there is one. An engine that `gives_up_blocks` of a failed load,
    and computes in others, need not wait for the end of an overdue one. Hit rates are about the last `window_requests`.
    """

    block_tokens: int
    block_bytes: int
    max_in_flight_blocks: int
    batch_blocks: int = 64
    offload_generated: bool = True
    min_priority: int = 0
    overdue_steps: int = 2000
    groups: tuple[Group, ...] = ()
    gives_up_blocks: bool = False
    window_requests: int = WINDOW_REQUESTS
    disk: DiskPolicy = field(default_factory=DiskPolicy)

    @classmethod
    def of(
        cls,
        config: ConnectorConfig,
        segments: Sequence[SegmentInfo],
        *,
        g1_blocks: int,
        block_tokens: int,
        groups: tuple[Group, ...] = (),
        gives_up_blocks: bool = False,
    ) -> LeaderSettings:
        """What a configuration comes to in an engine with these segments and `g1_blocks` blocks of device memory."""
        return cls(
            block_tokens=block_tokens,
            block_bytes=sum(segment.block_bytes for segment in segments),
            max_in_flight_blocks=max(1, g1_blocks // HELD_SHARE_OF_G1),
            batch_blocks=config.transfer.batch_blocks,
            offload_generated=config.offload.generated,
            min_priority=config.offload.min_priority,
            groups=groups,
            gives_up_blocks=gives_up_blocks,
            window_requests=config.metrics.window_requests,
            disk=DiskPolicy.of(config),
        )


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The end of one request's load: its G1 blocks may be read, except `failed_block_ids`.

    `is_live`: the request has neither ended nor been preempted since it asked.
    """

    request_id: str
    block_ids: tuple[int, ...]
    failed_block_ids: tuple[int, ...]
    is_live: bool


@dataclass(slots=True)
class _Request:
    """What the leader remembers of a live request. `considered`: per group, blocks already looked at for offload;
    `left_out`: those of them that found no room; `fresh_until`: how many evictions may be counted before its chain is
    made recent again."""

    considered: list[int]
    left_out: list[int]
    fresh_until: list[int]
    has_blocks: bool = False
    has_asked: bool = False
    awaited: int = 0
    may_onboard: bool = True
    may_read_disk: bool = True
    may_offload: bool = True
    is_waiting: bool = False
    asked_blocks: int = 0
    hit_blocks: int = 0
    disk_hit_blocks: int = 0
    disk_tokens: int = 0


@dataclass(slots=True)
class _OffloadInFlight:
    order: Offload
    target: MutableBlocks
    hashes: list[bytes]
    tenant: bytes
    born_step: int
    is_void: bool = False


@dataclass(frozen=True, slots=True)
class _Asking:
    """Who asked for a load. A request that was preempted and came back under its id is another one."""

    request_id: str
    request: _Request


class Leader:
    """Decides what moves; see the module's text for who calls what. Not thread-safe: one thread owns it.

    `hold(block_ids)` and `release(block_ids)` count references in the engine's block pool: a held G1 block is not
    given to anybody else, whatever happens to its request. `disk` moves blocks of G3, if there is one; `tenant_of` says
    whose the blocks of a request are. `trace` is called with the name and values of each decision.
    """

    def __init__(
        self,
        region: Region,
        settings: LeaderSettings,
        *,
        hold: Callable[[Sequence[int]], None],
        release: Callable[[Sequence[int]], None],
        hash_bytes: int = 16,
        disk: Disk | None = None,
        tenant_of: Callable[[str], bytes] = lambda request_id: b"",
        clock: Callable[[], float] = time.monotonic,
        trace: Callable[..., None] | None = None,
    ) -> None:
        assert settings.overdue_steps > 1, "a transfer is one step old when its order goes out"
        self._region = region
        self._settings = settings
        self._groups = settings.groups or (Group(settings.block_tokens),)
        self._hold = hold
        self._release = release
        self._tenant_of = tenant_of
        self._trace = trace
        self._store = BlockStore(region.slot_count, tier=Tier.HOST, hash_bytes=hash_bytes)
        self._slot_generations = array("Q", bytes(8 * region.slot_count))
        self._requests: dict[str, _Request] = {}
        self._departing: dict[bytes, int] = {}
        self._offloads: dict[int, _OffloadInFlight] = {}
        self._in_flight_blocks = 0
        self._orders: list[Offload] = []
        self._unreported: list[LoadResult] = []
        self._generation = 0
        self._step = 0
        self._checked_slots = 0
        self.counters = Counters(hit_window=deque(maxlen=settings.window_requests))
        self._disk: DiskTier | None = (
            None
            if disk is None
            else DiskTier(
                disk,
                settings.disk,
                host=self._store,
                region=region,
                slot_generations=self._slot_generations,
                next_generation=self._next_generation,
                block_tokens=settings.block_tokens,
                block_bytes=settings.block_bytes,
                counters=self.counters,
                hash_bytes=hash_bytes,
                clock=clock,
            )
        )
        self._loads: Onboards[_Asking] = Onboards(
            self._store,
            region,
            disk=self._disk,
            slot_generations=self._slot_generations,
            next_generation=self._next_generation,
            hold=hold,
            release=release,
            overdue_steps=settings.overdue_steps,
            batch_blocks=settings.disk.batch_blocks,
            disk_timeout_s=settings.disk.timeout_s,
            can_cut=len(self._groups) == 1 and self._groups[0].looks_back_over_all,
            clock=clock,
        )

    # -- a request arrives ---------------------------------------------------------------------------------------------

    def match(self, request_id: str, hashes: Sequence[bytes], start: int) -> int | None:
        """How many blocks of `hashes[start:]` can be onboarded now, or None: ask again at the next step.

        Starts nothing and promises only what `onboard` can reserve in the same step. `hashes` must end before the
        last token of the request, unless the engine computes that one again. None means that another request is
        bringing this very prefix into G1, where this one will then find it.
        """
        blocks = self._match(request_id, hashes, start, lambda disk: self._prefix(disk, hashes, start))
        if self._trace is not None:
            self._trace("match", request=request_id, start=start, hashes=hashes[start:], blocks=blocks)
        return blocks

    def match_groups(self, request_id: str, chains: Sequence[Sequence[bytes]], start: int, end: int) -> int | None:
        """The same for an engine with several KV cache groups, in tokens: `chains[g]` are the hashes of group g,
        `start` tokens are in G1 already, and a hit ends after `end` tokens at most."""

        def search(disk: DiskTier | None) -> int:
            contains = self._store.contains if disk is None else self._contains
            return longest_hit(contains, self._groups, chains, start=start, end=end) - start

        tokens = self._match(request_id, chains[0], start // self._groups[0].block_tokens, search)
        if self._trace is not None:
            self._trace("match", request=request_id, start_tokens=start, end_tokens=end, tokens=tokens)
        return tokens

    def onboard(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        start: int,
        block_ids: Sequence[int],
        *,
        tokens: int | None = None,
    ) -> None:
        """Bring `hashes[start : start + len(block_ids)]` into these G1 blocks; `settle` reports the end.

        The blocks are held until then. If a block has gone since `match`, the whole load ends as failed. `tokens` is
        what the engine need not compute, where blocks of several groups come together.
        """
        request = self._live(request_id)
        request.has_blocks = True
        wanted = hashes[start : start + len(block_ids)]
        if self._trace is not None:
            self._trace("onboard", request=request_id, start=start, hashes=wanted, device_blocks=tuple(block_ids))
        worth = len(block_ids) * self._settings.block_tokens if tokens is None else tokens
        asking = _Asking(request_id, request)
        load = None
        if self._loads.can_begin():
            load = self._loads.begin(asking, wanted, block_ids, worth, tenant=self._tenant(request_id))
        if load is None:
            self._fail_load(asking, tuple(block_ids))
            return
        request.disk_tokens = load.disk_tokens
        if self._disk is not None:
            self._disk.hit(wanted)

    def note_step(self, tokens: int, seconds: float) -> None:
        """The engine has computed so many tokens in a step of that length: whether to load or to compute is decided by
        it."""
        if self._disk is not None:
            self._disk.rates.note_step(tokens, seconds)

    # -- a step --------------------------------------------------------------------------------------------------------

    def offload(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        *,
        computed_blocks: int,
        prompt_blocks: int,
        group: int = 0,
        priorities: Sequence[int] | None = None,
    ) -> int:
        """Order copies of the full blocks that the coming forward pass completes, and of older ones still missing.

        `block_ids[i]` is the G1 block of `hashes[i]`, or NO_BLOCK. All are of one KV cache group. Where its layers have
        a window, the engine gives blocks up while the request runs: what finds no room now is not asked for again, and
        the last blocks, in which a hit would look first, have the first choice.
        `priorities[i]` is what the engine says of block i, 0 where it says nothing: offloaded is what lies before the
        first block whose priority is too low, so that what is kept is a prefix. None for an engine that has none.
        Returns `considered`: unless the request has more blocks than that, another call would change nothing.

            [0, considered)      looked at in an earlier step
            [considered, end)    computed when this step's forward pass is over: in G2, in flight, or ordered now
            [end, ...)           not computed yet, or generated and not wanted
        """
        request = self._live(request_id)
        request.has_blocks = True
        end = min(computed_blocks, len(hashes), len(block_ids))
        kept = None if self._disk is None else self._disk.must_be_waited_for(end)
        if kept is None:
            end = min(end, self._region.slot_count)
        if not self._settings.offload_generated:
            end = min(end, prompt_blocks)
        if priorities is not None:
            end = self._wanted_blocks(priorities, end)
        considered = request.considered[group]
        if end <= considered or not request.may_offload or self.counters.disabled:
            return considered
        fresh = list(hashes[considered:end])
        if considered == 0:
            self._store.touch(fresh)
        sources = block_ids[considered:end]
        absent = [
            index
            for index in self._store.missing(fresh)
            if fresh[index] not in self._departing and sources[index] != NO_BLOCK
        ]
        if kept is None and self._evictions_after(len(absent)) > request.fresh_until[group]:
            self._make_recent(request, group, hashes[:end])  # so that no block is evicted for its own tail
        can_wait = self._groups[group].looks_back_over_all
        ordered = self._order_offloads(request_id, fresh, sources, absent if can_wait else absent[::-1], kept)
        if can_wait and ordered < len(absent):
            request.left_out[group] = len(absent) - ordered
            request.considered[group] = considered + absent[ordered]
        else:
            request.left_out[group] = 0
            request.considered[group] = end
            self.counters.offload_skipped_blocks += len(absent) - ordered
        if self._trace is not None and (count := request.considered[group] - considered):
            self._trace("offload", request=request_id, group=group, start=considered, hashes=fresh[:count])
        return request.considered[group]

    def step(self) -> StepPlan:
        """Hand out the orders collected since the last step. Call exactly once per engine step."""
        self._step += 1
        if self._disk is not None:
            self._disk.step()
        plan = StepPlan(
            step=self._step,
            offloads=tuple(self._orders),
            onboards=self._loads.step(),
            overdue_offloads=tuple(f.order for f in self._offloads.values() if self._is_overdue(f.born_step)),
            overdue_onboards=self._loads.overdue(),
        )
        self.counters.overdue_transfers += len(plan.overdue_offloads) + len(plan.overdue_onboards)
        self._orders = []
        self._check_some()
        if self._trace is not None and not plan.is_empty():
            orders = [(one.generation, one.block_ids, one.slots) for one in plan.offloads]
            loads = [(one.generation, one.block_ids, one.slots) for one in plan.onboards]
            overdue = len(plan.overdue_offloads) + len(plan.overdue_onboards)
            self._trace("step", step=plan.step, offloads=orders, onboards=loads, overdue=overdue)
        return plan

    def settle(self) -> list[LoadResult]:
        """Read the control words: register what has arrived in G2, and return the onboards that have ended."""
        if not self.counters.disabled and self._region.has_lost_rank():
            self._disable()
        for offload in reversed(self._reported_offloads()):  # tails first, so that heads end up more recent
            self._settle_offload(offload)
        if self._disk is not None:
            self._loads.fetched(self._disk.settle())
        for load in self._loads.settle(gives_up_blocks=self._settings.gives_up_blocks):
            if load.is_failed:
                self._fail_load(load.owner, load.block_ids, by_disk=load.is_failed_by_disk)
            else:
                self._succeed_load(load)
        results, self._unreported = self._unreported, []
        if self._trace is not None:
            for one in results:
                failed = len(one.failed_block_ids)
                self._trace("loaded", request=one.request_id, blocks=len(one.block_ids), failed=failed)
        return results

    def has_pending(self) -> bool:
        """True while something is ordered, in flight or unreported: the engine must keep stepping.

        What has been overdue twice is not waited for: an engine that wants to rest must not be kept awake for ever.
        Nor is a disk that is off.
        """
        patience = 2 * self._settings.overdue_steps
        if self._unreported or self._loads.is_under_way(within_steps=patience):
            return True
        if self._disk is not None and (self._disk.is_writing() or self._disk.is_returning()):
            return True
        youngest = next(reversed(self._offloads.values()), None)
        return youngest is not None and self._step - youngest.born_step <= patience

    def has_unreported(self) -> bool:
        """Whether `settle` would return something now."""
        return bool(self._unreported)

    # -- a request ends ------------------------------------------------------------------------------------------------

    def finish(self, request_id: str, *chains: Sequence[bytes]) -> None:
        """Forget a request that ended, was aborted or was preempted. Its transfers go on and settle by themselves.

        The whole chain of each group becomes recent, tail first: what is left of it under pressure is then its head,
        without which the tail would be worthless.
        """
        if self._trace is not None:
            self._trace("finish", request=request_id)
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for considered, hashes in zip(request.considered, chains, strict=True):
            used = hashes[: max(considered, request.hit_blocks)]
            self._store.touch(used)
            if self._disk is not None:
                self._disk.touch(used)
        self.counters.offload_skipped_blocks += sum(request.left_out)
        if request.asked_blocks:
            host_blocks = request.hit_blocks - request.disk_hit_blocks
            self.counters.hit_window.append((host_blocks, request.disk_hit_blocks, request.asked_blocks))
            self.counters.finished_requests += 1

    def reset(self) -> bool:
        """Forget every block, in every tier. What is in flight ends as failed; live requests computed with the old
        state offload nothing more. False where blocks on disk could not be forgotten durably: none of them is served
        any more, but by an engine that is started before they are."""
        self._forget_all()
        is_forgotten = True
        if self._disk is not None:
            try:
                self._disk.reset()
            except EnvironmentProblem as error:
                log.error("%s: the disk tier stays off until it has forgotten its blocks", error.message)
                is_forgotten = False
        if self._trace is not None:
            self._trace("reset", is_forgotten=is_forgotten)
        return is_forgotten

    def close(self) -> None:
        """Write what only host memory has to disk, if there is one, as far as the time allows. For the end."""
        if self._disk is not None:
            self._disk.close()

    # -- what others may see -------------------------------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """Blocks stored in and removed from G2 since the last call, in order."""
        return self._store.take_events()

    def blocks(self) -> TierBlocks:
        """The slots of each tier by state."""
        stores = (
            {Tier.HOST: self._store} if self._disk is None else {Tier.HOST: self._store, Tier.DISK: self._disk.store}
        )
        return {tier: _by_state(store.counts()) for tier, store in stores.items()}

    def wear(self) -> dict[str, float]:
        """What the disk tier does to its drive, by the names of metrics, as far as it is known."""
        return {} if self._disk is None else self._disk.wear()

    def disk_tokens(self, request_id: str) -> int:
        """Of the tokens that were last promised to this request, those on disk."""
        request = self._requests.get(request_id)
        return 0 if request is None else request.disk_tokens

    def check(self) -> None:
        """Raise InvariantError unless the whole bookkeeping is consistent. For tests; takes time at scale."""
        self._store.check()
        held = sum(len(f.order.block_ids) for f in self._offloads.values())
        assert held == self._in_flight_blocks, (held, self._in_flight_blocks)
        self._loads.check()
        if self._disk is not None:
            self._disk.check()
        in_flight = {h for f in self._offloads.values() if not f.is_void for h in f.hashes}
        assert in_flight == set(self._departing), (len(in_flight), len(self._departing))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _live(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            count = len(self._groups)
            request = self._requests[request_id] = _Request([0] * count, [0] * count, [0] * count)
        return request

    def _match(
        self, request_id: str, hashes: Sequence[bytes], start: int, search: Callable[[DiskTier | None], int]
    ) -> int | None:
        """What `search` finds from `hashes[start]` on, with the disk or without, if this request may load and no other
        one brings just that."""
        request = self._live(request_id)
        if self._disk is not None:
            self._disk.refresh()
            if not request.has_asked:
                self._disk.hit(hashes[:start])
        request.has_asked = True
        request.asked_blocks = max(request.asked_blocks, len(hashes) - start)
        if not request.may_onboard or self.counters.disabled or not self._loads.can_begin():
            return 0
        arriving = self._loads.arriving(hashes[start]) if start < len(hashes) else None
        if arriving is not None and request.awaited in (0, arriving):
            request.is_waiting, request.awaited = True, arriving
            return None
        if request.is_waiting:
            request.is_waiting = False
            self.counters.onboard_shared_requests += 1
        return search(self._disk if request.may_read_disk else None)

    def _prefix(self, disk: DiskTier | None, hashes: Sequence[bytes], start: int) -> int:
        """How many of `hashes[start:]` are in host memory or on disk and worth a load, up to the first that is not."""
        end = start + self._store.match(hashes, start)
        if disk is None or end == len(hashes):
            return end - start
        spans = [(False, end - start)]
        while count := disk.match(hashes, end):
            in_host = self._store.match(hashes, end + count)
            end += count + in_host
            spans += [(True, count), (False, in_host)]
        return disk.worthwhile(spans)

    def _contains(self, sequence_hash: bytes) -> bool:
        assert self._disk is not None
        return self._store.contains(sequence_hash) or self._disk.contains(sequence_hash)

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def _evictions_after(self, count: int) -> int:
        """How many blocks will have been evicted when `count` more are in."""
        return self.counters.evicted_blocks + max(0, count - self._store.counts().free)

    def _make_recent(self, request: _Request, group: int, hashes: Sequence[bytes]) -> None:
        """The chain will not be what is evicted next, for some time. Doing it at every block would cost its length."""
        self._store.touch(hashes)
        request.fresh_until[group] = self.counters.evicted_blocks + self._region.slot_count // FRESH_SHARE

    def _is_overdue(self, born_step: int) -> bool:
        age = self._step - born_step
        return age > 0 and age % self._settings.overdue_steps == 0

    def _wanted_blocks(self, priorities: Sequence[int], end: int) -> int:
        """How many of the first `end` blocks lie before one whose priority is too low."""
        least = self._settings.min_priority
        low = (index for index in range(end) if (priorities[index] if index < len(priorities) else 0) < least)
        return next(low, end)

    def _tenant(self, request_id: str) -> bytes:
        return b"" if self._disk is None else self._tenant_of(request_id)

    def _order_offloads(
        self, request_id: str, fresh: list[bytes], block_ids: Sequence[int], absent: list[int], kept: int | None
    ) -> int:
        """Order copies of as many of `absent` as there is room for without evicting `kept` blocks, in batches, from the
        front; return how many."""
        counts = self._store.counts()
        room = min(
            self._settings.max_in_flight_blocks - self._in_flight_blocks, counts.free + counts.inactive - (kept or 0)
        )
        wanted = absent[: max(0, room)]
        if self._disk is not None:
            self._disk.evicting(len(wanted) - counts.free, keeps_unwritten=kept is not None)
        self.counters.evicted_blocks += max(0, len(wanted) - counts.free)
        tenant = self._tenant(request_id)
        for first in range(0, len(wanted), self._settings.batch_blocks):
            batch = wanted[first : first + self._settings.batch_blocks]
            self._order_offload([fresh[index] for index in batch], tuple(block_ids[index] for index in batch), tenant)
        return len(wanted)

    def _order_offload(self, hashes: list[bytes], block_ids: tuple[int, ...], tenant: bytes) -> None:
        target = self._store.allocate(len(hashes))
        assert target is not None, (len(hashes), self._store.counts())
        order = Offload(generation=self._next_generation(), block_ids=block_ids, slots=tuple(target.slots))
        self._hold(block_ids)
        self._offloads[order.generation] = _OffloadInFlight(order, target, hashes, tenant, self._step)
        self._departing.update(dict.fromkeys(hashes, order.generation))
        self._in_flight_blocks += len(block_ids)
        self._orders.append(order)

    def _reported_offloads(self) -> list[_OffloadInFlight]:
        """One look at one word of each: behind a hanging copy there may be thousands."""
        flights = list(self._offloads.values())
        if not flights:
            return flights
        reported = self._region.are_reported([f.order.slots[0] for f in flights], list(self._offloads))
        return [flight for flight, is_reported in zip(flights, reported, strict=True) if is_reported]

    def _settle_offload(self, flight: _OffloadInFlight) -> None:
        results = self._region.slot_results(flight.order.slots, flight.order.generation)
        if SlotState.EMPTY not in results:
            self._end_offload(flight, [result is SlotState.READY for result in results])

    def _end_offload(self, flight: _OffloadInFlight, is_ready: list[bool]) -> None:
        del self._offloads[flight.order.generation]
        self._in_flight_blocks -= len(flight.hashes)
        self._release(flight.order.block_ids[::-1])
        if flight.is_void:
            flight.target.release()
            return
        for block_hash in flight.hashes:
            del self._departing[block_hash]
        proven, failed = flight.target.split(is_ready)
        failed.release()
        self.counters.offload_failed_blocks += is_ready.count(False)
        self._register(proven, [h for h, ready in zip(flight.hashes, is_ready, strict=True) if ready], flight)

    def _register(self, proven: MutableBlocks, hashes: list[bytes], flight: _OffloadInFlight) -> None:
        slots = tuple(proven.slots)
        for slot in slots:
            self._slot_generations[slot] = flight.order.generation
        proven.stage(hashes).register().release()
        if self._disk is not None:
            self._disk.registered(hashes, slots, flight.tenant)
        self.counters.offload_blocks += len(hashes)
        self.counters.offload_bytes += len(hashes) * self._settings.block_bytes

    def _succeed_load(self, load: Load[_Asking]) -> None:
        """What was cut off is computed, and the request not offered a load again."""
        count, left_out = load.end, load.block_ids[load.end :]
        self.counters.onboard_blocks += count
        self.counters.onboard_failed_blocks += len(left_out)
        self.counters.onboard_bytes += count * self._settings.block_bytes
        self.counters.onboard_disk_blocks += load.disk_blocks
        request, request_id = load.owner.request, load.owner.request_id
        request.hit_blocks += load.loaded_tokens // self._settings.block_tokens
        request.disk_hit_blocks += load.disk_tokens // self._settings.block_tokens
        is_live = self._requests.get(request_id) is request
        request.may_onboard &= not left_out
        if is_live:
            self.counters.matched_tokens += load.loaded_tokens
        self._unreported.append(LoadResult(request_id, load.block_ids, left_out, is_live))

    def _fail_load(self, asking: _Asking, block_ids: tuple[int, ...], *, by_disk: bool = False) -> None:
        """The request must recompute. It is offered no load again, so that nothing can loop, but for once what is in
        host memory, if it was the disk that failed."""
        self.counters.onboard_failed_blocks += len(block_ids)
        request = asking.request
        request.may_onboard &= by_disk and request.may_read_disk
        request.may_read_disk = False
        is_live = self._requests.get(asking.request_id) is asking.request
        self._unreported.append(LoadResult(asking.request_id, block_ids, block_ids, is_live))

    def _forget_all(self) -> None:
        self._store.reset()
        self.counters.resets += 1
        for offload in self._offloads.values():
            offload.is_void = True
        self._loads.reset()
        self._departing.clear()
        for request in self._requests.values():
            request.may_offload = not request.has_blocks

    def _disable(self) -> None:
        """A rank is gone: forget everything and stay out of the engine's way. What the other ranks still copy ends
        as failed, when they have reported."""
        self._forget_all()
        self.counters.disabled = 1
        log.error("the process of a rank has ended: the engine goes on without the cache until it is started again")

    def _check_some(self) -> None:
        self._store.check(self._checked_slots, CHECKED_SLOTS_PER_STEP)
        self._checked_slots = (self._checked_slots + CHECKED_SLOTS_PER_STEP) % self._region.slot_count


def _by_state(counts: StoreCounts) -> dict[str, int]:
    moving = counts.mutable + counts.complete
    return {"free": counts.free, "moving": moving, "pinned": counts.pinned, "evictable": counts.inactive}
