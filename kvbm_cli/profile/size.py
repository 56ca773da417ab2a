"""Sizes of the tiers of a profile, and the table that `kvbm size` and `kvbm serve` print."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from kvbm.config.engine import ENGINES
from kvbm.config.sizes import format_size, whole_size
from kvbm.engines.model_facts import config_file
from kvbm.engines.table import cpu_of, kind_of, size
from kvbm.errors import ProfileError
from kvbm.sizing import ESTIMATE, SizeUnknown, Sizing, TierSize, Wanted
from kvbm_cli.profile.auto_capacity import is_all_to_spare, with_capacities
from kvbm_cli.profile.machine_check import Check, Severity
from kvbm_cli.terminal.console import noted, table
from kvbm_cli.terminal.quantities import counted

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import Profile

ASK_ENGINE = "`kvbm serve` starts the engine anyway; then `kvbm logs | grep allocated` shows blocks and bytes"
_NAMES = {"G1": "G1 device", "G2": "G2 host", "G3": "G3 disk"}
_TO_SPARE = {"G2": "free memory", "G3": "free space on the disk"}  # for a larger tier with `capacity: auto`


def order_checks(resolved: ResolvedProfile, sizing: Sizing) -> list[Check]:
    """Return a check for each tier that adds little: it is smaller than the one above it, or, with states, than a
    sequence."""
    resolved = with_capacities(resolved)
    smaller = (
        _too_small(
            lower,
            f"{below} holds {lower.token_count:,} tokens, fewer than the {upper.token_count:,} of {above}, "
            "so it adds little",
            upper.token_count / max(1, lower.token_count),
            _instead(resolved, below, f"lower {above}, or "),
        )
        for (above, upper), (below, lower) in pairwise(tiers_of(resolved, sizing).items())
        if lower.token_count < upper.token_count and not (below == "G2" and _takes_evicted(resolved.profile, sizing))
    )
    return [*smaller, *sequence_checks(resolved, sizing)]


def _instead(resolved: ResolvedProfile, name: str, first: str = "") -> str | None:
    """Return what to do where kvbm chose the size of G2 or G3 (`capacity: auto`), None where the profile sets it."""
    if (reason := resolved.chosen.get(name)) is None:
        return None
    if is_all_to_spare(reason):
        return f"this machine can spare no more; {first}{_TO_SPARE[name]}"
    return f"{name} auto: {reason}"


def _too_small(tier: TierSize, finding: str, factor: float, instead: str | None) -> Check:
    """Return the check of a tier that must be larger by this factor, if its size can be set."""
    if instead is not None:
        return Check("order", Severity.STRICT, finding, instead)
    blocks = math.ceil(tier.block_count * factor)
    size = whole_size(math.ceil(tier.total_bytes * blocks / tier.block_count), rounds_up=True)
    value = blocks if tier.set_by.endswith(".blocks") else size
    return Check("order", Severity.STRICT, finding, f"set `{tier.set_by}: {value}` or more")


def tiers_of(resolved: ResolvedProfile, sizing: Sizing) -> dict[str, TierSize]:
    """Return the tiers of known size by name. Without a host tier, G2 is a buffer, not a tier."""
    host = sizing.host if resolved.profile.tiers.host is not None else None
    tiers = {"G1": sizing.device, "G2": host, "G3": sizing.disk}
    return {name: tier for name, tier in tiers.items() if tier is not None}


def _takes_evicted(profile: Profile, sizing: Sizing) -> bool:
    """Whether G2 gets the blocks that G1 evicts (`offload.to_host: on_evict`), so that a small one adds its blocks."""
    from kvbm.leader.late_offloads import reason_to_copy_at_once

    engine, device = profile.engine.kind, sizing.device
    if not ENGINES[engine].shows_evictions or sizing.snapshot or profile.tiers.are_below_engine:
        return False
    if not kind_of(profile).has_prefix_caching(profile):
        return False
    if profile.offload.to_host != "auto" or device is None:
        return profile.offload.to_host == "on_evict"
    host_blocks, g1_blocks = sizing.host.block_count, device.block_count
    reason = reason_to_copy_at_once(profile.tiers, host_blocks=host_blocks, g1_blocks=g1_blocks)
    return not reason and not profile.disaggregated.is_enabled


def sequence_checks(resolved: ResolvedProfile, sizing: Sizing) -> Iterator[Check]:
    """Check a model with states: a hit needs a snapshot and all attention blocks before it, a whole sequence."""
    host = sizing.host
    if sizing.snapshot is not None and resolved.profile.tiers.host is not None and host.sequence_count == 0:
        finding = (
            f"G2 holds {counted(host.block_count, 'block')}, fewer than the {blocks_text(sizing)} of a sequence of "
            f"{sizing.sequence_tokens:,} tokens, so no prompt of this length has a hit"
        )
        instead = _instead(resolved, "G2")
        yield _too_small(host, finding, sizing.sequence_blocks / host.block_count, instead)


def blocks_text(sizing: Sizing) -> str:
    """Return the blocks of a sequence, in parts if it has a snapshot."""
    blocks = counted(sizing.sequence_blocks, "block")
    if sizing.snapshot is None:
        return blocks
    of_attention = sizing.sequence_blocks - sizing.snapshot.block_count
    return f"{blocks} ({of_attention:,} of attention, {sizing.snapshot.block_count:,} of a snapshot)"


def size_of(
    resolved: ResolvedProfile, wanted: Wanted | None = None, *, facts: Mapping[str, object] | None = None
) -> Sizing:
    """Compute the sizes of the tiers. `facts` is the model's configuration, by default that of `engine.model`. For
    `capacity: auto`, they are what this machine can spare now.

    ProfileError, at the place of the key, for a model without a size or a tier that holds no block. SizeUnknown if only
    the engine knows the sizes. Both name the file of the configuration.
    """
    resolved = with_capacities(resolved, facts=facts)
    profile, key, wanted = resolved.profile, "engine.model", wanted or Wanted()
    try:
        if facts is None:
            facts = kind_of(profile).model_facts(profile.engine.model)
        kind_of(profile).check_model(profile, facts)  # errors here are about the model; errors of `size` are not
        key = size_key(resolved)
        on_cpu = wanted.memory is None and kind_of(profile).runs_on_cpu(profile)
        if on_cpu:
            wanted = replace(wanted, cpu=cpu_of(profile))
        return size(profile, facts, environment=os.environ, on_cpu=on_cpu, wanted=wanted)
    except SizeUnknown as unknown:
        path, message = config_file(profile.engine.model), _named(profile.engine.model, unknown.message)
        is_named = path is None or str(path) in message
        hint = ASK_ENGINE if "knows" in message else None
        raise SizeUnknown(message if is_named else f"`{path}`: {message}", hint=unknown.hint or hint) from None
    except ProfileError as error:
        if error.hint is not None and "tiers.disk" in error.hint:
            key = "tiers.disk.blocks" if profile.tiers.disk and profile.tiers.disk.blocks else "tiers.disk.capacity"
        raise resolved.mistake(key, _named(profile.engine.model, error.message), hint=error.hint) from None


def _named(model: str, message: str) -> str:
    """Return a message with the file of the model's configuration, if there is one."""
    path = config_file(model)
    return message if path is None else message.replace("the model's configuration", f"`{path}`")


