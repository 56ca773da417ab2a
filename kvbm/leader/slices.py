"""Slices: work on long chains of blocks, in parts over several engine steps.

A request of a million tokens has 62,500 blocks. Work on all of them at once would stop all other requests for tens of
milliseconds. So a chain of more than SLICE_BLOCKS blocks is handled one slice per step: the match, the copies of a
load, the first offload, and what happens at the end of a request. Shorter chains are handled at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbm.core.blocks import PinnedBlocks

SLICE_BLOCKS = 4096  # the work on a slice takes about a millisecond
LARGE_BACKLOG = 64  # entries; with each of so many more, a step does the work of one slice more


class Slices:
    """Work that may be done in a later step. `size` is the number of blocks of a slice. The leader's thread owns it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()  # (blocks, action)
        self._releases: deque[PinnedBlocks] = deque()

    def run(self, action: Callable[[Sequence[bytes]], object], hashes: Sequence[bytes]) -> None:
        """Call `action` with `hashes`, in slices over the next steps if there are many. The tail comes first."""
        if len(hashes) <= self.size:
            action(hashes)
            return
        for begin in range(0, len(hashes), self.size)[::-1]:
            part = hashes[begin : begin + self.size]
            self._waiting.append((len(part), partial(action, part)))

    def release(self, blocks: PinnedBlocks) -> None:
        """Unpin blocks in a later step."""
        self._releases.append(blocks)

    def has_work(self) -> bool:
        """Whether something is left to do."""
        return bool(self._releases or self._waiting)

    def step(self) -> None:
        """Do the work on about one slice of blocks; releases come first, because others may need the room."""
        backlog = len(self._releases) + len(self._waiting)
        left = self.size * (1 + backlog // LARGE_BACKLOG)
        while self._releases and left > 0:
            blocks = self._releases.popleft()
            left -= len(blocks.slots)
            blocks.release()
        while self._waiting and left > 0:
            count, action = self._waiting.popleft()
            left -= count
            action()
