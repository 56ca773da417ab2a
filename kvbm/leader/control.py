"""CacheControl: answers operators' messages about a running cache, in the thread that owns the leader.

    thread of a client                         the leader's thread
    submit ────────── inbox ─────────────────▶ advance, once a step: runs the verb of one message, piece by piece
    waits for the future ◀──────────────────── the verb has ended

A verb is a generator in VERBS. It gets the cache and the arguments of the message, yields after each piece, and returns
the answer. A piece takes a few milliseconds at most, and a step runs pieces for BUDGET_S. A verb that yields WAITS has
nothing to do before the next step; it must end by itself. A message that has not begun can be cancelled; a verb that
has begun runs to its end. Nothing else of an operator reaches the metadata, so that one thread decides (docs/adr/0027).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbm.hashing import tenant as tenant_of
from kvbm.tiers.host_tier import HostTier
from kvbm.tiers.lower_tier import OwnedTier

if TYPE_CHECKING:
    from kvbm.leader.engine_tiers import EngineTiers
    from kvbm.leader.operations import Operations

BUDGET_S = 0.002  # of a step
PIECE_SLOTS = 65_536  # looked at in one piece
PIECE_BLOCKS = 2048  # forgotten in one piece
DURABLE_S = 0.7  # how long a clear waits for the disk, and a pin for its reads
PIN_S = 3600.0
AGES_S = (60, 600, 3600, 86_400)  # bounds of the ages that `ls` counts
MOST_TENANTS = 100  # in an answer
MOST_WAITING = 16  # messages
WAITS = "waits"

Answer = dict[str, Any]
Arguments = Mapping[str, str]
Verb = Generator[str | None, None, Answer]


class Refused(Exception):
    """A message that is not carried out; the text is for its sender."""


@dataclass(slots=True, eq=False)
class _Message:
    verb: str
    arguments: Arguments
    answer: Future[Answer] = field(default_factory=Future)


class CacheControl:
    """See the module's text. `submit` may be called by any thread, the rest by the leader's. `wake_after` lets an idle
    engine take a step after so many seconds; it does nothing if the engine cannot be woken."""

    def __init__(self, cache: EngineTiers, clock: Callable[[], float]) -> None:
        self.wake_after: Callable[[float], None] = lambda delay_s: None
        self._cache = cache
        self._clock = clock
        self._inbox: deque[_Message] = deque()  # filled by any thread, emptied by the leader's
        self._running: tuple[_Message, Verb] | None = None

    def submit(self, verb: str, arguments: Arguments) -> Future[Answer]:
        """Return the future of the answer, or of Refused. Raises Refused if too many messages wait."""
        if len(self._inbox) >= MOST_WAITING:
            raise Refused(f"{MOST_WAITING} messages wait already")
        message = _Message(verb, arguments)
        self._inbox.append(message)
        return message.answer

    def has_work(self) -> bool:
        return bool(self._inbox) or self._running is not None

    def advance(self) -> None:
        """Run pieces for BUDGET_S. An exception of a verb answers its message, and is raised."""
        if not self.has_work():
            return
        end_s = self._clock() + BUDGET_S
        while self._begin_next() and self._run_piece() and self._clock() < end_s:
            pass

    def refuse_all(self, why: str) -> None:
        """Refuse what waits or runs: the cache is off, or ends."""
        if self._running is not None:
            (message, verb), self._running = self._running, None
            verb.close()
            message.answer.set_exception(Refused(why))
        while self._inbox:
            answer = self._inbox.popleft().answer
            if answer.set_running_or_notify_cancel():
                answer.set_exception(Refused(why))

    def _begin_next(self) -> bool:
        """Return whether a verb runs. Begins the next one that its sender has not cancelled."""
        while self._running is None and self._inbox:
            message = self._inbox.popleft()
            if message.answer.set_running_or_notify_cancel():
                self._running = message, VERBS[message.verb](self._cache, message.arguments, self._clock)
        return self._running is not None

    def _run_piece(self) -> bool:
        """Return whether another piece may follow in this step."""
        assert self._running is not None, "a verb runs"
        message, verb = self._running
        try:
            return next(verb) != WAITS
        except StopIteration as end:
            message.answer.set_result(end.value)
        except Refused as refusal:
            message.answer.set_exception(refusal)
        except BaseException:
            message.answer.set_exception(Refused("kvbm failed on this message; see the engine's log"))
            raise
        finally:
            if message.answer.done():
                self._running = None
        return True


Part = HostTier | OwnedTier
"""A tier whose metadata is here. A lower one may replace its store and its labels, so they are read each time."""


def _parts(cache: EngineTiers) -> list[Part]:
    return [cache.host, *cache.owned_tiers]


def _begin_clear(cache: EngineTiers, part: Part, tenant: bytes | None) -> None:
    if isinstance(part, OwnedTier):
        part.begin_clear(tenant)
        return
    cache.forget_host(tenant)
    for tier in cache.lower_tiers:
        tier.reads.void(tenant)


def _not_durable(parts: Sequence[Part]) -> str:
    """Return why the last clears are not durable yet, empty if they are."""
    return "; ".join(filter(None, (part.not_durable() for part in parts if isinstance(part, OwnedTier))))


def _ls(cache: EngineTiers, arguments: Arguments, clock: Callable[[], float]) -> Verb:
    """Count the blocks of each tier by tenant and age."""
    tiers: list[Answer] = []
    for part in _parts(cache):
        counted: Counter[tuple[bytes, int]] = Counter()
        for start in range(0, part.store.capacity_blocks, PIECE_SLOTS):
            counted.update(_count(part, start, clock()))
            yield None
        tiers.append(_counted(part, counted))
    for one in cache.lower_tiers:
        if one not in cache.owned_tiers:
            tiers.append({"tier": str(one.kind)})
        tiers[[tier["tier"] for tier in tiers].index(str(one.kind))] |= {"is_on": one.is_on}
    facts = cache.facts
    return {
        "model": facts.info.get("model", ""),
        "block_bytes": facts.block_bytes,
        "block_tokens": int(facts.info.get("block_tokens", 0)),
        "ages_s": list(AGES_S),
        "tiers": tiers,
        "pins": [] if cache.operations is None else cache.operations.pins(),
    }


def _count(part: Part, start: int, now_s: float) -> Counter[tuple[bytes, int]]:
    """Count the blocks of PIECE_SLOTS slots by tenant and age; the age is a position in AGES_S, or its length."""
    labels, piece = part.labels, slice(start, start + PIECE_SLOTS)
    is_there = np.frombuffer(part.store.registered_mask(start, PIECE_SLOTS), np.bool_)
    owners = np.frombuffer(labels.owners, np.uint32)[piece][is_there].astype(np.int64)
    ages_s = int(now_s) - np.frombuffer(labels.since_s, np.int32)[piece][is_there]
    width = len(AGES_S) + 1
    keys, counts = np.unique(owners * width + np.searchsorted(AGES_S, ages_s, side="right"), return_counts=True)
    return Counter(
        {
            (labels.tenant(key // width), key % width): count
            for key, count in zip(keys.tolist(), counts.tolist(), strict=True)
        }
    )


def _counted(part: Part, counted: Counter[tuple[bytes, int]]) -> Answer:
    ages: dict[bytes, list[int]] = {}
    for (tenant, age), blocks in counted.items():
        ages.setdefault(tenant, [0] * (len(AGES_S) + 1))[age] += blocks
    largest = sorted(ages.items(), key=lambda one: (-sum(one[1]), one[0]))
    left_out = largest[MOST_TENANTS:]
    return {
        "tier": str(part.kind),
        "capacity_blocks": part.store.capacity_blocks,
        "states": part.store.counts().by_state(),
        "tenants": [{"tenant": tenant.hex(), "blocks_by_age": blocks} for tenant, blocks in largest[:MOST_TENANTS]],
        "left_out": {"tenants": len(left_out), "blocks": sum(sum(blocks) for _, blocks in left_out)},
    }


def _clear(cache: EngineTiers, arguments: Arguments, clock: Callable[[], float]) -> Verb:
    """Forget the blocks of a tier or of all, or those of one tenant, also those in flight. What requests store later
    stays. Blocks of a tenant in host memory are looked for again at the end: reads may have brought some back."""
    wanted = arguments.get("tier")
    tenant = bytes.fromhex(arguments["tenant"]) if "tenant" in arguments else None
    parts = [part for part in _parts(cache) if wanted in (None, part.kind)]
    if not parts:
        raise Refused(f"this engine has no tier {wanted}")
    forgotten = dict.fromkeys((part.kind for part in parts), 0)
    for part in (*parts, *(parts[:1] if tenant is not None and len(parts) > 1 else ())):
        forgotten[part.kind] += 0 if tenant is not None else part.store.registered
        _begin_clear(cache, part, tenant)
        for start in range(0, part.store.capacity_blocks if tenant is not None else 0, PIECE_SLOTS):
            for hashes in _owned(part, start, tenant or b""):
                part.store.forget(hashes)
                forgotten[part.kind] += len(hashes)
                cache.counters.note_reset(part.kind, len(hashes))
                yield None
            yield None
    end_s = clock() + DURABLE_S
    while _not_durable(parts) and clock() < end_s:
        yield WAITS
    return {"forgotten": {str(tier): count for tier, count in forgotten.items()}, "not_durable": _not_durable(parts)}


def _owned(part: Part, start: int, tenant: bytes) -> Generator[tuple[bytes, ...], None, None]:
    """Yield the hashes of a tenant's blocks in PIECE_SLOTS slots, in batches."""
    number = part.labels.number_of(tenant)
    if number is None:
        return
    is_there = np.frombuffer(part.store.registered_mask(start, PIECE_SLOTS), np.bool_)
    owners = np.frombuffer(part.labels.owners, np.uint32)[start : start + PIECE_SLOTS]
    hashes = part.store.hashes_at((np.flatnonzero(is_there & (owners == number)) + start).tolist())
    for at in range(0, len(hashes), PIECE_BLOCKS):
        yield hashes[at : at + PIECE_BLOCKS]


