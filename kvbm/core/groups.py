"""KV cache groups: layers of one model that have their own blocks, and how far back they attend.

Most models have one group, in which a token attends to all tokens before it. In a hybrid model some layers attend only
to a window, and an engine keeps no blocks before it. The blocks that a hit of `end` tokens needs then differ by group:

    full attention     |===============================| end
    window             |                      |========| end     blocks before the window are not needed
    chunk              |                 |=============| end     tokens attend only to their own chunk
    state              |                            |==| end     the block that ends there is a snapshot of the state

A block id belongs to one group at a time and all groups share the engine's pool, so a block of any group fits any slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

SNAPSHOTS_PER_CHAIN = 2  # that the end of a request makes recent


@dataclass(frozen=True, slots=True)
class Group:
    """A KV cache group with `block_tokens` tokens per block. At most one limit is set: the layers attend to the last
    `window_tokens` tokens, including the token itself, or only to their own chunk of `chunk_tokens`."""

    block_tokens: int
    window_tokens: int | None = None
    chunk_tokens: int | None = None

    @property
    def looks_back_over_all(self) -> bool:
        return self.window_tokens is None and self.chunk_tokens is None

    def first_needed_block(self, end: int) -> int:
        """Return the first block that the token at position `end` attends to."""
        first_token = 0
        if self.window_tokens is not None:
            first_token = max(0, end - self.window_tokens + 1)
        elif self.chunk_tokens is not None:
            first_token = end // self.chunk_tokens * self.chunk_tokens
        return first_token // self.block_tokens


@dataclass(frozen=True, slots=True)
class StateGroup(Group):
    """A KV cache group whose layers have one state per sequence instead of KV per token (Mamba, gated delta nets).

    A block is a snapshot: the state after the last of its tokens, which stands for all tokens before. Most boundaries
    have none.
    """

    @property
    def looks_back_over_all(self) -> bool:
        return False

    def first_needed_block(self, end: int) -> int:
        """Return the block that ends at `end`, a multiple of `block_tokens`; it is the only one that is needed."""
        return end // self.block_tokens - 1


def needed_blocks(groups: Sequence[Group], chains: Sequence[Sequence[bytes]], end: int) -> list[bytes]:
    """Return the names of the blocks that a hit of `end` tokens needs, from the first tokens to the last.

    At the same position snapshots come last.
    """
    found = []
    for group, chain in zip(groups, chains, strict=True):
        is_state = isinstance(group, StateGroup)
        for block in range(max(0, group.first_needed_block(end)), end // group.block_tokens):
            found.append(((block + 1) * group.block_tokens, is_state, chain[block]))
    return [name for _, _, name in sorted(found, key=lambda one: one[:2])]


def longest_hit(
    is_present: Callable[[bytes], bool],
    groups: Sequence[Group],
    chains: Sequence[Sequence[bytes]],
    *,
    start: int,
    end: int,
) -> int:
    """Return how many tokens a request has after the longest hit that every group can serve, `start` without a hit.

    `chains[g][i]` names block i of group g. The first `start` tokens are in G1 already. A hit ends after at most `end`
    tokens, at a position where a block of every group ends.
    """
    unit = math.lcm(*(group.block_tokens for group in groups))
    reach = end // unit * unit
    agreed = 0
    while reach > start and agreed < len(groups):
        agreed = 0
        for group, chain in zip(groups, chains, strict=True):
            shorter = _served(is_present, group, chain, start, reach) // unit * unit
            if shorter == reach:
                agreed += 1
            reach = shorter
    return max(reach, start)


def hits_to_keep(
    is_present: Callable[[bytes], bool], groups: Sequence[Group], chains: Sequence[Sequence[bytes]]
) -> Iterator[list[bytes]]:
    """Yield the blocks of the longest hits of a whole request, in the order in which a tier makes them recent: the
    shorter hit last, a snapshot less than its chain.

    Eviction then shortens the chain to the shorter hit before it takes it whole. Older snapshots, and blocks behind the
    last one, are left to age.
    """
    reach = min(len(chain) * group.block_tokens for group, chain in zip(groups, chains, strict=True))
    for _ in range(SNAPSHOTS_PER_CHAIN):
        hit = longest_hit(is_present, groups, chains, start=0, end=reach)
        yield needed_blocks(groups, chains, hit)
        reach = max(0, hit - 1)


def _served(is_present: Callable[[bytes], bool], group: Group, chain: Sequence[bytes], start: int, reach: int) -> int:
    """Return an upper bound of the prefix that this group can serve; if it is `reach`, it is exact."""
    if isinstance(group, StateGroup):
        ends = range(reach // group.block_tokens, start // group.block_tokens, -1)
        return next((end * group.block_tokens for end in ends if is_present(chain[end - 1])), start)
    first = max(start // group.block_tokens, group.first_needed_block(reach))
    blocks = range(first, reach // group.block_tokens)
    for block in blocks if group.looks_back_over_all else reversed(blocks):
        if not is_present(chain[block]):
            return block * group.block_tokens
    return reach
