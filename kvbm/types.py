"""Value types that several layers share. No behaviour, no imports beyond the standard library."""

from __future__ import annotations

import enum
from dataclasses import dataclass

MAX_SECONDS = 1_000_000  # of a time limit that a user sets; the system calls accept 24 days


class Tier(enum.StrEnum):
    """Tiers of memory, from the nearest to the engine to the farthest."""

    DEVICE = "G1"
    HOST = "G2"
    DISK = "G3"
    SHARED = "G4"


class SlotState(enum.IntEnum):
    """The low byte of a control word; the upper 56 bits are the generation that wrote it."""

    EMPTY = 0
    READY = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """How the leader finds one rank's segment; a rank sends it in the engine's handshake.

    The segment has `length` bytes behind `/proc/<pid>/fd/<fd>`, in `slot_count` slots of `slot_stride` bytes, of which
    `block_bytes` are payload. `layout_digest` names the order of the bytes inside a block.

    `replica_count` ranks with equal KV use one segment together; `replica` is the number of this one, from 0 on. Each
    rank sends its own `pid` and `fd`, also if it has only opened the memory of replica 0. `ready_s`: how long
    its allocation took.
    """

    rank: int
    pid: int
    fd: int
    length: int
    slot_count: int
    slot_stride: int
    block_bytes: int
    layout_digest: str
    replica: int = 0
    replica_count: int = 1
    ready_s: float = 0.0
