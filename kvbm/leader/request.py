"""LiveRequest: what the leader knows of one request. The leader's thread owns it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbm.core.blocks import PinnedBlocks
    from kvbm.leader.lower_tier import LowerTier
    from kvbm.leader.offloads import OffloadProgress
    from kvbm.leader.open_reads import Extent
    from kvbm.types import Tier


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request, from its arrival to its end. If it is preempted and returns under its id, it is another LiveRequest.

    `awaited` is the number of the load it waited for, because that load brings its prefix; 0 if none. The `probed`
    blocks are those that it looked for in the cache, the `hit` blocks those that it got. `lost_state_tokens` are tokens
    whose blocks were found, but no snapshot at their end. `promised` pins what the last match found, for an engine that
    does not accept failed loads. `match_restarts`: how often its long match began again. `extents` are those that its
    last match found. `lower_tokens` are the tokens last promised to it from each lower tier, `lower_hits` the blocks
    that it got from there.
    """

    request_id: str
    tenant: bytes
    offloads: list[OffloadProgress] = field(default_factory=list)
    has_blocks: bool = False
    has_probed: bool = False
    awaited: int = 0
    is_waiting: bool = False
    may_onboard: bool = True
    may_read_lower: bool = True
    may_offload: bool = True
    probed_blocks: int = 0
    hit_blocks: int = 0
    lower_hits: Counter[Tier] = field(default_factory=Counter)
    lower_tokens: dict[Tier, int] = field(default_factory=dict)
    lost_state_tokens: int = 0
    promised: PinnedBlocks | None = None
    match_restarts: int = 0
    extents: dict[LowerTier, list[Extent]] = field(default_factory=dict)
