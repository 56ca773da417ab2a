"""`kvbm size` and the tiers that `kvbm serve` prints: blocks, tokens and bytes of each, with what set them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvbm.errors import ProfileError
from kvbm_cli.console import noted, print_data, print_json, table
from kvbm_cli.model_facts import model_facts
from kvbm_cli.profiles import resolve

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.sizing import Sizing

_NAMES = {"G1": "G1 device", "G2": "G2 host"}


def show_size(reference: str, overrides: Sequence[str], *, as_json: bool) -> None:
    resolved = resolve(reference, overrides)
    sizing = size_of(resolved)
    if as_json:
        print_json(as_data(sizing))
    else:
        print_data(f"{block_line(sizing)}\n\n{tier_table(resolved, sizing)}")


def size_of(resolved: ResolvedProfile) -> Sizing:
    """ProfileError, where the key was written, for a model that has no size or memory that holds no block of it."""
    from kvbm.sizing import bytes_per_token, size

    key = "engine.model"
    try:
        facts = model_facts(resolved.profile.engine.model)
        bytes_per_token(facts, element_bytes=1)  # what it finds is about the model; what `size` still finds is not
        key = host_key(resolved)
        return size(resolved.profile, facts)
    except ProfileError as error:
        raise resolved.mistake(key, error.message, hint=error.hint) from None


def host_key(resolved: ResolvedProfile) -> str:
    """The key that sets G2's size."""
    return "tiers.host.blocks" if resolved.profile.tiers.host.blocks else "tiers.host.capacity"


def block_line(sizing: Sizing) -> str:
    from kvbm.config.sizes import format_size

    return f"a block is {sizing.block_tokens} tokens, {format_size(sizing.block_bytes)}"


def tier_table(resolved: ResolvedProfile, sizing: Sizing) -> str:
    from kvbm.config.sizes import format_size

    keys = {"G1": "engine.arguments.num_blocks", "G2": host_key(resolved)}
    rows = [("tier", "blocks", "tokens", "memory")]
    set_by = [("set by", "")]
    for tier in (sizing.device, sizing.host):
        key = keys[tier.tier.value]
        counts = (f"{tier.block_count:,}", f"{tier.token_count:,}", format_size(tier.total_bytes))
        origin = resolved.origins[key].rpartition("/")[2]
        rows.append((_NAMES[tier.tier.value], *counts))
        set_by.append((key, f"({origin})"))
    lines = zip(table(rows, right=(1, 2, 3)).splitlines(), set_by, strict=True)
    return "\n".join(noted(noted(line, key), origin, separator=" ").rstrip() for line, (key, origin) in lines)


def as_data(sizing: Sizing) -> Mapping[str, object]:
    return {
        "block": {"tokens": sizing.block_tokens, "bytes": sizing.block_bytes},
        "tiers": {
            tier.tier.value: {"blocks": tier.block_count, "tokens": tier.token_count, "bytes": tier.total_bytes}
            for tier in (sizing.device, sizing.host)
        },
    }