def size_if_known(resolved: ResolvedProfile) -> Sizing | None:
    """Return the sizes, None if only the engine knows them."""
    try:
        return size_of(resolved)
    except SizeUnknown:
        return None


def size_key(resolved: ResolvedProfile) -> str:
    """Return the key that sets the size of G2, or of G3 without a host tier."""
    tiers = resolved.profile.tiers
    section, name = (tiers.host, "tiers.host") if tiers.host is not None else (tiers.disk, "tiers.disk")
    return f"{name}.blocks" if section is not None and section.blocks else f"{name}.capacity"


def block_line(sizing: Sizing) -> str:
    ranks = f" on each of {sizing.rank_count} ranks" if sizing.rank_count > 1 else ""
    return f"a block is {counted(sizing.block_tokens, 'token')}, {format_size(sizing.block_bytes)}{ranks}"


def tier_table(resolved: ResolvedProfile, sizing: Sizing, *, has_cache: bool = True, has_ranks: bool = False) -> str:
    """Return the table. `has_ranks` adds the bytes of a tier on one rank, if there are several."""
    tiers: dict[str, TierSize | None] = {"G1": sizing.device}
    if has_cache:
        tiers |= {"G2": sizing.host, **({"G3": sizing.disk} if sizing.disk else {})}
    rows = [("tier", "blocks", "tokens", "size"), *(_row(name, tier) for name, tier in tiers.items())]
    if has_ranks and sizing.rank_count > 1:
        per_rank = ["-" if tier is None else format_size(sizing.rank_bytes(tier)) for tier in tiers.values()]
        rows = [(*row, extra) for row, extra in zip(rows, ["per rank", *per_rank], strict=True)]
    set_by = [("set by", ""), *(_set_by(resolved, tier) for tier in tiers.values())]
    lines = zip(table(rows, right=range(1, len(rows[0]))).splitlines(), set_by, strict=True)
    return "\n".join(noted(noted(line, key), origin, separator=" ").rstrip() for line, (key, origin) in lines)


