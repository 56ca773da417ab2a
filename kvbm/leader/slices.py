"""Slices: work on long chains of blocks, in parts over several engine steps.

A request of a million tokens has 62,500 blocks. Work on all of them at once would stop all other requests for tens of
milliseconds. So a chain of more than SLICE_BLOCKS blocks is handled one slice per step: the match, the copies of a
load, the first offload, and what happens at the end of a request. Shorter chains are handled at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

SLICE_BLOCKS = 4096  # the work on a slice takes about a millisecond


class Slices:
    """Work that may be done in a later step. `size` is the number of blocks of a slice. The leader's thread owns it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._waiting: deque[Callable[[], object]] = deque()

    def run(self, action: Callable[[Sequence[bytes]], object], hashes: Sequence[bytes]) -> None:
        """Call `action` with `hashes`, in slices over the next steps if there are many. The tail comes first."""
        if len(hashes) <= self.size:
            action(hashes)
            return
        for begin in range(0, len(hashes), self.size)[::-1]:
            self.later(partial(action, hashes[begin : begin + self.size]))

    def later(self, action: Callable[[], object]) -> None:
        """Call `action`, which handles at most one slice, in a later step."""
        self._waiting.append(action)

    def step(self) -> None:
        """Do the work on the next slice, if there is one."""
        if self._waiting:
            self._waiting.popleft()()
