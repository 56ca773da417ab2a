"""Lookup: how many blocks of a request the tiers hold together. Starts nothing and reserves nothing.

A block counts in either tier: a chain may begin in host memory, continue on disk and end in host memory again. `disk`
is None if there is no disk tier, or if the request may not read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbm.leader.disk_tier import DiskTier
    from kvbm.leader.host_tier import HostTier


def match_prefix(host: HostTier, disk: DiskTier | None, hashes: Sequence[bytes], start: int) -> int:
    """Return how many of `hashes[start:]`, up to the first missing one, are loaded faster than computed."""
    end = start + host.match(hashes, start)
    if disk is None or end == len(hashes):
        return end - start
    spans = [(False, end - start)]
    while count := disk.match(hashes, end):
        in_host = host.match(hashes, end + count)
        end += count + in_host
        spans += [(True, count), (False, in_host)]
    return disk.worthwhile(spans)


def contained_in(host: HostTier, disk: DiskTier | None) -> Callable[[bytes], bool]:
    """Return a function that says whether a block is in one of the tiers."""
    if disk is None:
        return host.contains
    return lambda sequence_hash: host.contains(sequence_hash) or disk.contains(sequence_hash)
