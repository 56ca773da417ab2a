"""`kvbm size`, and the table of tiers that `kvbm serve` prints: blocks, tokens, bytes and the key that sets them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvbm.config.sizes import format_size
from kvbm.errors import ProfileError
from kvbm.sizing import SizeUnknown, Sizing, TierSize, check_model, size
from kvbm_cli.engine.engines import runs_on_cpu
from kvbm_cli.engine.model_facts import model_facts
from kvbm_cli.profile.resolve import resolve
from kvbm_cli.terminal.console import noted, print_data, print_json, table

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile

_NAMES = {"G1": "G1 device", "G2": "G2 host", "G3": "G3 disk"}


def show_size(reference: str, overrides: Sequence[str], *, as_json: bool) -> None:
    resolved = resolve(reference, overrides)
    sizing = size_of(resolved)
    if as_json:
        print_json(as_data(sizing))
    else:
        print_data(f"{block_line(sizing)}\n\n{tier_table(resolved, sizing)}")


def size_of(resolved: ResolvedProfile) -> Sizing:
    """Computes the sizes of the tiers.

    ProfileError, at the place of the key, for a model without a size or a tier that holds no block. SizeUnknown if only
    the engine knows the sizes.
    """
    profile, key = resolved.profile, "engine.model"
    try:
        facts = model_facts(profile.engine.model, kind=profile.engine.kind)
        check_model(profile, facts)  # errors here are about the model; errors of `size` are not
        key = size_key(resolved)
        on_cpu = profile.engine.kind == "vllm" and runs_on_cpu(profile)
        return size(profile, facts, environment=os.environ, on_cpu=on_cpu)
    except ProfileError as error:
        if error.hint is not None and "tiers.disk" in error.hint:
            key = "tiers.disk.blocks" if profile.tiers.disk and profile.tiers.disk.blocks else "tiers.disk.capacity"
        raise resolved.mistake(key, error.message, hint=error.hint) from None


def size_if_known(resolved: ResolvedProfile) -> Sizing | None:
    """Returns the sizes, None if only the engine knows them."""
    try:
        return size_of(resolved)
    except SizeUnknown:
        return None


def size_key(resolved: ResolvedProfile) -> str:
    """The key that sets the size of G2, or of G3 without a host tier."""
    tiers = resolved.profile.tiers
    section, name = (tiers.host, "tiers.host") if tiers.host is not None else (tiers.disk, "tiers.disk")
    return f"{name}.blocks" if section is not None and section.blocks else f"{name}.capacity"


def block_line(sizing: Sizing) -> str:
    ranks = f" on each of {sizing.rank_count} ranks" if sizing.rank_count > 1 else ""
    return f"a block is {sizing.block_tokens} tokens, {format_size(sizing.block_bytes)}{ranks}"


def tier_table(resolved: ResolvedProfile, sizing: Sizing, *, has_cache: bool = True) -> str:
    tiers: dict[str, TierSize | None] = {"G1": sizing.device}
    if has_cache:
        tiers |= {"G2": sizing.host, **({"G3": sizing.disk} if sizing.disk else {})}
    rows = [("tier", "blocks", "tokens", "size"), *(_row(name, tier) for name, tier in tiers.items())]
    set_by = [("set by", ""), *(_set_by(resolved, tier) for tier in tiers.values())]
    lines = zip(table(rows, right=(1, 2, 3)).splitlines(), set_by, strict=True)
    return "\n".join(noted(noted(line, key), origin, separator=" ").rstrip() for line, (key, origin) in lines)


def _row(name: str, tier: TierSize | None) -> tuple[str, str, str, str]:
    if tier is None:
        return _NAMES[name], "-", "-", "-"
    return _NAMES[name], f"{tier.block_count:,}", f"{tier.token_count:,}", format_size(tier.total_bytes)


def _set_by(resolved: ResolvedProfile, tier: TierSize | None) -> tuple[str, str]:
    """Returns the key that set the size of a tier, and its origin."""
    if tier is None:
        return "determined by the engine at start-up", ""
    if tier.set_by == "tiers.host.blocks" and resolved.profile.tiers.host is None:
        return "buffer for the disk tier", ""
    variable = f"engine.environment.{tier.set_by}"
    key = variable if variable in resolved.origins else tier.set_by
    return key, f"({resolved.origins.get(key, 'environment').rpartition('/')[2]})"


def as_data(sizing: Sizing, *, has_cache: bool = True) -> Mapping[str, object]:
    """The sizes as JSON data. G1 is null if the engine determines it at start-up, the others without a cache."""
    host, disk = (sizing.host, sizing.disk) if has_cache else (None, None)
    return {
        "block": {"tokens": sizing.block_tokens, "bytes": sizing.block_bytes, "ranks": sizing.rank_count},
        "tiers": {"G1": _tier_data(sizing.device), "G2": _tier_data(host), "G3": _tier_data(disk)},
    }


def _tier_data(tier: TierSize | None) -> Mapping[str, object] | None:
    if tier is None:
        return None
    return {"blocks": tier.block_count, "tokens": tier.token_count, "bytes": tier.total_bytes}