def _pin(cache: EngineTiers, arguments: Arguments, clock: Callable[[], float]) -> Verb:
    """Bring a chain to host memory, and hold what is there."""
    operations, chain = _operations(cache), _chain(cache, arguments)
    if operations.room <= 0:
        raise Refused("pins hold as much of host memory as they may; `kvbm cache release` ends them")
    answer = yield from _prefetch(cache, arguments, clock)
    pinned = operations.pin(chain, float(arguments.get("seconds", PIN_S)))
    if pinned is None:
        raise Refused("there are too many pins; `kvbm cache release` ends them")
    return {**answer, "pin": pinned[0], "pinned": pinned[1]}


def _prefetch(cache: EngineTiers, arguments: Arguments, clock: Callable[[], float]) -> Verb:
    """Let lower tiers read what host memory lacks of a chain. Reads that take longer continue."""
    operations, chain = _operations(cache), _chain(cache, arguments)
    end_s = clock() + DURABLE_S
    owner = tenant_of(arguments.get("salt"))
    while is_late := operations.is_on_its_way(chain, owner):
        if clock() >= end_s:
            break
        yield WAITS
    operations.end_asking()
    return {"blocks": len(chain), "in_host": cache.host.store.match(chain), "is_reading": is_late}


def _release(cache: EngineTiers, arguments: Arguments, clock: Callable[[], float]) -> Verb:
    """Release one pin, or all."""
    yield from ()
    name = bytes.fromhex(arguments["pin"]) if "pin" in arguments else None
    return {"released": _operations(cache).release(name)}


def _limit(cache: EngineTiers, arguments: Arguments, clock: Callable[[], float]) -> Verb:
    """Set the part of host memory that hints may retain, for a tenant or for each."""
    yield from ()
    tenant = bytes.fromhex(arguments["tenant"]) if "tenant" in arguments else None
    return {"blocks": _operations(cache).hints.limit(float(arguments["percent"]) / 100, tenant)}


def _operations(cache: EngineTiers) -> Operations:
    if cache.operations is None:
        raise Refused("this engine asks for blocks without their chains")
    return cache.operations


def _chain(cache: EngineTiers, arguments: Arguments) -> Sequence[bytes]:
    chain = _operations(cache).chain_of([int(one) for one in arguments["tokens"].split()], arguments.get("salt"))
    if chain is None:
        raise Refused("the blocks of this engine cannot be named by tokens")
    if not chain:
        raise Refused("the prompt is shorter than a block")
    return chain


VERBS: dict[str, Callable[[EngineTiers, Arguments, Callable[[], float]], Verb]] = {
    "ls": _ls,
    "clear": _clear,
    "pin": _pin,
    "prefetch": _prefetch,
    "release": _release,
    "limit": _limit,
}