def chosen_lines(resolved: ResolvedProfile) -> list[str]:
    """Return a line for each tier whose size kvbm chose."""
    return [f"{tier} auto: {reason}" for tier, reason in resolved.chosen.items()]


def _row(name: str, tier: TierSize | None) -> tuple[str, ...]:
    if tier is None:
        return _NAMES[name], "-", "-", "-"
    return _NAMES[name], f"{tier.block_count:,}", f"{tier.token_count:,}", format_size(tier.total_bytes)


def _set_by(resolved: ResolvedProfile, tier: TierSize | None) -> tuple[str, str]:
    """Return the key that set the size of a tier, and its origin."""
    if tier is None:
        return "determined by the engine at start-up", ""
    if tier.set_by == ESTIMATE:
        return "estimate", ""
    if tier.set_by == "tiers.host.blocks" and resolved.profile.tiers.host is None:
        return "buffer for the disk tier", ""
    variable = f"engine.environment.{tier.set_by}"
    key = variable if variable in resolved.origins else tier.set_by
    return key, f"({resolved.origins.get(key, 'environment').rpartition('/')[2]})"


def as_data(sizing: Sizing, *, has_cache: bool = True) -> Mapping[str, object]:
    """Return the sizes as JSON data. G1 is null if the engine determines it at start-up, the others without a cache."""
    host, disk = (sizing.host, sizing.disk) if has_cache else (None, None)
    return {
        "token_bytes": sizing.token_bytes,
        "block": {"tokens": sizing.block_tokens, "bytes": sizing.block_bytes, "ranks": sizing.rank_count},
        "snapshot": _snapshot_data(sizing),
        "sequence": {"tokens": sizing.sequence_tokens, "blocks": sizing.sequence_blocks},
        "attention_backend": sizing.attention_backend,
        "notes": list(sizing.notes),
        "tiers": {name: _tier_data(sizing, tier) for name, tier in (("G1", sizing.device), ("G2", host), ("G3", disk))},
    }


def _snapshot_data(sizing: Sizing) -> Mapping[str, int] | None:
    """Return the cost of a snapshot, null for a model without states. `bytes`: its blocks, on all ranks."""
    snapshot = sizing.snapshot
    if snapshot is None:
        return None
    return {
        "state_bytes": snapshot.state_bytes,
        "as_tokens": snapshot.token_count,
        "blocks": snapshot.block_count,
        "bytes": sizing.host_bytes(snapshot.block_count),
    }


def snapshot_line(sizing: Sizing) -> str | None:
    """Return the cost of a snapshot, None for a model without states."""
    snapshot = sizing.snapshot
    if snapshot is None:
        return None
    stored = format_size(sizing.host_bytes(snapshot.block_count))
    return (
        f"a snapshot is {format_size(snapshot.state_bytes)} of states, as much as {snapshot.token_count:,} tokens; "
        f"it takes {counted(snapshot.block_count, 'block')}, {stored}"
    )


def _tier_data(sizing: Sizing, tier: TierSize | None) -> Mapping[str, object] | None:
    if tier is None:
        return None
    return {
        "blocks": tier.block_count,
        "tokens": tier.token_count,
        "sequences": tier.sequence_count,
        "bytes": tier.total_bytes,
        "rank_bytes": sizing.rank_bytes(tier),
        "is_estimate": tier.set_by == ESTIMATE,
    }
