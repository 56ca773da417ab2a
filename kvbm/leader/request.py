"""LiveRequest: what the leader knows of one request. Load: the blocks that it was promised, in the parts in which they
move into G1 (onboards.py). LoadResults: what the leader reports of loads that have ended, and what the end of a load
means for its request. The leader's thread owns all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbm.core.policies.ranking import PLAIN_MARK
from kvbm.tiers.settings import SpanNote

if TYPE_CHECKING:
    from kvbm.core.policies.chain_use import ChainUse
    from kvbm.core.store import PinnedBlocks
    from kvbm.leader.hints import Hint
    from kvbm.metrics import Counters
    from kvbm.tiers.lower_tier import Claim, LowerTier
    from kvbm.tiers.open_reads import Extent, Fetch, OpenReads
    from kvbm.tiers.rates import Rates
    from kvbm.tiers.settings import LeaderCallbacks, LeaderSettings
    from kvbm.types import Tier


@dataclass(slots=True)
class OffloadProgress:
    """How far the blocks of one KV cache group of a request have been offloaded.

    Of the first `considered` blocks, `left_out` found no room. With `can_wait`, blocks that found no room are tried
    again at a later step; without, the engine may have given them up by then. The chain is made recent again when more
    than `fresh_until` blocks have been evicted; at every block this would cost the chain's length.

    `arrival` says what the chain was when the request arrived, if eviction is adaptive. A request is `declined` when
    its next block would not be kept in host memory: no more of its blocks are copied.
    """

    tenant: bytes
    can_wait: bool = True
    considered: int = 0
    left_out: int = 0
    fresh_until: int = 0
    arrival: ChainUse | None = None
    is_declined: bool = False
    _fresh_from: int = 0  # blocks from there on have the same mark, which a decode step asks for often
    _fresh_mark: bytes = PLAIN_MARK

    def arrive(self, use: ChainUse | None) -> None:
        self.arrival = use
        if use is not None:
            self._fresh_from, self._fresh_mark = use.fresh_from, bytes((use.fresh,))

    def next_mark(self) -> bytes:
        """Return the mark of the next block of the chain; that of an unknown block if nothing is known."""
        if self.considered >= self._fresh_from:
            return self._fresh_mark
        return self.marks(self.considered, self.considered + 1)

    def marks(self, begin: int, end: int) -> bytes:
        """Return the marks of these blocks of the chain; empty if they are not known."""
        return b"" if self.arrival is None else self.arrival.marks(begin, end)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request, from its arrival to its end. If it is preempted and returns under its id, it is another LiveRequest.

    `awaited` is the load it waited for, because that load brings its prefix; None if it has not waited. The `probed`
    blocks are those that it looked for in the cache, the `hit` blocks those that it got. `lost_state_tokens` are tokens
    whose blocks were found, but no snapshot at their end. `promised` pins what the last match found, for an engine that
    does not accept failed loads. `match_restarts`: how often its long match began again. `extents` are those that its
    last match found. `lower_tokens` are the tokens last promised to it from each lower tier, `lower_hits` the blocks
    that it got from there. `hint` is what its client says of its chain, of which `retained` blocks are retained.
    """

    request_id: str
    tenant: bytes
    offloads: list[OffloadProgress] = field(default_factory=list)
    has_blocks: bool = False
    has_probed: bool = False
    awaited: Load | None = None
    is_waiting: bool = False
    may_onboard: bool = True
    may_read_lower: bool = True
    may_offload: bool = True
    probed_blocks: int = 0
    hit_blocks: int = 0
    lower_hits: dict[Tier, int] = field(default_factory=dict)
    lower_tokens: dict[Tier, int] = field(default_factory=dict)
    lost_state_tokens: int = 0
    promised: PinnedBlocks | None = None
    match_restarts: int = 0
    asked_blocks: int = 0
    extents: dict[LowerTier, list[Extent]] = field(default_factory=dict)
    hint: Hint | None = None
    retained: int = 0


@dataclass(frozen=True, slots=True)
class LoadPart:
    """Blocks of a load that move together: `block_ids[i]` receives `hashes[i]`. `first` is the position in the load."""

    first: int
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LowerPart(LoadPart):
    """A part that is read from a lower tier, where `extent` has its blocks."""

    tier: LowerTier
    extent: Extent | None


