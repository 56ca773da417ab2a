"""Bugs in the leader: what it offloads, holds, gives up and resets."""

from __future__ import annotations

from mutant import Mutant

MUTANTS = (
    Mutant(
        name="leader-registers-blocks-that-were-evicted-during-their-copy",
        bug="a block that is copied without a hold is registered although another request has written to it",
        file="kvbm/leader/offloads.py",
        old="            flight.dropped |= evicted\n",
        new="",
        fails="tests/leader/test_late_offloads.py",
    ),
    Mutant(
        name="leader-copies-blocks-under-the-name-of-their-former-content",
        bug="a noted block is copied although the engine has filled it with something else since",
        file="kvbm/leader/late_offloads.py",
        old="            if note[0] is not content:",
        new="            if content is None:",
        fails="tests/leader/test_late_offloads.py",
    ),
    Mutant(
        name="leader-evicts-the-head-of-a-spare-chain-first",
        bug="of a long chain that is in G1 again, host memory evicts the head first, without which the rest is useless",
        file="kvbm/leader/leader.py",
        old="self._slices.run(store.evict_next, recent, order=1)",
        new="self._slices.run(store.evict_next, recent)",
        fails="tests/leader/test_late_offloads.py",
    ),
    Mutant(
        name="leader-copies-at-once-to-host-memory-of-little-more-than-g1",
        bug="with `to_host: auto`, host memory above the size of G1 has blocks twice that G1 has, too",
        file="kvbm/leader/late_offloads.py",
        old="if host_blocks >= SMALL_HOST * g1_blocks:",
        new="if host_blocks >= g1_blocks:",
        fails="tests/leader/test_late_offloads.py",
    ),
    Mutant(
        name="leader-leaves-host-memory-empty-until-g1-is-full",
        bug="with `to_host: auto`, a reset of G1 loses blocks although host memory had room for them",
        file="kvbm/leader/late_offloads.py",
        old='self._fills_slots = context.settings.to_host == "auto"',
        new="self._fills_slots = False",
        fails="tests/leader/test_late_offloads.py",
    ),
    Mutant(
        name="leader-copies-unnamed-blocks-to-free-slots",
        bug="a block without a content that tells whether it was filled again during its copy is registered",
        file="kvbm/leader/late_offloads.py",
        old="if note is None or content is None or note[0] is not content:",
        new="if note is None or note[0] is not content:",
        fails="tests/leader/test_late_offloads.py",
    ),
    Mutant(
        name="leader-watches-as-little-with-much-host-memory",
        bug="a load of many blocks evicts some that were not copied, although host memory has room to watch more",
        file="kvbm/leader/late_offloads.py",
        old="most = max(context.settings.max_in_flight_blocks, context.host.capacity_blocks // HOST_SHARE)",
        new="most = context.settings.max_in_flight_blocks",
        fails="tests/leader/test_late_offloads.py",
    ),
    Mutant(
        name="leader-copies-evicted-blocks-that-host-memory-would-not-keep",
        bug="with `to_host: auto`, prompts that never repeat push conversations out of a small host memory",
        file="kvbm/leader/late_offloads.py",
        old="        if self._may_decline:",
        new="        if False:",
        fails="tests/leader/test_late_offloads.py",
    ),
    Mutant(
        name="leader-takes-blocks-in-g1-for-lost-ones",
        bug="a chain whose beginning is in G1 counts as one that came back, and is evicted before others",
        file="kvbm/leader/leader.py",
        old="above = start if self._offloads.are_late else 0",
        new="above = 0",
        fails="tests/leader/test_late_offloads.py",
    ),
    Mutant(
        name="leader-takes-equal-contents-for-the-same",
        bug="a block that was evicted and is being computed again counts as complete",
        file="kvbm/leader/late_offloads.py",
        old="if now is not then}",
        new="if now != then}",
        fails="tests/leader/test_late_offloads.py",
    ),
    Mutant(
        name="leader-never-looks-again",
        bug="an idle engine reports a disk as off for hours after it answers again",
        file="kvbm/leader/leader.py",
        old="self.control.wake_after(LOOK_AGAIN_S)",
        new="pass",
        fails="tests/leader/test_hanging_tiers.py -k looks_each_second",
    ),
    Mutant(
        name="leader-copies-a-completed-block-again",
        bug="one of many completed blocks is copied although it is on its way to G2",
        file="kvbm/leader/offloads.py",
        old="if block_id != NO_BLOCK and name not in departing and name not in wanted:",
        new="if block_id != NO_BLOCK and name not in wanted:",
        fails="tests/leader/test_long_chains.py",
    ),
    Mutant(
        name="leader-forgets-the-order-of-merged-blocks",
        bug="blocks of a merged order get the tenant of its first request",
        file="kvbm/tiers/slot_labels.py",
        old="self.own([slot for slot, _ in pairs], tenant)",
        new="self.own([slot for slot, _ in pairs], tenants[0])",
        fails="tests/leader/test_long_chains.py",
    ),
    Mutant(
        name="leader-registers-dropped-blocks",
        bug="a block that the engine reused during its copy is registered",
        file="kvbm/leader/offloads.py",
        old="        if flight.dropped:\n            is_ready",
        new="        if False:\n            is_ready",
        fails="tests/leader/test_long_chains.py",
    ),
    Mutant(
        name="leader-keeps-generations-in-a-list",
        bug="The garbage collector walks a list with an entry per block of host memory.",
        file="kvbm/tiers/host_tier.py",
        old='array("Q", bytes(8 * region.slot_count))',
        new="[0] * region.slot_count",
        fails="tests/leader/test_memory_at_scale.py",
    ),
    Mutant(
        name="leader-abandons-and-registers",
        bug="an offload is registered although its sources were released during the copy",
        file="kvbm/leader/offloads.py",
        old="""\
        self.reset()
        for flight in self.in_flight.values():
            self._release(flight)
""",
        new="""\
        for flight in self.in_flight.values():
            self._release(flight)
""",
        fails="tests/leader/test_leader.py",
    ),
    Mutant(
        name="leader-names-abandoned-orders",
        bug="after an exception the guard releases blocks that an abandoned offload no longer holds",
        file="kvbm/leader/leader.py",
        old="for generation, one in self._offloads.in_flight.items() if one.is_held}",
        new="for generation, one in self._offloads.in_flight.items()}",
        fails="tests/leader/test_leader.py",
    ),
    Mutant(
        name="leader-ages-hot-prefixes",
        bug="a hit in G1 does not refresh the chain in G2",
        file="kvbm/leader/leader.py",
        old="                        self._slices.run(store.touch, recent)",
        new="                        pass",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-asks-a-disk-that-failed-again",
        bug="a request whose load the disk has failed is sent to the disk again",
        file="kvbm/leader/matching.py",
        old="may_read_lower = request.may_read_lower and self._accepts_failed_loads",
        new="may_read_lower = self._accepts_failed_loads",
        fails="tests/leader/test_disk_tier.py -k does_not_read_from_it_again",
    ),
    Mutant(
        name="leader-copies-behind-a-low-priority",
        bug="blocks behind one whose priority is too low are copied",
        file="kvbm/leader/offloads.py",
        old="return next(low, end)",
        new="return end - sum(1 for _ in low)",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-copies-blocks-that-are-not-there",
        bug="a block that the engine does not keep is copied",
        file="kvbm/leader/offloads.py",
        old="if NO_BLOCK not in block_ids and departing.isdisjoint(fresh):",
        new="if departing.isdisjoint(fresh):",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-copies-what-is-in-flight",
        bug="a block on its way to G2 is copied again",
        file="kvbm/leader/offloads.py",
        old="if NO_BLOCK not in block_ids and departing.isdisjoint(fresh):",
        new="if NO_BLOCK not in block_ids:",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-counts-before-the-copy",
        bug="offloaded blocks are counted when ordered",
        file="kvbm/leader/offloads.py",
        old="""\
        self._held_blocks += len(block_ids)
""",
        new="""\
        self._held_blocks += len(block_ids)
        self._counters.offload_blocks += len(block_ids)
""",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-forgets-the-rest",
        bug="blocks that found no room are never looked at again",
        file="kvbm/leader/offloads.py",
        old="progress.considered = begin + absent[len(chosen)]",
        new="progress.considered = end",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-never-reports-the-end-of-an-aborted-load",
        bug="the end of an aborted request's load is not reported to the engine",
        file="kvbm/leader/request.py",
        old="""\
        self._untaken.append(LoadResult(request.request_id, block_ids, failed, self._is_live(request)))
""",
        new="""\
        if self._is_live(request):
            self._untaken.append(LoadResult(request.request_id, block_ids, failed, True))
""",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-offload-without-hold",
        bug="sources of an offload are not held (and not released)",
        file="kvbm/leader/offloads.py",
        old="""\
        self._block_pool.hold(block_ids)
""",
        new="",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-old-result-for-a-new-request",
        bug="the result of an aborted load goes to a new request of the same id",
        file="kvbm/leader/request.py",
        old="return self._requests.get(request.request_id) is request",
        new="return request.request_id in self._requests",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-reads-a-window-block-late",
        bug="a block that has left the window of its request is copied at a later step",
        file="kvbm/leader/offloads.py",
        old="""\
            progress.considered = end
""",
        new="""\
            progress.considered = end if not left_out else begin
""",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-registers-failed-blocks",
        bug="a block is registered whatever its control word says",
        file="kvbm/tiers/host_tier.py",
        old="[state is SlotState.READY for state in states]",
        new="[True for _ in states]",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-reset-keeps-offloading",
        bug="a request that lived through a reset offloads its old state",
        file="kvbm/leader/leader.py",
        old="request.may_offload = not request.has_blocks",
        new="request.may_offload = True",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-rests-before-the-disk-has-its-blocks",
        bug="an engine at rest leaves blocks unwritten that are due for the disk",
        file="kvbm/tiers/disk/tier.py",
        old="return self.is_writing() or (not self._is_filled and self._clock() < self._awake_until_s)",
        new="return not self._is_filled and self._clock() < self._awake_until_s",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-retries-a-failed-load",
        bug="a request whose load failed is offered a load again",
        file="kvbm/leader/request.py",
        old="        request.may_onboard &= is_below and request.may_read_lower\n",
        new="",
        fails="tests/leader",
    ),
    Mutant(
        name="leader-window-keeps-its-head",
        bug="the head of a window is copied when there is no room for its tail",
        file="kvbm/leader/offloads.py",
        old="chosen = (absent if progress.can_wait else absent[::-1])[:room]",
        new="chosen = absent[:room]",
        fails="tests/leader",
    ),
    Mutant(
        name="guard-releases-blocks-under-a-copy",
        bug="after a fault, blocks under a running copy are released at once",
        file="kvbm/leader/guarded.py",
        old="self._release(list((self._held - copied).elements()))",
        new="self._release(list(self._held.elements()))",
        fails="tests/embedded/test_boundary.py -k stay_held",
    ),
    Mutant(
        name="guard-forgets-who-waits-for-a-load",
        bug="after a fault, requests that wait for a load are not reported",
        file="kvbm/leader/guarded.py",
        old="        self._loads[request_id, tuple(block_ids)] = True",
        new="        pass",
        fails="tests/embedded/test_boundary.py -k waits_for_a_load",
    ),
    Mutant(
        name="guard-queries-nothing",
        bug="orders that were lost in a fault are never reported, and their blocks stay held",
        file="kvbm/leader/guarded.py",
        old="        if not is_due or not orders:",
        new="        if True:",
        fails="tests/embedded/test_boundary.py -k Leader-step -m 'not servers'",
    ),
    Mutant(
        name="guard-keeps-an-idle-engine-awake",
        bug="after a fault, a copy that never ends keeps an idle engine awake",
        file="kvbm/leader/guarded.py",
        old="(is_open and self._steps_off <= 2 * self._settings.overdue_steps)",
        new="is_open",
        fails="tests/embedded/test_boundary.py -k awake",
    ),
    Mutant(
        name="boundary-lets-exceptions-through",
        bug="a hook raises into the engine",
        file="kvbm/boundary.py",
        old="        self.boundary.caught(method.__qualname__, error, turns_off=turns_off)",
        new="        raise error",
        fails="tests/embedded/test_boundary.py -k Leader-step -m 'not servers'",
    ),
    Mutant(
        name="boundary-keeps-a-damaged-cache-on",
        bug="after an exception in a decision, the cache stays on",
        file="kvbm/boundary.py",
        old="self.boundary.caught(method.__qualname__, error, turns_off=turns_off)",
        new="self.boundary.caught(method.__qualname__, error)",
        fails="tests/embedded/test_boundary.py -k Leader-step -m 'not servers'",
    ),
    Mutant(
        name="leader-overlooks-loads-that-end-without-a-copy",
        bug="a load that fails before any copy is ordered is not reported, and its request waits for ever",
        file="kvbm/leader/leader.py",
        old=" or self._onboards.ended:",
        new=":",
        fails="tests/leader/test_disk_tier.py -k does_not_answer",
    ),
    Mutant(
        name="heartbeats-hear-the-dead",
        bug="a rank that is stopped is never recognised, and requests wait for it",
        file="kvbm/leader/heartbeats.py",
        old="if beat is None or beat != self._beats[rank] or not has_orders or self.is_idle:",
        new="if True:",
        fails="tests/leader/test_faults.py",
    ),
    Mutant(
        name="heartbeats-expect-idle-ranks-to-beat",
        bug="a rank without orders counts as silent",
        file="kvbm/leader/heartbeats.py",
        old="if beat is None or beat != self._beats[rank] or not has_orders or self.is_idle:",
        new="if beat is None or beat != self._beats[rank]:",
        fails="tests/leader/test_faults.py",
    ),
    Mutant(
        name="worker-does-not-beat",
        bug="a rank whose copies are slow counts as silent",
        file="kvbm/device/worker.py",
        old="        self._segment.beat()\n",
        new="",
        fails="tests/leader/test_faults.py -k alive",
    ),
    Mutant(
        name="onboards-promise-hits-that-wait-for-a-silent-rank",
        bug="while a rank is stopped, every request waits for it anew",
        file="kvbm/leader/onboards.py",
        old="""\
            and not self._are_ranks_silent
            and (oldest is None or not (oldest.load.is_reported or oldest.age(self._step) >= self._overdue_steps))
""",
        new="""\
            and (oldest is None or not oldest.age(self._step) >= self._overdue_steps)
""",
        fails="tests/leader/test_faults.py -k heartbeat",
    ),
    Mutant(
        name="scheduler-computes-in-blocks-under-a-copy",
        bug="after a failed load the embedded engine computes in blocks that a copy still writes to",
        file="kvbm/engines/embedded/engine/scheduler.py",
        old="""\
        self._release(request.block_ids[kept:])
        del request.block_ids[kept:]
""",
        new="",
        fails="tests/embedded/test_boundary.py -k hangs",
    ),
    Mutant(
        name="no-quota-for-hints",
        bug="A tenant can have all of host memory retained.",
        file="kvbm/leader/hints.py",
        old="limit=self.quota(tenant)",
        new="limit=self._store.capacity_blocks",
        fails="tests/leader/test_hints.py -k quota",
    ),
    Mutant(
        name="greedy-tenant-does-not-give-up-first",
        bug="A tenant with thousands of sessions makes those of others forgotten.",
        file="kvbm/leader/tenant_table.py",
        old="        if held > self._share(tenant):",
        new="        if False:",
        fails="tests/leader/test_hints.py -k remembers",
    ),
    Mutant(
        name="quota-of-a-tenant-is-not-reserved",
        bug="Clients with invented salts take the quota that an operator gave a tenant.",
        file="kvbm/leader/tenant_table.py",
        old="max(self._each, self._reserved.get(tenant, 0.0))",
        new="self._each",
        fails="tests/leader/test_hints.py -k operator_gave",
    ),
    Mutant(
        name="given-up-blocks-stay-retained",
        bug="Tenants that take turns have more of host memory retained than all may have.",
        file="kvbm/leader/hints.py",
        old="        self._store.unretain(chain, kept)",
        new="        pass",
        fails="tests/leader/test_hints.py -k given_up",
    ),
    Mutant(
        name="common-beginning-is-given-up",
        bug="A retention that ends early ends that of the beginning of another chain, which then has a hole.",
        file="kvbm/leader/hints.py",
        old="while kept < len(other) and other[kept] == chain[kept]:",
        new="while False:",
        fails="tests/leader/test_hints.py -k given_up",
    ),
    Mutant(
        name="leader-reads-the-wall-clock",
        bug="a clock that is set ahead makes the ranks look silent and the reads late",
        file="kvbm/tiers/settings.py",
        old="    clock: Callable[[], float] = time.monotonic\n",
        new="    clock: Callable[[], float] = lambda: time.time()\n",
        fails="tests/leader/test_hanging_tiers.py -k wall_clock",
    ),
)
