"""LongMatches: which requests match their chains in slices, how much these matches pin, and when they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbm.leader.long_match import LongMatch

if TYPE_CHECKING:
    from kvbm.core.store import BlockStore
    from kvbm.leader.onboards import LiveRequest
    from kvbm.leader.slices import Slices

PINNED_SHARE = 0.75  # of host memory that several matches may pin together
RESTARTS = 2  # of a match; then the whole chain is examined in each call


class LongMatches:
    """The long matches of all requests. In one step they examine one slice together. The leader's thread owns it."""

    def __init__(self, in_host: BlockStore, slices: Slices) -> None:
        self._in_host = in_host
        self._slices = slices
        self._unexamined = slices.size  # blocks that may be examined in this step
        self._matches: dict[str, LongMatch] = {}  # by request id

    def may_match(self, request: LiveRequest, blocks: int) -> bool:
        """Whether a match of so many blocks is made in slices, with pins.

        Not for a request whose match had to begin again twice, because its hit in G1 moves or blocks are being
        forgotten: it would wait for ever. And not if the matches of several requests would pin most of G2.
        """
        if blocks <= self._slices.size:
            return False
        if self._matches and request.request_id not in self._matches:
            pinned = sum(other.position - other.start for other in self._matches.values())
            if pinned + blocks > self._in_host.capacity_blocks * PINNED_SHARE:
                return False
        return request.match_restarts <= RESTARTS

    def advance(
        self, request: LiveRequest, hashes: Sequence[bytes], start: int, end: int, on_disk: BlockStore | None
    ) -> LongMatch | None:
        """Examine the next slice of `hashes[start:end]`; return the match if it is complete."""
        found = self._matches.get(request.request_id)
        if found is None or not found.is_for(start, on_disk):
            request.match_restarts += found is not None
            self.end(request.request_id)
            found = self._matches[request.request_id] = LongMatch(start, self._in_host, on_disk)
        before = found.position
        is_complete = found.advance(hashes, end, self._unexamined)
        self._unexamined -= found.position - before
        if is_complete and found.position == start:
            self.end(request.request_id)
        return found if is_complete else None

    def take(self, request_id: str) -> LongMatch | None:
        """Return the match of a request, which ends here; the caller owns its handles."""
        return self._matches.pop(request_id, None)

    def end(self, request_id: str) -> None:
        """Unpin what was found for a request."""
        if (found := self.take(request_id)) is not None:
            for _, blocks in found.take():
                self._slices.release(blocks)

    def step(self, *, is_disk_on: bool) -> None:
        """Begin a step. If the disk is off, its next process begins when no block of the last one is pinned."""
        self._unexamined = self._slices.size
        if not is_disk_on:
            for request_id in [name for name, found in self._matches.items() if found.on_disk is not None]:
                self.end(request_id)
