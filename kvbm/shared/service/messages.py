"""Messages between the leader and the process of the shared tier.

leader ──▶ Open, Get, Put, Probe, ListingTaken, Close ──▶ child
leader ◀── Opening, Problem, Opened, Listing, Status, Logged ◀── child

Those that are not here are in orders.py and process/child.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvbm.shared.settings import SharedSettings
from kvbm.types import SegmentInfo


class OpenStore(NamedTuple):
    """The first message. `digest` names the blocks, and `namespace` also the secret; 16 bytes each. `facts` describe
    them to people. `cores`: allowed for the threads."""

    settings: SharedSettings
    digest: bytes
    namespace: bytes
    facts: Mapping[str, object]
    segments: Sequence[SegmentInfo]
    hash_bytes: int
    block_tokens: int
    has_extents: bool
    cores: frozenset[int]


class ListingTaken(NamedTuple):
    """The leader has taken the last part of a listing. Until then no other one is sent, because an engine that has
    nothing to do does not read its channel."""


class StoreOpened(NamedTuple):
    """`extent_blocks` is the number of blocks in an object."""

    store_name: str
    extent_blocks: int
    extent_bytes: int
