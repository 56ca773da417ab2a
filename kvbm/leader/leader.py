"""Leader: the only orchestrator of one engine's block manager.

It runs in the engine's scheduler thread and owns all metadata: which blocks are in G2, which are moving, which G1
blocks a copy still reads or writes. It moves no bytes and never waits. An integration calls it in this order:

    new request      match -> (the engine allocates) -> onboard          0 or more times
    every step       offload (per scheduled request) -> step -> ... the workers act on the plan ... -> settle
    end of request   finish

Offload: `offload` reserves a G2 slot and orders the copy, a worker proves the bytes in the slot's control word,
`settle` registers the block; from then on `match` finds it. Onboard: `onboard` pins the slot and orders the copy, the
worker reports in a lane word, `settle` reports to the engine that it may read.

Every failure on the way counts as a miss and increments a metric; the engine recomputes. G1 blocks under a copy are
held in the engine's pool, in both directions, until every rank has reported that its copier has stopped. So an abort, a
preemption or a reset does not wait, and a hung copy costs only the blocks that it touches. Offloads of
late_offloads.py hold nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from kvbm.core.groups import StateGroup, hits_to_keep
from kvbm.core.policies.chain_use import LONGEST_CHAIN
from kvbm.leader.control import CacheControl
from kvbm.leader.engine_tiers import EngineTiers
from kvbm.leader.heartbeats import Heartbeats
from kvbm.leader.hints import Hint, Hints
from kvbm.leader.long_chains import Slices
from kvbm.leader.matching import Matching
from kvbm.leader.offloads import Offloads, blocks_before_low_priority
from kvbm.leader.onboards import Onboards
from kvbm.leader.operations import Operations
from kvbm.leader.prefetches import Prefetches
from kvbm.leader.request import LiveRequest, LoadResults, OffloadProgress
from kvbm.metrics import HIT_TIERS
from kvbm.plan import StepPlan
from kvbm.tiers.settings import SpanNote
from kvbm.types import Tier

if TYPE_CHECKING:
    from kvbm.core.policies.chain_use import ChainUse
    from kvbm.events import Event
    from kvbm.host.region import Region
    from kvbm.leader.offloads import Completed
    from kvbm.leader.request import LoadResult
    from kvbm.plan import Offload, Onboard
    from kvbm.tiers.lower_tier import OpenTier
    from kvbm.tiers.settings import LeaderCallbacks, LeaderSettings

LOWER = HIT_TIERS[1:]
LOOK_AGAIN_S = 1.0  # between two looks of an idle engine at a tier that is off

log = logging.getLogger(__name__)


class Leader(EngineTiers):
    """Decides what moves; see the module's text for who calls what. Not thread-safe: one thread owns it."""

    operations: Operations

    def __init__(
        self,
        region: Region,
        settings: LeaderSettings,
        callbacks: LeaderCallbacks,
        open_tiers: Sequence[OpenTier] = (),
    ) -> None:
        super().__init__(region, settings, callbacks, open_tiers, reads_always=settings.reads_always)
        self.control = CacheControl(self, callbacks.clock)
        self._groups = settings.groups
        self._is_one_chain = settings.can_cut_loads
        self._has_states = any(isinstance(group, StateGroup) for group in self._groups)
        self._tenant_of = callbacks.tenant_of
        self._hint_of = callbacks.hint_of
        self._trace = callbacks.trace
        self._spans = callbacks.spans
        self._ended = callbacks.ended
        context, tiers = self._context, self.lower_tiers
        self._prefetches = Prefetches(context, tiers)
        if not settings.traits.accepts_failed_loads:
            self._prefetches.warm()
        self._slices = Slices(settings.slice_blocks)
        self._offloads = Offloads(context, self._slices)
        self._onboards = Onboards(context, tiers, self._slices)
        self._matching = Matching(context, tiers, self._slices, self._onboards, self._prefetches)
        self._heartbeats = Heartbeats(region, settings.silence_s, callbacks.clock)
        self._requests: dict[str, LiveRequest] = {}
        self.hints = Hints(self.host.store, callbacks.clock, self.counters)
        self.operations = Operations(context, tiers, self._prefetches, self.hints)
        self._results = LoadResults(settings, self.counters, self._rates, self._requests, callbacks)
        self._step = 0
        self._has_computed = False  # in the last step
        self._look_again_s: float | None = None  # when an idle engine looks again at a tier that is off

    def match(self, request_id: str, hashes: Sequence[bytes], start: int, end: int | None = None) -> int | None:
        """Return how many blocks of `hashes[start:end]` can be onboarded now. None: call again at the next step.

        Starts nothing and promises only what `onboard` can reserve in the same step. `end` must be before the last
        token of the request, unless the engine computes that one again. None means that another request is bringing
        this prefix into G1, where this request will find it, or that a long chain has not been examined whole.
        """
        end = len(hashes) if end is None else min(end, len(hashes))
        began_s = self._clock()
        request = self._live(request_id)
        request.asked_blocks = end
        if self._is_one_chain and not request.has_probed:
            request.offloads[0].arrive(self._arrive(request, hashes, began_s, start))
        blocks = self._matching.match(request, hashes, start, end)
        self._note_lookup(request_id, began_s, blocks)
        if self._trace is not None:
            self._trace("match", request=request_id, start=start, hashes=hashes[start:end], blocks=blocks)
        return blocks

    def match_groups(self, request_id: str, chains: Sequence[Sequence[bytes]], start: int, end: int) -> int | None:
        """Like `match`, in tokens, for an engine with several KV cache groups. `chains[g]` are the hashes of group g,
        `start` tokens are in G1 already, and a hit ends after at most `end` tokens."""
        began_s = self._clock()
        tokens = self._matching.match_groups(self._live(request_id), chains, start, end)
        self._note_lookup(request_id, began_s, tokens)
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

        The blocks are held until then. If a block has left the cache since `match`, the whole load fails. `tokens` is
        the number of tokens that the engine need not compute, for blocks of several groups.
        """
        request = self._live(request_id)
        request.has_blocks = True
        wanted = hashes[start : start + len(block_ids)]
        if self._trace is not None:
            self._trace("onboard", request=request_id, start=start, hashes=wanted, device_blocks=tuple(block_ids))
        worth = len(block_ids) * self._settings.traits.block_tokens if tokens is None else tokens
        may_begin = request.promised is not None or self._onboards.can_begin()
        load = None
        if may_begin:
            load = self._onboards.begin(request, wanted, block_ids, worth, self._matching.long_matches.take(request_id))
        self._matching.end(request)
        if load is None:
            self._results.fail(request, tuple(block_ids))
            return
        request.lower_tokens = load.lower_tokens()
        for tier in self.lower_tiers:
            self._slices.run(tier.hit, wanted)

    def _arrive(self, request: LiveRequest, hashes: Sequence[bytes], now_s: float, start: int) -> ChainUse | None:
        """Return what the chain of a request is to host memory; without adaptive eviction there, to the disk."""
        above = start if self._offloads.are_late else 0
        below = [use for tier in self.owned_tiers if (use := tier.arrive(hashes, now_s)) is not None]
        if request.hint is None or not self.host.store.policy.knows_uses:
            arrival = self.host.arrive(hashes, now_s, above=above)
        else:
            hint = self.hints.arrive(request.hint, request.tenant, hashes)
            request.retained = hint.retained
            arrival = self.host.arrive(hashes, now_s, hint, above)
        return below[0] if arrival is None and below else arrival

    def _note_lookup(self, request_id: str, began_s: float, found: int | None) -> None:
        ended_s = self._clock()
        self.counters.durations["match"].observe(ended_s - began_s)
        if self._spans is not None:
            facts = {"is_deferred": found is None, "found": found or 0}
            self._spans(SpanNote(request_id, "lookup", began_s, ended_s, facts))

    def lost_state_tokens(self, request_id: str) -> int:
        """Return how many tokens after the request's last hit are in the cache, but without a snapshot at their end."""
        request = self._requests.get(request_id)
        return 0 if request is None else request.lost_state_tokens

    def note_step(self, tokens: int, seconds: float) -> None:
        """Note that the engine computed `tokens` in a step of `seconds`. The rate decides between load and compute."""
        self._has_computed = tokens > 0
        self._rates.note_step(tokens, seconds)

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

        `block_ids[i]` is the G1 block of `hashes[i]`, or NO_BLOCK. All belong to one KV cache group. If its layers have
        a window, the engine gives up blocks while the request runs. So blocks without room are not tried again, and the
        last blocks, in which a hit would look first, are copied first.

        `priorities[i]` is the engine's priority of block i, 0 by default; None if the engine has no priorities. Only
        the blocks before the first one with a too low priority are copied, so that they form a prefix.

        Return `considered`: as long as the request has no more blocks than that, another call would change nothing.

            [0, considered)      looked at in an earlier step
            [considered, end)    computed after this step's forward pass: in G2, in flight, or ordered now
            [end, ...)           not computed yet, or generated blocks that are not offloaded
        """
        request = self._live(request_id)
        request.has_blocks = True
        self._matching.long_matches.end(request_id)  # if there is one, the request runs without a load
        progress = request.offloads[group]
        if priorities is not None:
            limit = min(computed_blocks, len(hashes), len(block_ids))
            computed_blocks = blocks_before_low_priority(priorities, limit, least=self._settings.min_priority)
        end = min(computed_blocks, len(hashes), len(block_ids))
        if not self._settings.offload_generated:
            end = min(end, prompt_blocks)
        begin = progress.considered
        if end > begin and request.may_offload and not self.counters.disabled:
            self._offloads.advance(progress, hashes, block_ids, end)
            if self._trace is not None and progress.considered > begin:
                fresh = hashes[begin : progress.considered]
                self._trace("offload", request=request_id, group=group, start=begin, hashes=fresh)
        return progress.considered

    def offload_all(self, completed: Sequence[Completed]) -> list[int]:
        """Call `offload` for many requests of an engine with one KV cache group; return what each call returns."""
        if self._trace is not None or self.counters.disabled:
            return [self._offload_one(one) for one in completed]
        return self._offloads.advance_all(completed, self._requests, self._offload_one)

    def _offload_one(self, one: Completed) -> int:
        request_id, hashes, block_ids, computed_blocks, prompt_blocks = one
        return self.offload(request_id, hashes, block_ids, computed_blocks=computed_blocks, prompt_blocks=prompt_blocks)

    def offload_snapshot(self, request_id: str, hashes: Sequence[bytes], block_ids: Sequence[int]) -> bool:
        """Order copies of a snapshot: `block_ids[i]` of one state group each, named `hashes[i]`. The coming forward
        pass completes them, or they are complete. The engine gives the blocks up soon, so there is no second try.

        Return whether the snapshot is in G2 or on its way; without it, the blocks before it are of no use.
        """
        request = self._live(request_id)
        request.has_blocks = True
        if not request.may_offload or self.counters.disabled:
            return False
        if self._trace is not None:
            self._trace("offload_snapshot", request=request_id, hashes=hashes, device_blocks=tuple(block_ids))
        return self._offloads.add_snapshot(hashes, block_ids, request.tenant)

    def discard_offloads(self, block_ids: Collection[int]) -> None:
        """Do not register copies in flight of these G1 blocks: the engine reuses the blocks before the copies end."""
        self._offloads.discard(set(block_ids))

    def step(self) -> StepPlan:
        """Hand out the orders collected since the last step. Call exactly once per engine step."""
        self._step += 1
        offloads = self._offloads.step()
        for tier in self.lower_tiers:
            tier.step(computes=self._has_computed)
        self._has_computed = False
        self._prefetches.step()
        self.operations.step()
        self._slices.step()
        self._matching.long_matches.step()
        plan = StepPlan(
            step=self._step,
            offloads=offloads,
            onboards=self._onboards.step(),
            overdue_offloads=self._offloads.overdue(),
            overdue_onboards=self._onboards.overdue(),
        )
        overdue = len(plan.overdue_offloads) + len(plan.overdue_onboards)
        self.counters.overdue_transfers += overdue
        self.host.check_next()
        if self._trace is not None and not plan.is_empty():
            orders = [(one.generation, one.block_ids, one.slots) for one in plan.offloads]
            loads = [(one.generation, one.block_ids, one.slots) for one in plan.onboards]
            self._trace("step", step=plan.step, offloads=orders, onboards=loads, overdue=overdue)
        return plan

    def settle(self) -> list[LoadResult]:
        """Read the control words: register what has arrived in G2, and return the onboards that have ended."""
        if not self.counters.disabled:
            self._disable_if_unreliable()
        self._offloads.settle()
        if not self.counters.disabled and self.host.region.has_different_copies:
            self._disable_if_unreliable()
        for tier in self.lower_tiers:
            self._onboards.fetched(tier.settle())
        if self._look_again_s is not None or self.counters.is_tier_off:
            self._look_again_later()
        has_orders = bool(self._offloads.in_flight or self._onboards.in_flight)
        if has_orders or not self._heartbeats.is_idle or self._onboards.ended:
            for load in self._onboards.settle(are_ranks_silent=self._heartbeats.check(has_orders=has_orders)):
                self._results.note(load)
        results = self._results.take()
        if self._trace is not None:
            for one in results:
                blocks, failed = len(one.block_ids), len(one.failed_block_ids)
                self._trace("loaded", request=one.request_id, blocks=blocks, failed=failed)
        return results

    def _look_again_later(self) -> None:
        """Let an idle engine take a step later, so that it notices and reports when a tier is on again."""
        if not self.counters.is_tier_off:
            self._look_again_s = None
        elif self._look_again_s is None or self._is_look_due():
            self._look_again_s = self._clock() + LOOK_AGAIN_S
            self.control.wake_after(LOOK_AGAIN_S)

    def _is_look_due(self) -> bool:
        return self._look_again_s is not None and self._clock() >= self._look_again_s

    def settle_offloads(self) -> bool:
        """Register offloads that have ended; return whether others read G1 blocks. May be called between steps."""
        self._offloads.settle()
        return self._offloads.are_blocks_read()

    def abandon_offloads(self) -> None:
        """Give up the offloads in flight, which end as failed, and release their blocks. Onboards keep their blocks."""
        self._offloads.abandon()

    def has_pending(self) -> bool:
        """Whether something is ordered, in flight or unreported: the engine must keep stepping.

        Transfers that have been overdue twice do not count, so that a hung copy does not keep an idle engine awake.
        Neither does a disk that is off.
        """
        patience = 2 * self._settings.overdue_steps
        return (
            bool(self._results)
            or self._slices.has_work()
            or self._prefetches.has_work()
            or self.operations.has_work()
            or self._onboards.is_under_way(within_steps=patience)
            or self.is_busy()
            or self._offloads.is_under_way(within_steps=patience)
            or self._is_look_due()
        )

    def needs_settle(self) -> bool:
        """Whether `settle` may have something to do although no rank has written a word: it alone notices what the
        lower tiers have read and written."""
        has_reads = self._onboards.is_reading() or self._prefetches.has_work()
        has_results = bool(self._results) or bool(self._onboards.ended)
        return has_results or has_reads or self.is_busy() or self._is_look_due()

    def finish(self, request_id: str, *chains: Sequence[bytes], is_preempted: bool = False) -> None:
        """Forget a request that ended, was aborted or was preempted. Its transfers continue. The hint of a preempted
        request is carried out when it ends.

        The whole chain of each group becomes recent, tail first: eviction then takes the tail before the head, without
        which the tail would be useless.
        """
        if self._trace is not None:
            self._trace("finish", request=request_id)
        request = self._requests.pop(request_id, None)
        if self._spans is not None:
            now_s = self._clock()
            self._spans(SpanNote(request_id, "finish", now_s, now_s, {}))
        if request is None:
            return
        if self._ended is not None and self._is_one_chain:
            self._ended(chains[0], request.asked_blocks)
        self._matching.end(request)
        self._onboards.end_request(request)
        for store in self._stores() if self._has_states else ():
            for blocks in hits_to_keep(store.contains, self._groups, chains):
                store.touch(blocks)
        for asked in self._asked_tiers:
            asked.forget_request(request_id)
        for progress, hashes in zip(request.offloads, chains, strict=True):
            end = max(progress.considered, request.hit_blocks)
            for tier in self.lower_tiers if request.may_offload else ():
                tier.used(hashes, end, request.tenant)
            self.counters.offload_skipped_blocks += progress.left_out
            if not self._has_states:
                recent = hashes[:end]  # once: a long chain is copied
                for store in self._stores():
                    if store is self.host.store and self._offloads.has_spare(progress):
                        self._slices.run(store.evict_next, recent, order=1)
                    else:
                        self._slices.run(store.touch, recent)
        if request.hint is not None and self._is_one_chain and not is_preempted:
            self._end_hint(request, request.hint, chains[0])
        self.counters.lost_state_tokens += request.lost_state_tokens
        if request.probed_blocks:
            host_blocks = request.hit_blocks - sum(request.lower_hits.values())
            self.counters.note_hits({Tier.HOST: host_blocks, **request.lower_hits}, request.probed_blocks)
            self.counters.count_match(request.hit_blocks, request.probed_blocks)

    def _end_hint(self, request: LiveRequest, hint: Hint, chain: Sequence[bytes]) -> None:
        tenant = request.tenant
        self.hints.finish(hint, tenant, chain, request.retained)
        if hint.prefetch_s is not None and self.operations.want_later(chain[:LONGEST_CHAIN], tenant, hint.prefetch_s):
            self.control.wake_after(hint.prefetch_s)

    def reset(self, *, ends_persistence: bool = False) -> bool:
        """Forget every block, in every tier. Transfers in flight end as failed; live requests computed with the old
        state are not offloaded any more. With `ends_persistence`, no block that is stored later outlives this engine:
        use it if the weights may differ from those that the identity of the disk cache describes.

        False if the disk could not forget its blocks durably, or has not answered since the start. This engine serves
        none of them, but an engine that starts before they are forgotten may.
        """
        self._forget_all()
        is_forgotten = self._forget_lower_tiers(ends_persistence=ends_persistence)
        if self._trace is not None:
            self._trace("reset", is_forgotten=is_forgotten)
        return is_forgotten

    def orders_in_flight(self) -> dict[int, Offload | Onboard]:
        """Return every order that holds G1 blocks, by generation; also orders that have not been handed out."""
        offloads = {generation: one.order for generation, one in self._offloads.in_flight.items() if one.is_held}
        return {**offloads, **{generation: one.order for generation, one in self._onboards.in_flight.items()}}

    def take_events(self) -> list[Event]:
        """Return the blocks stored in and removed from G2 and G3 since the last call, if the engine publishes events.

        Those of each tier are in order. Those of G3 come first: a block that was written to disk and then evicted from
        host memory is never in neither.
        """
        events = self.host.store.take_events()
        for tier in self.owned_tiers:
            events = tier.store.take_events() + events
        return events

    def has_events(self) -> bool:
        """Whether `take_events` would return something."""
        return any(store.has_events() for store in self._stores())

    def lower_tier_tokens(self, request_id: str) -> tuple[int, int]:
        """Return how many of the tokens last promised to this request come from disk and from the shared tier."""
        request = self._requests.get(request_id)
        disk, shared = (0 if request is None else request.lower_tokens.get(tier, 0) for tier in LOWER)
        return disk, shared

    def forget_host(self, tenant: bytes | None) -> None:
        if tenant is None:
            self._forget_blocks()
        else:
            self._offloads.discard_tenant(tenant)

    def _live(self, request_id: str) -> LiveRequest:
        request = self._requests.get(request_id)
        if request is None:
            tenant = self._tenant_of(request_id)
            offloads = [OffloadProgress(tenant, group.looks_back_over_all) for group in self._groups]
            request = self._requests[request_id] = LiveRequest(request_id, tenant, offloads)
            request.hint = self.read_hint(*self._hint_of(request_id))
        return request

    def _queues(self) -> dict[str, tuple[int, float | None]]:
        return {"offload": self._offloads.queue(), "onboard": self._onboards.queue(), **super()._queues()}

    def _forget_all(self) -> None:
        self._forget_blocks()
        self.operations.reset()

    def _forget_blocks(self) -> None:
        self._forget_host_memory()
        self._offloads.reset()
        self._onboards.reset()
        self._prefetches.reset()
        self.hints.reset()
        for request in self._requests.values():
            request.may_offload = not request.has_blocks

    def _disable_if_unreliable(self) -> None:
        """Forget everything and move nothing more after a rank has ended. Copies of other ranks end as failed later.

        The same if ranks that share their host memory do not have equal KV. Then the blocks on disk may be wrong too.
        """
        region = self.host.region
        if region.has_lost_rank():
            self._forget_all()
            reason = "the process of a rank has ended"
        elif region.has_different_copies:
            self.reset(ends_persistence=True)
            reason = "ranks that share their host memory have different KV (set `transfer.share_equal_kv: false`)"
        else:
            return
        self.counters.disabled = 1
        log.error("kvbm: %s; the engine continues without the cache until it is restarted", reason)
