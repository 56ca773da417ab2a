"""PrefixTree: all prompts of a trace as paths from the root. A node is one block after one prefix.

Blocks with equal ids share a cache entry only after equal prefixes, so a cache entry is a node. A prompt is its last
node. Node 0 is the root, which holds nothing. A block without an id is never equal to another one. The last block of a
prompt may be shorter; it equals only a block of the same length.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class PrefixTree:
    def __init__(self) -> None:
        self.parent = array("q", [0])
        self.tokens = array("q", [0])  # of the block of a node
        self.depth_tokens = array("q", [0])  # of the path from the root
        self.depth = array("q", [0])  # blocks of the path from the root
        self._children: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self.parent)

    def add(self, start: int, hash_ids: tuple[int, ...], *, token_count: int, block_tokens: int) -> int:
        """Return the node of the last block. The ids cover `token_count` tokens after the path of `start`."""
        children, node = self._children, start
        last_tokens = token_count - (len(hash_ids) - 1) * block_tokens
        whole, partial = (hash_ids, ()) if last_tokens == block_tokens else (hash_ids[:-1], hash_ids[-1:])
        for one in whole:
            child = children.get((node, one))
            if child is None:
                children[node, one] = child = self.append(node, block_tokens)
            node = child
        for one in partial:
            child = children.get((node, one, last_tokens))
            if child is None:
                children[node, one, last_tokens] = child = self.append(node, last_tokens)
            node = child
        return node

    def append(self, parent: int, token_count: int) -> int:
        """Return a new node that no other prompt shares, unless it continues this one."""
        node = len(self.parent)
        self.parent.append(parent)
        self.tokens.append(token_count)
        self.depth_tokens.append(self.depth_tokens[parent] + token_count)
        self.depth.append(self.depth[parent] + 1)
        return node

    def path(self, node: int) -> list[int]:
        """Return the nodes from this one up to the first block."""
        nodes, parent = [], self.parent
        while node:
            nodes.append(node)
            node = parent[node]
        return nodes

    def use_counts(self, leaves: Iterable[int]) -> array[int]:
        """How many of the paths to `leaves` each node is on. A leaf counts as often as it is named."""
        counts = array("q", bytes(8 * len(self)))
        for leaf in leaves:
            counts[leaf] += 1
        for node in range(len(self) - 1, 0, -1):  # a parent is older than its children
            counts[self.parent[node]] += counts[node]
        return counts
