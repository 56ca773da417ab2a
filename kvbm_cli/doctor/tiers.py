"""Whether each tier holds at least what the one above it holds; a smaller one mostly turns blocks over."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from kvbm.config.sizes import format_size
from kvbm_cli.doctor.result import Check, capacity, ok, skipped, warning
from kvbm_cli.doctor.subject import Subject

if TYPE_CHECKING:
    from kvbm.config.schema import Tiers
    from kvbm.sizing import TierSize


def checks(subject: Subject) -> Iterator[Check]:
    resolved, sizing = subject.resolved, subject.sizing
    if resolved is None:
        yield skipped("order", "a profile says which tiers there are", "`--profile PROFILE`")
        return
    if sizing is None:
        yield from _by_bytes(resolved.profile.tiers)
        return
    if sizing.device is None:
        yield skipped("G1", "the engine decides at its start how many blocks it has")
    host = sizing.host if resolved.profile.tiers.host is not None else None
    present = [("G1", sizing.device), ("G2", host), ("G3", sizing.disk)]
    for (above, larger), (below, smaller) in pairwise((name, tier) for name, tier in present if tier is not None):
        yield _pair(above, larger, below, smaller)
    if host is None:
        yield warning("G2", "no host memory: every block passes through a small buffer", "`tiers.host.capacity`")


def _by_bytes(tiers: Tiers) -> Iterator[Check]:
    """Where nobody knows yet how large a block is."""
    host = tiers.host.capacity if tiers.host is not None else None
    disk = tiers.disk.capacity if tiers.disk is not None else None
    if host is None or disk is None:
        return
    finding = f"{format_size(host)} and {format_size(disk)}"
    if disk < host:
        finding += ": G3 is smaller, and holds little that G2 has not"
        yield warning("G2 <= G3", finding, f"`tiers.disk.capacity: {capacity(host)}` at least, or less of G2")
    else:
        yield ok("G2 <= G3", finding)


def _pair(above: str, upper: TierSize, below: str, lower: TierSize) -> Check:
    name = f"{above} <= {below}"
    finding = f"{upper.token_count:,} and {lower.token_count:,} tokens"
    facts = {above: upper.token_count, below: lower.token_count}
    if lower.token_count < upper.token_count:
        least = -(-lower.block_count * upper.token_count // lower.token_count)
        key = lower.set_by.rpartition(".")[0]
        finding += f": {below} is smaller, and holds little that {above} has not"
        return warning(name, finding, f"`{key}.blocks: {least}` at least, or less of {above}", **facts)
    return ok(name, finding, **facts)
