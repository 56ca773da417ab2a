"""Hints: what clients say of their chains, from the words of a request to what adaptive eviction does with it.

    parsed      checks the words of docs/reference/hints.md, which come from outside
    arrive      a request arrives: how much of its chain is retained, within the quota of its tenant
    finish      it has ended: its session has this chain now; chains of sessions that are over may leave

A tenant may have `quota` blocks of host memory retained at a time, all tenants together TOTAL_SHARE of it; requests
without a salt may have that, too. What is above is not retained. A block counts until its time has ended, also if it
has left host memory. One tenant cannot name the session of another one.

The leader's thread owns it. Retentions, sessions, and chains that are brought back later are in tables of bounded size,
in which each tenant has a share (tenant_table.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbm.core.policies.chain_use import LONGEST_CHAIN, ChainHint, grace_class
from kvbm.core.policies.ranking import GRACES_S
from kvbm.leader.tenant_table import Holding, TenantTable
from kvbm.metrics import Counters

if TYPE_CHECKING:
    from kvbm.core.store import BlockStore

LONGEST_S = GRACES_S[-1]
HIGH_S = GRACES_S[1]  # how long a priority of `high` retains
PRIORITIES = ("low", "normal", "high")
MOST_CHARACTERS = 128  # of the name of a session
MOST_ENDED = 8  # sessions that one hint ends
MOST_SESSIONS, MOST_RETENTIONS = 4096, 4096
MOST_WAITING = 1024  # chains that are brought back later
EXPIRE_EVERY_S = 1.0
QUOTA_SHARE, TOTAL_SHARE = 0.25, 0.5  # of host memory


class Invalid(Exception):
    """A hint that is ignored. The text says why."""


@dataclass(frozen=True, slots=True)
class Hint:
    """The words of a hint. `retain_s` is 0 for no retention; `ends` are sessions that are over. `prefetch_s`: how long
    after the end of the request lower tiers bring the chain back."""

    session: str = ""
    retain_s: float = 0.0
    demotes: bool = False
    releases: bool = False
    ends: tuple[str, ...] = ()
    prefetch_s: float | None = None


def parsed(given: object, session: object = None) -> Hint | None:
    """Return the hint of a request; None if it has none. `session` is the session that its engine knows. Raises
    Invalid."""
    name = session if isinstance(session, str) and _is_name(session) else ""
    if given is None:
        return Hint(name) if name else None
    if not isinstance(given, Mapping):
        raise Invalid("it is not an object")
    if len(given) > len(_CHECKS) or any(one not in _CHECKS for one in given):
        raise Invalid(f"it has a key that is none of {', '.join(_CHECKS)}")
    for key, value in given.items():
        if not _CHECKS[key](value):
            raise Invalid(f"`{key}` has a wrong value")
    priority = given.get("priority", "normal")
    demotes = bool(given.get("demote")) or priority == "low"
    retain_s = float(min(given.get("retain_s", HIGH_S if priority == "high" else 0.0), LONGEST_S))
    if demotes and retain_s:
        raise Invalid("it retains and demotes")
    return Hint(
        given.get("session") or name,
        retain_s,
        demotes,
        bool(given.get("release")),
        tuple(given.get("end", ())),
        given.get("prefetch_s"),
    )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MOST_CHARACTERS


def _is_time(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf  # type: ignore[operator]


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) <= MOST_ENDED and all(map(_is_name, value))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "session": _is_name,
    "retain_s": _is_time,
    "priority": lambda value: isinstance(value, str) and value in PRIORITIES,
    "demote": lambda value: isinstance(value, bool),
    "release": lambda value: isinstance(value, bool),
    "end": _is_list_of_names,
    "prefetch_s": lambda value: _is_time(value) and value <= LONGEST_S,
}


class Hints:
    """See the module's text. `store` has the blocks of host memory. `retentions`: the chains that are retained;
    `waiting`: those that are brought back."""

    def __init__(self, store: BlockStore, clock: Callable[[], float], counters: Counters | None = None) -> None:
        self._store = store
        self._clock = clock
        self._counters = counters or Counters()
        blocks = store.capacity_blocks
        self._quota = int(QUOTA_SHARE * blocks)
        self._quotas = {b"": int(TOTAL_SHARE * blocks)}  # of tenants with one of their own
        self._reserved: dict[bytes, float] = {}  # the parts of the tables of tenants with a quota from an operator
        self._sessions = TenantTable(blocks, MOST_SESSIONS, cuts=False)  # their last chains, by name
        # By the last blocks of the chains.
        self.retentions = TenantTable(int(TOTAL_SHARE * blocks), MOST_RETENTIONS, cuts=True)
        self.waiting = TenantTable(blocks, MOST_WAITING, cuts=True)
        self._expired_s = clock()

    def quota(self, tenant: bytes) -> int:
        """Return how many blocks a tenant may have retained. No bytes: the requests without a salt, which are all
        requests where no client uses salts."""
        return self._quotas.get(tenant, self._quota)

    def limit(self, share: float, tenant: bytes | None) -> int:
        """Set the quota of a tenant, which is reserved for it, or that of each tenant; return it in blocks."""
        blocks = int(share * self._store.capacity_blocks)
        if tenant is None:
            self._quota = blocks
            self._quotas.clear()
            self._reserved.clear()
        elif tenant in self._quotas or len(self._quotas) < MOST_SESSIONS:
            self._quotas[tenant] = blocks
            self._reserved[tenant] = min(1.0, share / TOTAL_SHARE)
        for table in (self._sessions, self.retentions, self.waiting):
            table.reserve(self._reserved)
        return self.quota(b"" if tenant is None else tenant)

    def arrive(self, hint: Hint, tenant: bytes, chain: Sequence[bytes]) -> ChainHint:
        """Return what a hint means for the chain of a request that arrives."""
        retained = self._charge(hint, tenant, chain := chain[:LONGEST_CHAIN])
        self._counters.retain_quota_hints += hint.retain_s > 0 and retained < len(chain)
        known = self._sessions.of(tenant).get(hint.session)
        last = known.chain if known is not None else ()
        continues = 0 < len(last) <= len(chain) and chain[len(last) - 1] == last[-1]
        return ChainHint(retained, grace_class(hint.retain_s), hint.demotes, bool(hint.session), continues)

    def finish(self, hint: Hint, tenant: bytes, chain: Sequence[bytes], arrived: int = 0) -> None:
        """Note that a request with this hint has ended and used `chain`, of which `arrived` blocks are retained since
        its arrival."""
        chain = chain[:LONGEST_CHAIN]
        retained = self._charge(hint, tenant, chain)
        if retained < min(arrived, len(chain)):
            self._unretain(tenant, chain, retained)
        if hint.session:
            given_up = self._sessions.add(Holding(tenant, hint.session, chain))
            self._counters.session_share_hints += len(given_up)
            if hint.demotes or hint.releases:
                self._let_go(tenant, hint.session, demotes=hint.demotes)
        for name in hint.ends:
            self._let_go(tenant, name, demotes=True)

    def reset(self) -> None:
        """Forget all chains: their blocks are gone."""
        self._sessions.clear()
        self.retentions.clear()

    def _charge(self, hint: Hint, tenant: bytes, chain: Sequence[bytes]) -> int:
        """Return how many blocks of the chain are retained, and count them in place of those of its beginning."""
        if not hint.retain_s or not chain:
            return 0
        self._expire()
        self._end_retention(tenant, chain)
        blocks = self.retentions.fitting(tenant, len(chain), limit=self.quota(tenant))
        if not blocks:
            return 0
        until_s = self._clock() + GRACES_S[grace_class(hint.retain_s)]
        entry = Holding(tenant, chain[-1], chain[:blocks], until_s)
        for one, former in self.retentions.add(entry).items():
            if one is not entry:
                self._counters.retain_share_hints += 1
                self._unretain(one.tenant, former, len(one.chain))
        return len(entry.chain)

    def _unretain(self, tenant: bytes, chain: Sequence[bytes], kept: int) -> None:
        """Let others evict the blocks of a chain from `kept` on, unless another retained chain has them, too."""
        for one in self.retentions.of(tenant).values():
            other = one.chain
            while kept < len(other) and other[kept] == chain[kept]:
                kept += 1
                if kept == len(chain):
                    return
        self._store.unretain(chain, kept)

    def _expire(self) -> None:
        now_s = self._clock()
        if now_s - self._expired_s < EXPIRE_EVERY_S:
            return
        self._expired_s = now_s
        for one in [one for one in self.retentions if one.until_s <= now_s]:
            self.retentions.pop(one.tenant, one.key)

    def _end_retention(self, tenant: bytes, chain: Sequence[bytes]) -> None:
        retained = self.retentions.of(tenant)
        if retained and (name := next((one for one in reversed(chain) if one in retained), None)) is not None:
            self.retentions.pop(tenant, name)

    def _let_go(self, tenant: bytes, session: str, *, demotes: bool) -> None:
        ended = self._sessions.pop(tenant, session)
        if ended is not None and ended.chain:
            self._end_retention(tenant, ended.chain)
            self._store.let_go(ended.chain, demotes=demotes)
