"""Segments without memory behind their payload, for the benchmarks of the leader: only control words are touched."""

from __future__ import annotations

import os

from kvbm.host.control_words import LANES, WORD_BYTES
from kvbm.host.layout import PAGE_BYTES, BlockLayout
from kvbm.host.segment import MEMFD_NAME
from kvbm.host.shared_memory import create_sealed
from kvbm.types import SegmentInfo


def sparse_segment(rank: int, layout: BlockLayout, slot_count: int) -> SegmentInfo:
    """Create a segment of this process, sealed like a real one. It lives until its descriptor is closed."""
    length = slot_count * layout.slot_stride + (slot_count + LANES + 1) * WORD_BYTES
    length = -(-length // PAGE_BYTES) * PAGE_BYTES
    return SegmentInfo(
        rank=rank,
        pid=os.getpid(),
        fd=create_sealed(MEMFD_NAME, length),
        length=length,
        slot_count=slot_count,
        slot_stride=layout.slot_stride,
        block_bytes=layout.block_bytes,
        layout_digest=layout.digest(),
    )
