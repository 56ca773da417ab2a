"""GuardedLeader: a Leader that never raises, and what remains of it after an exception.

It has the verbs of `Leader`, behind a `Boundary`. The first exception turns the cache off: `match` finds nothing and
nothing new is ordered, because the metadata may be damaged. Three things must still happen, and none of them may depend
on that metadata:

    G1 blocks      are released when no copier can use them: at once if no order names them, else when every rank has
                   reported the order in its control words, or has ended
    waiting loads  are reported as failed, so that the engine recomputes: at once if it `gives_up_blocks`, else when
                   their blocks are released
    orders         are repeated as overdue ones, so that a rank which never got them reports them as failed

Therefore the guard itself records each reference in the engine's block pool, and each load that the engine waits for.
The orders are in `in_flight` of Offloads and Onboards, each from before its copier can start until after it has
stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvbm.boundary import Boundary, contained, forwarded, hook
from kvbm.child import deadlines
from kvbm.errors import InvariantError
from kvbm.events import TierCleared
from kvbm.leader.leader import Leader
from kvbm.leader.request import LoadResult
from kvbm.plan import Offload, Onboard, StepPlan
from kvbm.types import SlotState, Tier

if TYPE_CHECKING:
    from kvbm.events import Event
    from kvbm.host.region import Region
    from kvbm.metrics import Counters, Facts
    from kvbm.tiers.lower_tier import OpenTier
    from kvbm.tiers.settings import LeaderCallbacks, LeaderSettings

OFF = "the cache is off until the engine is restarted: its log says why"
QUERY_STEPS = 64  # engine steps between two queries for the results of what was in flight


class GuardedLeader:
    """See the module's text. *Consumes* the region. `leader` is for tests only."""

    def __init__(
        self,
        boundary: Boundary,
        region: Region,
        settings: LeaderSettings,
        callbacks: LeaderCallbacks,
        open_tiers: Sequence[OpenTier] = (),
    ) -> None:
        self.boundary = boundary
        self.region = region
        self._settings = settings
        self._block_pool = callbacks
        self._held: Counter[int] = Counter()  # references in the engine's block pool, per G1 block
        self._loads: dict[tuple[str, tuple[int, ...]], bool] = {}  # the engine waits for them -> is the request live?
        self._orders: dict[int, Offload | Onboard] | None = None  # in flight when the cache was turned off
        self._steps_off = 0
        self._has_cleared = False
        trace = None if callbacks.trace is None else _that_never_raises(callbacks.trace, boundary)
        ours = replace(callbacks, hold=self._hold, release=self._release, trace=trace)
        self.leader = Leader(region, settings, ours, open_tiers)
        self.control = self.leader.control
        boundary.counters = self.leader.counters

    match = forwarded("leader", Leader.match, 0)
    match_groups = forwarded("leader", Leader.match_groups, 0)
    _onboard = forwarded("leader", Leader.onboard)
    note_step = forwarded("leader", Leader.note_step)
    lost_state_tokens = forwarded("leader", Leader.lost_state_tokens, 0, turns_off=False)
    lower_tier_tokens = forwarded("leader", Leader.lower_tier_tokens, (0, 0), turns_off=False)
    offload = forwarded("leader", Leader.offload, 0)
    offload_all = forwarded("leader", Leader.offload_all, list)
    offload_snapshot = forwarded("leader", Leader.offload_snapshot, False)
    discard_offloads = forwarded("leader", Leader.discard_offloads)
    settle_offloads = forwarded("leader", Leader.settle_offloads, False)
    abandon_offloads = forwarded("leader", Leader.abandon_offloads)
    _reset = forwarded("leader", Leader.reset, False)
    _close = forwarded("leader", Leader.close)
    blocks = forwarded("leader", Leader.blocks, dict, turns_off=False)
    wear = forwarded("leader", Leader.wear, dict, turns_off=False)
    queues = forwarded("leader", Leader.queues, dict, turns_off=False)

    def onboard(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        start: int,
        block_ids: Sequence[int],
        *,
        tokens: int | None = None,
    ) -> None:
        self.fail_load(request_id, block_ids)
        self._onboard(request_id, hashes, start, block_ids, tokens=tokens)

    def fail_load(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Note that the engine waits for a load. Unless `onboard` begins it, `settle` reports it as failed."""
        self._loads[request_id, tuple(block_ids)] = True

    @hook(StepPlan(step=0), when_off=True)
    def step(self) -> StepPlan:
        if self.boundary.is_off:
            self.control.refuse_all(OFF)
            return self._query()
        self.control.advance()
        return self.leader.step()

    @hook(list, when_off=True)
    def settle(self) -> list[LoadResult]:
        if self.boundary.is_off:
            return self._settle_remains()
        results = self.leader.settle()
        for result in results:
            self._loads.pop((result.request_id, result.block_ids), None)
        return results

    def held_references(self) -> int:
        """Return how many references transfers have in the engine's block pool."""
        return sum(self._held.values())

    @hook(False, when_off=True)
    def has_pending(self) -> bool:
        if not self.boundary.is_off:
            return self.control.has_work() or self.leader.has_pending()
        is_open = self._orders is None or bool(self._orders or self._loads)
        return self.control.has_work() or (is_open and self._steps_off <= 2 * self._settings.overdue_steps)

    @hook(False, when_off=True)
    def needs_settle(self) -> bool:
        if self.boundary.is_off:
            return bool(self._loads)
        return self.control.has_work() or self.leader.needs_settle()

    @hook(when_off=True)
    def finish(self, request_id: str, *chains: Sequence[bytes], is_preempted: bool = False) -> None:
        for key in self._loads:
            self._loads[key] &= key[0] != request_id
        if not self.boundary.is_off:
            self.leader.finish(request_id, *chains, is_preempted=is_preempted)

    def reset(self, *, ends_persistence: bool = False) -> bool:
        """Like `Leader.reset`. If the cache is off, delete what is on disk."""
        run = self._reset if not self.boundary.is_off else self._clear_disk
        return run(ends_persistence=ends_persistence)

    @contained(False)
    def _clear_disk(self, *, ends_persistence: bool) -> bool:
        for tier in self.leader.owned_tiers:
            tier.clear(ends_persistence=ends_persistence)
        return True

    def close(self) -> None:
        """Like `Leader.close`, and unmap the memory of the ranks. If the cache is off, write nothing more to a lower
        tier."""
        self.control.refuse_all("the engine ends")
        self._close()
        for tier in reversed(self.leader.lower_tiers) if self.boundary.is_off else ():
            self.boundary.attempt("abandon", partial(tier.abandon, deadlines.ABANDON_S))
        self.boundary.attempt("unmap", self.region.close)

    @contained(list)
    def take_events(self) -> list[Event]:
        """Return the events since the last call; when the cache was turned off, once that every tier is empty."""
        if not self.boundary.is_off:
            return self.leader.take_events()
        has_cleared, self._has_cleared = self._has_cleared, True
        owned = self.leader.owned_tiers
        return [] if has_cleared else [TierCleared(one) for one in (Tier.HOST, *(tier.kind for tier in owned))]

    @contained(False)
    def has_events(self) -> bool:
        return not self._has_cleared if self.boundary.is_off else self.leader.has_events()

    @property
    def counters(self) -> Counters:
        return self.leader.counters

    @property
    def facts(self) -> Facts:
        return self.leader.facts

    def _query(self) -> StepPlan:
        """Repeat the orders in flight as overdue ones, from time to time."""
        orders = self._taken_over().values()
        is_due = self._steps_off % QUERY_STEPS == 0
        self._steps_off += 1
        if not is_due or not orders:
            return StepPlan(step=0)
        return StepPlan(
            step=0,
            overdue_offloads=tuple(order for order in orders if isinstance(order, Offload)),
            overdue_onboards=tuple(order for order in orders if isinstance(order, Onboard)),
        )

    def _settle_remains(self) -> list[LoadResult]:
        """Release the blocks of orders that have ended, and return the loads that can be reported as failed."""
        orders = self._taken_over()
        self.region.has_lost_rank()
        for generation, order in list(orders.items()):
            if self._has_ended(order):
                del orders[generation]
                self._release(order.block_ids[::-1])
        for tier in self.leader.lower_tiers:
            self.boundary.attempt("drop_results", tier.drop_results)
        copied = {block_id for order in orders.values() for block_id in order.block_ids}
        gives_up = self._settings.traits.gives_up_blocks
        ended = [key for key in self._loads if gives_up or copied.isdisjoint(key[1])]
        return [LoadResult(*key, failed_block_ids=key[1], is_live=self._loads.pop(key)) for key in ended]

    def _taken_over(self) -> dict[int, Offload | Onboard]:
        """Return the orders in flight. The first call releases the blocks that no order names."""
        if self._orders is None:
            self._orders = self.leader.orders_in_flight()
            copied = Counter(block_id for order in self._orders.values() for block_id in order.block_ids)
            self._release(list((self._held - copied).elements()))
        return self._orders

    def _has_ended(self, order: Offload | Onboard) -> bool:
        if isinstance(order, Onboard):
            return self.region.lane_result(order.lane, order.generation) is not SlotState.EMPTY
        return SlotState.EMPTY not in self.region.slot_results(order.slots, order.generation)

    def _hold(self, block_ids: Sequence[int]) -> None:
        self._block_pool.hold(block_ids)
        self._held.update(block_ids)

    def _release(self, block_ids: Sequence[int]) -> None:
        held = self._held
        for block_id in block_ids:
            count = held.pop(block_id, 0)
            if count > 1:
                held[block_id] = count - 1
            elif not count:
                raise InvariantError(f"release of block {block_id}, which kvbm does not hold")
        self._block_pool.release(block_ids)


def _that_never_raises(trace: Callable[..., None], boundary: Boundary) -> Callable[..., None]:
    """Return the trace, which ends with its first exception."""
    is_on = True

    def record(call: str, **values: object) -> None:
        nonlocal is_on
        if is_on:
            _, error = boundary.attempt("trace", lambda: trace(call, **values))
            is_on = error is None

    return record
