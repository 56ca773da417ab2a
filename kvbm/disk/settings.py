"""What a disk tier is told: where, how much, how; and for which engine its blocks are good."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """The keys of `tiers.disk` in a profile. `capacity_bytes` is over all ranks; `block_count` wins over it."""

    directory: Path
    capacity_bytes: int | None = None
    block_count: int | None = None
    allocator: str = "default"  # "default": O_DIRECT is set after creation; "open-direct": the file is opened with it
    zerofill: bool = False
    o_direct: bool = True
    io: str = "threads"  # threads | nixl | auto
    threads: int = 4
    persist: bool = True
    reclaim: bool = False


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal for blocks to be the same. `facts` are for people, and can be written as JSON."""

    digest: bytes
    facts: Mapping[str, object]
