"""FrequencyFilter: which blocks have been asked for often enough to be worth a write to disk.

A block's count begins at 1 when it is registered in host memory, doubles at each cache hit in any tier and loses 1 per
decay step; at 0 it is forgotten. A block is let through from `threshold` on. One thread owns a filter; it has no clock:
whoever owns it says when a decay step is due.

Kept is not a block's count but the decay step at which it will be 0, so that a decay step touches no entry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_COUNT = 1 << 20


class FrequencyFilter:
    """Counts for up to `max_entries` blocks; of more, the one that was changed longest ago is forgotten."""

    def __init__(self, *, threshold: int, max_entries: int) -> None:
        self._threshold = threshold
        self._max_entries = max_entries
        self._step = 0
        self._ends: OrderedDict[bytes, int] = OrderedDict()  # changed longest ago first

    def __len__(self) -> int:
        return len(self._ends)

    def count(self, sequence_hash: bytes) -> int:
        """The block's count now, 0 where it is not known."""
        return max(0, self._ends.get(sequence_hash, 0) - self._step)

    def register(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Note blocks that have come to host memory; return those that are let through."""
        for sequence_hash in hashes:
            self._set(sequence_hash, max(1, self.count(sequence_hash)))
        self._forget_some()
        return [sequence_hash for sequence_hash in hashes if self.count(sequence_hash) >= self._threshold]

    def hit(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Note a cache hit of each; return those that are let through now and were not before."""
        crossed = []
        for sequence_hash in hashes:
            before = self.count(sequence_hash)
            after = min(2 * before, MAX_COUNT) or 1
            self._set(sequence_hash, after)
            if before < self._threshold <= after:
                crossed.append(sequence_hash)
        self._forget_some()
        return crossed

    def decay(self) -> None:
        """Take 1 from every count."""
        self._step += 1

    def clear(self) -> None:
        self._ends.clear()

    def _set(self, sequence_hash: bytes, count: int) -> None:
        self._ends[sequence_hash] = self._step + count
        self._ends.move_to_end(sequence_hash)

    def _forget_some(self) -> None:
        ends = self._ends
        while ends and (len(ends) > self._max_entries or next(iter(ends.values())) <= self._step):
            ends.popitem(last=False)
