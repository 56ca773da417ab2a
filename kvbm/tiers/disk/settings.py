"""Settings of the disk tier, and the namespace that its blocks belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[int, int], None]  # (bytes done, bytes total)


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """The keys of `tiers.disk` in a profile. `capacity_bytes` covers all ranks; `block_count` overrides it. With
    `fit`, an existing arena keeps its size, and a new one leaves a margin of the free space."""

    directory: Path
    capacity_bytes: int | None = None
    block_count: int | None = None
    allocator: str = "default"  # "default" sets O_DIRECT after creation; "open-direct" opens the file with it
    zerofill: bool = False
    o_direct: bool = True
    io: str = "threads"  # threads | nixl | gds | auto
    threads: int = 4
    persist: bool = True
    reclaim: bool = False
    fit: bool = False


@dataclass(frozen=True, slots=True)
class Namespace:
    """Identity of everything that decides the bytes of a block. `facts` describe it to people, as JSON values."""

    digest: bytes
    facts: Mapping[str, object]
