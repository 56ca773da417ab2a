"""Messages between the leader and the process of the shared tier.

leader ──▶ Open, Get, Put, Probe, ListingTaken, Close ──▶ child
leader ◀── Opening, Problem, Opened, Listing, Status, Logged ◀── child
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvbm.shared.orders import Result
from kvbm.shared.settings import SharedSettings
from kvbm.shared.storage import SharedCounters
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
    has_runs: bool
    cores: frozenset[int]


class ListingTaken(NamedTuple):
    """The leader has taken the last part of a listing. Until then no other one is sent, because an engine that has
    nothing to do does not read its channel."""


class CloseStore(NamedTuple):
    timeout_s: float


class StoreProblem(NamedTuple):
    """The store cannot be used."""

    message: str
    hint: str | None


class StoreOpened(NamedTuple):
    """`run_blocks` is the number of blocks in an object."""

    engine_name: str
    run_blocks: int
    run_bytes: int


class StoreStatus(NamedTuple):
    """Orders that have ended, and the state of the store. Sent at least every BEAT_S while results are due."""

    results: Sequence[Result]
    off_because: str | None
    counters: SharedCounters
