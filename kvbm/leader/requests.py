"""LiveRequest: what the leader remembers of a request between its arrival and its end."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class OffloadProgress:
    """How far the blocks of one KV cache group of a request have been offloaded.

    Of the first `considered` blocks, `left_out` found no room. With `can_wait`, blocks that found no room are tried
    again at a later step; without, the engine may have given them up by then. The chain is made recent again when more
    than `fresh_until` blocks have been evicted.
    """

    tenant: bytes
    can_wait: bool = True
    considered: int = 0
    left_out: int = 0
    fresh_until: int = 0


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request. If it is preempted and returns under its id, it is another LiveRequest.

    `awaited` is the number of the load it waited for, because that load brings its prefix; 0 if none. The `probed`
    blocks are those that it looked for in the cache, the `hit` blocks those that it got.
    """

    request_id: str
    tenant: bytes
    offloads: list[OffloadProgress] = field(default_factory=list)
    has_blocks: bool = False
    has_probed: bool = False
    awaited: int = 0
    is_waiting: bool = False
    may_onboard: bool = True
    may_read_disk: bool = True
    may_offload: bool = True
    probed_blocks: int = 0
    hit_blocks: int = 0
    disk_hit_blocks: int = 0
    disk_tokens: int = 0
