"""`kvbm size`: prints blocks, tokens and bytes of each tier, and the capacity that a number of users needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvbm.config.sizes import format_size
from kvbm.sizing import Sizing
from kvbm.sizing.catalogue import catalogue
from kvbm_cli.profile.auto_capacity import with_capacities
from kvbm_cli.profile.size import (
    as_data,
    block_line,
    blocks_text,
    chosen_lines,
    order_checks,
    sequence_checks,
    size_of,
    snapshot_line,
    tier_table,
)
from kvbm_cli.size.request import SizeRequest
from kvbm_cli.terminal.console import print_data, print_json
from kvbm_cli.terminal.quantities import counted
from kvbm_cli.terminal.show_error import show_warning

if TYPE_CHECKING:
    from kvbm.config.load import ResolvedProfile
    from kvbm.config.schema import Tiers


def show_size(request: SizeRequest, *, as_json: bool, is_strict: bool) -> int:
    """Print the sizes. Returns 1 if `is_strict` and a tier holds less than the one above it."""
    demand, speeds, resolved = request.demand(), request.speeds(), request.resolve()
    wanted, facts = request.wanted(resolved), request.facts()
    resolved = with_capacities(resolved, facts=facts)
    sizing = size_of(resolved, wanted, facts=facts)
    longest = None
    if wanted.sequence_tokens is not None:
        longest = size_of(resolved, replace(wanted, sequence_tokens=None), facts=facts)
    needed = None
    if demand is not None:
        sequences, tokens = demand
        needed = _needed(size_of(resolved, replace(wanted, sequence_tokens=tokens), facts=facts), sequences, tokens)
    checks = [*order_checks(resolved, sizing), *([] if longest is None else sequence_checks(resolved, longest))]
    warnings = list(dict.fromkeys([*(one.text for one in checks), *_demand_warnings(sizing, needed)]))
    if as_json:
        times = speeds.times(sizing) if speeds is not None else None
        longest_data = None if longest is None else as_data(longest)["sequence"]
        more = {"longest_sequence": longest_data, "needed": needed, "times": times, "warnings": warnings}
        print_json({**as_data(sizing), **({"chosen": dict(resolved.chosen)} if resolved.chosen else {}), **more})
    else:
        lines = _report(resolved, sizing, longest, needed)
        print_data("\n".join([*lines, *(["", *speeds.lines(sizing)] if speeds is not None else [])]))
        for warning in warnings:
            show_warning(warning)
    return 1 if is_strict and warnings else 0


def show_catalogue(*, as_json: bool) -> None:
    names = sorted(catalogue(), key=str.lower)
    if as_json:
        print_json(names)
    else:
        print_data("\n".join(names))


def _report(
    resolved: ResolvedProfile, sizing: Sizing, longest: Sizing | None, needed: Mapping[str, int] | None
) -> list[str]:
    """Return the lines. `longest` has the sequences of maximum length, if those of `sizing` have another one."""
    lines = [f"a token is {format_size(sizing.token_bytes)}, {block_line(sizing)}"]
    lines += [line for line in (snapshot_line(sizing),) if line is not None]
    lines += [f"note: {note}" for note in sizing.notes]
    lines += ["", tier_table(resolved, sizing, has_ranks=True), *chosen_lines(resolved)]
    lines += ["", _eviction_line(resolved, sizing)]
    for one in (longest, sizing):
        if one is not None and one.sequence_blocks:
            lines += ["", *_sequence_lines(one)]
    if needed is not None:
        lines += ["", *_needed_lines(needed)]
    return [*lines, *_variable_lines(resolved.profile.tiers, sizing)]


def _eviction_line(resolved: ResolvedProfile, sizing: Sizing) -> str:
    """Say which blocks leave each full tier."""
    profile, why = resolved.profile, ""
    if profile.engine.keeps_host_memory:
        why = f": {profile.engine.kind} does not name whole chains"
    elif sizing.group_count > 1 or sizing.snapshot is not None:
        why = ": the model has several KV cache groups or states"
    tiers = {"G2": profile.tiers.host, "G3": profile.tiers.disk}
    evictions = [f"{name} {'lru' if why else tier.eviction}" for name, tier in tiers.items() if tier is not None]
    return f"eviction: {', '.join(evictions)}{why}"


def _sequence_lines(sizing: Sizing) -> list[str]:
    size = format_size(sizing.host_bytes(sizing.sequence_blocks))
    tiers = {"G1": sizing.device, "G2": sizing.host, "G3": sizing.disk}
    counts = [f"{name} {tier.sequence_count:,}" for name, tier in tiers.items() if tier is not None]
    return [
        f"a sequence of {sizing.sequence_tokens:,} tokens is {blocks_text(sizing)}, {size}",
        f"sequences that fit: {', '.join(counts)}",
    ]


def _needed(sizing: Sizing, sequences: int, tokens: int) -> dict[str, int]:
    """Return the capacity that holds this many sequences of this length."""
    blocks = sequences * sizing.sequence_blocks
    size = sizing.host_bytes(blocks)
    return {"sequences": sequences, "tokens": sequences * tokens, "blocks": blocks, "bytes": size}


def _demand_warnings(sizing: Sizing, needed: Mapping[str, int] | None) -> Iterator[str]:
    """Yield warnings. A model with states needs whole sequences: a part of one has no hit."""
    if needed is None or sizing.snapshot is None:
        return
    blocks, sequences = needed["blocks"], needed["sequences"]
    if blocks > sizing.host.block_count:
        whole = sizing.host.block_count * sequences // blocks
        yield f"G2 holds {whole:,} of the {sequences:,} sequences, with one snapshot each"


def _needed_lines(needed: Mapping[str, int]) -> list[str]:
    gigabytes = -(-needed["bytes"] // 10**9)
    return [
        f"{needed['tokens']:,} tokens in {counted(needed['sequences'], 'sequence')} "
        f"need {counted(needed['blocks'], 'block')}, {format_size(needed['bytes'])}:",
        f"  tiers.host.capacity: {gigabytes}GB  or DYN_KVBM_CPU_CACHE_GB={gigabytes}",
        f"  tiers.disk.capacity: {gigabytes}GB  or DYN_KVBM_DISK_CACHE_GB={gigabytes}, if there is a disk tier",
    ]


def _variable_lines(tiers: Tiers, sizing: Sizing) -> list[str]:
    """Return the variables of kvbm's tiers: not of a buffer, nor of host memory that the engine manages."""
    is_ours = tiers.host is not None and not tiers.are_below_engine
    sizes = {"CPU": sizing.host if is_ours else None, "DISK": sizing.disk}
    lines = [
        f"  DYN_KVBM_{name}_CACHE_OVERRIDE_NUM_BLOCKS={tier.block_count}"
        for name, tier in sizes.items()
        if tier is not None
    ]
    return ["", "the same numbers of blocks as variables:", *lines] if lines else []