@dataclass(slots=True, eq=False)
class Load:
    """What was promised to a request. The engine need not compute `tokens` tokens.

    `lower` are the positions of the blocks that were in each lower tier, in order. `waiting` are parts of them that
    have not begun, pinned there by `kept`, and `reads` those that are being read; `slices` are parts in host memory
    that have not begun, with their pins. `open_parts` counts the parts in flight. Blocks from `end` on are not loaded.
    `idle_s`: how long its first missing part has made no progress; `lost_s`: the sum of such times that are over.
    `is_given_up`: its tier hung. `read_s`: when the first and the last read from a tier ended, after the load began;
    not for the tiers in `unrated`.
    """

    request: LiveRequest
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    tokens: int
    born_s: float
    born_step: int
    end: int
    lower: dict[Tier, list[int]] = field(default_factory=dict)
    waiting: deque[LowerPart] = field(default_factory=deque)
    reads: dict[Fetch, LowerPart] = field(default_factory=dict)
    kept: list[PinnedBlocks] = field(default_factory=list)
    slices: deque[tuple[LoadPart, PinnedBlocks]] = field(default_factory=deque)
    open_parts: int = 0
    is_failed: bool = False
    is_failed_below: bool = False
    is_given_up: bool = False
    is_reported: bool = False
    read_s: dict[Tier, tuple[float, float]] = field(default_factory=dict)
    unrated: set[Tier] = field(default_factory=set)
    idle_s: float = 0.0
    lost_s: float = 0.0

    def part(self, positions: Sequence[int]) -> LoadPart:
        return LoadPart(*self._blocks(positions))

    def _blocks(self, positions: Sequence[int]) -> tuple[int, tuple[bytes, ...], tuple[int, ...]]:
        first, last = (positions[0], positions[-1]) if positions else (0, -1)
        if last - first + 1 == len(positions):
            return first, self.hashes[first : last + 1], self.block_ids[first : last + 1]
        hashes, block_ids = self.hashes, self.block_ids
        return first, tuple(hashes[i] for i in positions), tuple(block_ids[i] for i in positions)

    def add(self, tier: LowerTier, claim: Claim) -> None:
        """Add a part per batch. Parts wait in the order of their positions, so that the beginning arrives first."""
        if not claim.batches:
            return
        here, known = self.lower.setdefault(tier.kind, []), len(self.waiting)
        for positions, extent in claim.batches:
            here += positions
            self.waiting.append(LowerPart(*self._blocks(positions), tier, extent))
        if known and self.waiting[known].first < self.waiting[known - 1].first:
            here.sort()
            self.waiting = deque(sorted(self.waiting, key=lambda part: part.first))
        self.kept += claim.kept

    def count_of(self, tier: Tier, end: int) -> int:
        """Return how many of its first `end` blocks come from this tier."""
        return bisect_left(self.lower.get(tier, ()), end)

    def lower_blocks(self, end: int) -> int:
        """Return how many of its first `end` blocks come from lower tiers."""
        return sum(bisect_left(positions, end) for positions in self.lower.values())

    def lower_tokens(self) -> dict[Tier, int]:
        """Return the part of `tokens` that comes from each lower tier. With several KV cache groups it is the share of
        the blocks."""
        whole = max(1, len(self.hashes))
        return {tier: self.tokens * self.count_of(tier, self.end) // whole for tier in self.lower}

    def first_missing(self) -> tuple[LowerPart, Fetch | None] | None:
        """Return the first part that has not come from a lower tier, and its read, None while it waits for room."""
        missing: list[tuple[LowerPart, Fetch | None]] = [(part, read) for read, part in self.reads.items()]
        if self.waiting:
            missing.append((self.waiting[0], None))
        return min(missing, key=lambda one: one[0].first, default=None)

    def has_hung(self, idle_s: float, reads: OpenReads) -> bool:
        """Note that its first missing part has made no progress for `idle_s`. Return whether the load has lost too much
        time. `reads`: of its tier."""
        if idle_s < self.idle_s and self.idle_s > reads.grace_s:
            self.lost_s += self.idle_s
        self.idle_s = idle_s
        return self.lost_s + (idle_s if idle_s > reads.grace_s else 0.0) > reads.limit_s

    def note_read(self, tier: Tier, waited_s: float) -> None:
        self.read_s[tier] = (self.read_s.get(tier, (waited_s, waited_s))[0], waited_s)

    @property
    def loaded_tokens(self) -> int:
        """The part of `tokens` that the engine gets in the end. With several KV cache groups it is all of them."""
        return self.tokens * self.end // max(1, len(self.hashes))


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The end of one request's load: its G1 blocks may be read, except `failed_block_ids`.

    `is_live`: the request has neither ended nor been preempted since the load began.
    """

    request_id: str
    block_ids: tuple[int, ...]
    failed_block_ids: tuple[int, ...]
    is_live: bool


class LoadResults:
    """Those that `take` has not returned. `requests` are the live ones of the leader."""

    def __init__(
        self,
        settings: LeaderSettings,
        counters: Counters,
        rates: Rates,
        requests: Mapping[str, LiveRequest],
        callbacks: LeaderCallbacks,
    ) -> None:
        self._callbacks = callbacks
        self._settings = settings
        self._counters = counters
        self._rates = rates
        self._requests = requests
        self._untaken: list[LoadResult] = []

    def __bool__(self) -> bool:
        return bool(self._untaken)

    def take(self) -> list[LoadResult]:
        results, self._untaken = self._untaken, []
        return results

    def note(self, load: Load) -> None:
        """Note a load that has ended, whole, cut or failed. After a cut, the request computes the rest and loads no
        more."""
        if load.is_failed:
            self._note_span(load, 0, 0.0)
            self.fail(load.request, load.block_ids, is_below=load.is_failed_below)
            return
        request, left_out = load.request, load.block_ids[load.end :]
        block_tokens = self._settings.traits.block_tokens
        self._counters.onboard_blocks += load.end
        self._counters.onboard_failed_blocks += len(left_out)
        self._counters.onboard_bytes += load.end * self._settings.block_bytes
        request.hit_blocks += load.loaded_tokens // block_tokens
        request.lower_tokens = load.lower_tokens()
        for tier, tokens in request.lower_tokens.items():
            self._counters.of(tier).onboard_blocks += load.count_of(tier, load.end)
            request.lower_hits[tier] = request.lower_hits.get(tier, 0) + tokens // block_tokens
        request.may_onboard &= not left_out
        saved_s = 0.0
        if self._is_live(request):
            self._counters.matched_tokens += load.loaded_tokens
            if rate := self._rates.tokens_per_s:
                saved_s = load.loaded_tokens / rate
                self._counters.saved_prefill_s += saved_s
        self._note_span(load, load.loaded_tokens if self._is_live(request) else 0, saved_s)
        self._report(request, load.block_ids, left_out)

    def _note_span(self, load: Load, tokens: int, saved_s: float) -> None:
        if self._callbacks.spans is None:
            return
        blocks = 0 if load.is_failed else load.end
        lower = {f"{tier.name.lower()}_blocks": load.count_of(tier, blocks) for tier in load.lower}
        facts: dict[str, int | float | str] = {
            "tokens": tokens,
            "blocks": blocks,
            "bytes": blocks * self._settings.block_bytes,
            "failed_blocks": len(load.block_ids) - blocks,
            "saved_prefill_s": saved_s,
            **lower,
        }
        request_id = load.request.request_id
        self._callbacks.spans(SpanNote(request_id, "load", load.born_s, self._callbacks.clock(), facts))

    def fail(self, request: LiveRequest, block_ids: tuple[int, ...], *, is_below: bool = False) -> None:
        """Note a load that failed. The request recomputes and gets no other load, so that it cannot loop; only if a
        lower tier failed, it may load from host memory once."""
        if self._is_live(request):
            self._counters.onboard_failed_blocks += len(block_ids)
        request.may_onboard &= is_below and request.may_read_lower
        request.may_read_lower = False
        request.lower_tokens = {}
        self._report(request, block_ids, block_ids)

    def _report(self, request: LiveRequest, block_ids: tuple[int, ...], failed: tuple[int, ...]) -> None:
        self._untaken.append(LoadResult(request.request_id, block_ids, failed, self._is_live(request)))

    def _is_live(self, request: LiveRequest) -> bool:
        return self._requests.get(request.request_id) is request
