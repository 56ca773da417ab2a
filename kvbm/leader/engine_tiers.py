"""EngineTiers: host memory and the tiers below it, of one engine, with what they count.

Each leader is one: `Leader` for an engine that asks for blocks of device memory, `StorageLeader` for one that has host
memory of its own. The leader's thread owns it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbm.core.policies.table import POLICIES
from kvbm.errors import EnvironmentProblem
from kvbm.leader.hints import Hint, Invalid, parsed
from kvbm.metrics import Counters, Facts, TierBlocks
from kvbm.tiers.host_tier import HostListener, HostTier
from kvbm.tiers.lower_tier import AskedTier, OwnedTier, TierContext
from kvbm.tiers.rates import Rates

if TYPE_CHECKING:
    from kvbm.core.store import BlockStore
    from kvbm.host.region import Region
    from kvbm.leader.operations import Operations
    from kvbm.tiers.lower_tier import LowerTier, OpenTier
    from kvbm.tiers.settings import LeaderCallbacks, LeaderSettings

log = logging.getLogger(__name__)


class EngineTiers:
    """`open_tiers` makes the lower tiers, the nearest one first. With `reads_always`, blocks are read from them even
    where computing is faster."""

    def __init__(
        self,
        region: Region,
        settings: LeaderSettings,
        callbacks: LeaderCallbacks,
        open_tiers: Sequence[OpenTier],
        *,
        reads_always: bool,
    ) -> None:
        self.counters = Counters(hit_window=deque(maxlen=settings.window_requests))
        self.facts = Facts(settings.block_bytes, has_shared=settings.shared is not None)
        self.counters.shared.off = int(self.facts.has_shared)  # without such a tier: its blocks are in doubt
        self._settings = settings
        self._clock = clock = callbacks.clock
        traits = settings.traits
        self.host = HostTier(
            region,
            self.counters,
            hash_bytes=traits.hash_bytes,
            events=traits.publishes_events,
            eviction=settings.host_eviction,
            marks_blocks=POLICIES[settings.disk_eviction].knows_uses,
            clock=clock,
        )
        self._rates = Rates(self.counters, block_tokens=traits.block_tokens, clock=clock, reads_always=reads_always)
        self._context = TierContext(self.host, settings, self.counters, self._rates, callbacks)
        self.lower_tiers: tuple[LowerTier, ...] = tuple(open_tier(self._context) for open_tier in open_tiers)
        self.owned_tiers = tuple(tier for tier in self.lower_tiers if isinstance(tier, OwnedTier))
        self._asked_tiers = tuple(tier for tier in self.lower_tiers if isinstance(tier, AskedTier))
        self.host.listeners = tuple(tier for tier in self.lower_tiers if isinstance(tier, HostListener))
        self.operations: Operations | None = None

    def forget_host(self, tenant: bytes | None) -> None:
        """Forget every block in host memory, and what is on its way there from the device; or only what is on its way
        there for a tenant."""
        if tenant is None:
            self._forget_host_memory()

    def read_hint(self, given: object, session: object) -> Hint | None:
        """Return the hint that a request brings, and count it. `session`: see `parsed`. None without a valid one."""
        try:
            hint = parsed(given, session)
        except Invalid as why:
            self.counters.invalid_hints += 1
            log.debug("kvbm: a hint is ignored: %s", why)
            return None
        self.counters.hinted_requests += hint is not None
        return hint

    def is_busy(self) -> bool:
        """Whether a lower tier needs to be settled soon."""
        return any(tier.is_busy() for tier in self.lower_tiers)

    def blocks(self) -> TierBlocks:
        """Return the slots of each tier by state."""
        return {store.tier: store.counts().by_state() for store in self._stores()}

    def queues(self) -> dict[str, tuple[int, float]]:
        """Return for each queue how many blocks wait or move, and for how many seconds the oldest ones have. Any thread
        may call it."""
        now_s = self._clock()
        return {
            name: (blocks, max(0.0, now_s - since_s) if blocks and since_s is not None else 0.0)
            for name, (blocks, since_s) in self._queues().items()
        }

    def wear(self) -> dict[str, float]:
        """Return the known wear metrics of the drives of lower tiers, by metric name."""
        return {name: value for tier in self.owned_tiers for name, value in tier.wear().items()}

    def close(self) -> None:
        """Write to the lower tiers what is due and what is only in host memory, as far as the time allows, and close
        them."""
        for tier in reversed(self.lower_tiers):
            tier.close()

    def _queues(self) -> dict[str, tuple[int, float | None]]:
        """Return for each queue how many blocks wait or move, and since when the oldest one has."""
        return {name: queue for tier in self.lower_tiers for name, queue in tier.queues().items()}

    def _stores(self) -> list[BlockStore]:
        """Return the metadata of host memory and of the lower tiers that have such."""
        return [self.host.store, *(tier.store for tier in self.owned_tiers)]

    def _forget_host_memory(self) -> None:
        self.counters.host_reset_blocks += self.host.store.registered
        self.host.store.reset()
        self.counters.resets += 1

    def _forget_lower_tiers(self, *, ends_persistence: bool) -> bool:
        """Reset each tier. False if one could not forget its blocks durably; it stays off until it has."""
        is_forgotten = True
        for tier in self.lower_tiers:
            try:
                tier.reset(ends_persistence=ends_persistence)
            except EnvironmentProblem as error:
                log.error("kvbm: %s; %s stays off until its blocks are deleted", error.message, tier.reads.name)
                is_forgotten = False
        return is_forgotten
