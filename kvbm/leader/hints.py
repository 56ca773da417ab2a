"""Hints: what clients say of their chains, from the words of a request to what adaptive eviction does with it.

    parsed      checks the words of docs/reference/hints.md, which come from outside
    arrive      a request arrives: how much of its chain is retained, within the quota of its tenant
    finish      it has ended: its session has this chain now; chains of sessions that are over may leave

A tenant may have `quota` blocks of host memory retained at a time, all tenants together TOTAL_SHARE of it; requests
without a salt may have that, too. What is above is not retained. A block counts until its time has ended, also if it
has left host memory. Tenants share nothing here: one cannot name the session of another one.

The leader's thread owns it. Everything here is bounded: sessions by number and blocks, retentions by number.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbm.core.chooser import LONGEST_CHAIN, ChainHint, grace_class
from kvbm.core.ranking import GRACES_S

if TYPE_CHECKING:
    from kvbm.core.store import BlockStore

LONGEST_S = GRACES_S[-1]
HIGH_S = GRACES_S[1]  # how long a priority of `high` retains
PRIORITIES = ("low", "normal", "high")
MOST_CHARACTERS = 128  # of the name of a session
MOST_ENDED = 8  # sessions that one hint ends
MOST_SESSIONS, MOST_RETENTIONS = 4096, 4096
EXPIRE_EVERY_S = 1.0
QUOTA_SHARE, TOTAL_SHARE = 0.25, 0.5  # of host memory

Session = tuple[bytes, str]  # tenant and name


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


@dataclass(slots=True)
class _Retention:
    tenant: bytes
    blocks: int
    until_s: float


class Hints:
    """See the module's text. `store` has the blocks of host memory. `total`: blocks that count as retained."""

    def __init__(self, store: BlockStore, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._quota = int(QUOTA_SHARE * store.capacity_blocks)
        self._quotas = {b"": int(TOTAL_SHARE * store.capacity_blocks)}  # of tenants with one of their own
        self._sessions: OrderedDict[Session, Sequence[bytes]] = OrderedDict()  # the last chain of each, oldest first
        self._session_blocks = 0
        self._retentions: dict[bytes, _Retention] = {}  # by the last block of the chain
        self._retained: dict[bytes, int] = {}  # blocks, by tenant
        self.total = 0
        self._expired_s = clock()

    def quota(self, tenant: bytes) -> int:
        """Return how many blocks a tenant may have retained. No bytes: the requests without a salt, which are all
        requests where no client uses salts."""
        return self._quotas.get(tenant, self._quota)

    def retained(self, tenant: bytes) -> int:
        """Return how many blocks count as retained for a tenant."""
        return self._retained.get(tenant, 0)

    def limit(self, share: float, tenant: bytes | None) -> int:
        """Set the quota of a tenant, or that of each tenant; return it in blocks."""
        blocks = int(share * self._store.capacity_blocks)
        if tenant is None:
            self._quota = blocks
            self._quotas.clear()
        elif tenant in self._quotas or len(self._quotas) < MOST_SESSIONS:
            self._quotas[tenant] = blocks
        return self.quota(b"" if tenant is None else tenant)

    def arrive(self, hint: Hint, tenant: bytes, chain: Sequence[bytes]) -> ChainHint:
        """Return what a hint means for the chain of a request that arrives."""
        retained = self._charge(hint, tenant, chain[:LONGEST_CHAIN])
        last = self._sessions.get((tenant, hint.session), ()) if hint.session else ()
        continues = 0 < len(last) <= len(chain) and chain[len(last) - 1] == last[-1]
        return ChainHint(retained, grace_class(hint.retain_s), hint.demotes, bool(hint.session), continues)

    def finish(self, hint: Hint, tenant: bytes, chain: Sequence[bytes]) -> None:
        """Note that a request with this hint has ended and used `chain`."""
        self._charge(hint, tenant, chain[:LONGEST_CHAIN])
        if hint.session:
            self._note_session((tenant, hint.session), chain[:LONGEST_CHAIN])
            if hint.demotes or hint.releases:
                self._let_go((tenant, hint.session), demotes=hint.demotes)
        for name in hint.ends:
            self._let_go((tenant, name), demotes=True)

    def reset(self) -> None:
        """Forget all chains: their blocks are gone."""
        for kept in (self._sessions, self._retentions, self._retained):
            kept.clear()
        self._session_blocks = self.total = 0

    def _charge(self, hint: Hint, tenant: bytes, chain: Sequence[bytes]) -> int:
        """Return how many blocks of the chain are retained, and count them in place of those of its beginning."""
        if not hint.retain_s or not chain:
            return 0
        self._expire()
        known = next((one for one in reversed(chain) if one in self._retentions), None)
        if known is not None and self._retentions[known].tenant == tenant:
            self._drop(known)
        room = min(
            self.quota(tenant) - self.retained(tenant),
            int(TOTAL_SHARE * self._store.capacity_blocks) - self.total,
        )
        blocks = max(0, min(len(chain), room)) if len(self._retentions) < MOST_RETENTIONS else 0
        if blocks and chain[-1] not in self._retentions:
            until_s = self._clock() + GRACES_S[grace_class(hint.retain_s)]
            self._retentions[chain[-1]] = _Retention(tenant, blocks, until_s)
            self._retained[tenant] = self.retained(tenant) + blocks
            self.total += blocks
        return blocks

    def _expire(self) -> None:
        now_s = self._clock()
        if now_s - self._expired_s < EXPIRE_EVERY_S:
            return
        self._expired_s = now_s
        for name in [name for name, one in self._retentions.items() if one.until_s <= now_s]:
            self._drop(name)

    def _drop(self, name: bytes) -> None:
        one = self._retentions.pop(name)
        self.total -= one.blocks
        left = self._retained[one.tenant] - one.blocks
        if left:
            self._retained[one.tenant] = left
        else:
            del self._retained[one.tenant]

    def _note_session(self, session: Session, chain: Sequence[bytes]) -> None:
        self._forget_session(session)
        self._sessions[session] = chain
        self._session_blocks += len(chain)
        while len(self._sessions) > MOST_SESSIONS or self._session_blocks > self._store.capacity_blocks:
            self._forget_session(next(iter(self._sessions)))

    def _forget_session(self, session: Session) -> Sequence[bytes]:
        chain = self._sessions.pop(session, ())
        self._session_blocks -= len(chain)
        return chain

    def _let_go(self, session: Session, *, demotes: bool) -> None:
        chain = self._forget_session(session)
        if chain:
            name = next((one for one in reversed(chain) if one in self._retentions), None)
            if name is not None and self._retentions[name].tenant == session[0]:
                self._drop(name)
            self._store.let_go(chain, demotes=demotes)
