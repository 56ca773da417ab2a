"""Checks that each tier is at least as large as the tier above it; a smaller one mostly replaces its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from kvbm.config.sizes import format_size
from kvbm_cli.doctor.check import Check, DoctorContext, capacity, ok, skipped, warning

if TYPE_CHECKING:
    from kvbm.config.schema import Tiers
    from kvbm.sizing import TierSize


def checks(context: DoctorContext) -> Iterator[Check]:
    resolved, sizing = context.resolved, context.sizing
    if resolved is None:
        yield skipped("order", "the sizes of the tiers are unknown without a profile", "add `--profile PROFILE`")
        return
    if sizing is None:
        yield from _by_bytes(resolved.profile.tiers)
        return
    if sizing.device is None:
        yield skipped("G1", "the engine determines its number of blocks at start-up")
    host = sizing.host if resolved.profile.tiers.host is not None else None
    present = [("G1", sizing.device), ("G2", host), ("G3", sizing.disk)]
    for (above, larger), (below, smaller) in pairwise((name, tier) for name, tier in present if tier is not None):
        yield _pair(above, larger, below, smaller)
    if host is None:
        yield warning("G2", "no host tier: every block passes through a small buffer", "set `tiers.host.capacity`")


def _by_bytes(tiers: Tiers) -> Iterator[Check]:
    """Compare capacities, for an engine whose block size is not known yet."""
    host = tiers.host.capacity if tiers.host is not None else None
    disk = tiers.disk.capacity if tiers.disk is not None else None
    if host is None or disk is None:
        return
    finding = f"{format_size(host)} and {format_size(disk)}"
    if disk < host:
        finding += ": G3 is smaller than G2 and adds little"
        yield warning(
            "G2 <= G3",
            finding,
            f"set `tiers.disk.capacity` to {capacity(host)} or more, or lower `tiers.host.capacity`",
        )
    else:
        yield ok("G2 <= G3", finding)


def _pair(above: str, upper: TierSize, below: str, lower: TierSize) -> Check:
    name = f"{above} <= {below}"
    finding = f"{upper.token_count:,} and {lower.token_count:,} tokens"
    facts = {above: upper.token_count, below: lower.token_count}
    if lower.token_count < upper.token_count:
        least = -(-lower.block_count * upper.token_count // lower.token_count)
        key = lower.set_by.rpartition(".")[0]
        finding += f": {below} is smaller than {above} and adds little"
        return warning(name, finding, f"set `{key}.blocks: {least}` or more, or make {above} smaller", **facts)
    return ok(name, finding, **facts)
