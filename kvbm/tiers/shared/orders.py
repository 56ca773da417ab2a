"""Messages between the leader and the storage of the shared tier: orders and results are the same frozen values on the
whole way.

    SharedTier -> SharedClient -> channel -> server -> SharedStorage      Get, Put, Probe
    SharedTier <- SharedClient <- channel <- server <- SharedStorage      ObjectResult, ProbeResult, Listing
                  SharedClient -> channel -> server                       OpenStore, ListingTaken
                  SharedClient <- channel <- server                       StoreOpened

Those of every process are in kvbm/child/child.py. Every submitted order ends as exactly one result with its ticket. An
object holds an extent: consecutive blocks of one chain, from all ranks. The sequence hash of the last block names it,
because that hash covers the whole prefix.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvbm.tiers.shared.settings import SharedSettings
from kvbm.types import SegmentInfo

NOT_WANTED = -1  # in place of a host slot


class Outcome(enum.Enum):
    """How an order for one object ended."""

    GOOD = "good"
    ABSENT = "absent"  # the store has no such object
    EXISTS = "exists"  # a write found an object of that name, which has the same content
    BAD = "bad"  # the object is cut, altered, foreign, or of another version
    FAILED = "failed"  # nothing is known about the object


@dataclass(frozen=True, slots=True)
class Get:
    """Read the extent of `hashes`. Block i goes to `host_slots[i]`, and is skipped if that is NOT_WANTED."""

    ticket: int
    hashes: Sequence[bytes]
    host_slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Put:
    """Write the extent of `hashes` from host slots. Nothing is written unless the slots still carry `generations` after
    their payload has been read. With `replaces`, an object of that name is overwritten."""

    ticket: int
    hashes: Sequence[bytes]
    host_slots: Sequence[int]
    generations: Sequence[int]
    tenant: bytes = b""
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """Find how many of the extents of one chain are in the store, from the first on. `names` are in order."""

    ticket: int
    names: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class ObjectResult:
    """The end of a Get or a Put, for all its blocks. `is_aging`: the object will expire soon. `is_copy`: it was read
    from another engine's copy on this machine, which does not show the speed of the store."""

    ticket: int
    outcome: Outcome
    error: str | None = None
    is_aging: bool = False
    is_copy: bool = False

    @classmethod
    def failed(cls, order: Get | Put, error: str) -> ObjectResult:
        return cls(order.ticket, Outcome.FAILED, error)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The end of a Probe: the first `present` extents are in the store; None if that could not be found out."""

    ticket: int
    present: int | None


class Listing(NamedTuple):
    """A part of a listing of the namespace, which began at `began_s` of the monotonic clock. `names` are 64-bit digests
    of names, as bytes; see presence.py."""

    names: bytes
    began_s: float
    is_first: bool
    is_last: bool


Order = Get | Put | Probe
Result = ObjectResult | ProbeResult


def failed(order: Order, why: str) -> Result:
    """Return the result of an order of which nothing is known."""
    return ProbeResult(order.ticket, None) if isinstance(order, Probe) else ObjectResult.failed(order, why)


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
