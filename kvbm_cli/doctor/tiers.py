"""Whether each tier holds at least what the one above it holds; a smaller one mostly turns blocks over."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from kvbm_cli.doctor.result import Check, ok, skipped, warning
from kvbm_cli.doctor.subject import Subject

if TYPE_CHECKING:
    from kvbm.sizing import TierSize


def checks(subject: Subject) -> Iterator[Check]:
    resolved, sizing = subject.resolved, subject.sizing
    if resolved is None:
        yield skipped("order", "a profile says which tiers there are", "`--profile PROFILE`")
        return
    if sizing is None:
        yield skipped("order", "only the engine can tell how large its blocks are, once it has started")
        return
    if sizing.device is None:
        yield skipped("G1", "the engine decides at its start how many blocks it has")
    host = sizing.host if resolved.profile.tiers.host is not None else None
    present = [("G1", sizing.device), ("G2", host), ("G3", sizing.disk)]
    for (above, larger), (below, smaller) in pairwise((name, tier) for name, tier in present if tier is not None):
        yield _pair(above, larger, below, smaller)
    if host is None:
        yield warning("G2", "no host memory: every block passes through a small buffer", "`tiers.host.capacity`")


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
