"""FrequencyFilter: decides which blocks are hit often enough to be worth a write to disk.

A block's count starts at 1 when the block is registered in host memory. It doubles at each cache hit in any tier and
decreases by 1 per decay step; at 0 the block is forgotten. Blocks whose count reaches `threshold` are admitted. One
thread owns a filter. It has no clock: the owner calls `decay`.

An entry stores the decay step at which its count reaches 0, so that a decay step changes no entry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_COUNT = 1 << 20


class FrequencyFilter:
    """Counts up to `max_entries` blocks. Beyond that, the entry that was changed longest ago is forgotten."""

    def __init__(self, *, threshold: int, max_entries: int) -> None:
        self._threshold = threshold
        self._max_entries = max_entries
        self._step = 0
        self._ends: OrderedDict[bytes, int] = OrderedDict()  # the entry changed longest ago is first

    def count(self, sequence_hash: bytes) -> int:
        """Return the current count of the block, 0 if it is unknown."""
        return max(0, self._ends.get(sequence_hash, 0) - self._step)

    def register(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Note blocks that were registered in host memory; return the admitted ones."""
        for sequence_hash in hashes:
            self._set(sequence_hash, max(1, self.count(sequence_hash)))
        self._forget_some()
        return [sequence_hash for sequence_hash in hashes if self.count(sequence_hash) >= self._threshold]

    def hit(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Note a cache hit of each block; return those that are admitted because of it."""
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
        """Decrease every count by 1."""
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
