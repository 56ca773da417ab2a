"""ChainUse: what the chain of a request is to a policy that knows uses, and ChainHint: what its client says of it."""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from kvbm.core.policies.ranking import (
    ARRIVING,
    CLASS_MASK,
    DEMOTED,
    GRACES_S,
    NEW,
    OWNED,
    PAUSES,
    PAUSES_S,
    RESIDENT,
    RETAINED,
    REUSED,
    SHARED,
)

LONGEST_CHAIN = 16_384  # blocks that are examined when a request arrives

_IS_RETAINED = bytes(mark & CLASS_MASK >= RETAINED for mark in range(256))


@cache
def _with_hint(its_class: int | None, *, is_owned: bool) -> bytes:
    """Return what each mark becomes with a class, None for its own one, and with OWNED."""
    return bytes(
        mark & ~(CLASS_MASK | OWNED) | (mark & CLASS_MASK if its_class is None else its_class) | OWNED * is_owned
        for mark in range(256)
    )


@dataclass(frozen=True, slots=True)
class ChainHint:
    """What a client says of the chain of a request (docs/reference/hints.md).

    Its first `retained` blocks are retained, in the class of graces `grace`. With `demotes`, the blocks that no earlier
    request has used leave first. `owns`: the request is of a session; `continues_session`: its chain continues that of
    the session's last request.
    """

    retained: int = 0
    grace: int = 0
    demotes: bool = False
    owns: bool = False
    continues_session: bool = False

    def applied(self, marks: bytes, begin: int, *, hit: int, reused_end: int) -> bytes:
        """Return the marks of the blocks from `begin` on, of which `hit` were in the cache, and `reused_end` used."""
        end = begin + len(marks)
        inner = {at for at in (self.retained, hit, reused_end) if begin < at < end}
        changed = bytearray()
        for at, upto in pairwise(sorted({begin, *inner, end})):
            its_class = None
            if at < self.retained:
                its_class = RETAINED + self.grace
            elif self.demotes and at >= reused_end:
                its_class = DEMOTED
            is_owned = self.owns and (self.continues_session or at >= hit)
            changed += marks[at - begin : upto - begin].translate(_with_hint(its_class, is_owned=is_owned))
        return bytes(changed)


def grace_class(retain_s: float) -> int:
    """Return the class of graces for a time; the longest one for longer times."""
    return min(bisect_left(GRACES_S, retain_s), len(GRACES_S) - 1)


@dataclass(frozen=True, slots=True)
class ChainUse:
    """What a chain is when its request arrives. Positions are in blocks:

        [0, hit)                in the cache
        [0, shared_end)         other chains that continue differently begin with these blocks, too
        [0, reused_end)         used before
        [reused_end, ...)       new blocks; their mark is `fresh`

    `pause` is the class of the pause since the last known use of the end of the chain, 0 for the longest one.
    `resident_pause` is the pause of the first block from `shared_end` on, if it is in the cache. Another chain may have
    used it since, so it is never longer. With the longer one, this block could leave before the end of that chain.
    `hint`: what a client says, if hints are followed.
    """

    hit: int
    shared_end: int
    reused_end: int
    pause: int
    resident_pause: int
    continues: bool
    hint: ChainHint | None = None

    @property
    def fresh(self) -> int:
        """The mark of blocks that were never used before."""
        return ARRIVING + self.pause if self.continues or self._has_resident_tail else NEW

    @property
    def fresh_from(self) -> int:
        """Where the blocks begin whose mark is `fresh`. What a hint says may be anything."""
        return self.reused_end if self.hint is None else sys.maxsize

    @property
    def _has_resident_tail(self) -> bool:
        return self.shared_end < self.hit

    def marks(self, begin: int, end: int) -> bytes:
        """Return the marks of the blocks from `begin` to `end`."""
        if begin >= self.fresh_from:
            return bytes((self.fresh,)) * (end - begin)
        shortest = PAUSES - 1
        spans = (
            (min(self.hit, self.shared_end), RESIDENT + shortest | REUSED | SHARED),
            (self.shared_end, ARRIVING + shortest | REUSED | SHARED),
            (self.hit, RESIDENT + self.resident_pause | REUSED),
            (self.reused_end, ARRIVING + self.pause | REUSED),
            (end, self.fresh),
        )
        marks = bytearray()
        at = begin
        for span_end, mark in spans:
            if (upto := min(end, span_end)) > at:
                marks += bytes([mark]) * (upto - at)
                at = upto
        if self.hint is None:
            return bytes(marks)
        return self.hint.applied(bytes(marks), begin, hit=self.hit, reused_end=self.reused_end)

    def beside(self, marks: bytes) -> ChainUse:
        """Return the use if these are the marks of the blocks in the cache. Blocks that were retained together count as
        used when their grace has ended, so none of them gets the class of a pause."""
        if not self.continues or not any(marks.translate(_IS_RETAINED)):
            return self
        return replace(self, pause=PAUSES - 1, resident_pause=PAUSES - 1)

    def seen_by(self, positions: Sequence[int], hit: int) -> ChainUse:
        """Return the arrival in a shadow cache that has the first `hit` of the blocks at these positions."""
        shared_end = bisect_left(positions, self.shared_end)
        reused_end = max(hit, bisect_left(positions, self.reused_end))
        hint = self.hint
        if hint is not None:
            hint = replace(hint, retained=bisect_left(positions, hint.retained))
        return ChainUse(hit, shared_end, reused_end, self.pause, self.resident_pause, self.continues, hint)


def pause_class(pause_s: float) -> int:
    return PAUSES - 1 - bisect_right(PAUSES_S, pause_s)
